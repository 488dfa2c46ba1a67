// The uses of pages: what lookups, loads and stores say of them goes to the eviction policies, to
// the HBM tier and into the curve of what other sizes of the tiers would have hit. Core thread
// only.
#pragma once

#include <cstdint>
#include <vector>

#include "eviction/miss_ratio.h"
#include "warehouse/state.h"

namespace kvw {

class Uses {
 public:
  explicit Uses(WarehouseState& state) : state_(state), started_ns_(state.clock.boot_ns()) {}

  // A page that no tier had is being stored.
  void store(const Key& key, uint16_t ordinal, uint64_t slot_bytes) {
    stores_.push_back({key, ordinal, slot_bytes, 0});
  }
  // What the curve makes of stores, which takes a tenth as long as their exchange itself.
  void count_stores();
  // Takes up what sessions have touched and released since the last call.
  void apply_touches();

  uint16_t time() const;  // in PageNode::used_at's units
  MissRatioReport miss_ratio(int ordinal);
  void forget(uint32_t ordinal) { curve_.forget(static_cast<uint16_t>(ordinal)); }
  uint64_t released_pages() const { return released_pages_; }
  uint64_t uptime_ns() const { return state_.clock.boot_ns() - started_ns_; }

 private:
  void release(const EntryView& view, PageId before);
  bool is_new(PageId page);
  MissRatioCurve::Use use_of(const EntryView& view, bool was_used) const;

  WarehouseState& state_;
  uint64_t started_ns_;
  MissRatioCurve curve_;
  std::vector<MissRatioCurve::Use> stores_;  // of one exchange, not in the curve yet
  PageId released_ = kNoPage;                // by what was taken up last
  uint64_t released_pages_ = 0;
};

}  // namespace kvw
