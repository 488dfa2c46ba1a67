// Slabs between page sizes: what nobody asks for gives way, what is in use keeps its own.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "tests/check.h"
#include "tests/warehouse_world.h"

using namespace kvw;

namespace {

constexpr uint64_t kDram = 16 * kMiB;  // 2 MiB a slab

struct Two {
  Two() : world(shape_of(64 * 1024, 1), kDram) {
    world.declared.push_back(small);
    world.start();
    other.emplace(world);
    other->use(small);
    peer.emplace(world);
  }
  uint64_t slabs_of(const NamespaceShape& shape) {
    uint64_t count = 0;
    for (uint32_t slab = 0; slab < world->arena().slab_count(); ++slab)
      count += world.slots().layout(slab).slot_blocks == shape.slot_bytes() / kBlockBytes ? 1 : 0;
    return count;
  }
  // Asks for each page of a working set, stores it where it is missing; how many were there.
  uint64_t round(Peer& by, const NamespaceShape& shape, uint64_t pages) {
    uint64_t hits = 0;
    for (uint64_t chain = 0; chain < pages; ++chain) {
      const TestPage page = page_of(shape, chain, 0);
      if (const auto entry = world.entry(page)) {
        hits += by.load_as(*entry, page, 0) == Got::right ? 1 : 0;
        by.session().touch(*entry);
      } else {
        by.store(page);
      }
    }
    world.pass(200 * kMillisecondNs);
    return hits;
  }

