// Everything that leaves: eviction, rebalancing between page sizes, clear, quarantine, orphans.
//
// One order for all of it (docs/protocol.md): word = CLOSING, full fence, read all pins, then
// either back to LIVE or index entry out and word = FREE.
#include <algorithm>
#include <array>
#include <queue>

#include "base/error.h"
#include "warehouse/warehouse.h"

namespace kvw {

namespace {

constexpr size_t kBatch = 64;        // slots closed per scan of the pins
constexpr uint64_t kFreeShare = 50;  // a fiftieth of a class is kept free, so that what was
                                     // evicted stays readable for a while
constexpr size_t kRetirePerTick = 256;

// What may not leave DRAM now, in terms of a class's residents.
class KeepBusy final : public Keep {
 public:
  KeepBusy(const Pool& pool, const SlotClass& cls, const std::unordered_set<SlotId>& writing,
           SlotId spare)
      : pool_(pool), cls_(cls), writing_(writing), spare_(spare) {}
  bool operator()(PageId resident) const override {
    const SlotId slot = pool_.slot_of(cls_, resident);
    return slot == spare_ || writing_.contains(slot);
  }

 private:
  const Pool& pool_;
  const SlotClass& cls_;
  const std::unordered_set<SlotId>& writing_;
  SlotId spare_;
};

}  // namespace

SlotId Warehouse::take_slot(SlotClass& cls, SlotState state, SlotId spare) {
  if (cls.free.empty() && !pool_.grow(cls)) {
    apply_touches();
    const size_t want = std::clamp<size_t>(cls.total() / kFreeShare, 1, kBatch);
    if (evict_some(cls, want, spare) == 0) rebalance(cls);
  }
  return pool_.take(cls, state);
}

void Warehouse::keep_free() {
  for (const auto& cls : pool_.classes()) {
    const uint64_t want = cls->total() / kFreeShare;
    if (cls->free.size() >= want || pool_.ready_slabs() != 0) continue;
    if (next_slab_ < arena_.slab_count() && growth_error_.empty()) continue;  // still growing
    evict_some(*cls, std::min<size_t>(want - cls->free.size(), kBatch), kNoSlot);
  }
}

size_t Warehouse::evict_some(SlotClass& cls, size_t want, SlotId spare) {
  const KeepBusy keep(pool_, cls, writing_, spare);
  std::array<PageId, kBatch> residents;
  std::vector<SlotId> slots;
  size_t left = 0;
  // Pinned victims are touched and not seen again this round; a few rounds bound the work.
  for (int round = 0; round < 4 && left < want; ++round) {
    const size_t found =
        cls.policy->victims(std::span(residents).first(std::min(want - left, kBatch)), keep);
    if (found == 0) break;
    slots.clear();
    for (size_t i = 0; i < found; ++i) slots.push_back(pool_.slot_of(cls, residents[i]));
    left += evict_slots(slots, Gone::evicted);
  }
  return left;
}

size_t Warehouse::evict_slots(std::span<const SlotId> slots, Gone gone) {
  for (const SlotId slot : slots) pool_.close(slot);
  full_fence();
  const PinSet pins = sessions_->pins();
  size_t left = 0;
  for (const SlotId slot : slots) {
    // What must not be found again goes, pinned or not; its slot waits until nobody reads it.
    const bool must = gone == Gone::quarantined || gone == Gone::cleared;
    if (must || !(pins.slots.contains(slot) || writing_.contains(slot))) {
      leave_dram(slot, gone);
      ++left;
    } else {
      pool_.reopen(slot);
      touch(pool_.page_at(slot));
    }
  }
  return left;
}

void Warehouse::leave_dram(SlotId slot, Gone gone) {
  const bool held = gone == Gone::quarantined || gone == Gone::cleared;
  pool_.class_of(slot).policy->removed(pool_.resident(slot));
  ++left_dram_[static_cast<size_t>(gone)];
  if (auto view = catalog_.at(pool_.page_at(slot))) {
    if (view->in_nvme() && gone != Gone::cleared) {
      view->flags = static_cast<uint16_t>(view->flags & ~(kEntryDram | kEntryUnverified));
      view->slot = kNoSlot;
      catalog_.update(*view);
    } else {
      if (view->in_nvme()) ++left_nvme_[static_cast<size_t>(gone)];
      catalog_.remove(*view);
    }
  }
  if (held) {
    pool_.page_at(slot) = kNoPage;
    zombies_.push_back(slot);
  } else {
    pool_.release(slot);
  }
}

void Warehouse::leave_nvme(const EntryView& entry, Gone gone) {
  EntryView view = entry;
  ++left_nvme_[static_cast<size_t>(gone)];
  if (!view.in_dram()) {
    catalog_.remove(view);
    return;
  }
  view.flags = static_cast<uint16_t>(view.flags & ~kEntryNvme);
  view.extent = {};
  catalog_.update(view);
}

void Warehouse::banish(const EntryView& view, Gone gone) {
  if (view.in_dram()) {
    const std::array<SlotId, 1> slots{view.slot};
    evict_slots(slots, gone);
    if (const auto rest = catalog_.find(view.key); rest && rest->in_nvme()) leave_nvme(*rest, gone);
  } else {
    leave_nvme(view, gone);
  }
}

void Warehouse::retry_zombies() {
  if (zombies_.empty()) return;
  full_fence();
  const PinSet pins = sessions_->pins();
  std::erase_if(zombies_, [&](SlotId slot) {
    if (pins.slots.contains(slot) || writing_.contains(slot)) return false;
    pool_.discard(slot);
    return true;
  });
}

bool Warehouse::rebalance(SlotClass& needy) {
  // Another page size gives up a slab: the class with the most, its slab with the fewest pages.
  SlotClass* donor = nullptr;
  for (const auto& cls : pool_.classes())
    if (cls.get() != &needy && (donor == nullptr || cls->total() * cls->cut.slot_bytes() >
                                                        donor->total() * donor->cut.slot_bytes()))
      donor = cls.get();
  if (donor == nullptr) return false;
  for (const uint32_t slab : std::vector<uint32_t>(donor->slabs)) {
    if (slab == UINT32_MAX) continue;
    std::vector<SlotId> live;
    bool movable = true;
    for (uint32_t place = 0; place < donor->slots_per_slab && movable; ++place) {
      const SlotId slot = arena_.slots().slot_id(slab, place);
      const SlotState state = pool_.load(slot).state;
      if (state == SlotState::live)
        live.push_back(slot);
      else if (state != SlotState::free)
        movable = false;  // somebody is writing or reading there
    }
    if (!movable || evict_slots(live, Gone::rebalanced) != live.size()) continue;
    pool_.retire(slab);
    return pool_.grow(needy);
  }
  return false;
}

bool Warehouse::make_window(const Key& key) {
  // The window of 16 is full, or the index is: the coldest evictable page of the window goes.
  const Index& index = catalog_.index();
  std::optional<EntryView> coldest;
  uint64_t heat = UINT64_MAX;
  for (uint32_t step = 0; step < kIndexWindow; ++step) {
    const auto view = index.at(static_cast<PageId>((index.home(key) + step) % index.entries()));
    if (!view) continue;
    if (view->in_dram() && writing_.contains(view->slot)) continue;
    const uint64_t own =
        view->in_dram() ? 1 + pool_.class_of(view->slot).policy->heat(pool_.resident(view->slot))
                        : 0;
    if (own < heat) {
      heat = own;
      coldest = view;
    }
  }
  if (!coldest) return false;
  if (coldest->in_dram()) {
    const std::array<SlotId, 1> slots{coldest->slot};
    if (evict_slots(slots, Gone::window) == 0) return false;
  }
  if (const auto rest = catalog_.find(coldest->key); rest && rest->in_nvme())
    leave_nvme(*rest, Gone::window);
  if (catalog_.full() && log_) log_->reclaim_one();
  return catalog_.has_room(key);
}

uint64_t Warehouse::collect(int ordinal, std::vector<EntryView>& found) const {
  for (PageId page = 0; page < catalog_.index().entries(); ++page)
    if (const auto view = catalog_.at(page); view && (ordinal < 0 || view->space == ordinal))
      found.push_back(*view);
  return found.size();
}

void Warehouse::raise_epoch(uint64_t epoch) {
  if (epoch <= epoch_) return;
  epoch_ = epoch;
  arena_.control().clear_epoch.value.store(epoch, std::memory_order_release);
  if (log_) log_->set_epoch(epoch);
}

uint64_t Warehouse::clear(uint32_t ordinal, uint64_t epoch) {
  if (ordinal >= spaces_.size() || spaces_[ordinal].shape.shards == 0)
    throw Error(ErrorKind::usage, "namespace_unknown",
                "there is no namespace number " + std::to_string(ordinal));
  raise_epoch(epoch);
  spaces_[ordinal].clear_epoch = epoch;
  // From here on no reader accepts a page of it, whatever its index says.
  arena_.control().namespaces[ordinal].clear_epoch.store(epoch, std::memory_order_release);
  std::vector<EntryView> found;
  collect(static_cast<int>(ordinal), found);
  for (const EntryView& view : found) banish(view, Gone::cleared);
  retry_zombies();
  return found.size();
}

std::vector<EntryView> Warehouse::coldest_first(const std::vector<EntryView>& found, size_t limit) {
  // Leaves of the set first, coldest of them first; a page's turn comes when its children had
  // theirs, so that no prefix gets a gap.
  std::unordered_map<PageId, size_t> place;
  for (size_t i = 0; i < found.size(); ++i) place[found[i].page] = i;
  std::vector<uint32_t> children(found.size(), 0);
  for (const EntryView& view : found)
    if (const auto above = place.find(catalog_.node(view.page).parent); above != place.end())
      ++children[above->second];
  const auto heat = [this](const EntryView& view) -> uint64_t {
    if (!view.in_dram()) return 0;
    return 1 + pool_.class_of(view.slot).policy->heat(pool_.resident(view.slot));
  };
  using Candidate = std::pair<uint64_t, size_t>;  // heat, place
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> leaves;
  for (size_t i = 0; i < found.size(); ++i)
    if (children[i] == 0) leaves.emplace(heat(found[i]), i);
  std::vector<EntryView> order;
  while (!leaves.empty() && order.size() < limit) {
    const size_t i = leaves.top().second;
    leaves.pop();
    order.push_back(found[i]);
    const auto above = place.find(catalog_.node(found[i].page).parent);
    if (above != place.end() && --children[above->second] == 0)
      leaves.emplace(heat(found[above->second]), above->second);
  }
  return order;
}

std::vector<std::pair<Key, uint32_t>> Warehouse::evict(int ordinal, uint64_t pages,
                                                       std::string_view tiers, uint64_t& left) {
  const bool dram = tiers == "dram" || tiers == "all";
  const bool nvme = tiers == "nvme" || tiers == "all";
  if (!dram && !nvme)
    throw Error(ErrorKind::usage, "bad_tiers",
                "tiers is '" + std::string(tiers) + "', it must be dram, nvme or all");
  apply_touches();
  std::vector<EntryView> found;
  collect(ordinal, found);
  std::erase_if(found, [&](const EntryView& view) {
    return !((dram && view.in_dram()) || (nvme && view.in_nvme()));
  });
  std::vector<std::pair<Key, uint32_t>> tombstones;
  left = 0;
  for (const EntryView& view : coldest_first(found, pages)) {
    bool out = false;
    if (dram && view.in_dram()) {
      const std::array<SlotId, 1> slots{view.slot};
      out = evict_slots(slots, Gone::operator_) != 0;
    }
    const auto rest = catalog_.find(view.key);
    if (nvme && rest && rest->in_nvme()) {
      tombstones.emplace_back(view.key, rest->extent.life);
      leave_nvme(*rest, Gone::operator_);
      out = true;
    }
    left += out ? 1 : 0;
  }
  return tombstones;
}

uint64_t Warehouse::sweep(size_t limit) {
  uint64_t dropped = 0;
  while (dropped < limit) {
    const auto orphans =
        catalog_.orphans_to_drop(std::min<size_t>(limit - dropped, kBatch),
                                 [this](const Key& parent) { return open_.contains(parent); });
    size_t left = 0;
    for (const PageId page : orphans) {
      const auto view = catalog_.at(page);
      if (!view) continue;
      if (view->in_dram()) {
        const std::array<SlotId, 1> slots{view->slot};
        if (evict_slots(slots, Gone::orphaned) == 0) continue;  // pinned: another time
      }
      if (const auto rest = catalog_.at(page); rest && rest->key == view->key && rest->in_nvme())
        leave_nvme(*rest, Gone::orphaned);
      ++left;
    }
    if (left == 0) break;
    dropped += left;
  }
  return dropped;
}

void Warehouse::report(const Report& report) {
  const auto view = catalog_.find(report.key);
  if (!view || !view->in_dram() || view->slot != report.slot ||
      pool_.load(report.slot).generation != report.generation)
    return;
  std::string why;
  if (verify(report.slot, why)) return;  // the reporter's own trouble: nothing is wrong here
  ++quarantined_;
  on_event("page_quarantined", "tier=dram key=" + to_hex(report.key) + " reason=" + why);
  const std::array<SlotId, 1> slots{report.slot};
  evict_slots(slots, Gone::quarantined);
}

}  // namespace kvw
