// Promotion: pages that are on NVMe alone are read into slots of the DRAM tier, for clients that
// wait for them. Bounded by the bytes under way. Core thread only.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "exchange/messages.h"
#include "warehouse/eviction.h"
#include "warehouse/quarantine.h"
#include "warehouse/state.h"

namespace kvw {

class Promotions {
 public:
  Promotions(WarehouseState& state, Eviction& eviction, Quarantine& quarantine);

  // An answer for each key.
  void promote(std::span<const Key> keys, std::vector<PromoteAnswer>& answers);
  // The log has read into the slot, or has not; see nvme::LogHost::on_read().
  void read(SlotId slot, nvme::ReadResult result, PageFacts&& facts);
  void tick();

  // The page is there, but the device did not give its only copy: it is stored anew.
  bool is_unreadable(PageId page) const;
  void store_anew(const EntryView& page);

  size_t under_way() const { return promoting_.size(); }
  uint64_t pages_promoted() const { return pages_promoted_; }

 private:
  struct Filling {
    Key key;
    uint64_t generation;
  };

  bool failed_lately(const Key& key) const;
  void drop_filling(SlotId slot, uint64_t generation);

  WarehouseState& state_;
  Eviction& eviction_;
  Quarantine& quarantine_;
  std::unordered_map<Key, nvme::Extent, KeyHash> promoting_;  // being read into FILLING slots
  std::unordered_map<SlotId, Filling> filling_;               // those slots
  std::unordered_map<Key, uint64_t, KeyHash> read_failures_;  // of NVMe records, when
  uint64_t limit_bytes_, promoting_bytes_ = 0;
  uint64_t pages_promoted_ = 0;
};

}  // namespace kvw
