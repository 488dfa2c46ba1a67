// Stores by construction: late writers, ranks that store the same page at once, limbo and its end,
// and the bounds of what may be unfinished.
#include <sys/wait.h>

#include <csignal>
#include <set>

#include "tests/check.h"
#include "tests/warehouse_world.h"
#include "warehouse/warehouse.h"

namespace kvw {
namespace {

constexpr uint64_t kBig = 60 * 1024;  // two shards of it: 120 KiB a slot, 17 a slab, 68 in all
constexpr uint64_t kLimbo = 30 * kSecondNs;
constexpr uint64_t kGrace = 5 * kSecondNs;

// Stores chains of one page until the arena has been through all its slots twice, and says whether
// any page ever lay in `slot`.
bool anybody_gets(World& world, Peer& peer, SlotId slot) {
  bool seen = false;
  for (uint64_t chain = 5000; chain < 5000 + 2 * world.capacity(); ++chain) {
    const TestPage page = world.page(chain);
    CHECK(peer.store(page));
    seen = seen || world.slot_of(page) == slot;
  }
  return seen;
}

std::vector<PageInfo> all_pages(World& world, size_t* steps = nullptr) {
  std::vector<PageInfo> found;
  for (PageId cursor = 0; cursor != kNoPage;) {
    const auto some = world->pages(-1, cursor, 1000);
    found.insert(found.end(), some.begin(), some.end());
    if (steps != nullptr) ++*steps;
  }
  return found;
}

void check_all_right(World& world, Peer& peer) {
  for (const PageInfo& info : all_pages(world))
    for (uint64_t chain = 5000; chain < 5000 + 2 * world.capacity(); ++chain)
      if (const TestPage page = world.page(chain); page.key == info.key)
        for (uint32_t shard = 0; shard < world.shape().shards; ++shard)
          CHECK_EQ(peer.load(page, shard), Got::right);
}

// What a fork of the test inherits of the daemon and a real client would not have.
void close_lock(const World& world) {
  for (int fd = 3; fd < 256; ++fd) {
    char path[256] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    if (::readlink(link.c_str(), path, sizeof path - 1) > 0 &&
        path == world.options.arena_dir + "/lock")
      ::close(fd);
  }
}

TEST(pages_are_listed_once_each_in_bounded_stretches_of_the_index) {
  World world(shape_of(5000, 1));
  world.options.index_pages = 1 << 16;
  world.start();
  Peer peer(world);
  std::set<PageId> pages;
  for (uint64_t chain = 0; chain < 100; ++chain) {
    CHECK(peer.store(world.page(chain)));
    pages.insert(world.entry(world.page(chain))->page);
  }
  size_t steps = 0;
  for (const PageInfo& info : all_pages(world, &steps)) CHECK_EQ(pages.erase(info.page), 1);
  CHECK(pages.empty());
  CHECK_EQ(steps, world->arena().index().entries() / Warehouse::kListedPerStep);
  PageId cursor = 0;
  CHECK_EQ(world->pages(-1, cursor, 0).size(), 0);
  cursor = kNoPage - 1;
  CHECK_EQ(world->pages(-1, cursor, 1).size(), 0);
  CHECK_EQ(cursor, kNoPage);
}

TEST(store_is_invisible_until_every_shard_is_sealed) {
  World world(shape_of(5000));
  world.start();
  Peer a(world), b(world);
  const TestPage page = world.page(1);
  const ReserveAnswer first = a.reserve(page, 0), second = b.reserve(page, 1);
  CHECK_EQ(first.answer, Answer::granted);
  CHECK_EQ(second.answer, Answer::granted);
  CHECK_EQ(first.slot, second.slot);  // one slot for all ranks
  CHECK_EQ(first.generation, second.generation);
  CHECK_EQ(a.seal(first, 0, a.copy(first, page, 0)), Reason::none);
  CHECK(!world.stored(page));
  CHECK_EQ(world.word(first.slot).state, SlotState::reserved);
  CHECK_EQ(b.seal(second, 1, b.copy(second, page, 1)), Reason::none);
  CHECK(world.stored(page));
  CHECK_EQ(a.load(page, 0), Got::right);
  CHECK_EQ(a.load(page, 1), Got::right);
  world.check_settled();
}

TEST(store_grants_a_shard_once_per_generation) {
  World world(shape_of(5000));
  world.start();
  Peer a(world), b(world);
  const TestPage page = world.page(1);
  const ReserveAnswer grant = a.reserve(page, 0);
  CHECK_EQ(b.reserve(page, 0).answer, Answer::busy);
  CHECK_EQ(a.reserve(page, 0).answer, Answer::busy);  // also for its own owner
  CHECK_EQ(a.seal(grant, 0, a.copy(grant, page, 0)), Reason::none);
  CHECK_EQ(b.reserve(page, 0).answer, Answer::already);
  const ReserveAnswer other = b.reserve(page, 1);
  CHECK_EQ(b.seal(other, 1, b.copy(other, page, 1)), Reason::none);
  CHECK_EQ(a.reserve(page, 1).answer, Answer::already);
  // A seal repeated after LIVE changes nothing.
  CHECK_EQ(a.seal(grant, 0, 0), Reason::stale);
  CHECK_EQ(a.load(page, 0), Got::right);
}

TEST(seal_is_refused_when_the_shard_belongs_to_another) {
  World world(shape_of(5000));
  world.start();
  Peer a(world), b(world);
  const TestPage page = world.page(1);
  const ReserveAnswer grant = a.reserve(page, 0);
  CHECK_EQ(b.seal(grant, 0, 1), Reason::not_owner);
  CHECK_EQ(a.seal(grant, 1, 1), Reason::not_owner);  // never granted to anybody
  CHECK_EQ(a.seal(grant, 64, 1), Reason::not_owner);
  CHECK_EQ(a.seal(grant, UINT32_MAX, 1), Reason::not_owner);
  ReserveAnswer forged = grant;
  forged.generation += 1;
  CHECK_EQ(a.seal(forged, 0, 1), Reason::stale);
  forged = grant;
  forged.slot = kNoSlot;
  CHECK_EQ(a.seal(forged, 0, 1), Reason::stale);
  CHECK_EQ(a.seal(grant, 0, a.copy(grant, page, 0)), Reason::none);
}

// What is ahead in a message is looked at early, before anybody knows whether it makes sense.
TEST(seals_that_make_no_sense_are_refused_wherever_they_stand_among_others) {
  World world(shape_of(5000, 1));
  world.start();
  Peer peer(world);
  std::vector<Seal> seals;
  for (uint32_t chain = 0; chain < 40; ++chain) {
    const TestPage page = world.page(chain);
    const ReserveAnswer grant = peer.reserve(page);
    seals.push_back({grant.generation, peer.copy(grant, page), grant.slot, 0});
    seals.push_back({grant.generation, 1, kNoSlot - chain, 0});  // of no slab
    seals.push_back({grant.generation + 1, 1, grant.slot, 0});   // of another generation
    if (chain > 0) seals.push_back(seals[0]);                    // sealed long since
  }
  std::vector<SealAnswer> sealed;
  std::vector<ReserveAnswer> reserved;
  world->exchange(peer.id(), world.shape().id, seals, {}, sealed, reserved);
  CHECK_EQ(sealed.size(), seals.size());
  uint64_t taken = 0;
  for (const SealAnswer& answer : sealed) {
    CHECK(answer.reason == Reason::none || answer.reason == Reason::stale);
    taken += answer.reason == Reason::none ? 1 : 0;
  }
  CHECK_EQ(taken, 40);
  for (uint64_t chain = 0; chain < 40; ++chain) CHECK_EQ(peer.load(world.page(chain)), Got::right);
}

TEST(join_is_refused_when_the_witness_or_parent_differs) {
  World world(shape_of(5000));
  world.start();
  Peer a(world), b(world);
  const TestPage page = world.page(1);
  CHECK_EQ(a.reserve(page, 0).answer, Answer::granted);
  TestPage other = page;
  other.tokens[3] ^= 1;  // the same key from other tokens: a collision
  CHECK_EQ(b.reserve(other, 1).reason, Reason::mismatch);
  other = page;
  other.parent.lo ^= 1;
  CHECK_EQ(b.reserve(other, 1).reason, Reason::mismatch);
  CHECK_EQ(b.reserve_as(page, 1, page.witness().first(60)).reason, Reason::mismatch);
  other = page;
  other.position = 1;
  CHECK_EQ(b.reserve(other, 1).reason, Reason::mismatch);
  CHECK_EQ(b.reserve(page, 1).answer, Answer::granted);
}

// The shards of a group are those of its own namespace: a join from one with more of them would
// write owners past the end of the slot's metadata.
TEST(join_is_refused_when_it_comes_from_another_namespace) {
  World world(shape_of(5000, 1));
  const NamespaceShape wide = shape_of(4096, 64, {6, 6});
  world.declared.push_back(wide);
  world.start();
  Peer a(world), b(world);
  b.use(wide);
  const TestPage page = world.page(1), next = world.page(2);
  const ReserveAnswer grant = a.reserve(page, 0), neighbour = a.reserve(next, 0);
  CHECK_EQ(neighbour.slot, grant.slot + 1);
  const SlotMeta* beside = world.meta(neighbour.slot);
  const uint64_t sum = meta_checksum(*beside, neighbour.generation);
  for (uint32_t shard = 0; shard < 64; ++shard)
    CHECK_EQ(b.reserve(page, shard).reason, Reason::mismatch);
  CHECK_EQ(meta_checksum(*beside, neighbour.generation), sum);
  CHECK(world->unsettled(b.id()).empty());
}

TEST(reserve_is_refused_when_its_fields_are_impossible) {
  World world(shape_of(5000));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  CHECK_EQ(peer.reserve(page, 2).reason, Reason::mismatch);
  CHECK_EQ(peer.reserve(page, UINT32_MAX).reason, Reason::mismatch);
  CHECK_EQ(peer.reserve_as(page, 0, {}).reason, Reason::mismatch);
  const std::vector<std::byte> huge(world.shape().witness_capacity() + 1);
  CHECK_EQ(peer.reserve_as(page, 0, huge).reason, Reason::mismatch);
  CHECK_EQ(peer.reserve(world.page(1, 5)).reason, Reason::parent_missing);
  peer.use(shape_of(5000, 2, {1, 1}));
  CHECK_THROWS(peer.reserve(page), "namespace_unknown");
  world.check_settled();
}

TEST(reserve_is_refused_when_too_much_is_unfinished) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  const uint64_t allowed = 8 * kMiB / 8 / world.shape().slot_bytes();
  std::vector<ReserveAnswer> grants;
  for (uint64_t chain = 0; chain < allowed; ++chain) {
    grants.push_back(peer.reserve(world.page(chain)));
    CHECK_EQ(grants.back().answer, Answer::granted);
  }
  CHECK_EQ(peer.reserve(world.page(100)).reason, Reason::reserve_limit);
  // Limbo counts as well: those slots are just as unusable.
  world.pass(kLimbo);
  CHECK_EQ(world->status().limbo_slots, allowed);
  CHECK_EQ(peer.reserve(world.page(100)).reason, Reason::reserve_limit);
  peer.settle(grants[0]);
  CHECK_EQ(peer.reserve(world.page(100)).answer, Answer::granted);
  // And after a restart, which may come with limits already exceeded.
  world.restart();
  CHECK_EQ(world->status().limbo_slots, allowed);
  peer.hello();
  CHECK_EQ(peer.reserve(world.page(101)).reason, Reason::reserve_limit);
  for (const SlotRef& ref : world->unsettled(peer.id()))
    world->settle(peer.id(), std::array<SlotRef, 1>{ref});
  CHECK_EQ(peer.reserve(world.page(101)).answer, Answer::granted);
}

// A window of a chain in one call, as a client asks: the part beyond the limit is granted later.
TEST(reserve_is_granted_again_when_only_its_parent_had_to_wait) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  std::vector<TestPage> pages;
  for (uint32_t at = 0; at < 12; ++at) pages.push_back(world.page(1, at));
  const auto ask = [&](size_t from) {
    std::vector<Reserve> fields;
    for (size_t at = from; at < pages.size(); ++at)
      fields.push_back({pages[at].key, pages[at].parent, pages[at].position, 0,
                        static_cast<uint32_t>(WitnessKind::tokens), 64});
    std::vector<ReserveRequest> requests;
    for (size_t i = 0; i < fields.size(); ++i)
      requests.push_back({&fields[i], pages[from + i].witness().data()});
    std::vector<SealAnswer> sealed;
    std::vector<ReserveAnswer> answers;
    world->exchange(peer.id(), kSpace, {}, requests, sealed, answers);
    return answers;
  };
  const std::vector<ReserveAnswer> first = ask(0);
  CHECK_EQ(first[7].answer, Answer::granted);
  CHECK_EQ(first[8].reason, Reason::reserve_limit);
  CHECK_EQ(first[9].reason, Reason::parent_missing);
  for (uint32_t at = 0; at < 8; ++at) {
    CHECK_EQ(peer.seal(first[at], 0, peer.copy(first[at], pages[at], 0)), Reason::none);
    const ReserveAnswer other = peer.reserve(pages[at], 1);
    CHECK_EQ(peer.seal(other, 1, peer.copy(other, pages[at], 1)), Reason::none);
  }
  for (const ReserveAnswer& answer : ask(8)) CHECK_EQ(answer.answer, Answer::granted);
  // Refused for good, a page is so for all its shards: half of it would only hold room.
  CHECK_EQ(peer.reserve(world.page(2, 1), 0).reason, Reason::parent_missing);
  CHECK_EQ(peer.reserve(world.page(2, 1), 1).reason, Reason::refused_tail);
  world.pass(2 * kSecondNs);
  CHECK_EQ(peer.reserve(world.page(2, 1), 1).reason, Reason::parent_missing);
}

