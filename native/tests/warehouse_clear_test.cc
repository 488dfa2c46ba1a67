// A clear beside other work: it takes pages out in steps, and clients store and load between them.
// And a clear after its time: what it took stays away, whatever was lost meanwhile.
#include <poll.h>

#include <functional>

#include "tests/check.h"
#include "tests/warehouse_world.h"
#include "warehouse/operator_eviction.h"

using namespace kvw;

namespace {

uint32_t ordinal_in(World& world) { return world->add_namespace(kMaxNamespaces, world.shape(), 0); }

// Page n is in both tiers, reserved under epoch n; 0 to 4.
struct Epochs {
  Epochs() : world(shape_of(5000, 1)) {
    set_nvme(true);
    world.start();
    Peer peer(world);
    for (uint64_t epoch = 0; epoch < 5; ++epoch) {
      world->raise_epoch(epoch);
      CHECK(peer.store(world.page(epoch)));
    }
    for (int round = 0; world->status().nvme_pages < 5; ++round) {
      CHECK(round < 20000);
      world->poll_log();
      world->tick();
      pollfd ready{world->log_fd(), POLLIN, 0};
      ::poll(&ready, 1, 5);
    }
    world.kill();
  }
  void set_nvme(bool attached) {
    world.options.nvme_dir = attached ? world.directory.path() + "/nvme" : "";
    std::filesystem::create_directory(world.directory.path() + "/nvme");
    world.options.nvme_capacity_bytes = attached ? 8 * kMiB : 0;
  }
  void lose(const char* name) { std::filesystem::remove_all(world.directory.path() + name); }
  // Those that are there after a start without a declared namespace.
  std::string found_without_ledger(uint64_t floor) {
    world.declare_own = false;
    world.options.epoch_floor = floor;
    world.options.epoch = world.restart().epoch;
    std::string found;
    for (uint64_t epoch = 0; epoch < 5; ++epoch)
      if (world.stored(world.page(epoch))) found += std::to_string(epoch);
    return found;
  }
  World world;
};

}  // namespace

// An import reads a page, the namespace is cleared, and only then is the page stored: it came back.
TEST(bytes_that_are_older_than_a_clear_are_not_reserved) {
  World world(shape_of(5000, 1));
  world.start();
  Peer peer(world);
  const uint32_t ordinal = ordinal_in(world);
  const TestPage stored = world.page(1), reserved = world.page(2), fresh = world.page(3);
  CHECK(peer.store(stored));
  const ReserveAnswer grant = peer.reserve_since(0, reserved);
  CHECK_EQ(grant.answer, Answer::granted);
  CHECK_EQ(peer.reserve_since(0, stored).answer, Answer::already);
  world->begin_clear(ordinal, 5);
  for (const uint64_t since : {0, 4})
    CHECK_EQ(peer.reserve_since(since, fresh).reason, Reason::cleared);
  CHECK_EQ(peer.seal(grant, 0, peer.copy(grant, reserved)), Reason::cleared);
  for (PageId cursor = 0; cursor != kNoPage;) world->clear_some(ordinal, 5, cursor);
  CHECK_EQ(peer.reserve_since(4, fresh).reason, Reason::cleared);
  // Neither is what others stored since theirs.
  CHECK(peer.store(stored));
  CHECK_EQ(peer.reserve_since(4, stored).reason, Reason::cleared);
  CHECK_EQ(peer.reserve_since(5, stored).answer, Answer::already);
  CHECK_EQ(peer.reserve_since(5, fresh).answer, Answer::granted);
  world.restart();
  peer.hello();
  world->add_namespace(kMaxNamespaces, world.shape(), 5);  // as the ledger has it
  CHECK_EQ(peer.reserve_since(4, reserved).reason, Reason::cleared);
}

TEST(what_is_stored_beside_a_clear_is_built_on_nothing_that_it_takes) {
  World world(shape_of(5000, 1));
  world.start();
  Peer peer(world);
  const uint32_t ordinal = ordinal_in(world);
  std::vector<TestPage> pages;
  for (uint32_t at = 0; at < 8; ++at) pages.push_back(world.page(1, at));
  CHECK(peer.store_all(std::span(pages).first(6)));
  world->begin_clear(ordinal, 5);
  // The prompt again, before the clear came to its pages: each is stored, none is there already.
  CHECK_EQ(peer.reserve(pages[6]).reason, Reason::parent_missing);
  CHECK(peer.store_all(std::span(pages).first(3)));
  uint64_t cleared = 0;
  for (PageId cursor = 0; cursor != kNoPage;) cleared += world->clear_some(ordinal, 5, cursor);
  for (int i = 0; i < 3; ++i) world.pass(kSecondNs);
  CHECK_EQ(cleared, 6);
  for (uint32_t at = 0; at < 8; ++at)
    CHECK(peer.load(pages[at]) == (at < 3 ? Got::right : Got::missing));
  CHECK(peer.store_all(std::span(pages).subspan(3)));
  world.restart();
  peer.hello();
  for (const TestPage& page : pages) CHECK(peer.load(page) == Got::right);
}

