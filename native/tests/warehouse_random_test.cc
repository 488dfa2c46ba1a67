// A warehouse driven at random: clients that store, stop, write late, die and come back, pins, a
// daemon that ends and is replaced, clears and damage. After every step the invariants hold; at the
// end everything that was unfinished is free again. --seed repeats a run.
#include <algorithm>
#include <set>

#include "tests/check.h"
#include "tests/warehouse_world.h"
#include "warehouse/warehouse.h"

namespace kvw {
namespace {

constexpr uint64_t kGrace = 5 * kSecondNs;
constexpr uint64_t kLimbo = 30 * kSecondNs;
constexpr uint64_t kChains = 60;
constexpr uint32_t kDepth = 6;

class Riot {
 public:
  explicit Riot(std::mt19937_64& random) : random_(random), world_(shape_of(20000)) {
    start();
    for (int i = 0; i < 4; ++i) peers_.push_back(std::make_unique<Peer>(world_));
  }

  void step() {
    const uint64_t dice = below(100);
    if (dice < 30)
      reserve();
    else if (dice < 50)
      seal();
    else if (dice < 54)
      write_late();
    else if (dice < 57)
      settle();
    else if (dice < 67)
      load();
    else if (dice < 72)
      load_by_old_entry();
    else if (dice < 77)
      pin();
    else if (dice < 81)
      unpin();
    else if (dice < 88)
      pass();
    else if (dice < 90)
      evict();
    else if (dice < 91)
      clear();
    else if (dice < 92)
      damage();
    else if (dice < 94)
      die();
    else if (dice < 96)
      come();
    else if (dice < 97)
      land_dma();
    else if (dice < 98)
      restart();
    else
      store_whole();
  }

  void check() {
    world_.check_no_slot_leaks();
    const WarehouseStatus status = world_->status();
    // Nothing sealed is missing without a counted reason.
    uint64_t left = 0;
    for (const uint64_t gone : status.left_dram) left += gone;
    CHECK_EQ(recovered_ + status.pages_sealed, status.dram_pages + left);
    CHECK_EQ(status.index_pages, status.dram_pages);
    CHECK(status.dram_used_bytes <= status.dram_capacity_bytes);
    const uint64_t unfinished = status.reserved_slots + status.limbo_slots;
    CHECK(unfinished * world_.shape().slot_bytes() <= kMiB);  // an eighth of 8 MiB
    for (const Pin& pin : pins_)
      for (uint32_t shard = 0; shard < 2; ++shard)
        CHECK_EQ(pin.peer->load_as(pin.entry, pin.page, shard), Got::right);
  }

  // Everybody leaves; in the end every slot is free or holds a page that reads right.
  void end() {
    check();
    pins_.clear();
    for (auto& peer : peers_) peer->die();
    peers_.clear();
    for (const uint64_t wait : {uint64_t{1}, kGrace, kLimbo, kGrace, uint64_t{1}})
      world_.pass(wait);
    world_.check_settled();
    Peer reader(world_);
    uint64_t found = 0;
    for (uint64_t chain = 0; chain < kChains; ++chain)
      for (uint32_t at = 0; at < kDepth; ++at) {
        const Got got = reader.load(page(chain, at), at % 2);
        CHECK(got == Got::right || got == Got::missing ||
              damaged_.contains(page(chain, at).key.lo));
        CHECK(got != Got::wrong);
        found += got != Got::missing ? 1 : 0;
      }
    CHECK_EQ(found, world_->status().dram_pages);
  }

 private:
  struct Grant {
    Peer* peer;
    TestPage page;
    uint32_t shard;
    ReserveAnswer answer;
  };
  struct Pin {
    Peer* peer;
    TestPage page;
    EntryView entry;
    int place;
  };
  struct Ghost {  // a dead client whose DMA may land until the grace is over
    std::unique_ptr<Peer> peer;
    std::vector<Grant> grants;
    uint64_t until_ns;
  };

