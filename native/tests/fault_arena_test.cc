// Damage to the files of the DRAM tier, one fault at a time, while no daemon is there or under
// readers: the next daemon opens what is left, or refuses it by name, and every page is read. What
// must hold: a page is right or a miss, never wrong; one that the damage did not touch is there;
// the damage is counted; and no slot is forgotten.
//
// What may be lost is exactly this: pages whose word, metadata or payload changed; all pages of a
// slab whose layout changed; and everything, until its directory is moved away, when the header of
// the slots file, the version in the control page, or the length of slots or arena cannot be
// believed, which is refused with a clear error.
#include <functional>

#include "base/error.h"
#include "tests/arena_image.h"
#include "tests/check.h"
#include "tests/tally.h"

using namespace kvw;

namespace {

using Random = std::mt19937_64;

struct Fault {
  const char* name;
  std::set<size_t> may_lose;
  bool counted = true;  // where pages were lost: by the start, or by the load that met it
  bool may_be_refused = false;
};

size_t any_page(const ArenaImage& image, Random& random) { return random() % image.pages.size(); }

int any_bit(Random& random) { return static_cast<int>(random() % 8); }

std::set<size_t> all_pages(const ArenaImage& image) {
  std::set<size_t> all;
  for (size_t page = 0; page < image.pages.size(); ++page) all.insert(page);
  return all;
}

// --- one fault of each class

Fault slot_word(ArenaImage& image, Random& random) {
  const size_t page = any_page(image, random);
  FilePart(image.path("slots")).flip(image.word_at(page) + random() % 8, any_bit(random));
  return {"slot word flipped", {page}};
}

// Of masks and owners nothing depends once a page is sealed; see warehouse_recover_test.cc for
// which words the checksum covers.
Fault slot_metadata(ArenaImage& image, Random& random) {
  const size_t page = any_page(image, random);
  FilePart(image.path("slots"))
      .flip(image.metas[page] + random() % image.meta_bytes, any_bit(random));
  return {"slot metadata flipped", {page}};
}

Fault slot_payload(ArenaImage& image, Random& random) {
  const size_t page = any_page(image, random);
  const uint64_t stride = round_up(kArenaShardBytes, kBlockBytes);
  const uint64_t at = random() % kArenaShards * stride + random() % kArenaShardBytes;
  FilePart(image.path("arena")).flip(image.payloads[page] + at, any_bit(random));
  return {"slot payload flipped", {page}};
}

Fault slot_padding(ArenaImage& image, Random& random) {
  const size_t page = any_page(image, random);
  const uint64_t stride = round_up(kArenaShardBytes, kBlockBytes);
  const uint64_t at = kArenaShardBytes + random() % (stride - kArenaShardBytes);
  FilePart(image.path("arena"))
      .flip(image.payloads[page] + random() % 2 * stride + at, any_bit(random));
  return {"padding of a slot flipped", {}};
}

Fault slab_layout(ArenaImage& image, Random& random) {
  // Half of them of a slab with pages.
  const uint32_t slab = random() % 2 == 0 ? image.slots[any_page(image, random)] /
                                                static_cast<uint32_t>(image.slots_per_slab())
                                          : static_cast<uint32_t>(random() % image.slabs);
  FilePart(image.path("slots")).flip(kBlockBytes + 8ull * slab + random() % 8, any_bit(random));
  Fault fault{"cut of a slab flipped", {}, false, true};
  for (size_t page = 0; page < image.slots.size(); ++page)
    if (image.slots[page] / image.slots_per_slab() == slab) fault.may_lose.insert(page);
  return fault;
}

Fault slots_header(ArenaImage& image, Random& random) {
  FilePart(image.path("slots")).flip(random() % sizeof(SlotsHeader), any_bit(random));
  return {"header of the slots file flipped", all_pages(image), false, true};
}

// It says nothing that the slots do not; but a version that seems to be a newer one's is refused.
Fault control_page(ArenaImage& image, Random& random) {
  const FilePart control(image.path("control"));
  const uint64_t at = random() % 2 == 0 ? random() % offsetof(ControlPage, namespaces)
                                        : random() % sizeof(ControlPage);
  control.flip(at, any_bit(random));
  constexpr size_t kVersion = offsetof(ControlPage, version);
  const bool newer = at >= kVersion && at < kVersion + sizeof(ControlPage::version);
  return {"control page flipped", {}, true, newer};
}

Fault copied_metadata(ArenaImage& image, Random& random) {
  const size_t from = any_page(image, random), to = any_page(image, random);
  const FilePart slots(image.path("slots"));
  slots.write(image.metas[to], slots.read(image.metas[from], image.meta_bytes));
  return {"metadata of a slot copied over another", {from, to}, from != to};
}

Fault exchanged_payloads(ArenaImage& image, Random& random) {
  const size_t one = any_page(image, random), two = any_page(image, random);
  const FilePart arena(image.path("arena"));
  const size_t bytes = round_up(kArenaShardBytes, kBlockBytes) * kArenaShards;
  const auto first = arena.read(image.payloads[one], bytes);
  arena.write(image.payloads[one], arena.read(image.payloads[two], bytes));
  arena.write(image.payloads[two], first);
  return {"payloads of two slots exchanged", {one, two}, one != two};
}

// With its word or without it: the generation is in the checksum.
Fault older_metadata(ArenaImage& image, Random& random) {
  const size_t page = any_page(image, random);
  const FilePart slots(image.path("slots"));
  slots.write(image.metas[page], image.older);
  if (random() % 2 == 0) slots.write(image.word_at(page), image.older_word);
  return {"earlier metadata of a slot brought back", {page}, false};
}

Fault noise(ArenaImage& image, Random& random) {
  const size_t page = any_page(image, random);
  const FilePart slots(image.path("slots"));
  const bool words = random() % 2 == 0;
  const uint64_t begin = words ? image.word_at(page) : image.metas[page];
  std::vector<std::byte> data(1 + random() % (words ? 64 : 1024));
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  slots.write(begin, data);
  Fault fault{"stretch of the slots file overwritten with noise", {}, false};
  for (size_t other = 0; other < image.pages.size(); ++other) {
    const uint64_t at = words ? image.word_at(other) : image.metas[other];
    const uint64_t end = at + (words ? 8 : image.meta_bytes);
    if (at < begin + data.size() && end > begin) fault.may_lose.insert(other);
  }
  return fault;
}

Fault cut_file(ArenaImage& image, Random& random) {
  const FileImage& file = image.files[random() % image.files.size()];
  const FilePart part(file.path());
  part.cut(random() % (random() % 2 == 0 ? file.bytes() : 4 * kBlockBytes));
  const bool control = &file == &image.files[2];
  Fault fault{"file of the arena cut at a random length", {}, false, !control};
  if (!control) fault.may_lose = all_pages(image);
  return fault;
}

// Readers see it; the daemon that comes next makes the index anew.
Fault index_entry(ArenaImage& image, Random& random) {
  const auto entry = image.world.entry(image.pages[any_page(image, random)]);
  const FilePart index(image.path("index.") + std::to_string(image.world->arena().incarnation()));
  const uint64_t at = kBlockBytes + sizeof(IndexEntry) * entry->page;
  const uint64_t bytes = 1 + random() % 8;
  for (uint64_t i = 0; i < bytes; ++i)
    index.flip(at + random() % sizeof(IndexEntry), any_bit(random));
  return {"index entry flipped under readers", {}, false};
}

constexpr Fault (*kClasses[])(ArenaImage&, Random&) = {
    slot_word,    slot_metadata, slot_payload,    slot_padding,       slab_layout,
    slots_header, control_page,  copied_metadata, exchanged_payloads, older_metadata,
    noise,        cut_file,      index_entry};

// --- what must hold

void check_kept(const ArenaImage& image, const Fault& fault, const std::set<size_t>& right) {
  for (size_t page = 0; page < image.pages.size(); ++page)
    if (!fault.may_lose.contains(page) && !right.contains(page))
      check::fail(__FILE__, __LINE__,
                  std::string(fault.name) + ": page " + std::to_string(page) +
                      " is lost, and was not touched");
}

// What is stored from here on is right, and every slot is somewhere.
void check_goes_on(ArenaImage& image) {
  World& world = image.world;
  for (int i = 0; i < 3; ++i) world.pass(kSecondNs);
  world.check_no_slot_leaks();
  Peer peer(world);
  for (uint64_t chain = 3000; chain < 3004; ++chain) {
    CHECK(peer.store(world.page(chain)));
    CHECK_EQ(peer.load(world.page(chain), 1), Got::right);
  }
}

// False: refused.
bool opens(ArenaImage& image, const Fault& fault, RecoverySummary& summary) {
  try {
    summary = image.world.start();
  } catch (const Error& error) {
    if (!fault.may_be_refused) throw;
    CHECK(std::string(error.what()).find("arena") != std::string::npos);  // says what to move away
    image.world.kill();
    return false;
  }
  return true;
}

void check_fault(ArenaImage& image, Fault (*make)(ArenaImage&, Random&), Random& random) {
  image.put_back();
  // Half of them under readers; cutting a mapped file ends its readers, and nobody is promised
  // more.
  const bool under_readers = make == index_entry || (make != cut_file && random() % 2 == 0);
  std::shared_ptr<const View> reader;
  if (under_readers) {
    image.world.start();
    reader = view_of(image.world->arena());
  }
  const Fault fault = make(image, random);
  if (under_readers) {
    image.read_all(*reader);
    image.world.kill();
  }
  RecoverySummary summary;
  if (!opens(image, fault, summary)) return check::tally(fault.name);
  const std::set<size_t> right = image.read_all();
  check_kept(image, fault, right);
  const uint64_t seen = summary.dropped_slots + summary.unfinished_slots +
                        summary.unknown_namespace + image.mismatches;
  if (fault.counted && right.size() < image.pages.size() && seen == 0)
    check::fail(__FILE__, __LINE__, std::string(fault.name) + ": was counted nowhere");
  if (random() % 8 == 0) check_goes_on(image);
  check::tally(fault.name);
}

}  // namespace

TEST(arena_image_is_read_back_whole_when_nothing_is_damaged) {
  ArenaImage image;
  image.put_back();
  image.world.start();
  CHECK_EQ(image.read_all().size(), image.pages.size());
  check_goes_on(image);
}

TEST(arena_with_any_damage_gives_right_pages_or_misses_and_keeps_what_was_not_touched) {
  auto random = check::random("arena damage");
  ArenaImage image;
  for (uint64_t round = 0; round < check::rounds(60); ++round)
    for (const auto make : kClasses) check_fault(image, make, random);
}
