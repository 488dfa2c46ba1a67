// The queue of runs for a remote store: which pages make one, when, in which order, and what the
// presence filter, the bound, a clear and an eviction keep out of it.
#include "warehouse/puts.h"

#include "tests/check.h"
#include "tests/warehouse_world.h"

using namespace kvw;

namespace {

const Key kFleet{11, 13};
constexpr uint32_t kToday = 20785, kDays = 7;
constexpr uint32_t kPages = 2;  // of a run
constexpr uint64_t kEpoch = 77;

NamespaceShape shape_of_runs(uint32_t pages) {
  NamespaceShape shape = shape_of(4096, 1);
  shape.page_tokens = remote::kObjectTokens / pages;
  return shape;
}

struct Store {
  explicit Store(RemoteWrite write, NamespaceShape shape = shape_of_runs(kPages),
                 uint64_t dram_bytes = 8 * kMiB)
      : world(shape, dram_bytes) {
    world.options.remote_write = write;
    world.options.remote_fleet = kFleet;
    world.options.index_pages = 32768;
    world.start();
    CHECK(world->set_remote_epoch(kSpace, kEpoch, 0));
    peer = std::make_unique<Peer>(world);
  }

  void store(uint64_t chain, uint32_t pages = kPages) {
    for (const TestPage& page : pages_of(world.shape(), chain, pages)) CHECK(peer->store(page));
  }
  Key run(uint64_t chain, uint32_t last = kPages - 1) { return world.page(chain, last).key; }
  // As a load does; then time for the daemon to see it, and for another use to be another.
  void use(uint64_t chain, uint32_t position = kPages - 1) {
    peer->session().touch(*world.entry(world.page(chain, position)));
    world.pass(2 * kSecondNs);
  }
  void use_again(uint64_t chain) {
    use(chain);
    use(chain);
  }
  Puts& puts() { return *world->puts(); }
  PutsStatus status() { return world->status().puts; }
  uint64_t dropped(PutDrop why) { return status().dropped[static_cast<size_t>(why)]; }
  std::vector<Key> handed_out() {
    std::vector<Key> keys;
    while (const auto run = puts().next()) keys.push_back(run->key);
    return keys;
  }

  World world;
  std::unique_ptr<Peer> peer;
};

// The filter of a worker, and the core's look at it.
struct Filter {
  explicit Filter(Store& store)
      : file({store.world.options.arena_dir + "/presence", kFleet, 1000, kDays, kToday}) {
    CHECK(store.puts().open_filter());
  }
  void has(const Key& key, uint32_t day) { file.writer().put(key, kEpoch, day); }

  PresenceFile file;
};

}  // namespace

TEST(nothing_is_there_without_a_remote_tier) {
  World world(shape_of(4096));
  world.start();
  CHECK(world->puts() == nullptr);
}

TEST(run_is_offered_when_its_last_page_is_used_a_second_time) {
  Store store(RemoteWrite::reused);
  store.store(1);
  store.use(1);
  CHECK_EQ(store.status().offered, 0);
  store.use(1);
  CHECK_EQ(store.status().offered, 1);
  CHECK_EQ(store.status().queued, 1);
  const auto run = store.puts().next();
  CHECK(run->key == store.run(1));
  CHECK(run->namespace_id == kSpace);
  CHECK_EQ(run->first_position, 0);
  CHECK_EQ(run->pages, kPages);
  CHECK_EQ(run->epoch, kEpoch);
  CHECK(!run->day.has_value());
  CHECK_EQ(run->record_bytes, 2 * kBlockBytes);
  CHECK_EQ(store.status().queued, 0);
  CHECK_EQ(store.status().under_way, 1);
}