  uint64_t below(uint64_t bound) { return random_() % bound; }
  Peer& any_peer() { return *peers_[below(peers_.size())]; }
  const TestPage& page(uint64_t chain, uint32_t at) {
    auto& slot = pages_[chain * kDepth + at];
    if (slot.tokens.empty()) slot = world_.page(chain, at);
    return slot;
  }
  const TestPage& any_page() {
    const uint64_t chain = std::min(below(kChains), below(kChains));  // some are warmer
    return page(chain, static_cast<uint32_t>(below(kDepth)));
  }
  void start() { recovered_ = world_.start().pages_dram + dropped_by_recovery(); }
  uint64_t dropped_by_recovery() {
    uint64_t left = 0;
    for (const uint64_t gone : world_->status().left_dram) left += gone;
    return left;
  }
  void drop_grants(const Peer* peer) {
    std::erase_if(grants_, [peer](const Grant& grant) { return grant.peer == peer; });
  }

  void reserve() {
    Peer& peer = any_peer();
    const TestPage& wanted = any_page();
    const auto shard = static_cast<uint32_t>(below(2));
    const ReserveAnswer answer = peer.reserve(wanted, shard);
    if (answer.answer == Answer::granted) grants_.push_back({&peer, wanted, shard, answer});
  }
  void seal() {
    if (grants_.empty()) return;
    const size_t which = below(grants_.size());
    const Grant grant = grants_[which];
    grants_.erase(grants_.begin() + static_cast<std::ptrdiff_t>(which));
    grant.peer->seal(grant.answer, grant.shard,
                     grant.peer->copy(grant.answer, grant.page, grant.shard));
  }
  // Half a copy, at any time that the slot is still the writer's: torn bytes, and no seal yet.
  void write_late() {
    if (grants_.empty()) return;
    scribble(grants_[below(grants_.size())]);
  }
  void scribble(const Grant& grant) {
    std::memset(grant.peer->place(grant.answer.slot, grant.shard), static_cast<int>(below(256)),
                1 + below(20000));
  }
  void settle() {
    if (grants_.empty()) return;
    const size_t which = below(grants_.size());
    grants_[which].peer->settle(grants_[which].answer, grants_[which].shard);
    grants_.erase(grants_.begin() + static_cast<std::ptrdiff_t>(which));
  }
  void store_whole() {
    const uint64_t chain = below(kChains);
    for (uint32_t at = 0; at < kDepth; ++at)
      if (!any_peer().store(page(chain, at))) break;
  }
  void load() {
    Peer& peer = any_peer();
    const TestPage& wanted = any_page();
    const auto entry = world_.entry(wanted);
    const auto shard = static_cast<uint32_t>(below(2));
    const Got got = peer.load(wanted, shard);
    CHECK(got != Got::wrong);
    if (damaged_.contains(wanted.key.lo)) {
      if (got == Got::mismatch) peer.report(*entry, shard);
      if (!world_.stored(wanted)) damaged_.erase(wanted.key.lo);
      return;
    }
    CHECK_EQ(got == Got::right, entry.has_value());
    if (!entry) return;
    peer.session().touch(*entry);
    if (old_.size() < 200) old_.emplace_back(wanted, *entry);
  }
  void load_by_old_entry() {
    if (old_.empty()) return;
    const size_t which = below(old_.size());
    const auto& [wanted, entry] = old_[which];
    const Got got = any_peer().load_as(entry, wanted, static_cast<uint32_t>(below(2)));
    CHECK(got != Got::wrong);
    if (got == Got::mismatch) CHECK(damaged_ever_.contains(wanted.key.lo));
    if (got == Got::stale) old_.erase(old_.begin() + static_cast<std::ptrdiff_t>(which));
  }
  void pin() {
    if (pins_.size() >= 40) return;
    Peer& peer = any_peer();
    const TestPage& wanted = any_page();
    if (damaged_.contains(wanted.key.lo)) return;
    const auto entry = peer.view().index().find(wanted.key);
    if (!entry) return;
    const int place = peer.store_pin(*entry);
    if (below(4) == 0) evict();  // between the pin and its check
    if (peer.confirm_pin(*entry, place)) pins_.push_back({&peer, wanted, *entry, place});
  }
  void unpin() {
    if (pins_.empty()) return;
    const size_t which = below(pins_.size());
    pins_[which].peer->session().drop_pin(pins_[which].place);
    pins_.erase(pins_.begin() + static_cast<std::ptrdiff_t>(which));
  }
  void pass() {
    const uint64_t times[] = {1, kSecondNs, kGrace - 1, kGrace, kLimbo};
    world_.pass(times[below(5)]);
    std::erase_if(ghosts_,
                  [&](const Ghost& ghost) { return world_.clock.boot_ns() >= ghost.until_ns; });
  }
  void evict() {
    uint64_t left = 0;
    world_->evict(-1, below(8), "dram", left);
  }
  void clear() {
    world_.clear_epoch = ++epoch_;
    world_->clear(0, epoch_);
  }
  void damage() {
    const TestPage& victim = any_page();
    const auto entry = world_.entry(victim);
    for (const Pin& pin : pins_)
      if (pin.page.key == victim.key) return;
    if (!entry) return;
    world_.payload(entry->slot)[below(20000)] ^= std::byte{1};
    damaged_.insert(victim.key.lo);
    damaged_ever_.insert(victim.key.lo);
  }
  void die() {
    if (peers_.size() < 2) return;
    const size_t which = below(peers_.size());
    std::unique_ptr<Peer> gone = std::move(peers_[which]);
    peers_.erase(peers_.begin() + static_cast<std::ptrdiff_t>(which));
    Ghost ghost{nullptr, {}, world_.clock.boot_ns() + kGrace};
    for (const Grant& grant : grants_)
      if (grant.peer == gone.get()) ghost.grants.push_back(grant);
    drop_grants(gone.get());
    std::erase_if(pins_, [&](const Pin& pin) { return pin.peer == gone.get(); });
    gone->die();
    ghost.peer = std::move(gone);
    ghosts_.push_back(std::move(ghost));
  }
  void come() {
    if (peers_.size() < 6) peers_.push_back(std::make_unique<Peer>(world_));
  }
  void land_dma() {
    for (const Ghost& ghost : ghosts_)
      for (const Grant& grant : ghost.grants)
        if (world_.clock.boot_ns() < ghost.until_ns) scribble(grant);
  }
  void restart() {
    world_.kill();
    if (below(2) == 0 && !grants_.empty()) write_late();  // while there is no daemon
    start();
    for (auto& peer : peers_) {
      if (below(3) == 0) continue;  // goes on with its old mapping; hello may come later
      for (const SlotRef& ref : peer->hello()) {
        const bool writing = std::any_of(grants_.begin(), grants_.end(), [&](const Grant& grant) {
          return grant.peer == peer.get() && grant.answer.slot == ref.slot &&
                 grant.shard == ref.shard && grant.answer.generation == ref.generation;
        });
        CHECK(writing);  // nobody is asked about what it was never granted
        if (below(2) == 0) continue;
        world_->settle(peer->id(), std::array<SlotRef, 1>{ref});
        std::erase_if(grants_, [&](const Grant& grant) {
          return grant.peer == peer.get() && grant.answer.slot == ref.slot &&
                 grant.shard == ref.shard;
        });
      }
    }
    for (auto& peer : peers_) peer->map();
  }

  std::mt19937_64& random_;
  World world_;
  uint64_t recovered_ = 0, epoch_ = 0;
  std::vector<TestPage> pages_ = std::vector<TestPage>(kChains * kDepth);
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Ghost> ghosts_;
  std::vector<Grant> grants_;
  std::vector<Pin> pins_;
  std::vector<std::pair<TestPage, EntryView>> old_;
  std::set<uint64_t> damaged_, damaged_ever_;
};

TEST(warehouse_keeps_its_invariants_whatever_clients_and_daemons_do) {
  auto random = check::random("warehouse_keeps_its_invariants_whatever_clients_and_daemons_do");
  for (uint64_t run = 0; run < check::rounds(6); ++run) {
    Riot riot(random);
    for (int step = 0; step < 3000; ++step) {
      riot.step();
      riot.check();
    }
    riot.end();
  }
}

}  // namespace
}  // namespace kvw