TEST(reserve_is_refused_when_draining) {
  World world(shape_of(5000));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  const ReserveAnswer grant = peer.reserve(page, 0);
  world->drain();
  CHECK_EQ(peer.reserve(world.page(2)).reason, Reason::draining);
  CHECK_EQ(peer.seal(grant, 0, peer.copy(grant, page)), Reason::none);  // what began may end
}

TEST(reserve_is_granted_again_when_a_drain_is_taken_back) {
  World world(shape_of(5000));
  world.start();
  Peer peer(world);
  world->drain();
  CHECK_EQ(peer.reserve(world.page(1)).reason, Reason::draining);
  world->undrain();
  CHECK_EQ(world->arena().control().state.value.load(),
           static_cast<uint64_t>(ControlState::serving));
  CHECK(!world->status().draining);
  CHECK_EQ(peer.reserve(world.page(1)).reason, Reason::none);
}

// --- the late writer

TEST(late_writer_keeps_its_slot_when_its_time_is_over) {
  World world(shape_of(kBig));
  world.start();
  Peer late(world), other(world);
  const TestPage page = world.page(1);
  const ReserveAnswer grant = late.reserve(page, 0);
  world.pass(kLimbo - 1);
  CHECK_EQ(world.word(grant.slot).state, SlotState::reserved);
  world.pass(1);
  CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
  CHECK(!anybody_gets(world, other, grant.slot));
  const uint64_t digest = late.copy(grant, page, 0);  // now, after all
  check_all_right(world, other);
  CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
  // Its seal comes too late to publish, and says that it writes no more.
  CHECK_EQ(late.seal(grant, 0, digest), Reason::stale);
  CHECK(!world.stored(page));
  CHECK_EQ(world.word(grant.slot).state, SlotState::free);
  CHECK(world.word(grant.slot).generation > grant.generation);
  CHECK(anybody_gets(world, other, grant.slot));
  world.check_settled();
}

