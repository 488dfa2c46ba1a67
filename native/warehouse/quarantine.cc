#include "warehouse/quarantine.h"

#include <algorithm>
#include <span>
#include <string>

namespace kvw {

namespace {

constexpr size_t kTombstonesKept = 8192;
constexpr size_t kStrayCopiesKept = 4096;

std::string described(const char* tier, const Key& key, const char* reason) {
  return std::string("tier=") + tier + " key=" + to_hex(key) + " reason=" + reason;
}

}  // namespace

void Quarantine::dram(const EntryView& view, const char* reason) {
  ++count_;
  state_.events.add("page_quarantined", described("dram", view.key, reason));
  removal_.evict_views(std::span(&view, 1), LeaveReason::quarantined);
}

void Quarantine::leave_tombstone(const Key& key, uint64_t position) {
  if (pending_tombstones_.size() < kTombstonesKept) pending_tombstones_.emplace_back(key, position);
}

void Quarantine::nvme(const EntryView& view, const char* reason, bool unreadable) {
  ++count_;
  state_.events.add("page_quarantined", described("nvme", view.key, reason));
  if (!unreadable) leave_tombstone(view.key, view.extent.position());
  removal_.leave_nvme(view, LeaveReason::quarantined);
  // The copy in DRAM is all there is now: it goes to NVMe again.
  if (view.in_dram())
    if (const auto rest = state_.catalog.find(view.key)) writes_.admit(*rest, rest->slot);
}

void Quarantine::moved(const Key& key, const nvme::Extent& from, const nvme::Extent& to) {
  if (const auto at = moving_.find(key); at != moving_.end() && at->second == to.position())
    moving_.erase(at);
  auto view = state_.catalog.find(key);
  if (!view || !view->in_nvme() || !(view->extent == from)) {
    // It left while it was copied: no restart may find the copy. Where the page was stored again,
    // its own record may lie below the copy: then one tombstone is for the two, when it leaves.
    if (view && (view->in_nvme() || (view->in_dram() && writes_.is_writing(view->slot)))) {
      if (stray_copies_.size() < kStrayCopiesKept) stray_copies_[key] = to.position();
    } else {
      leave_tombstone(key, to.position());
    }
    return;
  }
  if (to.position() < from.position() && stray_copies_.size() < kStrayCopiesKept)
    stray_copies_[key] = from.position();
  view->extent = to;
  state_.catalog.update(*view);
  state_.catalog.node(view->page).used = false;  // hot again only if used again
}

Tombstone Quarantine::tombstone_for(const EntryView& view) {
  uint64_t last = view.extent.position();
  for (const auto* copies : {&stray_copies_, &moving_})
    if (const auto at = copies->find(view.key); at != copies->end())
      last = std::max(last, at->second);
  stray_copies_.erase(view.key);
  return {view.key, last};
}

}  // namespace kvw
