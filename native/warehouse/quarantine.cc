// What is not believed any more: pages whose bytes are not those that were sealed leave their tier,
// and stay out of it over restarts. The other tier's copy is judged by itself.
#include "warehouse/warehouse.h"

namespace kvw {

namespace {

constexpr size_t kTombstonesKept = 8192;

std::string described(const char* tier, const Key& key, const char* reason) {
  return std::string("tier=") + tier + " key=" + to_hex(key) + " reason=" + reason;
}

}  // namespace

const char* Warehouse::header_problem_of(const EntryView& view) const {
  if (!state_.has_good_header(view.slot)) return "header";
  return state_.pool.meta(view.slot)->key == view.key ? nullptr : "key";
}

void Warehouse::quarantine_dram(const EntryView& view, const char* reason) {
  ++quarantined_;
  state_.events.add("page_quarantined", described("dram", view.key, reason));
  removal_.evict_views(std::span(&view, 1), LeaveReason::quarantined);
}

void Warehouse::leave_tombstone(const Key& key, uint64_t position) {
  if (pending_tombstones_.size() < kTombstonesKept) pending_tombstones_.emplace_back(key, position);
}

void Warehouse::quarantine_nvme(const EntryView& view, const char* reason, bool unreadable) {
  ++quarantined_;
  state_.events.add("page_quarantined", described("nvme", view.key, reason));
  if (!unreadable) leave_tombstone(view.key, view.extent.position());
  removal_.leave_nvme(view, LeaveReason::quarantined);
  // The copy in DRAM is all there is now: it goes to NVMe again.
  if (view.in_dram())
    if (const auto rest = state_.catalog.find(view.key)) writes_.admit(*rest, rest->slot);
}

}  // namespace kvw