  const NamespaceShape small = shape_of(32 * 1024, 1, {8, 8});
  World world;
  std::optional<Peer> peer, other;
};

uint64_t memory_of(const std::string& path) {
  struct stat info{};
  CHECK_EQ(::stat(path.c_str(), &info), 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

}  // namespace

TEST(page_size_that_is_asked_for_takes_slabs_from_one_that_is_not) {
  Two two;
  const uint64_t big = two.world.capacity();
  two.round(*two.peer, two.world.shape(), big);
  CHECK_EQ(two.slabs_of(two.world.shape()), 8);
  constexpr uint64_t kWorking = 120;  // two slabs of 64
  uint64_t hits = 0;
  for (int round = 0; round < 40; ++round) hits = two.round(*two.other, two.small, kWorking);
  CHECK_EQ(hits, kWorking);
  // And no more than that.
  CHECK(two.slabs_of(two.world.shape()) >= 5);
  two.world.check_settled();
}

TEST(page_sizes_that_are_both_in_use_do_not_take_slabs_from_each_other_for_ever) {
  Two two;
  for (int round = 0; round < 40; ++round) {
    two.round(*two.peer, two.world.shape(), 160);  // together more than there is
    two.round(*two.other, two.small, 320);
  }
  const auto moved = [&] {
    return two.world->status().left_dram[static_cast<size_t>(LeaveReason::rebalanced)];
  };
  const uint64_t before = moved();
  for (int round = 0; round < 40; ++round) {
    two.round(*two.peer, two.world.shape(), 80);
    two.round(*two.other, two.small, 320);
  }
  CHECK(moved() - before < 40 * 16);  // pages: less than half a slab a round
  CHECK(two.slabs_of(two.small) >= 1);
  CHECK(two.slabs_of(two.world.shape()) >= 1);
}

TEST(page_size_without_a_slab_gets_one_though_most_slabs_have_a_pinned_page) {
  Two two;
  const uint64_t big = two.world.capacity();
  two.round(*two.peer, two.world.shape(), big);
  // Pins in all slabs but one, wherever its pages are in age.
  std::set<uint32_t> pinned;
  std::optional<uint32_t> spared;
  for (uint64_t chain = big; chain-- > 0;) {
    const auto entry = two.world.entry(two.world.page(chain));
    if (!entry) continue;  // a few left, so that some slots are free
    const uint32_t slab = two.world.slots().slab_of(entry->slot);
    if (!spared) spared = slab;
    if (slab != *spared && pinned.insert(slab).second)
      CHECK(two.peer->pin(two.world.page(chain)) >= 0);
  }
  CHECK_EQ(pinned.size(), 7);
  CHECK(two.other->store(page_of(two.small, 1, 0)));
}

// Incident: the slab with the fewest pages went, which had the beginning of the hottest prompt, and
// with it all that was behind that in other slabs.
TEST(slab_with_the_beginning_of_a_long_prompt_is_not_the_one_that_goes) {
  Two two;
  World& world = two.world;
  constexpr uint64_t kPrompt = 1000, kFirst = 20, kPages = 100;
  for (uint64_t chain = 0; chain < kFirst; ++chain) CHECK(two.peer->store(world.page(chain)));
  for (uint32_t at = 0; at < kPages; ++at) CHECK(two.peer->store(world.page(kPrompt, at)));
  for (uint64_t chain = kFirst; world->status().dram_pages + 8 < world.capacity(); ++chain)
    CHECK(two.peer->store(world.page(chain)));
  const auto slab_of = [&](uint64_t chain, uint32_t at = 0) {
    return world.slots().slab_of(world.slot_of(world.page(chain, at)));
  };
  CHECK_EQ(slab_of(0), slab_of(kPrompt));
  CHECK(slab_of(kPrompt) != slab_of(kPrompt, kPages - 1));
  uint64_t left = 0;
  world->evict(-1, kFirst, "dram", left);  // the coldest
  CHECK(!world.stored(world.page(0)));
  for (uint32_t at = kPages; at-- > 0;)
    two.peer->session().touch(*world.entry(world.page(kPrompt, at)));
  world.pass(2 * kSecondNs);
  CHECK(two.other->store(page_of(two.small, 1, 0)));
  for (int pass = 0; pass < 10; ++pass) world.pass(kSecondNs);
  for (uint32_t at = 0; at < kPages; ++at) CHECK(world.stored(world.page(kPrompt, at)));
}

// Incident: each of 64 pages of a message scanned the slabs anew, 100 ms of the core together.
TEST(page_size_that_found_no_slab_looks_again_a_little_later) {
  Two two;
  const uint64_t big = two.world.capacity();
  two.round(*two.peer, two.world.shape(), big);
  std::map<uint32_t, int> pins;  // by slab
  for (uint64_t chain = 0; chain < big; ++chain)
    if (const auto entry = two.world.entry(two.world.page(chain)))
      if (const uint32_t slab = two.world.slots().slab_of(entry->slot); !pins.contains(slab))
        pins[slab] = two.peer->pin(two.world.page(chain));
  CHECK_EQ(pins.size(), 8);
  const TestPage page = page_of(two.small, 1, 0);
  CHECK_EQ(two.other->reserve(page).reason, Reason::no_room);
  for (const auto& [slab, pin] : pins) two.peer->session().drop_pin(pin);
  CHECK_EQ(two.other->reserve(page).reason, Reason::no_room);
  two.world.pass(20 * kMillisecondNs);
  CHECK(two.other->store(page));
}

// Incident: only the page size with the coldest page was looked at, and another had slabs to give.
TEST(page_size_without_a_slab_gets_one_though_the_coldest_is_pinned_all_over) {
  World world(shape_of(64 * 1024, 1), kDram);
  const NamespaceShape pinned = shape_of(32 * 1024, 1, {8, 8}), none = shape_of(8192, 1, {9, 9});
  world.declared = {pinned, none};
  world.start();
  Peer holder(world), peer(world), other(world);
  holder.use(pinned);
  other.use(none);
  for (uint64_t chain = 0; chain < 120; ++chain) {  // two slabs
    CHECK(holder.store(page_of(pinned, chain, 0)));
    CHECK(holder.pin(page_of(pinned, chain, 0)) >= 0);
  }
  for (uint64_t chain = 0; chain < world.capacity(); ++chain) peer.store(world.page(chain));
  bool stored = false;
  for (int look = 0; look < 8 && !stored; ++look) {
    stored = other.store(page_of(none, 1, 0));
    world.pass(20 * kMillisecondNs);
  }
  CHECK(stored);
  for (uint64_t chain = 0; chain < 120; ++chain)
    CHECK_EQ(holder.load(page_of(pinned, chain, 0)), Got::right);
}

// A slab of 2,048 pages of 4 KiB, which goes to another page size in two steps.
struct Small {
  Small() : world(shape_of(4096, 1), 64 * kMiB) {
    world.declared = {other};
    world.start();
    owner.emplace(world);
    needy.emplace(world);
    needy->use(other);
    for (uint64_t chain = 0; chain < world.capacity(); ++chain) owner->store(world.page(chain));
  }
  // The other size asks for its first slab; how many pages had to leave for it so far.
  uint64_t begin() {
    const uint64_t before = world->status().dram_pages;
    CHECK_EQ(needy->reserve(wanted).reason, Reason::later);
    CHECK(world->goes_on());
    return before - world->status().dram_pages;
  }
  bool end() {
    while (world->goes_on()) world->go_on();
    return needy->store(wanted);
  }
  // The slab that is on its way: the one whose pages went first.
  uint32_t slab_of_first_gap() {
    std::map<uint32_t, uint64_t> there;
    for (uint64_t chain = 0; chain < 4 * 2048 * 8; ++chain)
      if (const auto entry = world.entry(world.page(chain)))
        ++there[world.slots().slab_of(entry->slot)];
    return std::ranges::min_element(there, {}, [](const auto& each) { return each.second; })->first;
  }
  std::optional<uint64_t> chain_in(uint32_t slab) {
    for (uint64_t chain = 0; chain < 4 * 2048 * 8; ++chain)
      if (const auto entry = world.entry(world.page(chain));
          entry && world.slots().slab_of(entry->slot) == slab)
        return chain;
    return std::nullopt;
  }

  const NamespaceShape other = shape_of(64 * 1024, 1, {8, 8});
  const TestPage wanted = page_of(other, 1, 0);
  World world;
  std::optional<Peer> owner, needy;
};

// Incident: 65,536 small pages left at once, and another client's store waited 28 ms.
TEST(slab_of_many_pages_goes_to_another_page_size_in_steps) {
  Small small;
  const uint64_t first = small.begin();
  CHECK(first > 0 && first <= 1024);
  const uint32_t slab = small.slab_of_first_gap();
  // Between two steps others are served, and nothing goes into what is to be emptied.
  for (uint64_t chain = 100000; chain < 100300; ++chain) {
    const TestPage page = small.world.page(chain);
    CHECK(small.owner->store(page));
    CHECK(small.world.slots().slab_of(small.world.entry(page)->slot) != slab);
  }
  CHECK(small.end());
  CHECK_EQ(small.world.slots().layout(slab).slot_blocks, small.other.slot_bytes() / kBlockBytes);
  small.world.check_settled();
}

TEST(slab_stays_when_a_page_of_it_is_pinned_or_written_between_two_steps) {
  for (const bool pinned : {true, false}) {
    Small small;
    small.begin();
    const uint32_t slab = small.slab_of_first_gap();
    const auto chain = small.chain_in(slab);
    CHECK(chain.has_value());
    const TestPage page = small.world.page(*chain);
    int pin = -1;
    if (pinned) {
      pin = small.owner->pin(page);
    } else {  // its first child's metadata names it; without it the child could never be found
      CHECK_EQ(small.owner->reserve(small.world.page(*chain, 1)).reason, Reason::none);
    }
    while (small.world->goes_on()) small.world->go_on();
    CHECK(small.world.stored(page));
    CHECK_EQ(small.world.slots().layout(slab).slot_blocks, 1);
    if (pinned) {
      CHECK_EQ(small.owner->load(page), Got::right);
      small.owner->session().drop_pin(pin);
    }
    // It is used on: what left it makes room for others.
    std::set<uint32_t> slabs;
    for (uint64_t other = 200000; other < 201800; ++other) {
      CHECK(small.owner->store(small.world.page(other)));
      slabs.insert(small.world.slots().slab_of(small.world.entry(small.world.page(other))->slot));
    }
    CHECK(slabs.contains(slab));
  }
}

// Incident: it was all free until the store came again, and went back to who was storing meanwhile.
TEST(slab_that_came_is_kept_for_the_store_that_waits_for_it) {
  Small small;
  small.begin();
  while (small.world->goes_on()) small.world->go_on();
  const uint64_t most = small.world.capacity();
  for (uint64_t chain = 0; chain < most / 8; ++chain) {
    CHECK(small.owner->store(small.world.page(400000 + chain)));
    if (chain % 500 == 0) small.world.pass(10 * kMillisecondNs);
  }
  const uint64_t before = small.world->status().dram_pages;
  CHECK(small.needy->store(small.wanted));
  CHECK_EQ(small.world->status().dram_pages, before + 1);
  // But not for ever for one that does not come.
  Small other;
  other.begin();
  while (other.world->goes_on()) other.world->go_on();
  other.world.pass(2 * kSecondNs);
  for (uint64_t chain = 0; chain < other.world.capacity(); ++chain)
    CHECK(other.owner->store(other.world.page(500000 + chain)));
  for (uint32_t slab = 0; slab < other.world->arena().slab_count(); ++slab)
    CHECK_EQ(other.world.slots().layout(slab).slot_blocks, 1);
}

TEST(slab_whose_pages_are_cleared_between_two_steps_waits_for_who_reads_them) {
  for (const bool read : {true, false}) {
    Small small;
    small.begin();
    const uint32_t slab = small.slab_of_first_gap();
    const TestPage page = small.world.page(*small.chain_in(slab));
    const int pin = read ? small.owner->pin(page) : -1;
    const auto own = static_cast<uint32_t>(small.world.declared.size());
    small.world->clear(own, ++small.world.clear_epoch);
    // Another slab is free as well and is given; this one is on its way already.
    CHECK(small.needy->store(small.wanted));
    CHECK_EQ(small.world.slots().layout(slab).slot_blocks, 1);
    while (small.world->goes_on()) small.world->go_on();
    const bool moved = small.world.slots().layout(slab).slot_blocks != 1;
    CHECK_EQ(moved, !read);
    if (read) small.owner->session().drop_pin(pin);
    small.world.pass(60 * kSecondNs);
    while (small.world->goes_on()) small.world->go_on();
    small.world.check_settled();
  }
}

TEST(slab_that_moves_is_right_whatever_happens_between_its_steps) {
  Small small;
  auto random = check::random("slab that moves");
  uint64_t next = 300000, moved = 0;
  std::vector<int> pins;
  for (int round = 0; round < 40; ++round) {
    small.world.pass(150 * kMillisecondNs);
    const TestPage page = page_of(small.other, 1000 + round, 0);
    small.needy->store(page);
    while (small.world->goes_on()) {
      for (uint64_t step = random() % 30; step > 0; --step) {
        const TestPage own = small.world.page(next - random() % 400);
        switch (random() % 6) {
          case 0:
            if (const auto entry = small.world.entry(own)) {
              const int pin = small.owner->pin(own);
              if (pin >= 0) pins.push_back(pin);
            }
            break;
          case 1:
            if (!pins.empty()) {
              small.owner->session().drop_pin(pins.back());
              pins.pop_back();
            }
            break;
          case 2:
            small.world.pass(random() % 50 * kMillisecondNs);
            break;
          default:
            small.owner->store(small.world.page(next++));
        }
      }
      small.world->go_on();
    }
    moved += small.needy->store(page) ? 1 : 0;
  }
  for (const int pin : pins) small.owner->session().drop_pin(pin);
  CHECK(moved > 0);
  small.world.pass(60 * kSecondNs);
  small.world.pass(60 * kSecondNs);
  while (small.world->goes_on()) small.world->go_on();
  small.world.check_settled();
  for (uint64_t chain = next - 100; chain < next; ++chain)
    if (small.world.stored(small.world.page(chain)))
      CHECK_EQ(small.owner->load(small.world.page(chain)), Got::right);
}

TEST(store_waits_for_an_arena_that_grows_and_evicts_nothing) {
  World growing(shape_of(120 * 1024, 1));
  growing.start_without_slabs();
  Peer peer(growing);
  const auto slab = growing->next_slab_to_populate();
  growing->slab_populated(*slab, growing->arena().populate_slab(*slab));
  uint64_t chain = 0;
  ReserveAnswer answer;
  for (;; ++chain) {
    answer = peer.reserve(growing.page(chain));
    if (answer.answer != Answer::granted) break;
    CHECK_EQ(peer.seal(answer, 0, peer.copy(answer, growing.page(chain))), Reason::none);
  }
  CHECK_EQ(answer.reason, Reason::later);
  CHECK_EQ(growing->status().dram_pages, chain);
  const auto next = growing->next_slab_to_populate();
  growing->slab_populated(*next, growing->arena().populate_slab(*next));
  growing.pass(kSecondNs);
  CHECK(peer.store(growing.page(chain)));
  for (uint64_t at = 0; at <= chain; ++at) CHECK_EQ(peer.load(growing.page(at)), Got::right);
}

// A descriptor of this process that writes to a file.
int writing_to(const std::string& path) {
  for (const auto& each : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const int fd = std::stoi(each.path().filename());
    if (std::filesystem::read_symlink(each.path(), gone) == path &&
        (::fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR)
      return fd;
  }
  throw std::runtime_error("nobody writes to " + path);
}

// Incident: it was said once more with each slab that came, and stores waited for the next one.
TEST(metadata_without_room_is_said_once_though_further_slabs_come) {
  World world(shape_of(120 * 1024, 1));
  world.start_without_slabs();
  Peer peer(world);
  const int slots = writing_to(world.options.arena_dir + "/slots");
  const Fd kept(::fcntl(slots, F_DUPFD_CLOEXEC, 0));
  const Fd full(::open("/dev/null", O_RDONLY | O_CLOEXEC));  // takes no room from anywhere
  CHECK_EQ(::dup2(full.get(), slots), slots);
  int said = 0;
  while (const auto slab = world->next_slab_to_populate()) {
    world->slab_populated(*slab, world->arena().populate_slab(*slab));
    CHECK_EQ(peer.reserve(world.page(*slab)).answer, Answer::dropped);
    for (const auto& [name, detail] : world->take_events()) said += name == "arena_limited" ? 1 : 0;
    CHECK(world->status().dram_health.starts_with("cannot grow the arena"));
  }
  CHECK_EQ(said, 1);
  CHECK_EQ(::dup2(kept.get(), slots), slots);
  world.pass(kSecondNs);
  CHECK(peer.store(world.page(0)));
  CHECK_EQ(world->status().dram_health, "ok");
  CHECK(world->take_events().empty());
}

// Four slabs: three of large pages, and one of small pages with metadata of 16 KiB each, whose
// slots come a few at a time. From `no_memory()` on there is none for more of them.
struct FewSlots {
  explicit FewSlots(bool has_small = true) : world(shape_of(120 * 1024, 1)) {
    small.page_tokens = 4096;
    world.declared.push_back(small);
    world.start();
    large.emplace(world);
    owner.emplace(world);
    owner->use(small);
    for (uint64_t chain = 0; chain < kLarge; ++chain) CHECK(large->store(world.page(chain)));
    if (has_small) CHECK(store(0));
  }
  bool store(uint64_t chain) { return owner->store(page_of(small, chain, 0)); }
  uint64_t pages_of_large() {
    uint64_t count = 0;
    for (uint64_t chain = 0; chain < kLarge; ++chain) count += world.stored(world.page(chain));
    return count;
  }
  // From the slab on; it is the last ones that have it not.
  void no_memory(uint32_t slab = 0) {
    slots = writing_to(world.options.arena_dir + "/slots");
    kept = Fd(::fcntl(slots, F_DUPFD_CLOEXEC, 0));
    const SlotsHeader& header = world.slots().header();
    const Fd bounded(::memfd_create("bounded", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    const uint64_t bytes = slab == 0 ? 0 : header.metas_offset + slab * header.meta_region_bytes;
    CHECK_EQ(::ftruncate(bounded.get(), static_cast<off_t>(bytes)), 0);
    CHECK_EQ(::fcntl(bounded.get(), F_ADD_SEALS, F_SEAL_GROW), 0);
    CHECK_EQ(::dup2(bounded.get(), slots), slots);
  }
  void memory_again() { CHECK_EQ(::dup2(kept.get(), slots), slots); }

  static constexpr uint64_t kLarge = 3 * 17;
  World world;
  NamespaceShape small = shape_of(4096, 1, {0x61, 0x62});
  std::optional<Peer> large, owner;
  int slots = -1;
  Fd kept;
};

// Incident: a fiftieth of a slab was to be free, of which fewer slots had found memory: all that
// was stored in them left while nobody stored anything.
TEST(pages_stay_where_memory_for_more_slots_of_their_slab_is_missing) {
  NamespaceShape shape = shape_of(4096, 1);
  shape.page_tokens = 240;
  World world(shape, 256 * kMiB);  // 7,281 slots a slab, of which 113 are added at a time
  world.start_without_slabs();
  Peer peer(world);
  world->slab_populated(0, world->arena().populate_slab(0));
  CHECK(peer.store(world.page(0)));
  const int slots = writing_to(world.options.arena_dir + "/slots");
  const Fd kept(::fcntl(slots, F_DUPFD_CLOEXEC, 0));
  const Fd full(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  CHECK_EQ(::dup2(full.get(), slots), slots);
  uint64_t stored = 1;
  while (stored < 100) CHECK(peer.store(world.page(stored++)));
  for (int tick = 0; tick < 10; ++tick) world.pass(kSecondNs);
  CHECK_EQ(world->status().dram_pages, stored);
  CHECK_EQ(::dup2(kept.get(), slots), slots);
  while (stored < 300) CHECK(peer.store(world.page(stored++)));
  CHECK_EQ(world->status().dram_pages, stored);
  CHECK_EQ(world->status().dram_health, "populating");
}

// Incident: the word of a free slot became that of one with a page, and the daemon died of it when
// the slab went to another page size.
TEST(slab_with_a_damaged_word_costs_no_page_and_ends_nothing) {
  FewSlots few;
  uint64_t left = 0;
  const SlotId slot = few.world.slot_of(few.world.page(0));
  few.world->evict(-1, 1, "dram", left);
  const SlotWord word = few.world.word(slot);
  CHECK(word.state == SlotState::free);
  few.world.set_word(slot, {word.generation, SlotState::live});
  for (uint64_t chain = 1; chain < 100; ++chain) {
    CHECK(few.store(chain));
    few.world.clock.advance_ns(kSecondNs);
  }
  CHECK(few.pages_of_large() < FewSlots::kLarge - 1);  // of another slab
  few.world.set_word(slot, word);
  few.world.check_no_slot_leaks();
}

// Incident: the slabs of another page size lost their pages, one after the other, to a page size
// that then found no memory for its metadata in them.
TEST(slab_is_not_taken_where_there_is_no_memory_to_cut_it_anew) {
  FewSlots few;
  few.no_memory();
  for (uint64_t chain = 1; chain < 40; ++chain) {
    few.store(chain);
    few.world.clock.advance_ns(kSecondNs);
  }
  CHECK_EQ(few.pages_of_large(), FewSlots::kLarge);
  CHECK_EQ(few.world->take_events().size(), 1);  // it is said once
  few.memory_again();
  for (uint64_t chain = 100; chain < 140; ++chain) CHECK(few.store(chain));
}

// A slab whose metadata has memory goes to whom it was taken for, though an earlier one has not.
TEST(slab_is_used_where_an_earlier_one_still_waits_for_memory) {
  FewSlots few;
  few.no_memory(few.world.slots().slab_of(few.world.slot_of(page_of(few.small, 0, 0))));
  for (uint64_t chain = 1; chain < 40; ++chain) {
    CHECK(few.store(chain));
    few.world.clock.advance_ns(kSecondNs);
  }
  for (uint64_t chain = 0; chain < 40; ++chain)
    CHECK(few.world.stored(page_of(few.small, chain, 0)));
  CHECK(few.pages_of_large() >= FewSlots::kLarge / 3);  // what two slabs had left
  few.memory_again();
  few.world.check_settled();
}

TEST(slab_is_used_where_one_that_is_ready_has_no_memory) {
  FewSlots few(false);
  few.no_memory(3);
  for (uint64_t chain = 0; chain < 20; ++chain) {
    CHECK(few.store(chain));
    few.world.clock.advance_ns(kSecondNs);
  }
  CHECK_EQ(few.pages_of_large(), FewSlots::kLarge * 2 / 3);
  few.memory_again();
  few.world.check_settled();
}

// Incident: an arena of 128 MiB with ten pages in it could not be made smaller.
TEST(arena_that_no_client_has_mapped_gives_back_what_a_smaller_dram_has_no_room_for) {
  World world(shape_of(64 * 1024, 1), 16 * kMiB);
  const std::string arena = world.options.arena_dir + "/arena";
  world.start();
  std::vector<EntryView> entries;
  {
    Peer peer(world);
    for (uint64_t chain = 0; chain < world.capacity(); ++chain) {
      CHECK(peer.store(world.page(chain)));
      entries.push_back(*world.entry(world.page(chain)));
    }
  }
  const uint32_t kept_slabs = world->arena().slab_count() / 2;
  const auto kept = [&](const EntryView& entry) {
    return world.slots().slab_of(entry.slot) < kept_slabs;
  };
  const auto pages = static_cast<uint64_t>(std::ranges::count_if(entries, kept));
  CHECK(pages > 0 && pages < entries.size());
  world.kill();
  world.options.dram_bytes = 8 * kMiB;
  CHECK_EQ(world.start().pages_dram, pages);
  const auto events = world->take_events();
  CHECK_EQ(events.at(0).first, "arena_shrunk");
  CHECK_EQ(events.at(0).second,
           "bytes=8388608 dropped_pages=" + std::to_string(entries.size() - pages));
  CHECK_EQ(memory_of(arena), 8 * kMiB);
  {
    Peer peer(world);
    for (uint64_t chain = 0; chain < entries.size(); ++chain)
      CHECK_EQ(peer.load_as(entries[chain], world.page(chain), 0),
               kept(entries[chain]) ? Got::right : Got::stale);
    CHECK(peer.store(world.page(1000)));
    world.check_settled();
  }
  // And back: no old entry finds anything in the memory that was given back.
  world.kill();
  world.options.dram_bytes = 16 * kMiB;
  world.start();
  CHECK(world->take_events().empty());
  {
    Peer peer(world);
    for (uint64_t chain = 2000; world.word(entries.back().slot).state != SlotState::live; ++chain)
      CHECK(peer.store(world.page(chain)));
    for (uint64_t chain = 0; chain < entries.size(); ++chain)
      if (!kept(entries[chain]))
        CHECK_EQ(peer.load_as(entries[chain], world.page(chain), 0), Got::stale);
    world.check_settled();
  }
}

TEST(arena_gives_back_what_an_end_in_between_has_left) {
  World world(shape_of(64 * 1024, 1), 16 * kMiB);
  world.start();
  world.slots().layout_word(world->arena().slab_count() - 1).store(0);
  world.kill();
  world.options.dram_bytes = 14 * kMiB;
  world.start();
  CHECK(world->take_events().empty());
  CHECK_EQ(memory_of(world.options.arena_dir + "/arena"), 14 * kMiB);
}
