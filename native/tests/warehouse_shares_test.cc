// Shares of what may be unfinished: whoever never ends its stores leaves the others half of what
// they had without it.
#include "tests/check.h"
#include "tests/warehouse_world.h"

using namespace kvw;

namespace {

constexpr uint64_t kShard = 60000;

// Pages that a session gets, one after the other, without ending any.
uint64_t take_all(World& world, Peer& peer, uint64_t chain, uint32_t shard = 0) {
  uint64_t got = 0;
  while (peer.reserve(world.page(chain + got), shard).answer == Answer::granted) ++got;
  return got;
}

}  // namespace

TEST(session_that_ends_no_store_leaves_others_half_of_what_they_had_alone) {
  uint64_t alone = 0;
  for (const size_t stuck : {0, 1}) {
    World world(shape_of(kShard, 1));
    world.start();
    std::vector<std::unique_ptr<Peer>> frozen;
    for (size_t i = 0; i < stuck; ++i) {
      frozen.push_back(std::make_unique<Peer>(world));
      take_all(world, *frozen.back(), 1000 * (i + 1));
      CHECK_EQ(frozen.back()->reserve(world.page(999)).reason, Reason::reserve_limit);
    }
    // In limbo they hold it as well, for as long as their owner lives.
    world.pass(40 * kSecondNs);
    Peer peer(world);
    const uint64_t got = take_all(world, peer, 100000);
    if (stuck == 0)
      alone = got;
    else
      CHECK(got >= alone / 2);
  }
  CHECK_EQ(alone, 8 * kMiB / 8 / shape_of(kShard, 1).slot_bytes());
}

// Incident: each session of a process got half of the rest, so thirty of them took all of it, and
// no other process could store a page.
TEST(sessions_of_a_process_have_one_share_however_many_they_are) {
  World world(shape_of(kShard, 1));
  world.start();
  const uint64_t alone = 8 * kMiB / 8 / world.shape().slot_bytes();
  std::vector<std::unique_ptr<Peer>> hoard;
  uint64_t held = 0;
  for (uint64_t i = 1; i <= 30; ++i) {
    hoard.push_back(std::make_unique<Peer>(world, 7));
    held += take_all(world, *hoard.back(), 1000 * i);
  }
  CHECK_EQ(held, alone);
  Peer other(world, 8);
  CHECK(take_all(world, other, 100000) >= alone / 2);
  // Whichever of its sessions ends, what that one held is the process's again.
  hoard.front()->die();
  for (int i = 0; i < 4; ++i) world.pass(2 * kSecondNs);
  CHECK(take_all(world, *hoard.back(), 200000) > 0);
}

TEST(engine_without_its_second_rank_leaves_others_their_share) {
  World world(shape_of(kShard));
  world.start();
  Peer half(world), other(world);
  const uint64_t held = take_all(world, half, 1000);
  CHECK(held != 0);
  for (uint64_t chain = 0; chain < 50; ++chain) CHECK(other.store(world.page(chain)));
  // The rank that comes after all joins without a share of its own.
  Peer late(world);
  for (uint64_t at = 0; at < held; ++at)
    CHECK_EQ(late.reserve(world.page(1000 + at), 1).answer, Answer::granted);
}

TEST(share_comes_back_with_the_end_of_its_session) {
  World world(shape_of(kShard, 1));
  world.start();
  Peer peer(world);
  auto frozen = std::make_unique<Peer>(world);
  take_all(world, *frozen, 1000);
  const uint64_t beside = take_all(world, peer, 2000);
  frozen->die();
  for (int i = 0; i < 4; ++i) world.pass(2 * kSecondNs);
  CHECK(take_all(world, peer, 3000) > 0);
  CHECK(beside > 0);
}