TEST(late_writer_keeps_its_slot_when_the_page_is_stored_by_another_meanwhile) {
  World world(shape_of(kBig));
  world.start();
  Peer late(world), other(world);
  const TestPage page = world.page(1);
  const ReserveAnswer grant = late.reserve(page, 0);
  world.pass(kLimbo);
  CHECK(other.store(page));  // the same key in another slot
  CHECK(world.slot_of(page) != grant.slot);
  std::memset(late.place(grant.slot, 0), 0xee, kBig);
  CHECK_EQ(other.load(page, 0), Got::right);
  late.settle(grant);  // the client gave up: settle says so
  CHECK_EQ(world.word(grant.slot).state, SlotState::free);
  CHECK_EQ(other.load(page, 0), Got::right);
  world.check_settled();
}

TEST(late_writer_keeps_its_slot_across_a_restart) {
  World world(shape_of(kBig));
  world.start();
  auto late = std::make_unique<Peer>(world);
  const TestPage page = world.page(1);
  const ReserveAnswer grant = late->reserve(page, 0);
  CHECK_EQ(world.restart().unfinished_slots, 1);
  CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
  Peer other(world);
  CHECK(!anybody_gets(world, other, grant.slot));
  for (int i = 0; i < 10; ++i) world.pass(kLimbo);  // no timeout gives it away
  late->copy(grant, page, 0);                       // the old daemon's grant, used now
  check_all_right(world, other);
  CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
  CHECK_EQ(late->seal(grant, 0, 1), Reason::stale);
  CHECK(anybody_gets(world, other, grant.slot));
}

