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

#include <algorithm>
#include <fstream>
#include <functional>
#include <set>

#include "tests/check.h"
#include "tests/shared_image.h"
#include "tests/store_trace.h"
#include "tests/tally.h"
#include "tests/warehouse_world.h"

namespace kvw {
namespace {

constexpr uint64_t kShard = 60 * 1024;
constexpr uint64_t kMostSteps = 100;  // of one call that are looked at
constexpr uint64_t kLater = 1000000;  // prompts that are stored to see that it works

// What may be different after a call that did not come to its end.
struct Intent {
  std::set<uint64_t> may_go;    // sealed prompts that it may take away
  std::set<uint64_t> may_come;  // prompts that it may seal
  std::set<uint64_t> must_stay_away;
  bool settles = false;  // slots of outstanding grants may become free
};

struct Grant {
  uint64_t chain;
  uint32_t shard;
  ReserveAnswer answer;
};

class Scene {
 public:
  explicit Scene(std::mt19937_64& random, bool nvme = false)
      : world(shape_of(kShard)), random_(random) {
    world.options.limbo_after_ns = kSecondNs;
    if (nvme) {
      world.options.nvme_dir = world.directory.path() + "/nvme";
      world.options.nvme_capacity_bytes = 16 * kMiB;
      world.options.nvme_segment_bytes = 2 * kMiB;
      world.options.io_engine = "pread";
      std::filesystem::create_directories(world.options.nvme_dir);
    }
    world.start();
    peer = std::make_unique<Peer>(world);
    reader = std::make_unique<Peer>(world);
  }

  void seal(uint64_t chain) {
    CHECK(peer->store(world.page(chain)));
    sealed.insert(chain);
  }
  Grant reserve(uint64_t chain, uint32_t shard) {
    Grant grant{chain, shard, peer->reserve(world.page(chain), shard)};
    CHECK_EQ(grant.answer.answer, Answer::granted);
    outstanding.push_back(grant);
    return grant;
  }

  // A restart gave up what was open: its writer lets go of it.
  void begin_again() {
    outstanding.clear();
    settle_unheard(*peer);
    world.pass(20 * kSecondNs);
  }

  // Runs `call` with its stores traced, then ends the daemon after each of them.
  void crash_in(const char* fault, const Intent& intent, const std::function<void()>& call);

  World world;
  std::unique_ptr<Peer> peer, reader;
  Peer* other = nullptr;  // of another namespace
  std::set<uint64_t> sealed;
  std::vector<Grant> outstanding;  // not sealed, not settled: somebody may be writing
  std::optional<std::pair<uint64_t, EntryView>> pinned;

 private:
  std::string file(const char* name) const { return world.options.arena_dir + "/" + name; }
  std::vector<StoreTrace::Region> regions();
  void remember_entries();
  void start_on(const SharedImage& slots, const SharedImage& control);
  void check(const Intent& intent);
  void check_loads(const Intent& intent);
  void check_old_entries();
  void check_writers(const Intent& intent);
  void settle_unheard(Peer& who);
  void check_goes_on();
  void crash_in_recovery(const char* fault, const SharedImage& slots, const SharedImage& control,
                         const Intent& intent);

