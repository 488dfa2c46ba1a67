// The daemon ends between any two of its stores to shared memory: while it reserves, joins,
// publishes, gives up, settles, evicts, quarantines, clears, hands a slab to another page size,
// promotes from NVMe, and while it recovers from such an end. Each of these calls is run once with
// every store traced (tests/store_trace.h); then, for each store, the shared files are put back to
// what they were just after it, and a new daemon starts on them.
//
// What must hold: no load gives wrong bytes, by an entry of before or of now; what was sealed is
// there unless the call was taking it away; what was taken away for good stays away; a slot that a
// living writer may still write to is not free; a pinned page is where it was; no slot is lost, and
// pages can be stored again.
#include <poll.h>

#include "tests/crash_scene.h"

namespace kvw {
namespace {

void seal_some(Scene& scene, uint64_t count) {
  for (uint64_t chain = 0; chain < count; ++chain) scene.seal(chain);
}

// A page that every daemon must keep for its reader.
void pin_one(Scene& scene, uint64_t chain) {
  scene.pinned = {chain, *scene.world.entry(scene.world.page(chain))};
  CHECK(scene.reader->pin(scene.world.page(chain)) >= 0);
}

#define NEEDS_TRACES()                                                             \
  if (!kStoresCanBeTraced) {                                                       \
    std::printf("(skipped: stores cannot be traced on this processor or build) "); \
    return;                                                                        \
  }

constexpr const char* kStoring = "daemon ended at a store: reserve, join, seal, publish";
constexpr const char* kGivingUp = "daemon ended at a store: settle, give up, limbo";
constexpr const char* kLeaving = "daemon ended at a store: evict, quarantine, clear";
constexpr const char* kHandover = "daemon ended at a store: slab handed to another page size";
constexpr const char* kPromoting = "daemon ended at a store: write-behind and promotion";

}  // namespace

// Everything that a page goes through until it is published.
void crash_while_storing(Scene& scene, uint64_t chain) {
  const TestPage page = scene.world.page(chain);
  scene.crash_in(kStoring, {}, [&] { scene.peer->reserve(page, 0); });
  scene.begin_again();
  scene.reserve(chain, 0);
  scene.crash_in(kStoring, {}, [&] { scene.peer->reserve(page, 1); });
  scene.begin_again();
  Grant first = scene.reserve(chain, 0);
  uint64_t digest = scene.peer->copy(first.answer, page, 0);
  Intent intent;
  intent.seals = true;
  scene.crash_in(kStoring, intent, [&] { scene.peer->seal(first.answer, 0, digest); });
  scene.begin_again();
  first = scene.reserve(chain, 0);
  const Grant second = scene.reserve(chain, 1);
  digest = scene.peer->copy(first.answer, page, 0);
  CHECK_EQ(scene.peer->seal(first.answer, 0, digest), Reason::none);
  digest = scene.peer->copy(second.answer, page, 1);
  intent.may_come = {chain};
  scene.crash_in(kStoring, intent,
                 [&] { CHECK_EQ(scene.peer->seal(second.answer, 1, digest), Reason::none); });
  CHECK(scene.world.stored(page));
  scene.outstanding.clear();
  scene.sealed.insert(chain);
}

TEST(daemon_that_ends_at_any_store_of_reserve_and_publish_leaves_whole_pages_and_free_slots) {
  NEEDS_TRACES();
  auto random = check::random("stores of publish");
  for (uint64_t round = 0; round < check::rounds(1); ++round) {
    Scene scene(random);
    seal_some(scene, 1 + random() % 12);
    if (round % 2 == 0) pin_one(scene, 0);
    for (uint64_t chain = 100; chain < 106; ++chain) crash_while_storing(scene, chain);
  }
}

// A new page needs a slot, and all are taken.
TEST(daemon_that_ends_at_any_store_of_making_room_loses_no_more_than_it_evicted) {
  NEEDS_TRACES();
  auto random = check::random("stores of making room");
  for (uint64_t round = 0; round < check::rounds(1); ++round) {
    Scene scene(random);
    for (uint64_t chain = 0; chain < scene.world.capacity(); ++chain) scene.seal(chain);
    pin_one(scene, 0);
    for (uint64_t chain = 500; chain < 504; ++chain) {
      Intent intent;
      intent.may_go = scene.sealed;
      intent.may_go.erase(0);
      scene.crash_in(kLeaving, intent, [&] {
        CHECK_EQ(scene.peer->reserve(scene.world.page(chain), 0).answer, Answer::granted);
      });
      scene.begin_again();
      std::erase_if(scene.sealed,
                    [&](uint64_t each) { return !scene.world.stored(scene.world.page(each)); });
      CHECK(scene.sealed.size() + 8 > scene.world.capacity());
    }
  }
}

TEST(daemon_that_ends_at_any_store_of_giving_up_frees_no_slot_under_a_writer) {
  NEEDS_TRACES();
  auto random = check::random("stores of giving up");
  for (uint64_t round = 0; round < check::rounds(1); ++round) {
    Scene scene(random);
    seal_some(scene, 1 + random() % 12);
    scene.reserve(200, 0);
    scene.reserve(200, 1);
    scene.reserve(201, 1);
    scene.crash_in(kGivingUp, {}, [&] { scene.world.pass(2 * kSecondNs); });
    Intent intent;
    intent.settles = true;
    scene.crash_in(kGivingUp, intent, [&] {
      for (const Grant& grant : scene.outstanding) scene.peer->settle(grant.answer, grant.shard);
      scene.world.pass(20 * kSecondNs);
    });
    scene.outstanding.clear();
    scene.world.check_settled();
  }
}

TEST(daemon_that_ends_at_any_store_of_evict_quarantine_and_clear_brings_back_nothing_wrong) {
  NEEDS_TRACES();
  auto random = check::random("stores of leaving");
  for (uint64_t round = 0; round < check::rounds(1); ++round) {
    Scene scene(random);
    seal_some(scene, 16);
    pin_one(scene, 3);
    Intent intent;
    intent.may_go = scene.sealed;
    intent.may_go.erase(3);
    uint64_t left = 0;
    scene.crash_in(kLeaving, intent, [&] { scene.world->evict(-1, 5, "dram", left); });
    std::erase_if(scene.sealed,
                  [&](uint64_t chain) { return !scene.world.stored(scene.world.page(chain)); });
    CHECK(scene.sealed.size() < 16);

    // A damaged page: from the report on it must not be found again, whenever the daemon ends. At
    // the first steps nothing is decided yet, and the next load would find out as well.
    const uint64_t bad = *scene.sealed.rbegin();
    scene.world.payload(scene.world.slot_of(scene.world.page(bad)))[100] ^= std::byte{1};
    const EntryView entry = *scene.world.entry(scene.world.page(bad));
    scene.sealed.erase(bad);
    scene.crash_in(kLeaving, {}, [&] { scene.peer->report(entry); });
    CHECK(!scene.world.stored(scene.world.page(bad)));

    // The ledger knows of a clear before the daemon begins with it.
    scene.world.options.epoch = scene.world.clear_epoch = 1;
    Intent cleared;
    cleared.must_stay_away = std::exchange(scene.sealed, {});
    scene.crash_in(kLeaving, cleared, [&] { scene.world->clear(0, 1); });
  }
}

TEST(daemon_that_ends_at_any_store_of_a_slab_changing_hands_loses_no_slot_of_either_size) {
  NEEDS_TRACES();
  auto random = check::random("stores of a handover");
  for (uint64_t round = 0; round < check::rounds(1); ++round) {
    Scene scene(random);
    const NamespaceShape other = shape_of(200 * 1024, 1, {8, 8});
    scene.world.declared.push_back(other);
    scene.world.restart();
    scene.peer->map();
    scene.reader->map();
    for (uint64_t chain = 0; chain < scene.world.capacity(); ++chain) scene.seal(chain);
    pin_one(scene, 3);
    Peer wide(scene.world);
    wide.use(other);
    scene.other = &wide;
    Intent intent;
    intent.may_go = scene.sealed;
    intent.may_go.erase(3);
    const TestPage page = page_of(other, 1, 0);
    scene.crash_in(kHandover, intent,
                   [&] { CHECK_EQ(wide.reserve(page).answer, Answer::granted); });
    for (const SlotRef& ref : wide.hello())
      scene.world->settle(wide.id(), std::array<SlotRef, 1>{ref});
    scene.world.pass(20 * kSecondNs);
    CHECK(wide.store(page));
    CHECK_EQ(wide.load(page), Got::right);
  }
}

TEST(daemon_that_ends_at_any_store_of_promotion_serves_the_page_from_either_tier) {
  NEEDS_TRACES();
  auto random = check::random("stores of promotion");
  for (uint64_t round = 0; round < check::rounds(1); ++round) {
    Scene scene(random, true);
    seal_some(scene, 6);
    const auto settle_log = [&](const std::function<bool()>& done) {
      for (int i = 0; i < 20000 && !done(); ++i) {
        pollfd ready{scene.world->log_fd(), POLLIN, 0};
        ::poll(&ready, 1, 5);
        scene.world->poll_log();
        scene.world.pass(kMillisecondNs);
      }
      CHECK(done());
    };
    const uint64_t ticket = scene.world->request_flush();
    settle_log([&] { return scene.world->flushed(ticket); });
    settle_log([&] { return scene.world->status().nvme_pages == 6; });
    uint64_t left = 0;
    scene.world->evict(-1, 6, "dram", left);
    CHECK_EQ(left, 6);
    const Key key = scene.world.page(2).key;
    scene.crash_in(kPromoting, {}, [&] {
      std::vector<PromoteAnswer> answers;
      scene.world->promote(std::array<Key, 1>{key}, answers);
      CHECK_EQ(answers.at(0), PromoteAnswer::reading);
      settle_log([&] { return scene.world.entry(scene.world.page(2))->in_dram(); });
    });
    CHECK_EQ(scene.peer->load(scene.world.page(2), 1), Got::right);
  }
}

}  // namespace kvw
