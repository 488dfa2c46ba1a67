// What leaves to make room in DRAM, by a clear, or as an orphan.
#include <algorithm>
#include <array>
#include <functional>

#include "base/error.h"
#include "base/sequence_point.h"
#include "warehouse/warehouse.h"

namespace kvw {

namespace {

constexpr size_t kBatch = 64;                // victims of stores at a time
constexpr uint64_t kEntriesPerStep = 16384;  // of the index that one step of a clear looks at
constexpr size_t kClearedPerStep = 512;      // and that it takes out

// What may not leave DRAM now, in terms of a class's residents.
class KeepBusy final : public Keep {
 public:
  using Busy = std::function<bool(SlotId)>;
  KeepBusy(const Pool& pool, const SlotClass& cls, Busy busy)
      : pool_(pool), cls_(cls), busy_(std::move(busy)) {}
  bool operator()(PageId resident) const override { return busy_(pool_.slot_of(cls_, resident)); }

 private:
  const Pool& pool_;
  const SlotClass& cls_;
  Busy busy_;
};

}  // namespace

SlotId Warehouse::take_slot(SlotClass& cls, SlotState state, SlotId spare) {
  if (cls.free.empty() && !grow(cls) && !take_spare_slab(cls)) {
    // Room that nothing must leave for is on its way: a store can wait for it.
    if (state == SlotState::reserved && still_growing()) return kNoSlot;
    uses_.apply_touches();
    if (take_colder_slab(cls)) return state_.pool.take(cls, state);
    const size_t want = std::clamp<size_t>(cls.total() / kFreeShare, 1, kBatch);
    // A class that only waits for its own writes takes nothing from others.
    const bool waits = cls.total() != 0 && !writes_.is_idle();
    if (evict_some(cls, want, spare) == 0 && !waits) take_any_slab(cls);
  }
  return state_.pool.take(cls, state);
}

bool Warehouse::awaits_child(SlotId slot) {
  if (state_.groups.none_open()) return false;
  const auto view = state_.catalog.at(state_.pool.page_at(slot));
  return view && awaits_child(*view);
}

void Warehouse::keep_free() {
  for (const auto& cls : state_.pool.classes()) {
    const uint64_t want = cls->total() / kFreeShare;
    if (cls->free.size() >= want || state_.pool.ready_slabs() != 0) continue;
    if (still_growing()) continue;
    if (take_spare_slab(*cls)) continue;
    evict_some(*cls, std::min<size_t>(want - cls->free.size(), kBatch), kNoSlot);
  }
}

size_t Warehouse::evict_some(SlotClass& cls, size_t want, SlotId spare) {
  // None, until a victim turns out to be pinned: then those pinned are passed over.
  const PinSet* pins = nullptr;
  const KeepBusy keep(state_.pool, cls, [&](SlotId slot) {
    return slot == spare || writes_.is_writing(slot) || (pins != nullptr && pins->has_slot(slot)) ||
           awaits_child(slot);
  });
  std::array<PageId, kBatch> residents;
  std::vector<SlotId> slots;
  size_t left = 0;
  // Pinned since we looked, a victim is touched; a few rounds bound the work.
  for (int round = 0; round < 4 && left < want; ++round) {
    const size_t found =
        cls.policy->victims(std::span(residents).first(std::min(want - left, kBatch)), keep);
    if (found == 0) break;
    slots.clear();
    for (size_t i = 0; i < found; ++i) slots.push_back(state_.pool.slot_of(cls, residents[i]));
    const size_t out = removal_.evict_slots(slots, LeaveReason::evicted);
    if (out < found) pins = &state_.sessions.pins_seen();
    left += out;
  }
  return left;
}

void Warehouse::raise_epoch(uint64_t epoch) {
  if (epoch <= state_.epoch) return;
  state_.epoch = epoch;
  state_.arena.control().clear_epoch.value.store(epoch, std::memory_order_release);
  if (state_.log) state_.log->set_epoch(epoch);
}

void Warehouse::begin_clear(uint32_t ordinal, uint64_t epoch) {
  if (ordinal >= state_.spaces.size() || state_.spaces[ordinal].shape.shards == 0)
    throw Error(ErrorKind::usage, "namespace_unknown",
                "there is no namespace number " + std::to_string(ordinal));
  raise_epoch(epoch);
  Space& space = state_.spaces[ordinal];
  space.clear_epoch = std::max(space.clear_epoch, epoch);
  // From here on no reader accepts an older page of it, whatever its index says.
  state_.arena.control().namespaces[ordinal].clear_epoch.store(space.clear_epoch,
                                                               std::memory_order_release);
  for (auto& [slot, group] : state_.groups) {
    if (!group.limbo && group.space == ordinal && group.clear_epoch < epoch) give_up(slot, group);
  }
}

uint64_t Warehouse::clear_some(uint32_t ordinal, uint64_t epoch, PageId& cursor) {
  const uint64_t end =
      std::min<uint64_t>(state_.catalog.index().entries(), cursor + kEntriesPerStep);
  std::vector<EntryView> found;
  for (; cursor < end && found.size() < kClearedPerStep; ++cursor)
    if (const auto view = state_.catalog.at(cursor);
        view && view->space == ordinal && view->clear_epoch < epoch)
      found.push_back(*view);
  if (cursor == state_.catalog.index().entries()) cursor = kNoPage;
  removal_.evict_views(found, LeaveReason::cleared);
  for (const EntryView& view : found)
    if (!view.in_dram()) removal_.leave_nvme(view, LeaveReason::cleared);
  return found.size() + std::exchange(state_.spaces[ordinal].cleared_early, 0);
}

uint64_t Warehouse::clear(uint32_t ordinal, uint64_t epoch) {
  begin_clear(ordinal, epoch);
  uint64_t cleared = 0;
  for (PageId cursor = 0; cursor != kNoPage;) cleared += clear_some(ordinal, epoch, cursor);
  removal_.free_retired();
  while (removal_.goes_on()) removal_.go_on();
  return cleared;
}

uint64_t Warehouse::sweep(size_t limit) {
  std::vector<EntryView> found;
  const auto add = [&](PageId page) {
    // What a clear is yet to reach is left to it: it says how many pages it took.
    if (const auto view = state_.catalog.at(page); view && !state_.is_cleared(*view))
      found.push_back(*view);
  };
  const auto awaited = [this](const Key& key) { return state_.groups.open_slot(key) != kNoSlot; };
  for (const PageId page : state_.catalog.orphans_to_drop(limit, awaited)) add(page);
  // And what hangs below them, so that a long chain takes no more passes over the pins than one.
  for (size_t at = 0, looks = found.size(); at < found.size() && looks < limit; ++at)
    for (PageId child = state_.catalog.first_child(found[at].page);
         child != kNoPage && looks < limit; child = state_.catalog.next_sibling(child), ++looks)
      add(child);
  std::ranges::reverse(found);
  removal_.evict_views(found, LeaveReason::orphaned);
  uint64_t dropped = 0;
  for (const EntryView& view : found) {
    const auto rest = state_.catalog.find(view.key);
    if (rest && rest->in_dram()) continue;  // pinned: another time
    if (rest && rest->in_nvme()) removal_.leave_nvme(*rest, LeaveReason::orphaned);
    ++dropped;
  }
  return dropped;
}

}  // namespace kvw
