// What is not believed any more: pages whose bytes are not those that were sealed leave their tier,
// and stay out of it over restarts, by tombstones for their records. The other tier's copy is
// judged by itself. Core thread only.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "warehouse/removal.h"
#include "warehouse/state.h"
#include "warehouse/write_admission.h"

namespace kvw {

// Records of `first` up to log position `second` are dead.
using Tombstone = std::pair<Key, uint64_t>;

class Quarantine {
 public:
  Quarantine(WarehouseState& state, WriteAdmission& writes, Removal& removal)
      : state_(state), writes_(writes), removal_(removal) {}

  void dram(const EntryView& view, const char* reason);
  // `unreadable`: the device gave no bytes, so that a restart may look again.
  void nvme(const EntryView& view, const char* reason, bool unreadable);
  uint64_t count() const { return count_; }

  // Reclaim copies a record, and has copied it; see nvme::LogHost.
  void moving(const Key& key, const nvme::Extent& to) { moving_[key] = to.position(); }
  void moved(const Key& key, const nvme::Extent& from, const nvme::Extent& to);
  // For a page that leaves NVMe for good: up to where its last record is or, by a copy under way,
  // will be.
  Tombstone tombstone_for(const EntryView& view);
  // Those that nobody has taken yet. Bounded.
  std::vector<Tombstone> take_tombstones() { return std::exchange(pending_tombstones_, {}); }

 private:
  void leave_tombstone(const Key& key, uint64_t position);

  WarehouseState& state_;
  WriteAdmission& writes_;
  Removal& removal_;
  uint64_t count_ = 0;
  std::vector<Tombstone> pending_tombstones_;
  std::unordered_map<Key, uint64_t, KeyHash> stray_copies_;  // of pages stored again: positions
  std::unordered_map<Key, uint64_t, KeyHash> moving_;        // reclaim's copies: positions
};

}  // namespace kvw
