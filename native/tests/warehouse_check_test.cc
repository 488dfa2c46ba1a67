// What is judged to be damaged. The check of both tiers, from the core's side: it never waits, it
// is bounded, and what it judges is the copy that a load would get. And promotions, whose pages may
// be cleared and stored again while they are read.
#include <poll.h>

#include "base/error.h"
#include "io/faulty_engine.h"
#include "tests/arena_image.h"
#include "tests/check.h"
#include "tests/warehouse_world.h"

using namespace kvw;

namespace {

constexpr uint64_t kPageBytes = 5000;

// Pages in both tiers.
struct Both {
  Both() : world(shape_of(kPageBytes, 1)) {
    world.options.nvme_dir = world.directory.path() + "/nvme";
    std::filesystem::create_directory(world.options.nvme_dir);
    world.options.nvme_capacity_bytes = 8 * kMiB;
    world.options.make_engine = [this] {
      return make_faulty_engine(make_io_engine("auto", 8), faults);
    };
    world.start();
    store();
  }
  // Reads that are held would hold up the end.
  ~Both() { faults->hold_reads(false); }
  void store() {
    Peer peer(world);
    for (uint64_t chain = 0; chain < 40; ++chain) CHECK(peer.store(world.page(chain)));
    until([&] { return world->status().nvme_pages == 40; });
  }
  // Every page is being read, and none has arrived.
  void begin_promotions() {
    uint64_t left = 0;
    world->evict(-1, 100, "dram", left);
    CHECK_EQ(world->status().dram_pages, 0);
    faults->hold_reads(true);
    std::vector<Key> keys;
    for (uint64_t chain = 0; chain < 40; ++chain) keys.push_back(world.page(chain).key);
    std::vector<PromoteAnswer> answers;
    world->promote(keys, answers);
    for (const PromoteAnswer answer : answers) CHECK(answer == PromoteAnswer::reading);
  }
  void end_promotions() {
    faults->hold_reads(false);
    until([&] { return world->status().promotions_in_flight == 0; });
  }
  void until(const std::function<bool()>& done) {
    for (int round = 0; round < 20000; ++round) {
      world->poll_log();
      world->tick();
      if (done()) return;
      pollfd ready{world->log_fd(), POLLIN, 0};
      ::poll(&ready, 1, 5);
    }
    CHECK(!"the warehouse never got there");
  }
  CheckReport check(const CheckRequest& request) {
    std::optional<CheckReport> report;
    world->check(request, [&](CheckReport&& found) { report = std::move(found); });
    until([&] { return report.has_value(); });
    return *report;
  }

  std::shared_ptr<Faults> faults = std::make_shared<Faults>();
  World world;
};

// Where reclaim might copy a record to.
nvme::Extent copy_of(const nvme::Extent& from) {
  return {from.segment, from.offset_blocks + 1000, from.blocks, from.life};
}

// Where the record of a page was, and where reclaim copies it to while everything is evicted.
std::pair<nvme::Extent, nvme::Extent> evicted_under_a_move(Both& both, const TestPage& page) {
  const nvme::Extent from = both.world.entry(page)->extent;
  const nvme::Extent to = copy_of(from);
  uint64_t left = 0;
  both.world->evict(-1, 100, "all", left);
  return {from, to};
}

}  // namespace

TEST(check_reads_every_copy_once_stretch_by_stretch) {
  Both both;
  uint64_t dram = 0, nvme = 0, stretches = 0;
  for (int64_t after = 0; after >= 0; ++stretches) {
    const CheckReport report = both.check({-1, static_cast<PageId>(after), 16, false});
    CHECK(report.bad.empty());
    CHECK(report.dram.pages <= 16);
    dram += report.dram.pages;
    nvme += report.nvme.pages;
    after = report.next;
  }
  CHECK_EQ(dram, 40);
  CHECK_EQ(nvme, 40);
  CHECK(stretches >= 3);
}

TEST(check_does_not_wait_for_the_device_and_ends_with_what_it_read) {
  Both both;
  bool ended = false;
  both.world->check({}, [&](CheckReport&& report) {
    ended = true;
    CHECK_EQ(report.nvme.pages, 16);
  });
  CHECK(!ended);  // the reads end in poll_log()
  both.until([&] { return ended; });
}