TEST(late_writer_is_listed_at_hello_and_frees_its_slot_by_settling) {
  World world(shape_of(kBig));
  world.start();
  Peer late(world), second(world);
  const TestPage page = world.page(1), whole = world.page(2);
  const ReserveAnswer grant = late.reserve(page, 0), joined = second.reserve(page, 1);
  CHECK(late.store(whole));
  world.restart();
  for (int round = 0; round < 2; ++round) {  // hello twice: what is not answered is listed again
    const std::vector<SlotRef> refs = late.hello();
    CHECK_EQ(refs.size(), 1);
    CHECK_EQ(refs[0].slot, grant.slot);
    CHECK_EQ(refs[0].generation, grant.generation);
    CHECK_EQ(refs[0].shard, 0);
  }
  late.settle(grant, 0);
  CHECK(late.hello().empty());
  CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);  // the other rank may still write
  second.hello();
  second.settle(joined, 1);
  CHECK_EQ(world.word(grant.slot).state, SlotState::free);
  CHECK_EQ(late.load(whole, 0), Got::right);
  world.check_settled();
}

TEST(settle_is_ignored_when_it_names_what_is_not_ones_own) {
  World world(shape_of(5000));
  world.start();
  Peer a(world), b(world);
  const TestPage page = world.page(1);
  const ReserveAnswer grant = a.reserve(page, 0);
  b.settle(grant, 0);
  b.settle(grant, 1);
  b.settle(grant, 64);
  ReserveAnswer forged = grant;
  forged.generation += 1;
  a.settle(forged, 0);
  CHECK_EQ(world.word(grant.slot).state, SlotState::reserved);
  CHECK_EQ(a.seal(grant, 0, a.copy(grant, page)), Reason::none);
}

