// A client's session file is the client's to write. Whatever it writes there, the daemon goes on,
// and what other sessions pin stays where it is.
#include <sys/stat.h>

#include "tests/arena_image.h"
#include "tests/check.h"
#include "tests/tally.h"

using namespace kvw;

namespace {

using Random = std::mt19937_64;

std::string path_of(World& world, const Peer& peer) {
  char name[32];
  std::snprintf(name, sizeof name, "/%016llx", static_cast<unsigned long long>(peer.id()));
  return world->arena().sessions_directory() + name;
}

uint64_t any_word(Random& random) {
  switch (random() % 5) {
    case 0:
      return 0;
    case 1:
      return ~0ull;
    case 2:
      return random() % 64 << 32 | random() % 64;  // looks like a pin or a touch
    case 3:
      return 1ull << random() % 64;
    default:
      return random();
  }
}

void write_words(const FilePart& file, uint64_t at, size_t words, Random& random) {
  std::vector<std::byte> data(words * 8);
  for (size_t i = 0; i < words; ++i) {
    const uint64_t word = any_word(random);
    std::memcpy(data.data() + i * 8, &word, 8);
  }
  file.write(at, data);
}

void spoil(const FilePart& file, Random& random) {
  const auto some = [&](size_t most) { return 1 + random() % most; };
  switch (random() % 6) {
    case 0:  // pins and how many of them there are
      write_words(file, offsetof(SessionFile, pins_high), 1, random);
      write_words(file, offsetof(SessionFile, pins), some(kPinCapacity), random);
      break;
    case 1:  // touches of pages that are not there, and a head that runs away
      write_words(file, offsetof(SessionFile, touches), some(kTouchCapacity), random);
      write_words(file, offsetof(SessionFile, touch_head), 1, random);
      break;
    case 2:
      write_words(file, offsetof(SessionFile, counters), 32, random);
      break;
    case 3:  // who it is
      write_words(file, 0, offsetof(SessionFile, pins_high) / 8, random);
      break;
    case 4:
      file.cut(random() % sizeof(SessionFile));
      break;
    default:
      write_words(file, 0, sizeof(SessionFile) / 8, random);
  }
}

// Everything that reads session files, and room made under their pins.
void use_sessions(World& world) {
  world.pass(kMillisecondNs);
  (void)world->status();
  uint64_t left = 0;
  world->evict(-1, 1000, "dram", left);
}

}  // namespace

TEST(session_files_of_garbage_neither_end_the_daemon_nor_free_what_others_pin) {
  auto random = check::random("session garbage");
  World world(shape_of(kArenaShardBytes, kArenaShards));
  world.start();
  Peer honest(world);
  const TestPage pinned = world.page(1);
  CHECK(honest.store(pinned));
  const int pin = honest.pin(pinned);
  CHECK(pin >= 0);
  const EntryView entry = *world.entry(pinned);
  for (uint64_t round = 0; round < check::rounds(100); ++round) {
    auto bad = std::make_unique<Peer>(world);
    const FilePart file(path_of(world, *bad));
    for (uint64_t chain = 2; chain < 8; ++chain) CHECK(honest.store(world.page(chain)));
    spoil(file, random);
    use_sessions(world);
    if (random() % 4 == 0) {
      world.restart();
      honest.map();
      CHECK_EQ(honest.hello().size(), 0);
      use_sessions(world);
    }
    CHECK_EQ(honest.load(pinned, 1), Got::right);
    CHECK_EQ(world.entry(pinned)->slot, entry.slot);
    CHECK_EQ(world.entry(pinned)->generation, entry.generation);
    // Its end is told by its lock, whatever its file says; what it pinned is free again.
    bad->die();
    world.pass(6 * kSecondNs);
    world.pass(6 * kSecondNs);
    CHECK_EQ(world->sessions().size(), 1);
    uint64_t left = 0;
    world->evict(-1, 1000, "dram", left);
    CHECK_EQ(world->status().dram_pages, 1);
    world.check_no_slot_leaks();
    check::tally("session file filled with garbage");
  }
  honest.session().drop_pin(pin);
}