TEST(check_refuses_what_is_above_its_bound) {
  Both both;
  size_t ended = 0;
  const auto count = [&](CheckReport&&) { ++ended; };
  for (size_t i = 0; i < Checker::kMaxStretches; ++i) both.world->check({}, count);
  CHECK_THROWS(both.world->check({}, count), "check_busy");
  both.until([&] { return ended == Checker::kMaxStretches; });
  both.world->check({}, count);
  both.until([&] { return ended == Checker::kMaxStretches + 1; });
}

TEST(check_passes_over_what_left_while_it_waited) {
  Both both;
  std::optional<CheckReport> report;
  both.world->check({}, [&](CheckReport&& found) { report = std::move(found); });
  uint64_t left = 0;
  both.world->evict(-1, 100, "all", left);
  CHECK_EQ(left, 40);
  both.until([&] { return report.has_value(); });
  CHECK(report->bad.empty());
  CHECK_EQ(report->nvme.pages, 0);
}

TEST(check_that_the_warehouse_does_not_live_to_end_is_no_damage) {
  Both both;
  both.world->check({-1, 0, 16, true}, [&](CheckReport&&) {});
  both.world->stop();  // reads that the disk thread has not begun end here
  CHECK_EQ(both.world->status().quarantined, 0);
  CHECK(both.world->take_tombstones().empty());
}

TEST(quarantined_record_is_told_once_for_its_tombstone) {
  Both both;
  const TestPage page = both.world.page(7);
  const auto entry = both.world.entry(page);
  char name[32];
  std::snprintf(name, sizeof name, "/segments/%08u.seg", entry->extent.segment);
  FilePart(both.world.options.nvme_dir + name)
      .flip((uint64_t{entry->extent.offset_blocks} + 1) * kBlockBytes + 17, 3);
  const CheckReport report = both.check({-1, 0, 1000, true});
  CHECK_EQ(report.bad.size(), 1);
  CHECK_EQ(std::string(report.bad[0].reason), "digest");
  const auto tombstones = both.world->take_tombstones();
  CHECK_EQ(tombstones.size(), 1);
  CHECK(tombstones[0].first == page.key);
  CHECK_EQ(tombstones[0].second, entry->extent.position());
  CHECK(both.world->take_tombstones().empty());
  // Good in DRAM, it is written again, further on.
  both.until([&] { return both.world->status().nvme_pages == 40; });
  CHECK(both.world.entry(page)->extent.position() > entry->extent.position());
}

// Incident: of 110 pages evicted beside reclaim, a restart found 30: their tombstones ended below
// the copies that were under way.
TEST(copy_of_a_page_that_left_while_reclaim_moved_it_gets_a_tombstone) {
  Both both;
  const TestPage page = both.world.page(7);
  const auto [from, to] = evicted_under_a_move(both, page);
  both.world->moved(page.key, from, to);
  const auto tombstones = both.world->take_tombstones();
  CHECK_EQ(tombstones.size(), 1);
  CHECK(tombstones[0].first == page.key);
  CHECK_EQ(tombstones[0].second, to.position());
  CHECK(!both.world.stored(page));
}

// And when the daemon is killed before the copy is written.
TEST(tombstone_of_a_page_that_reclaim_is_copying_covers_the_copy) {
  Both both;
  const TestPage page = both.world.page(7);
  const nvme::Extent from = both.world.entry(page)->extent;
  const nvme::Extent to = copy_of(from);
  both.world->moving(page.key, to);
  uint64_t left = 0;
  for (const auto& [key, position] : both.world->evict(-1, 100, "all", left))
    CHECK(key == page.key ? position == to.position() : position < to.position());
}

TEST(page_that_was_stored_again_while_reclaim_moved_it_gets_a_tombstone_with_the_copy) {
  Both both;
  const TestPage page = both.world.page(7);
  const auto [from, to] = evicted_under_a_move(both, page);
  both.store();
  both.world->moved(page.key, from, to);
  CHECK(both.world->take_tombstones().empty());  // one up to there would take its own record
  CHECK(both.world.entry(page)->extent.position() < to.position());
  uint64_t left = 0;
  for (const auto& [key, position] : both.world->evict(-1, 100, "all", left))
    CHECK(key == page.key ? position == to.position() : position < to.position());
}

