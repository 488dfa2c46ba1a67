// The queue of runs that clients wait for from a remote store: who gets what answer, what is handed
// out when, how it ends, and that nothing of it is left behind by a clear, a bound, a deadline, or
// a worker that says nothing any more.
#include "warehouse/fetches.h"

#include <array>
#include <span>

#include "tests/check.h"
#include "tests/warehouse_world.h"

using namespace kvw;
using remote::GetEnd;

namespace {

constexpr uint64_t kEpoch = 77, kLongNs = 30 * kSecondNs, kForeverNs = UINT64_MAX;
constexpr uint32_t kDay = 20785;

// Objects of 16 pages, 8 KiB of payload each.
struct Scene {
  explicit Scene(NamespaceShape shape = shape_of(4096), uint64_t dram_bytes = 64 * kMiB)
      : world(shape, dram_bytes) {
    world.options.remote_read = true;
    world.start();
    peer = std::make_unique<Peer>(world);
    CHECK(world->set_remote_epoch(kSpace, kEpoch, 0));
    serve();
  }

  Fetches& fetches() { return *world->fetches(); }
  void serve(bool serving = true) { serve_until(serving ? kForeverNs : 0); }
  void serve_until(uint64_t until_ns) { fetches().state({until_ns, 5, 6}); }
  FetchesStatus status() { return world->status().fetches; }
  uint64_t ended(GetEnd end) { return status().ends[static_cast<size_t>(end)]; }
  uint32_t pages() { return remote::object_pages(world.shape()); }
  // Of the run number `number` of a prompt.
  FetchRun run(uint64_t chain, uint32_t number = 0, uint32_t from = 0,
               uint64_t within_ns = kLongNs) {
    return {Key{chain, number + 1}, kDay, number * pages(), pages(), from, within_ns};
  }
  FetchAnswer ask(const FetchRun& run, WitnessKind kind = WitnessKind::tokens, Key space = kSpace) {
    return world->fetch(asker, {space, static_cast<uint32_t>(kind), 0}, std::span(&run, 1)).at(0);
  }
  FetchAnswer ask(uint64_t chain) { return ask(run(chain)); }
  remote::RunToGet next() {
    const auto run = fetches().next();
    CHECK(run.has_value());
    return *run;
  }
  const ControlPage& control() { return world->arena().control(); }
  uint64_t promoted() { return control().promoted.value.load(); }
  // Time goes by, and the worker says what it says each second.
  void pass(uint64_t ns) {
    for (; ns > kSecondNs; ns -= kSecondNs) {
      world.pass(kSecondNs);
      serve();
    }
    world.pass(ns);
    serve();
  }

  World world;
  std::unique_ptr<Peer> peer;
  SessionId asker = 1;
};

}  // namespace

TEST(nothing_is_fetched_without_a_remote_tier_that_is_read) {
  World world(shape_of(4096));
  world.start();
  CHECK(world->fetches() == nullptr);
  const FetchRun run{};
  CHECK(world->fetch(1, {kSpace, 1, 0}, std::span(&run, 1)) == std::vector{FetchAnswer::off});
}

TEST(run_is_handed_out_as_it_was_asked_for) {
  Scene scene;
  CHECK_EQ(scene.pages(), 16);
  CHECK(scene.ask(scene.run(1, 3, 5), WitnessKind::engine_key) == FetchAnswer::reading);
  scene.world.pass(kSecondNs);
  const remote::RunToGet run = scene.next();
  CHECK(run.namespace_id == kSpace);
  CHECK(run.key == Key({1, 4}));
  CHECK_EQ(run.epoch, kEpoch);
  CHECK_EQ(run.clear_epoch, 0);
  CHECK_EQ(run.record_bytes, 3 * kBlockBytes);
  CHECK_EQ(run.within_ns, kLongNs - kSecondNs);
  CHECK_EQ(run.first_position, 48);
  CHECK_EQ(run.pages, 16);
  CHECK_EQ(run.from, 5);
  CHECK_EQ(run.day, kDay);
  CHECK(run.witness_kind == WitnessKind::engine_key);
  CHECK_EQ(run.begin(), 5 * run.record_bytes);
  CHECK_EQ(run.end(), 16 * run.record_bytes);
  CHECK(!scene.fetches().next().has_value());
}

