// The uses of pages: what lookups, loads and stores say of them goes to the eviction policies, to
// the HBM tier and into the curve of what other sizes of the tiers would have hit. Core thread
// only.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "eviction/miss_ratio.h"
#include "warehouse/state.h"

namespace kvw {

class Uses {
 public:
  static constexpr uint64_t kUseNs = kSecondNs / 2;  // a page's use takes less than two of them
  static constexpr uint64_t kMostAgeNs = UINT16_MAX * kUseNs;

  explicit Uses(WarehouseState& state) : state_(state), started_ns_(state.clock.boot_ns()) {}

  // A page that no tier had is being stored.
  void store(const Key& key, uint16_t ordinal, uint64_t slot_bytes) {
    stores_.push_back({key, ordinal, slot_bytes, 0});
  }
  // What the curve makes of stores, which takes a tenth as long as their exchange itself, and which
  // of their pages had been here before.
  void count_stores();
  // Takes up what sessions have touched and released since the last call.
  void apply_touches();

  // In PageNode::used_at's units.
  uint16_t time() const { return time_at(state_.clock.boot_ns()); }
  // How long ago a PageNode::used_at was: it begins anew after kMostAgeNs.
  static uint64_t age_ns(uint16_t used_at, uint64_t boot_ns) {
    return static_cast<uint16_t>(time_at(boot_ns) - used_at) * kUseNs;
  }
  MissRatioReport miss_ratio(int ordinal);
  void forget(uint32_t ordinal) { curve_.forget(static_cast<uint16_t>(ordinal)); }
  uint64_t released_pages() const { return released_pages_; }
  // Pages that were stored again, by why they had left.
  const std::array<uint64_t, kLeaveReasons>& stored_again() const { return stored_again_; }
  uint64_t uptime_ns() const { return state_.clock.boot_ns() - started_ns_; }

 private:
  static uint16_t time_at(uint64_t boot_ns) { return static_cast<uint16_t>(1 + boot_ns / kUseNs); }
  void release(const EntryView& view, PageId before);
  bool is_new(PageId page);
  MissRatioCurve::Use use_of(const EntryView& view, bool was_used) const;

  WarehouseState& state_;
  uint64_t started_ns_;
  MissRatioCurve curve_;
  std::vector<MissRatioCurve::Use> stores_;  // of one exchange, not in the curve yet
  PageId released_ = kNoPage;                // by what was taken up last
  uint64_t released_pages_ = 0;
  std::array<uint64_t, kLeaveReasons> stored_again_{};
};

}  // namespace kvw