TEST(pages_before_the_last_of_a_run_offer_none) {
  Store store(RemoteWrite::reused);
  store.store(1, 3 * kPages);
  for (const uint32_t position : {0u, 2u, 4u}) {
    store.use(1, position);
    store.use(1, position);
  }
  CHECK_EQ(store.status().offered, 0);
  store.use(1, 5);
  store.use(1, 5);
  const auto run = store.puts().next();
  CHECK(run->key == store.run(1, 5));
  CHECK_EQ(run->first_position, 4);
}

TEST(all_are_offered_when_they_are_sealed) {
  Store store(RemoteWrite::all);
  store.store(1, 2 * kPages);
  store.store(2, 2 * kPages - 1);
  CHECK(store.handed_out() ==
        std::vector<Key>({store.run(1, 1), store.run(1, 3), store.run(2, 1)}));
}

TEST(runs_are_handed_out_in_the_order_in_which_they_came_and_once) {
  Store store(RemoteWrite::reused);
  for (const uint64_t chain : {3, 1, 2}) store.store(chain);
  for (const uint64_t chain : {2, 3, 1}) store.use_again(chain);
  store.use_again(3);
  CHECK_EQ(store.status().offered, 3);
  CHECK(store.handed_out() == std::vector<Key>({store.run(2), store.run(3), store.run(1)}));
  store.use_again(3);  // under way
  CHECK(store.handed_out().empty());
  store.puts().done(store.run(3));
  store.use(3);
  CHECK(store.handed_out() == std::vector<Key>({store.run(3)}));
}

TEST(run_that_is_stored_anew_while_one_of_before_a_clear_is_under_way_is_put_too) {
  Store store(RemoteWrite::all);
  store.store(1);
  CHECK_EQ(store.puts().next()->epoch, kEpoch);
  store.world->clear(0, 6);
  CHECK(store.world->set_remote_epoch(kSpace, kEpoch + 1, 6));
  store.store(1);
  store.store(2);
  CHECK(store.handed_out() == std::vector{store.run(2)});  // once at a time
  store.puts().done(store.run(1));
  CHECK_EQ(store.status().queued, 1);
  CHECK_EQ(store.puts().next()->epoch, kEpoch + 1);
  store.puts().done(store.run(1));
  CHECK_EQ(store.status().queued, 0);
}

TEST(run_that_was_used_while_it_was_put_is_not_put_again) {
  Store store(RemoteWrite::reused);
  Filter filter(store);
  store.store(1);
  store.use_again(1);
  CHECK(store.handed_out() == std::vector{store.run(1)});
  store.use(1);
  filter.has(store.run(1), kToday);
  store.puts().done(store.run(1));
  CHECK_EQ(store.status().queued, 0);
  CHECK_EQ(store.dropped(PutDrop::already), 0);
}

TEST(run_that_left_while_it_was_wanted_again_is_forgotten) {
  Store store(RemoteWrite::all);
  store.store(1);
  CHECK(store.handed_out() == std::vector{store.run(1)});
  store.use(1);
  store.world->clear(0, 6);
  store.puts().done(store.run(1));
  CHECK_EQ(store.status().queued, 0);
  CHECK_EQ(store.status().under_way, 0);
}

TEST(run_that_the_store_has_of_today_is_not_offered) {
  Store store(RemoteWrite::all);
  Filter filter(store);
  filter.has(store.run(1), kToday);
  store.store(1);
  store.use_again(1);
  CHECK_EQ(store.status().offered, 0);
}

// Once a day for what is in use, however seldom that is.
TEST(run_that_the_store_has_of_an_earlier_day_is_refreshed_at_its_first_use) {
  for (const uint32_t age : {1u, kDays - 1}) {
    Store store(RemoteWrite::reused);
    Filter filter(store);
    filter.has(store.run(1), kToday - age);
    store.store(1);
    store.store(2);
    CHECK_EQ(store.status().offered, 0);
    store.use(1);
    store.use(2);  // nowhere: not at its first use
    CHECK_EQ(store.status().offered, 1);
    CHECK_EQ(store.status().refreshes, 1);
    const auto run = store.puts().next();
    CHECK(run->key == store.run(1));
    CHECK_EQ(*run->day, kToday - age);
    filter.has(store.run(1), kToday);
    store.puts().done(store.run(1));
    store.use_again(1);
    CHECK_EQ(store.status().offered, 1);
    filter.file.writer().advance(kToday + 1);
    store.use(1);
    CHECK_EQ(*store.puts().next()->day, kToday);
    CHECK_EQ(store.status().refreshes, 2);
  }
}