TEST(nothing_is_served_while_the_worker_does_not_say_so) {
  Scene scene;
  CHECK_EQ(scene.control().remote.serving.value.load(), 1);
  CHECK_EQ(scene.control().remote.read_bytes_per_s.value.load(), 5);
  CHECK_EQ(scene.control().remote.first_byte_ns.value.load(), 6);
  scene.serve(false);
  CHECK(scene.ask(1) == FetchAnswer::off);
  CHECK_EQ(scene.control().remote.serving.value.load(), 0);
  scene.serve();
  CHECK(scene.ask(1) == FetchAnswer::reading);
}

TEST(nothing_is_served_of_a_namespace_without_an_epoch) {
  Scene scene;
  CHECK(scene.ask(scene.run(1), WitnessKind::tokens, {9, 9}) == FetchAnswer::off);
  scene.world->stop_remote(kSpace);
  CHECK(scene.ask(1) == FetchAnswer::off);
  CHECK(scene.world->set_remote_epoch(kSpace, kEpoch, 0));
  CHECK(scene.ask(1) == FetchAnswer::reading);
}

TEST(worker_that_is_silent_serves_nothing_after_five_seconds) {
  Scene scene;
  scene.pass(remote::kStateOldNs);
  CHECK(scene.ask(1) == FetchAnswer::reading);
  CHECK(scene.ask(2) == FetchAnswer::reading);
  scene.next();
  scene.world.pass(remote::kStateOldNs - 1);
  CHECK_EQ(scene.control().remote.serving.value.load(), 1);
  const uint64_t before = scene.promoted();
  scene.world.pass(1);
  CHECK_EQ(scene.control().remote.serving.value.load(), 0);
  CHECK_EQ(scene.ended(GetEnd::failed), 2);
  CHECK(scene.promoted() > before);
  CHECK(scene.ask(1) == FetchAnswer::off);
}

// What a worker has said may lie there while a core, or its whole machine, stands still.
TEST(nothing_is_served_beyond_the_time_that_the_worker_said_whenever_the_core_reads_it) {
  Scene scene;
  FakeClock& clock = scene.world.clock;
  scene.serve_until(clock.boot_ns() + kSecondNs);
  CHECK(scene.ask(1) == FetchAnswer::reading);
  clock.advance_ns(kSecondNs);  // and no tick
  CHECK(scene.ask(2) == FetchAnswer::off);
  CHECK(!scene.fetches().next().has_value());
  scene.world.pass(1);
  CHECK_EQ(scene.control().remote.serving.value.load(), 0);
  CHECK_EQ(scene.ended(GetEnd::failed), 1);
  scene.serve_until(clock.boot_ns());  // it was said before, and is read now
  CHECK_EQ(scene.control().remote.serving.value.load(), 0);
  CHECK(scene.ask(2) == FetchAnswer::off);
}

TEST(worker_that_is_gone_ends_what_it_was_given_and_what_waits) {
  Scene scene;
  scene.ask(1);
  scene.ask(2);
  const remote::RunToGet run = scene.next();
  const uint64_t before = scene.promoted();
  scene.fetches().off();
  CHECK(scene.promoted() > before);
  CHECK_EQ(scene.ended(GetEnd::failed), 2);
  CHECK_EQ(scene.control().remote.queued_bytes.value.load(), 0);
  CHECK(scene.ask(1) == FetchAnswer::off);
  scene.serve();                               // another one
  CHECK(scene.ask(1) == FetchAnswer::failed);  // so what has ended a worker does not end each
  scene.pass(kSecondNs);
  CHECK(scene.ask(1) == FetchAnswer::reading);
  scene.fetches().done(run, GetEnd::filled);  // of the one before
  CHECK_EQ(scene.status().queued, 1);
}

TEST(run_that_two_want_is_fetched_once) {
  Scene scene;
  CHECK(scene.ask(scene.run(1, 0, 7)) == FetchAnswer::reading);
  CHECK(scene.ask(scene.run(1, 0, 9)) == FetchAnswer::reading);
  CHECK(scene.ask(scene.run(1, 0, 3)) == FetchAnswer::reading);  // and more of it
  CHECK_EQ(scene.status().asked, 3);
  CHECK_EQ(scene.status().joined, 2);
  const remote::RunToGet run = scene.next();
  CHECK_EQ(run.from, 3);
  CHECK_EQ(scene.status().under_way_bytes, run.end() - run.begin());
  CHECK_EQ(scene.control().remote.queued_bytes.value.load(), run.end() - run.begin());
  CHECK(scene.ask(scene.run(1)) == FetchAnswer::reading);  // under way
  CHECK(!scene.fetches().next().has_value());
  scene.fetches().done(run, GetEnd::filled);
  CHECK_EQ(scene.control().remote.queued_bytes.value.load(), 0);
}

