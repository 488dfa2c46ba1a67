// A warehouse whose daemon is made to end just after each store of a call to it, and what must hold
// then. One thread; one Scene at a time.
#pragma once

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

constexpr uint64_t kShard = 60 * 1024;
constexpr uint64_t kMostSteps = 100;  // of one call that are looked at
constexpr uint64_t kLater = 1000000;  // prompts that are stored to see that it works

// What may be different after a call that did not come to its end.
struct Intent {
  std::set<uint64_t> may_go;    // sealed prompts that it may take away
  std::set<uint64_t> may_come;  // prompts that it may seal
  std::set<uint64_t> must_stay_away;
  bool settles = false;  // slots of outstanding grants may become free
  bool seals = false;    // the same, once a new daemon has looked at who still writes
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
  void check_goes_on(const Intent& intent);
  void crash_in_recovery(const char* fault, const SharedImage& slots, const SharedImage& control,
                         const Intent& intent);

  std::mt19937_64& random_;
  std::vector<std::pair<uint64_t, EntryView>> entries_;  // by prompt, as readers hold them
};

inline std::vector<StoreTrace::Region> Scene::regions() {
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

inline void Scene::remember_entries() {
  entries_.clear();
  for (const uint64_t chain : sealed)
    if (const auto entry = world.entry(world.page(chain)); entry && entry->in_dram())
      entries_.emplace_back(chain, *entry);
}

inline void Scene::start_on(const SharedImage& slots, const SharedImage& control) {
  world.kill();
  slots.put_back();
  control.put_back();
  world.start();
  peer->hello();
}

inline void Scene::crash_in(const char* fault, const Intent& intent,
                            const std::function<void()>& call) {
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

inline void Scene::crash_in_recovery(const char* fault, const SharedImage& before_slots,
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

inline void Scene::check(const Intent& intent) {
  check_old_entries();
  peer->map();
  check_loads(intent);
  check_writers(intent);
  world.check_no_slot_leaks();
  if (random_() % 8 == 0) check_goes_on(intent);
}

inline void Scene::check_old_entries() {
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

inline void Scene::check_loads(const Intent& intent) {
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

inline void Scene::check_writers(const Intent& intent) {
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
inline void Scene::settle_unheard(Peer& who) {
  for (const SlotRef& ref : who.hello()) {
    const bool known = std::ranges::any_of(outstanding, [&](const Grant& grant) {
      return grant.answer.slot == ref.slot && grant.answer.generation == ref.generation;
    });
    if (!known) world->settle(who.id(), std::array<SlotRef, 1>{ref});
  }
}

// A new page gets a slot of its own, and the slot's old bytes are put back: the next step of the
// trace starts from them.
inline void Scene::check_goes_on(const Intent& intent) {
  const TestPage page = world.page(kLater + random_() % 1000);
  const std::array grants{peer->reserve(page, 0), peer->reserve(page, 1)};
  CHECK_EQ(grants[0].answer, Answer::granted);
  if (!intent.settles && !intent.seals)
    for (const Grant& grant : outstanding) CHECK(grant.answer.slot != grants[0].slot);
  if (pinned) CHECK(pinned->second.slot != grants[0].slot);
  std::byte* at = peer->place(grants[0].slot, 0);
  const std::vector<std::byte> old(at, at + world.shape().slot_bytes());
  for (uint32_t shard = 0; shard < 2; ++shard)
    CHECK_EQ(peer->seal(grants[shard], shard, peer->copy(grants[shard], page, shard)),
             Reason::none);
  CHECK_EQ(peer->load(page, 1), Got::right);
  // Whoever holds an entry of what was there before is told that it is stale.
  for (const auto& [chain, entry] : entries_)
    if (entry.slot == grants[0].slot)
      CHECK_EQ(reader->load_as(entry, world.page(chain), 1), Got::stale);
  std::memcpy(at, old.data(), old.size());
}

}  // namespace kvw
