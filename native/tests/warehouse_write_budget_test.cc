// The write budget of NVMe: never more than it allows, what is asked for again before what is new,
// and everything again once there is enough.
#include <poll.h>

#include <functional>
#include <vector>

#include "nvme/write_budget.h"
#include "tests/warehouse_world.h"

namespace kvw {
namespace {

using nvme::WriteBudget;

constexpr uint64_t kPageBytes = 16 * 1024;
constexpr uint64_t kRecordBytes = kPageBytes + kBlockBytes;  // with its header
constexpr uint64_t kDayNs = WriteBudget::kDayNs;

// A warehouse whose NVMe tier has room for all, and a budget of `daily` records a day, of which
// `left` are there.
struct Thrifty {
  World world;
  std::unique_ptr<Peer> peer;

  Thrifty(uint64_t daily, double left, uint64_t keep_bytes = 0) : world(shape_of(kPageBytes, 1)) {
    world.options.nvme_dir = world.directory.path() + "/nvme";
    world.options.nvme_capacity_bytes = 64 * kMiB;
    world.options.io_engine = "pread";
    world.options.nvme_bytes_per_day = daily * kRecordBytes;
    world.options.nvme_bytes_left = left * kRecordBytes;
    world.options.keep_bytes = keep_bytes;
    world.start();
    peer = std::make_unique<Peer>(world);
  }