TEST(dead_owner_frees_its_slot_only_after_the_grace) {
  World world(shape_of(kBig));
  world.start();
  Peer dying(world), other(world);
  const TestPage page = world.page(1);
  const ReserveAnswer grant = dying.reserve(page, 0);
  dying.die();
  world.pass(1);  // seen dead
  world.pass(kGrace - 1);
  CHECK(world.word(grant.slot).state != SlotState::free);
  world.pass(1);
  CHECK_EQ(world.word(grant.slot).state, SlotState::free);
  CHECK(world.word(grant.slot).generation > grant.generation);
  CHECK(other.store(page));
  world.check_settled();
}

TEST(dead_owner_frees_its_slot_only_after_the_grace_of_a_new_daemon) {
  World world(shape_of(kBig));
  world.start();
  Peer dying(world);
  const ReserveAnswer grant = dying.reserve(world.page(1), 0);
  world.kill();
  dying.die();
  world.start();
  world.pass(1);
  world.pass(kGrace - 1);
  CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
  world.pass(1);
  CHECK_EQ(world.word(grant.slot).state, SlotState::free);
}

TEST(hung_up_owner_keeps_its_slot) {
  World world(shape_of(kBig));
  world.start();
  Peer quiet(world), other(world);
  const ReserveAnswer grant = quiet.reserve(world.page(1), 0);
  quiet.hang_up();
  for (int i = 0; i < 10; ++i) world.pass(kLimbo);
  CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
  CHECK(!anybody_gets(world, other, grant.slot));
  CHECK_EQ(quiet.hello().size(), 1);
}