// Else who says what is wrong of a run would have it missing, or damaged, for others.
TEST(run_that_is_described_otherwise_is_another) {
  Scene scene;
  scene.ask(1);
  FetchRun other_day = scene.run(1), other_place = scene.run(1);
  --other_day.day;
  other_place.first_position = 16;
  CHECK(scene.ask(other_day) == FetchAnswer::reading);
  CHECK(scene.ask(other_place) == FetchAnswer::reading);
  CHECK(scene.ask(scene.run(1), WitnessKind::engine_key) == FetchAnswer::reading);
  CHECK_EQ(scene.status().queued, 4);
  for (int i = 0; i < 4; ++i) {
    const remote::RunToGet run = scene.next();
    const bool right =
        run.day == kDay && run.first_position == 0 && run.witness_kind == WitnessKind::tokens;
    if (!right) scene.fetches().done(run, GetEnd::missing);
  }
  CHECK_EQ(scene.status().under_way, 1);
  CHECK(scene.ask(1) == FetchAnswer::reading);
  CHECK(scene.ask(other_day) == FetchAnswer::missing);
}

TEST(runs_are_handed_out_by_their_deadlines_and_from_the_beginning_of_a_prompt) {
  Scene scene;
  scene.ask(scene.run(1, 1));
  scene.ask(scene.run(1, 0));
  scene.ask(scene.run(2, 0, 0, kLongNs / 2));
  scene.ask(scene.run(3, 0, 0, kLongNs));
  scene.ask(scene.run(3, 0, 0, kLongNs / 3));  // somebody else, who has less time
  std::vector<Key> keys;
  for (int i = 0; i < 4; ++i) keys.push_back(scene.next().key);
  CHECK(keys == std::vector<Key>({{3, 1}, {2, 1}, {1, 1}, {1, 2}}));
}

// The worker's get threads take what is handed out one after the other, and a run whose parent
// comes after it may find that it is not stored yet.
TEST(runs_of_one_call_are_handed_out_from_the_beginning_of_a_prompt_however_long_it_takes) {
  Scene scene;
  scene.world.clock.creep_ns(1);
  const std::array runs{scene.run(1, 2), scene.run(1, 0), scene.run(1, 1)};
  const FetchSpace space{kSpace, static_cast<uint32_t>(WitnessKind::tokens), 0};
  CHECK(scene.world->fetch(1, space, runs) == std::vector(3, FetchAnswer::reading));
  for (const uint32_t number : {0u, 1u, 2u}) CHECK(scene.next().key == scene.run(1, number).key);
}

// Found by reading, with AddressSanitizer: what was asked for again was of a run that had ended.
TEST(run_that_is_asked_for_again_as_serving_ends_is_no_more) {
  for (uint64_t left_ns = 1; left_ns < 12; ++left_ns) {
    Scene scene;
    scene.ask(scene.run(1, 0, 5));
    scene.world.clock.creep_ns(1);
    scene.serve_until(scene.world.clock.boot_ns() + left_ns);
    scene.ask(scene.run(1, 0, 2));
    scene.ask(scene.run(1, 0, 0));
    scene.world.pass(kSecondNs);
    CHECK_EQ(scene.status().queued + scene.status().under_way, 0);
    CHECK_EQ(scene.control().remote.queued_bytes.value.load(), 0);
  }
}

// A message that was read late has a later deadline than those that were sent after it.
TEST(runs_of_many_calls_are_handed_out_from_the_beginning_where_their_deadlines_are_close) {
  Scene scene;
  constexpr uint64_t kClose = Fetches::kSameDeadlineNs / 2;
  scene.ask(scene.run(1, 2, 0, kLongNs - kClose));
  scene.ask(scene.run(1, 1, 0, kLongNs - Fetches::kSameDeadlineNs));
  scene.ask(scene.run(1, 0, 0, kLongNs));
  scene.ask(scene.run(2, 0, 0, kLongNs + kClose + 1));  // not close to any of them
  std::vector<Key> keys;
  for (int i = 0; i < 4; ++i) keys.push_back(scene.next().key);
  CHECK(keys == std::vector<Key>({{1, 1}, {1, 2}, {1, 3}, {2, 1}}));
}