  std::mt19937_64& random_;
  std::vector<std::pair<uint64_t, EntryView>> entries_;  // by prompt, as readers hold them
};

std::vector<StoreTrace::Region> Scene::regions() {
  std::vector<StoreTrace::Region> found;
  for (const char* name : {"/arena/slots", "/arena/control"}) {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (!line.ends_with(world.directory.path() + name)) continue;
      if (line.find(" rw-s ") == std::string::npos) continue;
      uint64_t begin = 0, end = 0;
      CHECK_EQ(std::sscanf(line.c_str(), "%lx-%lx", &begin, &end), 2);
      found.push_back({reinterpret_cast<std::byte*>(begin), end - begin});
    }
  }
  CHECK_EQ(found.size(), 2);
  return found;
}

void Scene::remember_entries() {
  entries_.clear();
  for (const uint64_t chain : sealed)
    if (const auto entry = world.entry(world.page(chain)); entry && entry->in_dram())
      entries_.emplace_back(chain, *entry);
}

void Scene::start_on(const SharedImage& slots, const SharedImage& control) {
  world.kill();
  slots.put_back();
  control.put_back();
  world.start();
  peer->hello();
}

void Scene::crash_in(const char* fault, const Intent& intent, const std::function<void()>& call) {
  reader->map();
  remember_entries();
  SharedImage slots(file("slots")), control(file("control"));
  StoreTrace::begin(regions());
  try {
    call();
  } catch (...) {
    StoreTrace::end();
    throw;
  }
  StoreTrace::end();
  const std::vector<StoreTrace::Change> changes = StoreTrace::changes();
  CHECK(!changes.empty());
  const SharedImage slots_after(file("slots")), control_after(file("control"));
  // A call with thousands of stores does the same things many times.
  const uint64_t one_in = 1 + StoreTrace::steps() / kMostSteps;
  for (size_t at = 0; at < changes.size(); ++at) {
    const StoreTrace::Change& change = changes[at];
    (change.region == 0 ? slots : control).set(change.offset, change.word);
    if (at + 1 < changes.size() && changes[at + 1].step == change.step) continue;
    // The heartbeat and its like are of no consequence; some of them will do.
    if (random_() % one_in != 0 || (change.region == 1 && random_() % 4 != 0)) continue;
    start_on(slots, control);
    check(intent);
    check::tally(fault);
    if (random_() % 64 == 0) crash_in_recovery(fault, slots, control, intent);
  }
  start_on(slots_after, control_after);
  peer->map();
  reader->map();
}

void Scene::crash_in_recovery(const char* fault, const SharedImage& before_slots,
                              const SharedImage& before_control, const Intent& intent) {
  world.kill();
  before_slots.put_back();
  before_control.put_back();
  SharedImage slots = before_slots, control = before_control;
  world.before_recover = [this] { StoreTrace::begin(regions()); };
  world.start();
  StoreTrace::end();
  world.before_recover = nullptr;
  const std::vector<StoreTrace::Change> changes = StoreTrace::changes();
  const uint64_t one_in = 1 + changes.size() / 24;
  for (size_t at = 0; at < changes.size(); ++at) {
    (changes[at].region == 0 ? slots : control).set(changes[at].offset, changes[at].word);
    if (random_() % one_in != 0) continue;
    start_on(slots, control);
    check(intent);
    check::tally(fault);
  }
}

void Scene::check(const Intent& intent) {
  check_old_entries();
  peer->map();
  check_loads(intent);
  check_writers(intent);
  world.check_no_slot_leaks();
  if (random_() % 8 == 0) check_goes_on();
}

void Scene::check_old_entries() {
  for (size_t i = 0; i < 4 && !entries_.empty(); ++i) {
    const auto& [chain, entry] = entries_[random_() % entries_.size()];
    const Got got = reader->load_as(entry, world.page(chain), random_() % 2);
    CHECK(got == Got::right || got == Got::stale);
  }
  if (!pinned) return;
  const auto& [chain, entry] = *pinned;
  CHECK_EQ(reader->load_as(entry, world.page(chain), 0), Got::right);
  CHECK_EQ(reader->load_as(entry, world.page(chain), 1), Got::right);
}

void Scene::check_loads(const Intent& intent) {
  std::set<uint64_t> asked = intent.may_come;
  asked.insert(sealed.begin(), sealed.end());
  asked.insert(intent.must_stay_away.begin(), intent.must_stay_away.end());
  for (const Grant& grant : outstanding) asked.insert(grant.chain);
  for (const uint64_t chain : asked) {
    const bool there = world.stored(world.page(chain));
    const bool away = intent.must_stay_away.contains(chain);
    if (away) CHECK(!there);
    if (!away && sealed.contains(chain) && !intent.may_go.contains(chain) && !there)
      check::fail(__FILE__, __LINE__, "prompt " + std::to_string(chain) + " was sealed, is lost");
    if (!sealed.contains(chain) && !intent.may_come.contains(chain)) CHECK(!there);
    // Not every byte of every page each time: every step is followed by another.
    if (!there || (!intent.may_come.contains(chain) && random_() % asked.size() > 3)) continue;
    for (uint32_t shard = 0; shard < 2; ++shard) {
      const Got got = peer->load(world.page(chain), shard);
      CHECK(got == Got::right || (got == Got::missing && world->has_log()));
    }
  }
}

void Scene::check_writers(const Intent& intent) {
  for (const Grant& grant : outstanding) {
    const SlotWord word = world.word(grant.answer.slot);
    const bool kept = word.generation == grant.answer.generation &&
                      (word.state == SlotState::limbo ||
                       (word.state == SlotState::live && intent.may_come.contains(grant.chain)));
    CHECK(kept || intent.settles);
  }
  settle_unheard(*peer);
  if (other != nullptr) settle_unheard(*other);
  world.pass(20 * kSecondNs);
  std::set<SlotId> writing;
  for (const Grant& grant : outstanding) {
    const SlotWord word = world.word(grant.answer.slot);
    if (word.state == SlotState::limbo) writing.insert(grant.answer.slot);
  }
  const WarehouseStatus status = world->status();
  CHECK_EQ(status.reserved_slots, 0);
  CHECK_EQ(status.limbo_slots, writing.size());
  if (!pinned) CHECK_EQ(status.zombie_slots, 0);
}

// What hello lists beyond what is known was granted by a call whose answer nobody heard.
void Scene::settle_unheard(Peer& who) {
  for (const SlotRef& ref : who.hello()) {
    const bool known = std::ranges::any_of(outstanding, [&](const Grant& grant) {
      return grant.answer.slot == ref.slot && grant.answer.generation == ref.generation;
    });
    if (!known) world->settle(who.id(), std::array<SlotRef, 1>{ref});
  }
}

// A new page gets a slot of its own, and the slot's old bytes are put back: the next step of the
// trace starts from them.
void Scene::check_goes_on() {
  const TestPage page = world.page(kLater + random_() % 1000);
  const std::array grants{peer->reserve(page, 0), peer->reserve(page, 1)};
  CHECK_EQ(grants[0].answer, Answer::granted);
  for (const Grant& grant : outstanding) CHECK(grant.answer.slot != grants[0].slot);
  if (pinned) CHECK(pinned->second.slot != grants[0].slot);
  std::byte* at = peer->place(grants[0].slot, 0);
  const std::vector<std::byte> old(at, at + world.shape().slot_bytes());
  for (uint32_t shard = 0; shard < 2; ++shard)
    CHECK_EQ(peer->seal(grants[shard], shard, peer->copy(grants[shard], page, shard)),
             Reason::none);
  CHECK_EQ(peer->load(page, 1), Got::right);
  std::memcpy(at, old.data(), old.size());
}

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
  scene.crash_in(kStoring, {}, [&] { scene.peer->seal(first.answer, 0, digest); });
  scene.begin_again();
  first = scene.reserve(chain, 0);
  const Grant second = scene.reserve(chain, 1);
  digest = scene.peer->copy(first.answer, page, 0);
  CHECK_EQ(scene.peer->seal(first.answer, 0, digest), Reason::none);
  digest = scene.peer->copy(second.answer, page, 1);
  Intent intent;
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