// The filter has the next day's place a minute early: what is of today is no older for that.
TEST(run_of_today_is_offered_when_today_is_over_and_no_sooner) {
  for (const RemoteWrite write : {RemoteWrite::reused, RemoteWrite::all}) {
    Store store(write);
    Filter filter(store);
    for (const uint64_t chain : {1, 2}) {
      filter.has(store.run(chain), kToday);
      store.store(chain);
    }
    filter.file.writer().advance(kToday + 1, kToday);
    filter.has(store.run(2), kToday + 1);  // another host's clock is ahead
    for (const uint64_t chain : {1, 2}) store.use_again(chain);
    CHECK_EQ(store.status().offered, 0);
    filter.file.writer().advance(kToday + 1);
    for (const uint64_t chain : {1, 2}) store.use(chain);
    CHECK_EQ(store.status().offered, 1);
    const auto run = store.puts().next();
    CHECK(run->key == store.run(1));
    CHECK_EQ(*run->day, kToday);
  }
}

TEST(run_that_is_too_old_to_be_found_is_put_as_one_that_is_nowhere) {
  Store store(RemoteWrite::reused);
  Filter filter(store);
  filter.has(store.run(1), kToday - kDays + 1);
  filter.file.writer().advance(kToday + 1);
  store.store(1);
  store.use(1);
  CHECK_EQ(store.status().offered, 0);
  store.use(1);
  CHECK(!store.puts().next()->day.has_value());
}

TEST(filter_is_asked_again_when_the_run_is_handed_out) {
  Store store(RemoteWrite::all);
  store.store(1);
  store.store(2);
  store.store(3);
  Filter filter(store);
  filter.has(store.run(1), kToday);
  filter.has(store.run(2), kToday - 2);
  CHECK_EQ(*store.puts().next()->day, kToday - 2);
  CHECK(store.puts().next()->key == store.run(3));
  CHECK_EQ(store.dropped(PutDrop::already), 1);
  store.puts().close_filter();
  store.use(1);  // who is to know
  CHECK_EQ(store.status().queued, 1);
}

TEST(filter_of_another_fleet_is_none) {
  Store store(RemoteWrite::all);
  CHECK(!store.puts().open_filter());
  const PresenceFile file(
      {store.world.options.arena_dir + "/presence", {1, 2}, 1000, kDays, kToday});
  CHECK(!store.puts().open_filter());
}

TEST(queue_is_bounded_and_drops_what_comes_beyond_it) {
  constexpr uint32_t kMore = 5;
  Store store(RemoteWrite::all, shape_of_runs(1), 64 * kMiB);
  for (uint64_t chain = 0; chain < Puts::kQueued + kMore; ++chain) store.store(chain, 1);
  CHECK_EQ(store.status().queued, Puts::kQueued);
  CHECK_EQ(store.dropped(PutDrop::queue_full), kMore);
  CHECK(store.puts().next()->key == store.run(0, 0));  // the first, not the last
  store.use(Puts::kQueued, 0);                         // there is room for one
  CHECK_EQ(store.status().queued, Puts::kQueued);
  CHECK_EQ(store.dropped(PutDrop::queue_full), kMore);
}

