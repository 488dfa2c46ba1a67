// What a new daemon makes of what an earlier one left: sealed pages and free space, nothing else,
// whatever state a slot was in, whichever word of it was damaged, and whoever still holds it.
#include <sys/wait.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "tests/check.h"
#include "tests/warehouse_world.h"
#include "warehouse/warehouse.h"

namespace kvw {
namespace {

constexpr uint64_t kSmall = 5000;
constexpr uint64_t kGrace = 5 * kSecondNs;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_at(const std::string& path, off_t at, const void* data, size_t bytes) {
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  CHECK_EQ(::pwrite(fd.get(), data, bytes, at), bytes);
}

// --- every state, believed and not, pinned and not

struct Case {
  SlotState state;
  bool good, pinned;
};

void check_sealed_case(const Case& which) {
  World world(shape_of(kSmall));
  world.start();
  Peer peer(world), reader(world);
  const TestPage page = world.page(1), beside = world.page(2);
  CHECK(peer.store(page));
  CHECK(peer.store(beside));
  const EntryView entry = *world.entry(page);
  const uint64_t generation = world.word(entry.slot).generation;
  int place = which.pinned ? reader.pin(page) : -1;
  world.set_word(entry.slot, {generation, which.state});
  if (!which.good) world.meta(entry.slot)->checksum ^= 1ull << 40;
  const RecoverySummary summary = world.restart();
  CHECK_EQ(world.stored(page), which.good);
  CHECK_EQ(summary.dropped_slots, which.good ? 0 : 1);
  CHECK_EQ(summary.pages_dram, which.good ? 2 : 1);
  reader.map();
  if (which.good) {
    CHECK_EQ(world.word(entry.slot).state, SlotState::live);
    CHECK((world.entry(page)->flags & kEntryUnverified) != 0);
    CHECK_EQ(reader.load(page, 0), Got::right);
    CHECK_EQ(reader.load(page, 1), Got::right);
  } else if (which.pinned) {
    CHECK_EQ(world.word(entry.slot).state, SlotState::closing);  // waits for its reader
    CHECK_EQ(world->status().zombie_slots, 1);
    world.pass(100 * kGrace);
    CHECK_EQ(world->status().zombie_slots, 1);
    reader.session().drop_pin(place);
    place = -1;
    world.pass(1);
  }
  if (!which.good) {
    CHECK_EQ(world.word(entry.slot).state, SlotState::free);
    CHECK(world.word(entry.slot).generation > generation);
  }
  CHECK_EQ(reader.load(beside, 1), Got::right);
  world.check_settled();
}

TEST(recovery_keeps_a_sealed_page_and_drops_a_damaged_one_pinned_or_not) {
  for (const SlotState state : {SlotState::live, SlotState::closing})
    for (const bool good : {true, false})
      for (const bool pinned : {true, false}) check_sealed_case({state, good, pinned});
}

TEST(recovery_leaves_a_free_slot_free_and_readable_as_it_was) {
  World world(shape_of(kSmall));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  CHECK(peer.store(page));
  const EntryView entry = *world.entry(page);
  uint64_t left = 0;
  world->evict(-1, 1, "dram", left);
  const SlotWord before = world.word(entry.slot);
  world.restart();
  CHECK_EQ(world.word(entry.slot).pack(), before.pack());
  CHECK(!world.stored(page));
  CHECK_EQ(peer.load_as(entry, page, 0), Got::right);  // through the old mapping
  world.check_settled();
}

TEST(recovery_turns_unfinished_slots_to_limbo_until_nobody_can_write) {
  for (const SlotState state : {SlotState::reserved, SlotState::limbo, SlotState::filling,
                                static_cast<SlotState>(77), static_cast<SlotState>(0xffff)}) {
    World world(shape_of(kSmall));
    world.start();
    Peer peer(world);
    const ReserveAnswer grant = peer.reserve(world.page(1));
    world.set_word(grant.slot, {grant.generation, state});
    if (state == SlotState::filling) world.meta(grant.slot)->granted.store(0);
    CHECK_EQ(world.restart().unfinished_slots, 1);
    CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
    CHECK_EQ(world.word(grant.slot).generation, grant.generation);
    world.pass(kGrace - 1);
    CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
    world.pass(1);
    // The old daemon's own DMA ends with the grace; a client's writing ends when it says so.
    if (state != SlotState::filling) {
      CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
      CHECK_EQ(peer.hello().size(), 1);
      peer.settle(grant);
      world.pass(1);
    }
    CHECK_EQ(world.word(grant.slot).state, SlotState::free);
    CHECK(world.word(grant.slot).generation > grant.generation);
    world.check_settled();
  }
}

// The daemon ended between the word and the metadata of a reserve: what an earlier page left there
// names owners of long ago.
TEST(recovery_frees_a_slot_whose_metadata_is_of_an_earlier_page) {
  World world(shape_of(kSmall));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  CHECK(peer.store(page));
  const SlotId slot = world.slot_of(page);
  const uint64_t generation = world.word(slot).generation;
  for (const bool wiped : {false, true}) {
    world.set_word(slot, {generation + (wiped ? 3u : 1u), SlotState::reserved});
    if (wiped) std::memset(static_cast<void*>(world.meta(slot)), 0, sizeof(SlotMeta));
    CHECK_EQ(world.restart().unfinished_slots, 1);
    CHECK(!world.stored(page));
    world.pass(1);
    CHECK_EQ(world.word(slot).state, SlotState::free);
    world.check_settled();
  }
}

// --- damage

// Which words of a record recovery's checksum covers: all but masks and owners.
bool covered(size_t at, uint32_t shards, size_t witness_bytes) {
  const size_t digests = sizeof(SlotMeta), owners = digests + 8 * shards,
               witness = owners + 8 * shards;
  return at < offsetof(SlotMeta, granted) || (at >= digests && at < owners) ||
         (at >= witness && at < witness + witness_bytes);
}

TEST(recovery_believes_no_page_whose_metadata_was_flipped_in_any_word) {
  auto random = check::random("recovery_believes_no_page_whose_metadata_was_flipped_in_any_word");
  for (uint64_t round = 0; round < check::rounds(8); ++round) {
    World world(shape_of(kSmall));
    world.start();
    Peer peer(world);
    const size_t words = meta_bytes_of(world.shape()) / 8;
    for (uint64_t chain = 0; chain < words; ++chain) CHECK(peer.store(world.page(chain)));
    for (uint64_t chain = 0; chain < words; ++chain) {
      auto* meta = reinterpret_cast<uint64_t*>(world.meta(world.slot_of(world.page(chain))));
      meta[chain] ^= round == 0 ? ~0ull : 1ull << random() % 64;
    }
    world.restart();
    peer.map();
    for (uint64_t chain = 0; chain < words; ++chain) {
      const TestPage page = world.page(chain);
      CHECK_EQ(world.stored(page), !covered(chain * 8, 2, 64));
      if (!world.stored(page)) continue;
      for (uint32_t shard = 0; shard < 2; ++shard) CHECK_EQ(peer.load(page, shard), Got::right);
    }
    world.pass(1);
    world.check_settled();
  }
}

TEST(recovery_frees_an_unfinished_slot_whatever_word_of_it_was_flipped) {
  auto random = check::random("recovery_frees_an_unfinished_slot_whatever_word_of_it_was_flipped");
  World world(shape_of(kSmall));
  world.start();
  auto peer = std::make_unique<Peer>(world);
  const size_t words = meta_bytes_of(world.shape()) / 8;
  for (uint64_t round = 0; round < check::rounds(8); ++round) {
    std::vector<ReserveAnswer> grants;
    for (uint64_t chain = 0; chain < words; ++chain) {
      grants.push_back(peer->reserve(world.page(round * 100 + chain)));
      CHECK_EQ(grants.back().answer, Answer::granted);
      auto* meta = reinterpret_cast<uint64_t*>(world.meta(grants.back().slot));
      meta[chain] ^= round == 0 ? ~0ull : 1ull << random() % 64;
    }
    CHECK_EQ(world.restart().unfinished_slots, words);
    for (const SlotRef& ref : peer->hello())  // what is still legible is settled
      world->settle(peer->id(), std::array<SlotRef, 1>{ref});
    peer->die();
    world.pass(1);
    world.pass(kGrace);
    world.pass(kGrace);
    world.check_settled();
    CHECK_EQ(world->status().dram_pages, 0);
    peer = std::make_unique<Peer>(world);
  }
}

TEST(recovery_counts_orphans_and_a_sweep_drops_them) {
  World world(shape_of(kSmall));
  world.start();
  Peer peer(world);
  for (uint32_t at = 0; at < 6; ++at) CHECK(peer.store(world.page(1, at)));
  CHECK(peer.store(world.page(2)));
  world.meta(world.slot_of(world.page(1, 2)))->checksum ^= 1;
  const RecoverySummary summary = world.restart();
  CHECK_EQ(summary.pages_dram, 6);
  CHECK_EQ(summary.orphans, 1);  // the page below the gap; the rest hangs on it
  CHECK_EQ(world->status().index_pages, 6);
  CHECK_EQ(world->status().orphan_pages, 1);
  for (int i = 0; i < 4; ++i) world.pass(1);
  CHECK_EQ(world->status().orphan_pages, 0);
  CHECK_EQ(world->status().index_pages, 3);
  for (uint32_t at = 0; at < 6; ++at) CHECK_EQ(world.stored(world.page(1, at)), at < 2);
  CHECK_EQ(world->status().left_dram[static_cast<size_t>(LeaveReason::orphaned)], 3);
  world.check_settled();
}

TEST(recovered_page_with_damaged_bytes_is_a_mismatch_then_quarantined) {
  World world(shape_of(kSmall));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  CHECK(peer.store(page));
  world.payload(world.slot_of(page))[4999] ^= std::byte{4};
  CHECK_EQ(world.restart().pages_dram, 1);  // recovery reads headers, not payloads
  peer.map();
  CHECK_EQ(peer.load(page, 0), Got::mismatch);
  CHECK_EQ(peer.load(page, 1), Got::right);
  peer.report(*world.entry(page));
  CHECK(!world.stored(page));
  CHECK_EQ(world->status().quarantined, 1);
  world.restart();
  CHECK(!world.stored(page));  // not even if the daemon ended before the slot was free
  world.pass(1);
  world.check_settled();
}

// --- namespaces and clears

// Slots are found in another order than their pages came in: a page found its window filled with
// others that had come after it, and was lost with its descendants.
TEST(recovery_has_a_place_for_every_page_in_whatever_order_it_finds_them) {
  constexpr uint64_t kHomes = 5, kOfEach = 4, kFirst = 100;  // 20 pages from 5 homes fit just so
  World world(shape_of(kSmall, 1));
  world.options.index_pages = 128;
  world.start();
  std::vector<TestPage> pages;
  const uint64_t positions = world->arena().index().entries();
  for (uint64_t home = kFirst; home < kFirst + kHomes; ++home)
    for (uint64_t chain = 0, found = 0; found < kOfEach; ++chain) {
      TestPage page = world.page(chain);
      if (page.key.lo % positions != home) continue;
      pages.push_back(std::move(page));
      ++found;
    }
  Peer peer(world);
  for (const TestPage& page : pages) CHECK(peer.store(page));
  // Half of them again: in slots behind those of the others, and where they were in the index.
  const size_t half = pages.size() / 2;
  uint64_t left = 0;
  world->evict(0, half, "dram", left);
  for (size_t at = 0; at < half; ++at) {
    CHECK(!world.stored(pages[at]));
    CHECK(peer.store(pages[at]));
  }
  for (int restart = 0; restart < 2; ++restart) {
    CHECK_EQ(world.restart().pages_dram, pages.size());
    peer.map();
    for (const TestPage& page : pages) CHECK_EQ(peer.load(page, 0), Got::right);
  }
  world.check_settled();
}

// They were counted as damaged, and nothing was said.
TEST(pages_that_a_smaller_index_has_no_room_for_are_told_and_are_no_damage) {
  constexpr uint64_t kPages = 200, kRoom = 64;
  World world(shape_of(kSmall, 1), 32 * kMiB);
  world.start();
  {
    Peer peer(world);
    for (uint64_t chain = 0; chain < kPages; ++chain) CHECK(peer.store(world.page(chain)));
  }
  CHECK_EQ(world.restart().pages_dram, kPages);
  CHECK(world->take_events().empty());
  world.options.index_pages = kRoom;
  const RecoverySummary summary = world.restart();
  CHECK_EQ(summary.dropped_slots, 0);
  CHECK(summary.pages_dram <= kRoom);
  const auto events = world->take_events();
  CHECK_EQ(events.size(), 2);
  CHECK_EQ(events[0].first, "index_small");
  CHECK_EQ(events[1].first, "index_too_small");
  CHECK_EQ(events[1].second,
           "capacity=64 dropped_dram=" + std::to_string(kPages - summary.pages_dram) +
               " dropped_nvme=0 enough=--index-pages=200");
}

TEST(recovery_adopts_a_namespace_that_nobody_declared) {
  World world(shape_of(kSmall));
  world.start();
  {
    Peer peer(world);
    for (uint32_t at = 0; at < 3; ++at) CHECK(peer.store(world.page(1, at)));
  }
  world.declare_own = false;
  CHECK_EQ(world.restart().pages_dram, 3);
  CHECK_EQ(world->status().spaces.size(), 1);
  Peer peer(world);
  // No client finds it before it is declared: who opens it makes it known to the ledger again.
  CHECK(!peer.view().space(kSpace).has_value());
  const uint32_t ordinal = world->add_namespace(kMaxNamespaces, world.shape(), 0);
  const auto row = peer.view().space(kSpace);
  CHECK(row.has_value());
  CHECK_EQ(row->ordinal, ordinal);
  CHECK_EQ(row->shape.shard_bytes, kSmall);
  CHECK_EQ(row->shape.shards, 2);
  CHECK_EQ(peer.load(world.page(1, 2), 1), Got::right);
  CHECK_THROWS(world->add_namespace(kMaxNamespaces, shape_of(kSmall + 1), 0), "bad_namespace");
}

TEST(namespace_opened_with_a_later_clear_hides_older_pages_from_readers) {
  World world(shape_of(kSmall));
  world.start();
  Peer peer(world);
  CHECK(peer.store(world.page(1)));
  world.declare_own = false;
  world.restart();  // adopted, as never cleared
  const uint32_t ordinal = world->add_namespace(kMaxNamespaces, world.shape(), 3);
  CHECK_EQ(world->arena().control().namespaces[ordinal].clear_epoch.load(), 3);
}

TEST(recovery_drops_what_was_reserved_before_a_clear) {
  World world(shape_of(kSmall));
  const NamespaceShape other = shape_of(kSmall, 2, {8, 8});
  world.declared.push_back(other);
  world.start();
  Peer peer(world), beside(world);
  beside.use(other);
  CHECK(peer.store(world.page(1)));
  CHECK(beside.store(page_of(other, 1, 0)));
  world.options.epoch = 1;  // the ledger knows of the clear, the daemon died before it did it
  world.clear_epoch = 1;
  const RecoverySummary summary = world.restart();
  CHECK_EQ(summary.cleared, 1);
  CHECK_EQ(summary.epoch, 1);
  CHECK(!world.stored(world.page(1)));
  CHECK(world.stored(page_of(other, 1, 0)));
  CHECK(peer.store(world.page(1)));  // stored anew, it is younger than the clear
  CHECK_EQ(world.restart().cleared, 0);
  CHECK(world.stored(world.page(1)));
}

TEST(recovery_drops_what_is_not_provably_younger_when_the_ledger_is_lost) {
  World world(shape_of(kSmall));
  world.start();
  Peer peer(world);
  CHECK(peer.store(world.page(1)));
  world->clear(0, 1);
  CHECK(peer.store(world.page(2)));
  world->raise_epoch(2);  // a clear of some other namespace
  CHECK(peer.store(world.page(3)));
  world.options.epoch_floor = kLedgerLost;
  world.declare_own = false;
  const RecoverySummary summary = world.restart();
  CHECK_EQ(summary.epoch, 2);  // the arena remembers
  CHECK(!world.stored(world.page(1)));
  CHECK(!world.stored(world.page(2)));
  CHECK(world.stored(world.page(3)));
  CHECK_EQ(summary.cleared, 1);
}

// --- files that are not what they should be: an error that says so, and nothing destroyed

struct Spoilt {
  Spoilt() : world(shape_of(kSmall)) {
    world.start();
    Peer peer(world);
    for (uint64_t chain = 0; chain < 4; ++chain) CHECK(peer.store(world.page(chain)));
    world.kill();
  }
  std::string file(const char* name) const { return world.options.arena_dir + "/" + name; }
  // Refused with the code, and after `undo` everything is there as before.
  template <class Do, class Undo>
  void check_refused(const char* code, Do&& spoil, Undo&& undo) {
    spoil();
    const std::string control = read_file(file("control"));
    CHECK_THROWS(world.start(), code);
    world.kill();
    CHECK(read_file(file("control")) == control);
    undo();
    CHECK_EQ(world.start().pages_dram, 4);
    Peer peer(world);
    for (uint64_t chain = 0; chain < 4; ++chain)
      CHECK_EQ(peer.load(world.page(chain), 1), Got::right);
    world.kill();
  }
  World world;
};

TEST(start_is_refused_when_the_files_belong_to_another_warehouse) {
  Spoilt spoilt;
  spoilt.check_refused(
      "arena_foreign", [&] { spoilt.world.options.warehouse_id = {1, 1}; },
      [&] { spoilt.world.options.warehouse_id = kWarehouse; });
}

TEST(start_is_refused_when_the_slots_file_has_another_version_or_is_damaged) {
  Spoilt spoilt;
  for (const size_t at : {offsetof(SlotsHeader, magic), offsetof(SlotsHeader, version),
                          offsetof(SlotsHeader, slab_bytes), offsetof(SlotsHeader, checksum)}) {
    const std::string before = read_file(spoilt.file("slots")).substr(at, 4);
    spoilt.check_refused(
        "arena_foreign",
        [&] {
          const uint32_t wrong = 0x5a5a5a5a;
          write_at(spoilt.file("slots"), static_cast<off_t>(at), &wrong, 4);
        },
        [&] { write_at(spoilt.file("slots"), static_cast<off_t>(at), before.data(), 4); });
  }
}

TEST(start_is_refused_when_the_slots_file_is_truncated) {
  Spoilt spoilt;
  const std::string path = spoilt.file("slots"), kept = read_file(path);
  for (const size_t bytes : {size_t{0}, size_t{50}, size_t{4096}, kept.size() - 1})
    spoilt.check_refused(
        "arena_foreign", [&] { std::filesystem::resize_file(path, bytes); },
        [&] {
          std::filesystem::resize_file(path, kept.size());
          write_at(path, 0, kept.data(), kept.size());
        });
}

TEST(start_is_refused_when_the_arena_is_gone_or_truncated) {
  Spoilt spoilt;
  const std::string path = spoilt.file("arena"), aside = path + ".aside";
  spoilt.check_refused(
      "arena_missing", [&] { std::filesystem::rename(path, aside); },
      [&] { std::filesystem::rename(aside, path); });
  std::filesystem::copy_file(path, aside);
  spoilt.check_refused(
      "arena_foreign", [&] { std::filesystem::resize_file(path, 4096); },
      [&] { std::filesystem::rename(aside, path); });
}

TEST(start_is_refused_when_a_living_client_has_more_of_the_arena_mapped_than_asked) {
  Spoilt spoilt;
  spoilt.world.options.dram_bytes = 16 * kMiB;
  spoilt.world.start();
  const Peer peer(spoilt.world);
  spoilt.world.kill();
  spoilt.world.options.dram_bytes = 16 * kMiB;
  spoilt.check_refused(
      "arena_larger", [&] { spoilt.world.options.dram_bytes = 8 * kMiB; },
      [&] { spoilt.world.options.dram_bytes = 16 * kMiB; });
}

TEST(start_goes_on_when_only_the_control_page_is_lost_or_foreign) {
  Spoilt spoilt;
  uint64_t incarnation = 0;
  for (int round = 0; round < 3; ++round) {
    const std::string path = spoilt.file("control");
    if (round == 0) std::filesystem::remove(path);
    if (round == 1) std::filesystem::resize_file(path, 100);
    if (round == 2) write_at(path, 0, "another one", 11);
    CHECK_EQ(spoilt.world.start().pages_dram, 4);
    // The name of an index is never given twice: an old client must not take it for its own.
    CHECK(spoilt.world->arena().incarnation() > incarnation);
    incarnation = spoilt.world->arena().incarnation();
    spoilt.world.kill();
  }
}

TEST(second_daemon_is_refused_with_the_pid_of_the_first) {
  World world(shape_of(kSmall));
  world.start();
  try {
    Warehouse second(world.options, world.clock);
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), "owned");
    CHECK(std::string(error.what()).find(std::to_string(::getpid())) != std::string::npos);
  }
  Peer peer(world);
  CHECK(peer.store(world.page(1)));
}