TEST(run_that_is_due_does_not_wait_for_the_beginning_of_what_is_due_later) {
  Scene scene;
  scene.ask(scene.run(1, 3, 0, kLongNs - Fetches::kSameDeadlineNs - 1));
  scene.ask(scene.run(1, 0, 0, kLongNs));
  CHECK(scene.next().key == Key({1, 4}));
  CHECK(scene.next().key == Key({1, 1}));
}

TEST(runs_of_other_namespaces_are_handed_out_by_their_deadlines_alone) {
  Scene scene;
  constexpr Key kOther{7, 7};
  NamespaceShape other = shape_of(4096);
  other.id = kOther;
  scene.world->add_namespace(kMaxNamespaces, other, 0);
  CHECK(scene.world->set_remote_epoch(kOther, kEpoch, 0));
  scene.ask(scene.run(1, 1, 0, kLongNs - 1));
  scene.ask(scene.run(2, 0, 0, kLongNs), WitnessKind::tokens, kOther);
  CHECK(scene.next().key == Key({1, 2}));
  CHECK(scene.next().key == Key({2, 1}));
}

TEST(run_lives_as_long_as_the_last_of_those_who_wait) {
  Scene scene;
  scene.ask(scene.run(1, 0, 0, kSecondNs));
  scene.ask(scene.run(1, 0, 0, 3 * kSecondNs));
  scene.pass(2 * kSecondNs);
  CHECK_EQ(scene.next().within_ns, kSecondNs);
}

TEST(run_that_was_not_begun_by_its_deadline_is_dropped) {
  Scene scene;
  scene.ask(scene.run(1, 0, 0, kSecondNs));
  scene.ask(scene.run(2, 0, 0, kSecondNs - 1));
  scene.world.clock.advance_ns(kSecondNs - 1);
  CHECK(scene.next().key == Key({1, 1}));
  CHECK_EQ(scene.ended(GetEnd::late), 1);
  scene.ask(scene.run(3, 0, 0, kSecondNs));
  const uint64_t before = scene.promoted();
  scene.world.pass(kSecondNs);
  CHECK_EQ(scene.ended(GetEnd::late), 2);
  CHECK(scene.promoted() > before);
  CHECK_EQ(scene.status().queued, 0);
}

TEST(run_of_which_the_worker_says_nothing_is_given_up_after_its_deadline) {
  Scene scene;
  scene.ask(scene.run(1, 0, 0, kSecondNs));
  const remote::RunToGet lost = scene.next();
  scene.pass(2 * kSecondNs);
  CHECK(scene.ask(1) == FetchAnswer::reading);  // joins it, and has more time than it
  scene.pass(kLongNs + 2 * kSecondNs);
  CHECK_EQ(scene.status().under_way, 0);
  CHECK_EQ(scene.ended(GetEnd::late), 1);
  CHECK(scene.ask(1) == FetchAnswer::reading);
  const remote::RunToGet again = scene.next();
  scene.fetches().done(lost, GetEnd::missing);
  CHECK_EQ(scene.status().under_way, 1);
  scene.fetches().done(again, GetEnd::filled);
  CHECK_EQ(scene.status().under_way, 0);
}

TEST(end_is_told_for_a_second_to_who_asks_again) {
  const std::pair<GetEnd, FetchAnswer> cases[] = {
      {GetEnd::missing, FetchAnswer::missing}, {GetEnd::damaged, FetchAnswer::damaged},
      {GetEnd::failed, FetchAnswer::failed},   {GetEnd::no_room, FetchAnswer::no_room},
      {GetEnd::filled, FetchAnswer::no_room},  // and gone again
      {GetEnd::late, FetchAnswer::reading},    // who has more time goes on
      {GetEnd::cleared, FetchAnswer::reading}};
  for (const auto& [end, answer] : cases) {
    Scene scene;
    scene.ask(1);
    const uint64_t before = scene.promoted();
    scene.fetches().done(scene.next(), end);
    CHECK_EQ(scene.promoted(), before + 1);
    CHECK_EQ(scene.ended(end), 1);
    scene.world.clock.advance_ns(kSecondNs - 1);
    CHECK(scene.ask(1) == answer);
    scene.world.clock.advance_ns(1);
    CHECK(scene.ask(1) == FetchAnswer::reading);
    CHECK_EQ(scene.status().queued, 1);
  }
}