  // The pages of a prompt from `first` on.
  void store(uint64_t chain, uint32_t pages, uint32_t first = 0) {
    const std::vector<TestPage> prompt = pages_of(world.shape(), chain, pages);
    CHECK(peer->store_all(std::span(prompt).subspan(first)));
    settle();
  }
  void use(uint64_t chain, uint32_t pages) {
    for (const TestPage& page : pages_of(world.shape(), chain, pages))
      peer->session().touch(*world.entry(page));
    pass(2 * kSecondNs);
  }
  // What is queued is written, and what came in by then is there for the next.
  void settle() {
    world->tick();
    until([&] { return world->status().log.queued_records == 0; });
    world->tick();
  }
  // Twice: a walk over what is not written begins at most once a second.
  void pass(uint64_t ns) {
    for (int half = 0; half < 2; ++half) {
      world.pass(ns / 2);
      settle();
    }
  }
  void until(const std::function<bool()>& done) {
    for (int round = 0; !done(); ++round) {
      CHECK(round < 20000);
      world->poll_log();
      world->tick();
      pollfd ready{world->log_fd(), POLLIN, 0};
      ::poll(&ready, 1, 5);
    }
  }
  FlushReport flush() {
    Warehouse::Spill walk{true, {}};
    while (!world->spill(walk)) world->poll_log();  // without a tick, as while a daemon is busy
    settle();
    return world->flush_report();
  }
  uint64_t written() { return world->status().log.written_records; }
  bool on_nvme(uint64_t chain, uint32_t position) {
    const auto entry = world.entry(world.page(chain, position));
    return entry && entry->in_nvme();
  }
};

TEST(budget_carries_over_a_day_s_worth_and_no_more) {
  WriteBudget budget(1000, 1000);
  budget.earn(0);
  budget.spend(700);
  CHECK_EQ(budget.left(), 300);
  budget.earn(kDayNs / 2);
  CHECK_EQ(budget.left(), 800);
  budget.earn(9 * kDayNs);
  CHECK_EQ(budget.left(), 1000);
  budget.spend(1500);
  CHECK_EQ(budget.left(), -500);
  budget.earn(10 * kDayNs);
  CHECK_EQ(budget.left(), 500);
  CHECK_EQ(WriteBudget(1000, 5000).left(), 1000);  // of a larger one, before
}

TEST(budget_is_for_all_above_half_and_below_for_what_is_used_again) {
  WriteBudget budget(1000, 501);
  CHECK(budget.allows(false, 0));
  CHECK(!budget.allows(false, 1));
  CHECK(budget.allows(true, 1));
  CHECK(budget.allows(true, 500));
  CHECK(!budget.allows(true, 501));
  budget.spend(501);
  CHECK(!budget.allows(true, 0));
  CHECK(WriteBudget(0, 0).allows(false, UINT64_MAX));
}

TEST(all_that_is_stored_is_written_while_half_of_the_budget_is_left) {
  Thrifty thrifty(1000, 1000);
  thrifty.store(1, 50);
  CHECK_EQ(thrifty.written(), 50u);
  CHECK(thrifty.world->status().not_admitted.empty());
  CHECK_EQ(thrifty.world->status().nvme_bytes_left, 950.0 * kRecordBytes);
}

TEST(what_is_used_again_is_written_where_the_rest_is_spared) {
  Thrifty thrifty(1000, 400);
  thrifty.store(1, 20);
  thrifty.store(2, 20);
  thrifty.pass(2 * kSecondNs);
  CHECK_EQ(thrifty.written(), 0u);
  CHECK_EQ(thrifty.world->status().not_admitted["write_budget"], 40u);
  thrifty.use(2, 20);
  CHECK_EQ(thrifty.written(), 20u);
  CHECK(thrifty.on_nvme(2, 19));
  CHECK(!thrifty.on_nvme(1, 0));
  // The end of a prompt was used, by an engine that has the beginning itself.
  thrifty.peer->session().touch(*thrifty.world.entry(thrifty.world.page(1, 9)));
  thrifty.pass(2 * kSecondNs);
  CHECK_EQ(thrifty.written(), 30u);
  CHECK(thrifty.on_nvme(1, 9));
  CHECK(!thrifty.on_nvme(1, 10));
}

TEST(no_more_is_written_than_the_budget_allows_however_much_is_used) {
  Thrifty thrifty(64, 16);
  for (uint64_t chain = 0; chain < 10; ++chain) thrifty.store(chain, 20);
  for (uint64_t chain = 0; chain < 10; ++chain) thrifty.use(chain, 20);
  const uint64_t at_once = thrifty.written();
  CHECK(at_once >= 16);
  CHECK(at_once <= 17);  // the one that it was not quite enough for
  for (int hour = 0; hour < 48; ++hour) thrifty.pass(kDayNs / 24);
  CHECK(thrifty.written() <= at_once + 2 * 64 + 1);
  CHECK(thrifty.written() >= at_once + 2 * 64 - 1);
  CHECK_EQ(thrifty.flush().not_admitted, 200 - thrifty.written());
}

TEST(what_was_spared_is_written_once_there_is_enough) {
  Thrifty thrifty(100, 10);
  thrifty.store(1, 30);
  CHECK_EQ(thrifty.written(), 0u);
  thrifty.pass(kDayNs / 4);
  CHECK_EQ(thrifty.written(), 0u);  // 35: less than half
  for (int part = 0; part < 8; ++part) thrifty.pass(kDayNs / 4);
  CHECK_EQ(thrifty.written(), 30u);
}

// A child whose parent is spared waits for it, and is no backlog that others wait for.
TEST(what_is_stored_behind_spared_pages_is_written_with_them) {
  Thrifty thrifty(1000, 400);
  thrifty.store(1, 10);
  thrifty.pass(kDayNs / 5);  // 600: enough for all
  thrifty.store(1, 20, 10);
  thrifty.pass(2 * kSecondNs);
  CHECK_EQ(thrifty.written(), 20u);
  CHECK(thrifty.on_nvme(1, 19));
}

// Incident: the core ended of it, with a budget or without.
TEST(page_whose_parent_left_while_it_was_stored_waits_for_it) {
  Thrifty thrifty(0, 0);
  const TestPage first = thrifty.world.page(1, 0), second = thrifty.world.page(1, 1);
  CHECK(thrifty.peer->store(first));
  const ReserveAnswer grant = thrifty.peer->reserve(second);
  CHECK(grant.answer == Answer::granted);
  const uint64_t digest = thrifty.peer->copy(grant, second);
  *thrifty.world.payload(thrifty.world.slot_of(first)) ^= std::byte{1};
  bool checked = false;
  thrifty.world->check({-1, 0, 16, true}, [&](CheckReport&&) { checked = true; });
  thrifty.until([&] { return checked; });  // what was written meanwhile is damaged, too
  CHECK(!thrifty.world.stored(first));
  CHECK(thrifty.peer->seal(grant, 0, digest) == Reason::none);
  CHECK_EQ(thrifty.world->status().not_admitted["parent_not_admitted"], 1u);
}

TEST(pages_that_left_for_the_budget_are_told_so_and_written_when_they_come_back) {
  Thrifty thrifty(10'000, 4'000);
  thrifty.store(1, 20);
  for (uint64_t chain = 2; thrifty.world.stored(thrifty.world.page(1, 0)); ++chain) {
    CHECK(chain < 100);
    thrifty.store(chain, 20);
  }
  const TestPage first = thrifty.world.page(1, 0);
  const PageWhy why = thrifty.world->why(thrifty.world.shape().id, std::array{first.key}, 0).at(0);
  CHECK(why.absence.left() == LeaveReason::write_budget);
  CHECK_EQ(thrifty.written(), 0u);
  thrifty.store(1, 20);
  CHECK_EQ(thrifty.written(), 20u);
  const WarehouseStatus status = thrifty.world->status();
  CHECK_EQ(status.stored_again[size_t(LeaveReason::write_budget)], 20u);
  CHECK(status.left_dram[size_t(LeaveReason::write_budget)] >= 20);
  CHECK_EQ(status.left_dram[size_t(LeaveReason::evicted)], 0u);
}

TEST(kept_pages_are_written_before_others) {
  Thrifty thrifty(1000, 400, 4 * kMiB);
  thrifty.store(1, 10);
  thrifty.store(2, 10);
  CHECK(thrifty.world->keeps().begin(1, {UINT64_MAX, 0}) == KeepRefusal::none);
  std::vector<PageOfRun> run;
  for (const TestPage& page : pages_of(thrifty.world.shape(), 2, 10))
    run.push_back({page.key, run.empty()});
  CHECK(thrifty.world->keep(1, thrifty.world.shape().id, run, false).refusal == KeepRefusal::none);
  thrifty.pass(2 * kSecondNs);
  CHECK_EQ(thrifty.written(), 10u);
  CHECK(thrifty.on_nvme(2, 9));
}

TEST(flush_writes_what_the_budget_allows_and_ends) {
  Thrifty thrifty(1000, 15);
  thrifty.store(1, 40);
  CHECK_EQ(thrifty.written(), 0u);
  const FlushReport report = thrifty.flush();
  CHECK(!thrifty.world->has_room_for_unwritten());
  CHECK_EQ(report.pending, 0u);
  CHECK(report.flushed >= 15);
  CHECK(report.flushed <= 16);
  CHECK_EQ(report.not_admitted, 40 - report.flushed);
}

}  // namespace
}  // namespace kvw