// --- a real kill -9, at any moment

// The daemon of the child: stores pages forever, saying which are sealed.
[[noreturn]] void serve_and_store(World& world, int said, bool churn, uint64_t round) {
  world.start();
  Peer peer(world);
  for (uint64_t chain = 0;; ++chain) {
    const uint64_t number = round * 100000 + (churn ? chain : chain % 100);
    if (!churn && chain == 100) ::pause();
    if (peer.store(world.page(number)) && !churn)
      if (::write(said, &number, sizeof number) != sizeof number) ::_exit(1);
    if (churn && chain % 64 == 63) world.pass(1);
    if (churn && ::write(said, &number, sizeof number) != sizeof number) ::_exit(1);
  }
}

TEST(daemon_killed_at_any_moment_loses_nothing_sealed_and_serves_nothing_wrong) {
  auto random = check::random("daemon_killed_at_any_moment");
  for (const bool churn : {false, true}) {
    World world(churn ? shape_of(60 * 1024) : shape_of(1000));
    world.start();
    auto reader = std::make_unique<Peer>(world);
    const TestPage held = world.page(999999);
    CHECK(reader->store(held));
    const EntryView entry = *world.entry(held);
    CHECK(reader->pin(held) >= 0);
    world.kill();
    std::vector<uint64_t> sealed;
    for (uint64_t round = 0; round < check::rounds(6); ++round) {
      std::array<int, 2> pipe{};
      CHECK_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
      const pid_t child = ::fork();
      if (child == 0) serve_and_store(world, pipe[1], churn, round % 4);
      ::close(pipe[1]);
      uint64_t number = 0;
      const uint64_t enough = random() % (churn ? 300 : 100);
      for (uint64_t heard = 0; heard <= enough && ::read(pipe[0], &number, 8) == 8; ++heard)
        if (!churn) sealed.push_back(number);
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
      while (::read(pipe[0], &number, 8) == 8)
        if (!churn) sealed.push_back(number);
      ::close(pipe[0]);
      world.start();
      reader->hello();
      CHECK_EQ(reader->load_as(entry, held, 0), Got::right);  // pinned all the while
      CHECK_EQ(reader->load_as(entry, held, 1), Got::right);
      for (const uint64_t chain : sealed)
        for (uint32_t shard = 0; shard < 2; ++shard)
          CHECK_EQ(reader->load(world.page(chain), shard), Got::right);
      for (uint64_t chain = round % 4 * 100000; churn && chain <= number + 70; ++chain) {
        const Got got = reader->load(world.page(chain), 0);
        CHECK(got == Got::right || got == Got::missing);
      }
      world.pass(1);  // the dead daemon's own client is seen dead
      world.pass(kGrace);
      world.check_settled();
      world.kill();
    }
  }
}

TEST(pages_larger_than_the_segments_of_a_smaller_tier_stay_in_dram) {
  World world(shape_of(kMiB));
  world.options.nvme_dir = world.directory.path() + "/nvme";
  world.options.nvme_capacity_bytes = 32 * kMiB;
  world.start();
  const TestPage page = world.page(1);
  CHECK(Peer(world).store(page));
  world.options.nvme_capacity_bytes = 8 * kMiB;
  CHECK_EQ(world.restart().pages_dram, 1);
  CHECK(world.stored(page));
  CHECK_THROWS(world->add_namespace(kMaxNamespaces, shape_of(kMiB, 2, Key{1, 2}), 0),
               "page_too_large");
}

}  // namespace
}  // namespace kvw