TEST(group_waits_for_each_owner_when_ranks_end_differently) {
  World world(shape_of(5000, 3));
  world.start();
  Peer sealed(world), dead(world), alive(world);
  const TestPage page = world.page(1);
  const ReserveAnswer a = sealed.reserve(page, 0), b = dead.reserve(page, 1),
                      c = alive.reserve(page, 2);
  CHECK_EQ(sealed.seal(a, 0, sealed.copy(a, page, 0)), Reason::none);
  dead.die();
  for (int i = 0; i < 5; ++i) world.pass(kGrace);
  // One rank's death is the page's end, not the end of the others' writing.
  world.pass(kLimbo);
  CHECK_EQ(world.word(b.slot).state, SlotState::limbo);
  CHECK_EQ(alive.seal(c, 2, 1), Reason::stale);
  CHECK_EQ(world.word(c.slot).state, SlotState::free);
  world.check_settled();
}

TEST(group_is_given_up_in_time_when_a_rank_never_comes) {
  World world(shape_of(5000));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  const ReserveAnswer grant = peer.reserve(page, 0);
  CHECK_EQ(peer.seal(grant, 0, peer.copy(grant, page)), Reason::none);
  world.pass(kLimbo - 1);
  CHECK_EQ(world.word(grant.slot).state, SlotState::reserved);  // the other rank may still come
  world.pass(1);
  CHECK_EQ(world.word(grant.slot).state, SlotState::free);
  world.check_settled();
  CHECK(peer.store(page));  // and again from the start
}

TEST(page_reserved_before_a_clear_is_not_published_after_it) {
  World world(shape_of(5000));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  const ReserveAnswer first = peer.reserve(page, 0), second = peer.reserve(page, 1);
  CHECK_EQ(peer.seal(first, 0, peer.copy(first, page, 0)), Reason::none);
  world->clear(0, 1);
  CHECK(peer.seal(second, 1, peer.copy(second, page, 1)) != Reason::none);
  CHECK(!world.stored(page));
  world.pass(1);
  world.check_settled();
  CHECK(peer.store(page));
  CHECK_EQ(peer.load(page, 0), Got::right);
}

// A real process, stopped between its grant and its copy, while the daemon goes on.
TEST(late_writer_that_was_stopped_never_lands_in_another_page) {
  World world(shape_of(kBig));
  world.start();
  Peer other(world);
  for (const bool restart : {false, true}) {
    const TestPage page = world.page(restart ? 2 : 1);
    auto late = std::make_unique<Peer>(world);
    const ReserveAnswer grant = late->reserve(page, 0);
    std::array<int, 2> written{}, leave{};
    CHECK_EQ(::pipe2(written.data(), O_CLOEXEC) | ::pipe2(leave.data(), O_CLOEXEC), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      late->map();  // mappings do not follow a fork; the descriptors do
      close_lock(world);
      ::raise(SIGSTOP);
      late->copy(grant, page, 0);
      char byte = 'w';
      bool good = ::write(written[1], &byte, 1) == 1;
      good = ::read(leave[0], &byte, 1) >= 0 && good;
      ::_exit(good ? 0 : 1);
    }
    const SessionId id = late->id();
    late.reset();  // from here on only the child holds the lock
    int status = 0;
    CHECK_EQ(::waitpid(child, &status, WUNTRACED), child);
    CHECK(WIFSTOPPED(status));
    world->sessions().hung_up(id);
    if (restart) world.restart();
    for (int i = 0; i < 4; ++i) world.pass(kLimbo);
    if (restart) other.hello();
    CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
    CHECK(!anybody_gets(world, other, grant.slot));
    ::kill(child, SIGCONT);
    char byte = 0;
    CHECK_EQ(::read(written[0], &byte, 1), 1);
    check_all_right(world, other);
    world.pass(kLimbo);
    CHECK_EQ(world.word(grant.slot).state, SlotState::limbo);
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
    world.pass(1);
    world.pass(kGrace);
    CHECK_EQ(world.word(grant.slot).state, SlotState::free);
    for (const int fd : {written[0], written[1], leave[0], leave[1]}) ::close(fd);
    check_all_right(world, other);
  }
}

}  // namespace
}  // namespace kvw