// Incident: a clear gave up all of them at once, tens of thousands where pages are small.
TEST(clear_gives_up_unfinished_pages_in_steps_and_nobody_joins_or_builds_on_one_meanwhile) {
  constexpr size_t kOpen = 3000;
  constexpr uint64_t kStep = 2048;
  World world(shape_of(512, 2), 256 * kMiB);
  world.start();
  Peer peer(world), other(world);
  std::vector<ReserveAnswer> grants;
  for (uint64_t chain = 0; chain < kOpen; ++chain) {
    grants.push_back(peer.reserve(world.page(chain)));
    CHECK_EQ(grants.back().reason, Reason::none);
  }
  const uint32_t ordinal = ordinal_in(world);
  world->begin_clear(ordinal, 5);
  CHECK_EQ(world->status().reserved_slots, kOpen);
  // Of the clear's own time: a page that is stored whole, in another slot than the one before it.
  CHECK_EQ(other.reserve(world.page(1, 1)).reason, Reason::parent_missing);
  CHECK(other.store(world.page(2)));
  CHECK(world.slot_of(world.page(2)) != grants[2].slot);
  CHECK_EQ(peer.seal(grants[3], 0, peer.copy(grants[3], world.page(3))), Reason::cleared);
  uint64_t left = world->status().reserved_slots;
  CHECK_EQ(left, kOpen - 3);
  for (PageId cursor = 0; cursor != kNoPage;) {
    world->clear_some(ordinal, 5, cursor);
    const uint64_t now = world->status().reserved_slots;
    CHECK(left - now <= kStep);
    left = now;
  }
  CHECK_EQ(left, 0);
  CHECK_EQ(world->status().limbo_slots, kOpen - 1);
  for (uint64_t chain = 0; chain < kOpen; ++chain)
    if (chain != 3) peer.settle(grants[chain]);
  world.check_settled();
  CHECK(!world.stored(world.page(3)));
  CHECK_EQ(other.load(world.page(2)), Got::right);
}

TEST(step_of_a_clear_takes_out_a_bounded_number_of_pages) {
  World world(shape_of(512, 1), 16 * kMiB);
  world.start();
  Peer peer(world);
  const uint32_t ordinal = ordinal_in(world);
  constexpr uint64_t kPages = 3000;
  for (uint64_t chain = 0; chain < kPages; ++chain) CHECK(peer.store(world.page(chain)));
  world->begin_clear(ordinal, 5);
  uint64_t cleared = 0;
  for (PageId cursor = 0; cursor != kNoPage;) {
    const uint64_t step = world->clear_some(ordinal, 5, cursor);
    CHECK(step <= 1024);
    cleared += step;
  }
  CHECK_EQ(cleared, kPages);
  CHECK_EQ(world->status().dram_pages, 0);
}

// --- an operator's evict, in steps

namespace {

uint64_t evict_with(World& world, OperatorEviction& eviction,
                    const std::function<void()>& between) {
  while (eviction.step()) between();
  for (int i = 0; i < 3; ++i) world.pass(kSecondNs);
  return eviction.left();
}

}  // namespace

TEST(evict_takes_leaves_before_their_parents_whatever_comes_between_its_steps) {
  auto random = check::random("evict in steps");
  World world(shape_of(512, 1), 16 * kMiB);
  world.start();
  Peer peer(world);
  constexpr uint64_t kChains = 300;
  std::vector<uint32_t> length(kChains);
  for (uint64_t chain = 0; chain < kChains; ++chain) {
    length[chain] = 1 + static_cast<uint32_t>(random() % 9);
    for (uint32_t at = 0; at < length[chain]; ++at) CHECK(peer.store(world.page(chain, at)));
  }
  // Beside it chains grow and others begin: none may lose the page that it builds on.
  uint64_t grown = kChains;
  OperatorEviction eviction = world->begin_eviction(-1, 700, "dram");
  const uint64_t left = evict_with(world, eviction, [&] {
    CHECK(peer.store(world.page(grown++)));
    const uint64_t chain = random() % kChains;
    if (world.stored(world.page(chain, length[chain] - 1))) {
      CHECK(peer.store(world.page(chain, length[chain])));
      ++length[chain];
    }
  });
  CHECK_EQ(left, 700);
  CHECK_EQ(world->status().left_dram[static_cast<size_t>(LeaveReason::orphaned)], 0);
  for (uint64_t chain = 0; chain < kChains; ++chain)
    for (uint32_t at = 1; at < length[chain]; ++at)
      CHECK(!world.stored(world.page(chain, at)) || world.stored(world.page(chain, at - 1)));
}