// However small pages are: the core looks at each unfinished slot in every tick, and a session that
// is frozen lets all of its own turn to limbo at one time.
TEST(unfinished_slots_are_bounded_by_number_and_end_a_bounded_number_at_a_time) {
  constexpr uint64_t kHalf = Groups::kUnfinishedSlots / 2;
  World world(shape_of(4096, 1), 1024 * kMiB);
  world.options.index_pages = 4 * kHalf;
  world.start_without_slabs();  // nobody writes into them: they need no memory
  while (const auto slab = world->next_slab_to_populate()) world->slab_populated(*slab, 0);
  Peer frozen(world), other(world);
  CHECK_EQ(take_all(world, frozen, 100000), kHalf);
  CHECK_EQ(frozen.reserve(world.page(1)).reason, Reason::reserve_limit);
  CHECK_EQ(take_all(world, other, 200000), kHalf / 2);

  world.pass(40 * kSecondNs);
  const uint64_t first = world->status().limbo_slots;
  CHECK(first > 0 && first <= kHalf / 4);
  for (int tick = 0; tick < 20; ++tick) world->tick();
  CHECK_EQ(world->status().limbo_slots, kHalf + kHalf / 2);
  CHECK_EQ(world->status().reserved_slots, 0);
  frozen.die();
  other.die();
  world->tick();
  world.pass(10 * kSecondNs);
  CHECK(world->status().limbo_slots >= kHalf);
  for (int tick = 0; tick < 20; ++tick) world->tick();
  world.check_settled();
}

TEST(page_larger_than_a_share_is_stored_by_one_at_a_time) {
  World world(shape_of(3 * kMiB / 4, 2));  // of 8 MiB
  world.start();
  Peer first(world), second(world);
  const ReserveAnswer grant = first.reserve(world.page(1));
  CHECK_EQ(grant.answer, Answer::granted);
  CHECK_EQ(second.reserve(world.page(2)).reason, Reason::reserve_limit);
  first.settle(grant);
  CHECK(second.store(world.page(2)));
}

TEST(process_is_told_to_pin_no_more_than_half_of_what_others_leave) {
  const NamespaceShape small = shape_of(4096, 1, Key{1, 2});
  World world(shape_of(60 * 1024, 1), 16 * kMiB);
  world.declared = {small};
  world.start();
  Peer peer(world), other(world);
  const uint64_t arena = world->arena().bytes();
  const auto limit = [&] {
    world.pass(kSecondNs);
    for (int i = 0; i < 4; ++i) world.pass(100 * kMillisecondNs);
    return world->arena().control().pin_limit_bytes.value.load();
  };
  CHECK_EQ(limit(), arena / 2);
  const uint64_t pages = arena / world.shape().slot_bytes() * 5 / 8;
  std::vector<int> pins;
  for (uint64_t chain = 0; chain < pages; ++chain) {
    CHECK(peer.store(world.page(chain)));
    pins.push_back(peer.pin(world.page(chain)));
    CHECK(pins.back() >= 0);
  }
  const uint64_t left = arena - pages * world.shape().slot_bytes();
  CHECK_EQ(limit(), left);
  other.use(small);
  CHECK(other.store(page_of(small, 1, 0)));
  CHECK(other.pin(page_of(small, 1, 0)) >= 0);
  CHECK_EQ(limit(), left - small.slot_bytes());
  const auto pin_word = [&](uint64_t word) {
    other.session().store_pin(other.session().take_pin(), word);
  };
  // A page that is pinned already, a segment, and slots that are none: of a slab that nothing cut,
  // behind the last of one, and beyond the arena.
  CHECK(other.pin(world.page(1)) >= 0);
  pin_word(segment_pin(1, 1));
  const uint32_t uncut = world->arena().slab_count() - 1;
  CHECK_EQ(world.slots().slots_in(world.slots().layout(uncut)), 0);
  const uint32_t behind = world.slots().slots_in(world.slots().layout(0));
  for (const SlotId slot :
       {world.slots().slot_id(uncut, 0), world.slots().slot_id(0, behind), SlotId{0x7ffffff0}})
    pin_word(slot_pin(slot, 1));
  CHECK_EQ(limit(), left - small.slot_bytes());
  other.die();
  for (const int pin : pins) peer.session().drop_pin(pin);
  CHECK_EQ(limit(), arena / 2);
}