TEST(page_whose_copy_was_lost_gets_a_tombstone_with_the_copy_that_a_start_may_find) {
  Both both;
  const TestPage page = both.world.page(7);
  const nvme::Extent from = both.world.entry(page)->extent;
  const nvme::Extent to = copy_of(from);
  both.world->moved(page.key, from, to);
  both.world->moved(page.key, to, from);
  CHECK(both.world.entry(page)->extent == from);
  uint64_t left = 0;
  for (const auto& [key, position] : both.world->evict(-1, 100, "all", left))
    CHECK(key == page.key ? position == to.position() : position < to.position());
}

// It knows no record of it; another start does.
TEST(eviction_without_the_nvme_tier_holds_for_all_that_it_has_and_for_nothing_written_later) {
  Both both;
  World& world = both.world;
  uint64_t left = 0;
  CHECK(both.world->log_end() >= world.entry(world.page(39))->extent.position());
  CHECK(world.options.nvme_dir != "");
  const std::string nvme = std::exchange(world.options.nvme_dir, "");
  world.restart();
  CHECK_EQ(world->log_end(), 0);
  CHECK(world->evict(-1, 5, "all", left).empty());  // there never was a tier, as far as it knows
  CHECK_EQ(left, 5);
  world.options.log_end = uint64_t{1} << 50 | UINT32_MAX;
  world.restart();
  CHECK(world->evict(-1, 5, "dram", left).empty());
  CHECK(world->evict(-1, 5, "nvme", left).empty());
  CHECK_EQ(left, 0);
  const std::vector<Tombstone> tombstones = world->evict(-1, 100, "all", left);
  CHECK_EQ(left, 30);
  CHECK_EQ(tombstones.size(), 30);
  for (const auto& [key, position] : tombstones) CHECK_EQ(position, world.options.log_end);
  {
    Peer peer(world);
    for (uint64_t chain = 0; chain < 40; ++chain)
      if (world.page(chain).key == tombstones.front().first) CHECK(peer.store(world.page(chain)));
  }
  world.options.nvme_dir = nvme;
  world.before_recover = [&] {
    for (const auto& [key, position] : tombstones) world->add_tombstone(key, position);
  };
  for (int start = 0; start < 2; ++start) {
    CHECK_EQ(world.restart().log.unreadable_segments, 0);
    both.until([&] { return world->status().nvme_pages == 11; });  // and what was stored again
    CHECK(world->log_end() > world.options.log_end);
  }
}

// Incident: the records of reclaimed segments stay in their files until these are written to again.
// Of 80 pages that were in DRAM alone by then, and evicted, a start found 11.
TEST(eviction_holds_for_records_that_reclaim_let_go_and_for_nothing_stored_later) {
  Both both;
  World& world = both.world;
  std::unordered_map<Key, nvme::Extent, KeyHash> records;
  for (uint64_t chain = 0; chain < 40; ++chain) {
    const Key key = world.page(chain).key;
    records[key] = world.entry(world.page(chain))->extent;
    world->forget(key, records[key], false);
  }
  CHECK_EQ(world->status().nvme_pages, 0);
  uint64_t left = 0;
  CHECK(world->evict(-1, 5, "dram", left).empty());
  const std::vector<Tombstone> tombstones = world->evict(-1, 100, "all", left);
  CHECK_EQ(left, 35);
  CHECK_EQ(tombstones.size(), 35);
  for (const auto& [key, position] : tombstones) CHECK(position >= records[key].position());
  {
    Peer peer(world);
    for (uint64_t chain = 0; chain < 40; ++chain)
      if (world.page(chain).key == tombstones.front().first) CHECK(peer.store(world.page(chain)));
    both.until([&] { return world->status().nvme_pages == 1; });
  }
  world.before_recover = [&] {
    for (const auto& [key, position] : tombstones) world->add_tombstone(key, position);
  };
  for (int start = 0; start < 2; ++start) {
    world.kill();
    std::filesystem::remove_all(world.options.arena_dir);
    world.start();
    CHECK_EQ(world->status().nvme_pages, 6);  // what was stored again, and what had left DRAM alone
  }
}