TEST(run_that_was_stored_meanwhile_is_not_fetched) {
  Scene scene;
  const std::vector<TestPage> pages = pages_of(scene.world.shape(), 1, scene.pages());
  for (const TestPage& page : pages) CHECK(scene.peer->store(page));
  FetchRun run = scene.run(1);
  run.key = pages.back().key;
  const uint64_t before = scene.promoted();
  CHECK(scene.ask(run) == FetchAnswer::reading);
  CHECK_EQ(scene.promoted(), before + 1);  // so that whoever waits looks again
  CHECK_EQ(scene.status().queued, 0);
}

TEST(stores_wake_those_who_wait_while_a_run_is_fetched_and_only_then) {
  Scene scene;
  const uint64_t before = scene.promoted();
  CHECK(scene.peer->store(scene.world.page(1)));
  CHECK_EQ(scene.promoted(), before);
  scene.ask(2);
  CHECK(scene.peer->store(scene.world.page(3)));
  CHECK_EQ(scene.promoted(), before + 1);
}

TEST(runs_beyond_the_bound_are_told_later) {
  Scene scene(shape_of(512, 1), 512 * kMiB);  // small ones
  // Nobody has all of it: each has three quarters of what those before leave.
  uint64_t chain = 0;
  for (const uint64_t share : {192, 48, 12, 3, 1}) {
    for (uint64_t end = chain + share; chain < end; ++chain)
      CHECK(scene.ask(chain) == FetchAnswer::reading);
    CHECK(scene.ask(chain) == FetchAnswer::later);
    ++scene.asker;
  }
  CHECK_EQ(chain, kFetchRuns);
  CHECK(scene.ask(chain) == FetchAnswer::later);
  CHECK(scene.ask(0) == FetchAnswer::reading);  // it is on its way
  scene.fetches().done(scene.next(), GetEnd::filled);
  CHECK(scene.ask(chain) == FetchAnswer::reading);
  CHECK(scene.ask(chain + 1) == FetchAnswer::later);
  CHECK_EQ(scene.status().later, 7);
}

TEST(bytes_beyond_the_bound_are_told_later_also_where_a_run_becomes_longer) {
  Scene scene(shape_of(256 << 10, 1), 64 * kMiB);  // an eighth of it: two runs, all but
  const auto within = [&] { return scene.control().remote.queued_bytes.value.load() <= 6 * kMiB; };
  CHECK(scene.ask(scene.run(1)) == FetchAnswer::reading);
  CHECK(scene.ask(scene.run(2)) == FetchAnswer::later);
  CHECK(scene.ask(scene.run(2, 0, 10)) == FetchAnswer::reading);
  CHECK(within());
  CHECK(scene.ask(scene.run(2)) == FetchAnswer::later);  // it waits, and this is more than it
  CHECK(scene.ask(scene.run(3, 0, 15)) == FetchAnswer::reading);
  CHECK(within());
  scene.asker = 2;
  CHECK(scene.ask(scene.run(4, 0, 10)) == FetchAnswer::reading);
}

TEST(single_run_above_the_bound_of_bytes_is_fetched) {
  Scene scene(shape_of(1 << 20, 1), 64 * kMiB);
  CHECK_EQ(scene.pages(), 16);
  CHECK(scene.ask(1) == FetchAnswer::reading);
  CHECK(scene.ask(2) == FetchAnswer::later);
}

TEST(run_that_there_cannot_be_is_refused) {
  Scene scene;
  const auto changed = [&](auto change) {
    FetchRun run = scene.run(1);
    change(run);
    return run;
  };
  CHECK_THROWS(scene.ask(changed([](FetchRun& run) { run.pages = 8; })), "bad_fetch");
  CHECK_THROWS(scene.ask(changed([](FetchRun& run) { run.pages = 0; })), "bad_fetch");
  CHECK_THROWS(scene.ask(changed([](FetchRun& run) { run.from = 16; })), "bad_fetch");
  CHECK_THROWS(scene.ask(changed([](FetchRun& run) { run.first_position = 8; })), "bad_fetch");
  // What no name can have would end the worker.
  CHECK_THROWS(scene.ask(changed([](FetchRun& run) { run.day = remote::kLastDay + 1; })),
               "bad_fetch");
  CHECK_THROWS(scene.ask(scene.run(1), WitnessKind{0}), "bad_fetch");
  CHECK_THROWS(scene.ask(scene.run(1), WitnessKind{3}), "bad_fetch");
  CHECK_EQ(scene.status().queued, 0);
  // Whatever else it says.
  CHECK(scene.ask(changed([](FetchRun& run) {
    run.within_ns = UINT64_MAX;
    run.first_position = UINT32_MAX - 15;
    run.day = remote::kLastDay;
  })) == FetchAnswer::reading);
  CHECK(scene.next().within_ns <= 60 * kSecondNs);
}

