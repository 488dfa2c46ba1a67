#include "warehouse/removal.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "base/sequence_point.h"
#include "warehouse/uses.h"

namespace kvw {

const PinSet* Removal::close_slots(std::span<const SlotId> slots, LeaveReason reason) {
  // What must not be found again goes, pinned or not; its slot waits until nobody reads it.
  const bool must = reason == LeaveReason::quarantined || reason == LeaveReason::cleared;
  for (const SlotId slot : slots) {
    // A crash must not bring a quarantined page back: its metadata says so before anything else.
    if (reason == LeaveReason::quarantined) state_.pool.meta(slot)->checksum = 0;
    state_.pool.close(slot);
    state_.catalog.prefetch_write(state_.pool.page_at(slot));  // where its entry is taken out
    __builtin_prefetch(state_.pool.meta(slot));                // when it was stored
  }
  const auto each_page = [&](const auto& look) {
    for (const SlotId slot : slots)
      if (const PageId page = state_.pool.page_at(slot); state_.catalog.has(page)) look(page);
  };
  each_page([&](PageId page) { state_.catalog.prefetch_page(page); });
  each_page([&](PageId page) { state_.absences.prefetch(state_.catalog.key(page)); });
  KVW_SEQUENCE_POINT("evict: closed");
  const PinSet* pins = nullptr;
  if (!must) {
    full_fence();
    pins = &state_.sessions.pins();
  }
  KVW_SEQUENCE_POINT("evict: pins read");
  return pins;
}

bool Removal::leave_or_reopen(SlotId slot, const PinSet* pins, LeaveReason reason) {
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

size_t Removal::evict_slots(std::span<const SlotId> slots, LeaveReason reason) {
  const PinSet* pins = close_slots(slots, reason);
  size_t left = 0;
  for (const SlotId slot : slots) left += leave_or_reopen(slot, pins, reason) ? 1 : 0;
  return left;
}

size_t Removal::evict_views(std::span<const EntryView> views, LeaveReason reason) {
  std::vector<SlotId> slots;
  for (const EntryView& view : views)
    if (view.in_dram()) slots.push_back(view.slot);
  return evict_slots(slots, reason);
}

void Removal::leave_dram(SlotId slot, LeaveReason reason) {
  if (state_.hbm) state_.hbm->left(slot);
  const PageId page = state_.pool.page_at(slot);
  auto view = state_.catalog.at(page);
  state_.pool.class_of(slot).policy->removed(state_.pool.resident(slot));
  state_.pool.page_at(slot) = kNoPage;
  // Nothing else has it, for want of writes: whoever asks why it is not there is told so.
  if ((reason == LeaveReason::evicted || reason == LeaveReason::rebalanced) &&
      writes_.is_spared(page))
    reason = LeaveReason::write_budget;
  writes_.left_dram(page);
  ++left_dram_[static_cast<size_t>(reason)];
  if (view) {
    if (view->in_nvme() && reason != LeaveReason::cleared) {
      view->flags = static_cast<uint16_t>(view->flags & ~(kEntryDram | kEntryUnverified));
      view->slot = kNoSlot;
      state_.catalog.update(*view);
    } else {
      if (view->in_nvme()) ++left_nvme_[static_cast<size_t>(reason)];
      leave_last_tier(*view, reason, state_.pool.meta(slot)->stored_at_ns);
    }
  }
  KVW_SEQUENCE_POINT("evict: entry out");
  if (reason == LeaveReason::quarantined || reason == LeaveReason::cleared)
    retired_.push_back(slot);
  else
    state_.pool.release(slot);
}

void Removal::leave_last_tier(const EntryView& view, LeaveReason reason, uint64_t stored_at_ns) {
  const uint64_t boot_ns = state_.now.boot_ns, wall_ns = state_.now.wall_ns;
  Absence absence{.key = view.key, .why = static_cast<uint8_t>(reason)};
  absence.at_s = absence_time(boot_ns);
  // How long ago, as far as this boot goes back.
  const uint64_t age_ns =
      stored_at_ns != 0 ? wall_ns - std::min(wall_ns, stored_at_ns) : UINT64_MAX;
  if (age_ns <= boot_ns) absence.stored_at_s = absence_time(boot_ns - age_ns);
  if (const uint16_t used_at = state_.catalog.node(view.page).used_at; used_at != 0) {
    const uint64_t ago_ns = Uses::age_ns(used_at, boot_ns);
    absence.used_at_s = absence_time(boot_ns - std::min(ago_ns, boot_ns));
    absence.perhaps_earlier = age_ns >= Uses::kMostAgeNs;
  }
  state_.absences.add(absence);
  state_.keeps.left(view.page);
  state_.catalog.remove(view);
}

void Removal::leave_nvme(const EntryView& entry, LeaveReason reason) {
  EntryView view = entry;
  ++left_nvme_[static_cast<size_t>(reason)];
  if (!view.in_dram()) return leave_last_tier(view, reason, 0);
  view.flags = static_cast<uint16_t>(view.flags & ~kEntryNvme);
  view.extent = {};
  state_.catalog.update(view);
  writes_.left_nvme(view.page, reason);
}

bool Removal::leave(const EntryView& view, LeaveReason reason) {
  if (view.in_dram() && evict_views(std::span(&view, 1), reason) == 0) return false;
  if (const auto rest = state_.catalog.find(view.key); rest && rest->in_nvme())
    leave_nvme(*rest, reason);
  return true;
}

void Removal::free_retired() {
  to_try_ = retired_.size();
  go_on();
}

void Removal::go_on() {
  if (to_try_ == 0) return;
  full_fence();
  const PinSet& pins = state_.sessions.pins();
  size_t looks = std::min(to_try_, kRetiredPerStep);
  for (to_try_ -= looks; looks > 0; --looks) {
    const SlotId slot = retired_.front();
    retired_.pop_front();
    if (pins.has_slot(slot) || writes_.is_writing(slot))
      retired_.push_back(slot);
    else
      state_.pool.discard(slot);
  }
}

void Removal::count_without_room(uint64_t dram, uint64_t nvme) {
  left_dram_[static_cast<size_t>(LeaveReason::window)] += dram;
  left_nvme_[static_cast<size_t>(LeaveReason::window)] += nvme;
}

}  // namespace kvw