TEST(evict_of_everything_leaves_what_is_pinned_with_its_prefix_and_ends) {
  World world(shape_of(512, 1), 16 * kMiB);
  world.start();
  Peer peer(world);
  for (uint32_t at = 0; at < 2000; ++at) CHECK(peer.store(world.page(at % 50, at / 50)));
  CHECK(peer.pin(world.page(3, 39)) >= 0);
  OperatorEviction eviction = world->begin_eviction(-1, UINT64_MAX, "all");
  CHECK_EQ(evict_with(world, eviction, [] {}), 1960);
  for (uint32_t at = 0; at < 40; ++at) CHECK(world.stored(world.page(3, at)));
  CHECK_EQ(peer.load(world.page(3, 39)), Got::right);
}

// --- after losses

// Incident: the start that found the ledger lost dropped what had been cleared; the next one had a
// ledger again, and served it.
TEST(what_was_cleared_stays_away_at_every_start_after_a_loss_of_the_ledger) {
  Epochs kept;
  CHECK_EQ(kept.found_without_ledger(kLedgerLost), "4");
  CHECK_EQ(kept.world.options.epoch, 4);
  for (int start = 0; start < 2; ++start) CHECK_EQ(kept.found_without_ledger(4), "4");
  kept.lose("/arena");
  CHECK_EQ(kept.found_without_ledger(4), "4");
  CHECK_EQ(kept.found_without_ledger(2), "234");
}

// Incident: with the NVMe tier detached for one run nothing knew of the epoch but the slots, and a
// clear of everything took nothing.
TEST(epoch_is_the_highest_that_any_header_slot_or_record_has_seen) {
  Epochs kept;
  CHECK_EQ(kept.world.start().epoch, 4);  // the control page
  kept.world.kill();
  kept.lose("/arena/control");
  CHECK_EQ(kept.world.start().epoch, 4);  // slots
  kept.world.kill();
  kept.lose("/arena");
  CHECK_EQ(kept.world.start().epoch, 4);  // records: their segment began under epoch 0
}

TEST(control_page_of_another_size_keeps_the_incarnation_and_the_epoch) {
  Epochs kept;
  uint64_t incarnation = 0;
  for (const bool attached : {true, false, true}) {
    kept.set_nvme(attached);
    kept.world.start();
    kept.world->raise_epoch(7);  // a clear that has left no page behind
    CHECK(kept.world->arena().incarnation() > incarnation);
    incarnation = kept.world->arena().incarnation();
    CHECK_EQ(kept.world->arena().control().clear_epoch.value.load(), 7);
    kept.world.kill();
  }
  kept.set_nvme(false);
  CHECK_EQ(kept.world.start().epoch, 7);
}

TEST(slots_of_what_was_cleared_come_back_in_steps_but_for_those_that_are_pinned) {
  constexpr size_t kPages = 2 * Removal::kRetiredPerStep;
  World world(shape_of(512, 1), 64 * kMiB);
  world.start();
  Peer peer(world);
  std::vector<TestPage> pages;
  for (uint64_t chain = 0; chain < kPages; ++chain) pages.push_back(world.page(chain));
  for (size_t at = 0; at < kPages; at += 256)
    CHECK(peer.store_all(std::span(pages).subspan(at, 256)));
  const int pinned = peer.pin(pages[17]);
  world->begin_clear(ordinal_in(world), 5);
  for (PageId cursor = 0; cursor != kNoPage;) world->clear_some(0, 5, cursor);
  CHECK_EQ(world->status().zombie_slots, kPages);
  world.pass(100 * kMillisecondNs);
  CHECK(world->status().zombie_slots >= kPages - Removal::kRetiredPerStep);
  CHECK(world->goes_on());
  world->go_on();
  CHECK(!world->goes_on());
  CHECK_EQ(world->status().zombie_slots, 1);
  peer.session().drop_pin(pinned);
  world.pass(100 * kMillisecondNs);
  world.check_settled();
}

// --- forgotten namespaces

namespace {

NamespaceShape next_shape() { return shape_of(9000, 1, {0x91, 0x92}); }

}  // namespace

