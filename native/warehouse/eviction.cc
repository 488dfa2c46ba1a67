#include "warehouse/eviction.h"

#include <algorithm>
#include <array>

namespace kvw {

namespace {

// Victims of stores at a time: each time the pins of all sessions are read, two files at most for
// each.
constexpr size_t kBatch = 256;

}  // namespace

SlotId Eviction::take_slot(SlotClass& cls, SlotState state, SlotId spare) {
  if (cls.free.empty() && !grow(cls) && !take_spare_slab(cls)) {
    // Room that nothing must leave for is on its way: a store can wait for it.
    if (state == SlotState::reserved && still_growing()) return kNoSlot;
    if (!state_.sessions.touches_are_new()) uses_.apply_touches();
    if (take_colder_slab(cls)) return state_.pool.take(cls, state);
    const size_t want = std::clamp<size_t>(cls.total() / kFreeShare, 1, kBatch);
    if (state == SlotState::filling && evict_written(cls, want, spare))
      return state_.pool.take(cls, state);
    // A class that only waits for its own writes takes nothing from others.
    const bool waits = cls.total() != 0 && !writes_.is_idle(cls);
    if (evict_some(cls, want, spare, Unwritten::leaves) == 0 && !waits) take_any_slab(cls);
  }
  return state_.pool.take(cls, state);
}

bool Eviction::evict_written(SlotClass& cls, size_t want, SlotId spare) {
  if (evict_some(cls, want, spare, Unwritten::stays) != 0) return true;
  if (!writes_.catches_up(cls.layout.slot_bytes())) return false;
  WriteAdmission::Spill now;
  writes_.spill(now);
  return !writes_.is_idle();
}

bool Eviction::awaits_child(SlotId slot) const {
  if (state_.groups.none_open()) return false;
  const auto view = state_.catalog.at(state_.pool.page_at(slot));
  return view && !view->in_nvme() && state_.groups.has_open_child(view->key);
}

void Eviction::keep_free() {
  for (const auto& cls : state_.pool.classes()) {
    const uint64_t want = (cls->total() - state_.pool.not_added(*cls)) / kFreeShare;
    if (cls->free.size() >= want || state_.pool.ready_slabs() != 0) continue;
    if (!cls->uncut.empty() && grow(*cls)) continue;
    if (still_growing()) continue;
    if (take_spare_slab(*cls)) continue;
    evict_some(*cls, std::min<size_t>(want - cls->free.size(), kBatch), kNoSlot, Unwritten::stays);
  }
}

size_t Eviction::evict_some(SlotClass& cls, size_t want, SlotId spare, Unwritten unwritten) {
  const bool missed_stay =
      unwritten == Unwritten::stays && writes_.catches_up(cls.layout.slot_bytes());
  // What is kept or was seen pinned is passed over; a round that meets a pin sees them all.
  const ExemptIf busy([&](PageId resident) {
    const SlotId slot = state_.pool.slot_of(cls, resident);
    const PageId page = state_.pool.page_at(slot);
    return slot == spare || state_.pool.is_aside(slot) || writes_.is_writing(slot) ||
           state_.sessions.seen_pinned(slot) || state_.keeps.has(page) || awaits_child(slot) ||
           (missed_stay && writes_.is_missed(page));
  });
  std::array<PageId, kBatch> residents;
  std::vector<SlotId> slots;
  size_t left = 0;
  // Pinned since we looked, a victim is touched; a few rounds bound the work.
  for (int round = 0; round < 4 && left < want; ++round) {
    const size_t found =
        cls.policy->victims(std::span(residents).first(std::min(want - left, kBatch)), busy);
    if (found == 0) break;
    slots.clear();
    for (size_t i = 0; i < found; ++i) slots.push_back(state_.pool.slot_of(cls, residents[i]));
    left += removal_.evict_slots(slots, LeaveReason::evicted);
  }
  return left;
}

bool Eviction::room_is_coming() const {
  return still_growing() || goes_on() || !writes_.is_idle() || removal_.retired() != 0 ||
         state_.pool.unfinished_bytes() != 0;
}

}  // namespace kvw
