// Everything that leaves: eviction, clear, quarantine, orphans.
//
// One order for all of it (docs/protocol.md): word = CLOSING, full fence, read all pins, then
// either back to LIVE or index entry out and word = FREE.
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
    apply_touches();
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
    const size_t out = evict_slots(slots, LeaveReason::evicted);
    if (out < found) pins = &state_.sessions.pins_seen();
    left += out;
  }
  return left;
}

const PinSet* Warehouse::close_slots(std::span<const SlotId> slots, LeaveReason reason) {
  // What must not be found again goes, pinned or not; its slot waits until nobody reads it.
  const bool must = reason == LeaveReason::quarantined || reason == LeaveReason::cleared;
  for (const SlotId slot : slots) {
    // A crash must not bring a quarantined page back: its metadata says so before anything else.
    if (reason == LeaveReason::quarantined) state_.pool.meta(slot)->checksum = 0;
    state_.pool.close(slot);
    state_.catalog.prefetch_write(state_.pool.page_at(slot));  // where its entry is taken out
  }
  KVW_SEQUENCE_POINT("evict: closed");
  const PinSet* pins = nullptr;
  if (!must) {
    full_fence();
    pins = &state_.sessions.pins();
  }
  KVW_SEQUENCE_POINT("evict: pins read");
  return pins;
}

bool Warehouse::leave_or_reopen(SlotId slot, const PinSet* pins, LeaveReason reason) {
  const auto stays = [&] {
    if (pins->has_slot(slot) || writes_.is_writing(slot)) return true;
    // A victim before it was pinned, or is more than its policy was told of.
    return reason == LeaveReason::evicted &&
           state_.catalog.count_children(state_.pool.page_at(slot), std::mem_fn(&PageNode::in_dram),
                                         1) != 0;
  };
  if (pins == nullptr || !stays()) {
    leave_dram(slot, reason);
    return true;
  }
  state_.pool.reopen(slot);
  state_.touch(state_.pool.page_at(slot));
  return false;
}

size_t Warehouse::evict_slots(std::span<const SlotId> slots, LeaveReason reason) {
  const PinSet* pins = close_slots(slots, reason);
  size_t left = 0;
  for (const SlotId slot : slots) left += leave_or_reopen(slot, pins, reason) ? 1 : 0;
  return left;
}

size_t Warehouse::evict_views(std::span<const EntryView> views, LeaveReason reason) {
  std::vector<SlotId> slots;
  for (const EntryView& view : views)
    if (view.in_dram()) slots.push_back(view.slot);
  return evict_slots(slots, reason);
}

void Warehouse::leave_dram(SlotId slot, LeaveReason reason) {
  if (state_.hbm) state_.hbm->left(slot);
  const PageId page = state_.pool.page_at(slot);
  state_.pool.class_of(slot).policy->removed(state_.pool.resident(slot));
  state_.pool.page_at(slot) = kNoPage;
  writes_.left_dram(page);
  ++left_dram_[static_cast<size_t>(reason)];
  if (auto view = state_.catalog.at(page)) {
    if (view->in_nvme() && reason != LeaveReason::cleared) {
      view->flags = static_cast<uint16_t>(view->flags & ~(kEntryDram | kEntryUnverified));
      view->slot = kNoSlot;
      state_.catalog.update(*view);
    } else {
      if (view->in_nvme()) ++left_nvme_[static_cast<size_t>(reason)];
      state_.catalog.remove(*view);
    }
  }
  KVW_SEQUENCE_POINT("evict: entry out");
  if (reason == LeaveReason::quarantined || reason == LeaveReason::cleared)
    retired_slots_.push_back(slot);
  else
    state_.pool.release(slot);
}

void Warehouse::leave_nvme(const EntryView& entry, LeaveReason reason) {
  EntryView view = entry;
  ++left_nvme_[static_cast<size_t>(reason)];
  if (!view.in_dram()) {
    state_.catalog.remove(view);
    return;
  }
  view.flags = static_cast<uint16_t>(view.flags & ~kEntryNvme);
  view.extent = {};
  state_.catalog.update(view);
  writes_.left_nvme(view.page, reason);
}

void Warehouse::free_retired() {
  retired_to_try_ = retired_slots_.size();
  free_some_retired();
}

void Warehouse::free_some_retired() {
  if (retired_to_try_ == 0) return;
  full_fence();
  const PinSet& pins = state_.sessions.pins();
  size_t looks = std::min(retired_to_try_, kRetiredPerStep);
  for (retired_to_try_ -= looks; looks > 0; --looks) {
    const SlotId slot = retired_slots_.front();
    retired_slots_.pop_front();
    if (pins.has_slot(slot) || writes_.is_writing(slot))
      retired_slots_.push_back(slot);
    else
      state_.pool.discard(slot);
  }
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
  evict_views(found, LeaveReason::cleared);
  for (const EntryView& view : found)
    if (!view.in_dram()) leave_nvme(view, LeaveReason::cleared);
  return found.size() + std::exchange(state_.spaces[ordinal].cleared_early, 0);
}

uint64_t Warehouse::clear(uint32_t ordinal, uint64_t epoch) {
  begin_clear(ordinal, epoch);
  uint64_t cleared = 0;
  for (PageId cursor = 0; cursor != kNoPage;) cleared += clear_some(ordinal, epoch, cursor);
  free_retired();
  while (retired_to_try_ != 0) free_some_retired();
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
  evict_views(found, LeaveReason::orphaned);
  uint64_t dropped = 0;
  for (const EntryView& view : found) {
    const auto rest = state_.catalog.find(view.key);
    if (rest && rest->in_dram()) continue;  // pinned: another time
    if (rest && rest->in_nvme()) leave_nvme(*rest, LeaveReason::orphaned);
    ++dropped;
  }
  return dropped;
}

}  // namespace kvw
