// How pages leave the tiers. One order for all of it (docs/protocol.md): word = CLOSING, full
// fence, read all pins, then either back to LIVE or index entry out and word = FREE. Core thread
// only.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>

#include "warehouse/state.h"
#include "warehouse/write_admission.h"

namespace kvw {

class Removal {
 public:
  static constexpr size_t kRetiredPerStep = 4096;
  using Counts = std::array<uint64_t, kLeaveReasons>;

  Removal(WarehouseState& state, WriteAdmission& writes) : state_(state), writes_(writes) {}

  // Closes the slots and scans the pins; null for what leaves pinned or not.
  const PinSet* close_slots(std::span<const SlotId> slots, LeaveReason reason);
  // True: it left DRAM. Nothing is evicted before a child of it.
  bool leave_or_reopen(SlotId slot, const PinSet* pins, LeaveReason reason);
  // Both, for all of them, descendants first. Returns how many left.
  size_t evict_slots(std::span<const SlotId> slots, LeaveReason reason);
  size_t evict_views(std::span<const EntryView> views, LeaveReason reason);  // those in DRAM
  void leave_nvme(const EntryView& entry, LeaveReason reason);
  // Out of both tiers. False: it stays in DRAM.
  bool leave(const EntryView& view, LeaveReason reason);

  // Of a slot that is CLOSING and out of the index: it is freed once nobody reads or writes it.
  void retire(SlotId slot) { retired_.push_back(slot); }
  size_t retired() const { return retired_.size(); }
  // Frees the first of those that can be; while it goes on, go_on() has the rest.
  void free_retired();
  bool goes_on() const { return to_try_ != 0; }
  void go_on();

  // Pages that an earlier daemon has left and that the index has no room for.
  void count_without_room(uint64_t dram, uint64_t nvme);
  const Counts& left_dram() const { return left_dram_; }
  const Counts& left_nvme() const { return left_nvme_; }

 private:
  void leave_dram(SlotId slot, LeaveReason reason);
  // It is in the catalog still. stored_at_ns: wall time; 0: not known.
  void leave_last_tier(const EntryView& view, LeaveReason reason, uint64_t stored_at_ns);

  WarehouseState& state_;
  WriteAdmission& writes_;
  std::deque<SlotId> retired_;  // perhaps still pinned or being written
  size_t to_try_ = 0;           // the first ones
  Counts left_dram_{}, left_nvme_{};
};

}  // namespace kvw