// Of more than 64 MiB, in a slab of 128 MiB, which is all that is taken of the arena.
TEST(page_that_is_too_large_is_counted_and_not_queued) {
  World world(shape_of(remote::kMostPageBytes + 1, 1), 1024 * kMiB);
  world.options.remote_write = RemoteWrite::all;
  world.start_without_slabs();
  world->slab_populated(0, world->arena().populate_slab(0));
  Peer peer(world);
  CHECK(peer.store(world.page(1)));
  const PutsStatus status = world->status().puts;
  CHECK_EQ(status.offered, 0);
  CHECK_EQ(status.dropped[static_cast<size_t>(PutDrop::too_large)], 1);
}

TEST(run_whose_last_page_left_is_passed_over) {
  Store store(RemoteWrite::all);
  store.store(1);
  store.store(2);
  uint64_t left = 0;
  store.world->evict(-1, 1, "all", left);  // the coldest one, which is a last one
  CHECK_EQ(left, 1);
  CHECK(store.handed_out() == std::vector<Key>({store.run(2)}));
  CHECK_EQ(store.dropped(PutDrop::not_in_dram), 1);
}

TEST(clear_takes_the_runs_that_were_queued) {
  Store store(RemoteWrite::all);
  store.store(1);
  store.store(2);
  store.world->begin_clear(0, 5);
  CHECK(store.handed_out().empty());
  CHECK_EQ(store.dropped(PutDrop::cleared), 2);
  store.world->clear(0, 6);
  CHECK(store.world->set_remote_epoch(kSpace, kEpoch + 1, 6));
  store.store(1);  // again, and queued again
  CHECK_EQ(store.puts().next()->epoch, kEpoch + 1);
}

// As from a clear until the store knows of it: what is put then would be of no epoch, or of one
// that is gone.
TEST(run_waits_in_the_queue_until_the_epoch_of_its_namespace_is_known) {
  Store store(RemoteWrite::all);
  store.world->stop_remote(kSpace);
  store.store(1);
  store.store(2, kPages - 1);  // no run
  CHECK_EQ(store.status().offered, 1);
  CHECK(store.handed_out().empty());
  CHECK_EQ(store.status().queued, 1);
  CHECK(store.world->set_remote_epoch(kSpace, kEpoch, 0));
  CHECK(store.handed_out() == std::vector<Key>({store.run(1)}));
}

TEST(runs_that_wait_for_an_epoch_leave_half_of_the_queue_to_others) {
  constexpr uint32_t kMore = 5;
  Store store(RemoteWrite::all, shape_of_runs(1), 64 * kMiB);
  store.world->stop_remote(kSpace);  // as while a clear is owed to the store
  for (uint64_t chain = 0; chain < Puts::kQueued / 2 + kMore; ++chain) store.store(chain, 1);
  CHECK_EQ(store.status().queued, Puts::kQueued / 2);
  CHECK_EQ(store.dropped(PutDrop::queue_full), kMore);
}

TEST(run_whose_epoch_was_lost_in_the_queue_waits_for_the_next) {
  Store store(RemoteWrite::all);
  store.store(1);
  store.world->stop_remote(kSpace);
  CHECK(store.handed_out().empty());
  CHECK(store.world->set_remote_epoch(kSpace, kEpoch + 1, 0));
  CHECK_EQ(store.puts().next()->epoch, kEpoch + 1);
}

TEST(namespace_that_was_forgotten_takes_its_runs) {
  Store store(RemoteWrite::all);
  store.store(1);
  store.world->clear(0, 5);
  CHECK(store.world->forget_namespace(0).has_value());
  CHECK(store.handed_out().empty());
  CHECK_EQ(store.dropped(PutDrop::not_in_dram), 1);
}

TEST(names_of_what_is_written_are_those_that_are_documented) {
  CHECK(remote_write_from("") == RemoteWrite::none);
  CHECK(remote_write_from("reused") == RemoteWrite::reused);
  CHECK(remote_write_from("all") == RemoteWrite::all);
  CHECK_THROWS(remote_write_from("some"), "bad_remote_write");
}