// Incident: pages whose records had been written twice, the later time to a segment that one start
// could not read. Evicted then, all 40 were there again at the next start.
TEST(eviction_holds_for_a_later_record_that_lies_in_a_segment_without_an_answer) {
  Both both;
  World& world = both.world;
  const uint32_t first = world.entry(world.page(0))->extent.segment;
  world.restart();
  for (uint64_t chain = 0; chain < 40; ++chain)
    world->forget(world.page(chain).key, world.entry(world.page(chain))->extent, false);
  both.until([&] { return world->status().nvme_pages == 40; });
  const uint32_t second = world.entry(world.page(0))->extent.segment;
  CHECK(second != first);
  world.options.log_end = world->log_end() + (uint64_t{1} << 32);  // as the ledger notes it
  both.faults->add({IoKind::read, std::to_string(second) + ".seg", 0, 1, EIO, -1});
  CHECK_EQ(world.restart().log.unreadable_segments, 1);
  CHECK_EQ(world.entry(world.page(0))->extent.segment, first);
  uint64_t left = 0;
  const std::vector<Tombstone> tombstones = world->evict(-1, 100, "all", left);
  CHECK_EQ(left, 40);
  CHECK_EQ(tombstones.size(), 40);
  world.before_recover = [&] {
    for (const auto& [key, position] : tombstones) world->add_tombstone(key, position);
  };
  for (int start = 0; start < 2; ++start) {
    CHECK_EQ(world.restart().log.unreadable_segments, 0);
    CHECK_EQ(world->status().nvme_pages, 0);
  }
}

TEST(page_that_is_cleared_while_it_is_read_is_no_damage) {
  Both both;
  both.begin_promotions();
  both.world->begin_clear(0, 2);  // hidden from readers, and not swept yet
  both.end_promotions();
  CHECK_EQ(both.world->status().quarantined, 0);
  CHECK_EQ(both.world->status().dram_pages, 0);
}

TEST(page_that_is_cleared_and_stored_again_while_it_is_read_is_not_taken_for_the_old_one) {
  Both both;
  both.begin_promotions();
  both.world->clear(0, 2);
  both.store();
  uint64_t left = 0;
  both.world->evict(-1, 100, "dram", left);
  CHECK_EQ(both.world->status().nvme_pages, 40);
  both.end_promotions();
  CHECK_EQ(both.world->status().quarantined, 0);
  CHECK_EQ(both.world->status().nvme_pages, 40);
  CHECK(both.world->take_tombstones().empty());
  both.world.check_settled();
}

// Of an orphan no record is worth its room; once its parent is there again, it is a page like
// others.
TEST(page_whose_record_made_room_while_its_parent_was_gone_is_written_again_with_it) {
  Both both;
  World& world = both.world;
  Peer peer(world);
  const TestPage parent = world.page(100), child = world.page(100, 1);
  CHECK(peer.store(parent) && peer.store(child));
  both.until([&] { return world->status().nvme_pages == 42; });
  CHECK(peer.pin(child) >= 0);  // no sweep takes it
  world->forget(parent.key, world.entry(parent)->extent, true);
  *world.payload(world.slot_of(parent)) ^= std::byte{1};
  peer.report(*world.entry(parent));
  CHECK(!world.stored(parent));
  const nvme::Extent record = world.entry(child)->extent;
  CHECK(world->use_of(child.key, record) == nvme::RecordUse::dead);
  world->forget(child.key, record, false);
  CHECK_EQ(world->status().nvme_pages, 40);
  CHECK(peer.store(parent));
  both.until([&] { return world->status().nvme_pages == 42; });
}

struct LargePage {
  LargePage() {
    world.options.index_pages = 1024;  // one step's looks
    world.start();
    peer.emplace(world);
    CHECK(peer->store(page));
  }
  std::byte& last() {
    return world.payload(world.slot_of(page))[2 * world.shape().shard_stride() - 1];
  }
  void check() {
    world->check({-1, 0, 16, true}, [this](CheckReport&& found) { report = std::move(found); });
  }
  // Returns how many steps it took.
  size_t go_on() {
    size_t steps = 0;
    for (; !report; ++steps) {
      CHECK(world->goes_on());
      world->go_on();
    }
    CHECK(!world->goes_on());
    return steps;
  }