TEST(forgotten_namespace_gives_its_number_to_another_and_shares_nothing_with_it) {
  World world(shape_of(5000, 1));
  world.start();
  Peer peer(world), next(world);
  const uint32_t ordinal = ordinal_in(world);
  CHECK(peer.store(world.page(1)));
  CHECK(!world->forget_namespace(ordinal));  // it has a page
  CHECK_EQ(world->clear(ordinal, 5), 1);
  CHECK(world->forget_namespace(ordinal) == kSpace);
  CHECK(!world->forget_namespace(ordinal));
  CHECK(!peer.view().space(kSpace));
  CHECK_THROWS(peer.reserve(world.page(1)), "namespace_unknown");
  CHECK_EQ(world->add_namespace(ordinal, next_shape(), 5), ordinal);
  next.use(next_shape());
  CHECK(next.store(page_of(next_shape(), 1, 0)));
  CHECK(!peer.view().space(kSpace));
  CHECK_THROWS(peer.reserve(world.page(1)), "namespace_unknown");
  CHECK_EQ(peer.load(world.page(1)), Got::missing);
  CHECK_EQ(next.load(page_of(next_shape(), 1, 0)), Got::right);
  // It comes back as one that is new, beside the other.
  const uint32_t again = world->add_namespace(ordinal, world.shape(), 5);
  CHECK(again != ordinal);
  CHECK_EQ(peer.view().space(kSpace)->ordinal, again);
  CHECK_EQ(peer.load(world.page(1)), Got::missing);
  CHECK(peer.store(world.page(1)));
  CHECK_EQ(peer.load(world.page(1)), Got::right);
  CHECK_EQ(next.load(page_of(next_shape(), 1, 0)), Got::right);
}

TEST(namespace_that_is_being_stored_into_is_not_forgotten_and_a_late_seal_meets_nobody) {
  World world(shape_of(5000, 1));
  world.start();
  Peer peer(world);
  const uint32_t ordinal = ordinal_in(world);
  const ReserveAnswer grant = peer.reserve(world.page(1));
  const uint64_t digest = peer.copy(grant, world.page(1));
  CHECK(!world->forget_namespace(ordinal));
  CHECK(!world->forget_namespace(kMaxNamespaces));
  world->clear(ordinal, 5);  // gives the store up
  CHECK(world->forget_namespace(kMaxNamespaces) == kSpace);
  CHECK_EQ(world->add_namespace(ordinal, next_shape(), 5), ordinal);
  CHECK_EQ(peer.seal(grant, 0, digest), Reason::stale);
  CHECK_EQ(world->status().dram_pages, 0);
  world.check_settled();
}

TEST(namespace_that_was_used_longest_ago_is_forgotten_first) {
  World world(shape_of(5000, 1));
  for (uint64_t number = 0; number < 3; ++number)
    world.declared.push_back(shape_of(5000, 1, {number, 1}));
  world.start();  // all at one time
  Peer peer(world);
  CHECK(peer.store(world.page(1)));
  world.pass(kSecondNs);
  world->add_namespace(kMaxNamespaces, world.declared[0], 0);  // opened again
  world.pass(kSecondNs);
  peer.use(world.declared[1]);
  peer.settle(peer.reserve(page_of(world.declared[1], 1, 0)));
  for (const uint64_t number : {2, 0, 1})
    CHECK(world->forget_namespace(kMaxNamespaces) == Key(number, 1));
  CHECK(!world->forget_namespace(kMaxNamespaces));  // the last one has a page
}

TEST(pages_of_a_forgotten_namespace_stay_away_also_from_a_tier_that_was_detached) {
  for (const bool attached : {true, false}) {
    Epochs kept;
    kept.set_nvme(attached);
    kept.world.options.epoch = 4;
    kept.world.start();
    const uint32_t ordinal = ordinal_in(kept.world);
    CHECK_EQ(kept.world->clear(ordinal, 5), 5);
    CHECK(kept.world->forget_namespace(ordinal) == kSpace);
    kept.world->raise_epoch(6);
    kept.world->add_namespace(ordinal, next_shape(), 6);
    Peer next(kept.world);
    next.use(next_shape());
    CHECK(next.store(page_of(next_shape(), 1, 0)));
    kept.world.kill();
    kept.set_nvme(true);
    CHECK_EQ(kept.found_without_ledger(6), "");
    CHECK(kept.world.stored(page_of(next_shape(), 1, 0)));
    CHECK_EQ(kept.world->status().spaces.size(), 1);
    kept.lose("/arena");
    CHECK_EQ(kept.found_without_ledger(6), "");
    // Without a ledger, too: what is not provably younger goes.
    CHECK_EQ(kept.found_without_ledger(kLedgerLost), "");
  }
}