TEST(pages_that_are_too_large_for_an_object_are_refused) {
  Scene scene(shape_of(remote::kMostPageBytes + 1, 1), 1024 * kMiB);
  for (const uint32_t pages : {0u, 1u})
    CHECK_THROWS(scene.ask({Key{1, 1}, kDay, 0, pages, 0, kLongNs}), "bad_fetch");
}

TEST(clear_ends_what_waits_and_wakes_who_does) {
  Scene scene;
  scene.ask(1);
  scene.ask(2);
  const remote::RunToGet old = scene.next();
  const uint64_t before = scene.promoted();
  scene.world->begin_clear(0, 5);
  CHECK(scene.promoted() > before);
  CHECK_EQ(scene.control().namespaces[0].remote_epoch.load(), 0);
  CHECK(scene.ask(1) == FetchAnswer::off);
  CHECK(!scene.fetches().next().has_value());
  CHECK_EQ(scene.ended(GetEnd::cleared), 1);
  CHECK(scene.world->set_remote_epoch(kSpace, kEpoch + 1, 5));
  CHECK(scene.ask(scene.run(old.key.lo)) == FetchAnswer::reading);
  const remote::RunToGet fresh = scene.next();  // not that of before
  CHECK_EQ(fresh.epoch, kEpoch + 1);
  CHECK_EQ(fresh.clear_epoch, 5);
  scene.fetches().done(old, GetEnd::cleared);
  CHECK_EQ(scene.status().under_way, 1);
}

TEST(epoch_is_taken_for_the_clears_that_it_belongs_to_alone) {
  Scene scene;
  const auto published = [&] { return scene.control().namespaces[0].remote_epoch.load(); };
  CHECK_EQ(published(), kEpoch + 1);
  scene.world->begin_clear(0, 5);
  for (const uint64_t other : {0, 4, 6}) CHECK(!scene.world->set_remote_epoch(kSpace, 80, other));
  CHECK(!scene.world->set_remote_epoch({9, 9}, 80, 5));
  CHECK(!scene.world->set_remote_epoch(kSpace, UINT64_MAX, 5));
  CHECK_EQ(published(), 0);
  CHECK(scene.world->set_remote_epoch(kSpace, 80, 5));
  CHECK_EQ(published(), 81);
  scene.world->begin_clear(0, 5);  // which it knows
  CHECK_EQ(published(), 81);
  scene.world->add_namespace(kMaxNamespaces, scene.world.shape(), 5);
  CHECK_EQ(published(), 81);
  scene.world->add_namespace(kMaxNamespaces, scene.world.shape(), 7);
  CHECK_EQ(published(), 0);
  scene.world->stop_remote({9, 9});  // nobody
}

TEST(namespace_that_is_forgotten_takes_its_epoch) {
  Scene scene;
  scene.ask(1);
  CHECK(scene.world->forget_namespace(0).has_value());
  CHECK_EQ(scene.control().namespaces[0].remote_epoch.load(), 0);
  CHECK(!scene.fetches().next().has_value());
  scene.world->add_namespace(0, scene.world.shape(), 0);
  CHECK(scene.ask(1) == FetchAnswer::off);
}

TEST(daemon_that_drains_fetches_nothing) {
  Scene scene;
  scene.ask(1);
  scene.world->drain();
  CHECK_EQ(scene.status().queued, 0);
  scene.serve();
  CHECK(scene.ask(2) == FetchAnswer::off);
  CHECK_EQ(scene.control().remote.serving.value.load(), 0);
  scene.world->undrain();
  CHECK(scene.ask(2) == FetchAnswer::reading);
}

TEST(daemon_that_starts_says_nothing_of_what_the_one_before_served) {
  Scene scene;
  scene.peer.reset();
  scene.world.restart();
  CHECK_EQ(scene.control().remote.serving.value.load(), 0);
  CHECK_EQ(scene.control().namespaces[0].remote_epoch.load(), 0);
  CHECK(scene.ask(1) == FetchAnswer::off);
}

TEST(daemon_that_ends_says_that_nothing_is_served) {
  Scene scene;
  scene.world->stop();
  CHECK_EQ(scene.control().remote.serving.value.load(), 0);
}