  World world{shape_of(10 * kMiB, 2), 256 * kMiB};
  TestPage page = world.page(1);
  std::optional<Peer> peer;
  std::optional<CheckReport> report;
};

TEST(check_digests_a_large_page_in_steps) {
  LargePage large;
  large.last() ^= std::byte{1};
  large.check();
  CHECK(!large.report.has_value());
  CHECK_EQ(1 + large.go_on(), 20 * kMiB / Checker::kBytesPerStep);
  CHECK_EQ(large.report->dram.pages, 1);
  CHECK_EQ(large.report->bad.size(), 1);
  CHECK_EQ(std::string(large.report->bad[0].reason), "digest");
  CHECK_EQ(large.world->status().quarantined, 1);
}

TEST(check_begins_a_page_anew_that_left_and_came_again_between_its_steps) {
  LargePage large;
  large.last() ^= std::byte{1};
  large.check();
  large.world->go_on();
  uint64_t left = 0;
  large.world->evict(-1, 1, "all", left);
  CHECK_EQ(left, 1);
  CHECK(large.peer->store(large.page));
  large.go_on();
  CHECK_EQ(large.report->dram.pages, 1);
  CHECK(large.report->bad.empty());
}

TEST(check_looks_at_a_bounded_stretch_of_the_index_in_a_step) {
  World world(shape_of(kPageBytes, 1));
  world.options.index_pages = 2 * Checker::kLooksPerStep;
  world.start();
  size_t steps = 1;
  bool ended = false;
  world->check({}, [&](CheckReport&&) { ended = true; });
  for (; !ended; ++steps) world->go_on();
  CHECK_EQ(steps, world->arena().index().entries() / Checker::kLooksPerStep);
}

// Incident: one client that reported a good page of 100 MiB again and again held up everybody
// else's stores for a third of a second each.
TEST(reported_page_is_judged_in_stretches_of_ticks_and_not_again_within_a_second) {
  World world(shape_of(10 * kMiB, 2), 256 * kMiB);
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  CHECK(peer.store(page));
  const EntryView entry = *world.entry(page);
  constexpr uint64_t kTickNs = 100 * kMillisecondNs;
  std::byte& last = world.payload(entry.slot)[2 * world.shape().shard_stride() - 1];
  peer.report(entry);
  world.pass(kTickNs);
  CHECK_EQ(world->status().quarantined, 0);
  last ^= std::byte{1};  // damaged right after it was found good
  peer.report(entry);
  world.pass(kTickNs);
  world.pass(kTickNs);
  CHECK_EQ(world->status().quarantined, 0);
  world.pass(kSecondNs);
  for (int again = 0; again < 100; ++again) peer.report(entry);
  CHECK_EQ(world->status().quarantined, 0);  // more than a tick's share
  world.pass(kTickNs);
  CHECK_EQ(world->status().quarantined, 1);
  CHECK(!world.entry(page));
}

TEST(session_has_a_bounded_number_of_reports_waiting) {
  constexpr size_t kAtOnce = Checker::kReportedBytesPerTick / (2 * kMiB);
  constexpr size_t kTaken = kAtOnce + Checker::kReportsPerSession;
  World world(shape_of(2 * kMiB, 1), 64 * kMiB);
  world.start();
  Peer peer(world), other(world);
  std::vector<EntryView> entries;
  for (size_t chain = 0; chain < kTaken + 2; ++chain) {
    CHECK(peer.store(world.page(chain)));
    entries.push_back(*world.entry(world.page(chain)));
    world.payload(entries.back().slot)[17] ^= std::byte{1};
  }
  for (const EntryView& entry : entries) peer.report(entry);
  CHECK_EQ(world->status().quarantined, kAtOnce);
  other.report(entries.back());  // another has a share of its own
  for (int tick = 0; tick < 10; ++tick) world.pass(100 * kMillisecondNs);
  CHECK_EQ(world->status().quarantined, kTaken + 1);
  peer.report(entries[kTaken]);
  CHECK_EQ(world->status().quarantined, kTaken + 2);
  world.pass(100 * kMillisecondNs);
  world.check_settled();
}
