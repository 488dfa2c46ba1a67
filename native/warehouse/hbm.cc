#include "warehouse/hbm.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/sequence_point.h"
#include "warehouse/check.h"
#include "warehouse/state.h"

namespace kvw {

const char* hbm_leave_reason_name(HbmLeaveReason reason) {
  static constexpr const char* kNames[] = {"demoted", "left_dram", "rebalanced", "damaged",
                                           "operator"};
  static_assert(std::size(kNames) == static_cast<size_t>(HbmLeaveReason::count));
  return kNames[static_cast<size_t>(reason)];
}

HbmTier::HbmTier(WarehouseState& state, Checker& checker)
    : state_(state), checker_(checker), copier_(state.options.hbm) {}

void HbmTier::poll() {
  HbmCopier::News news = copier_.take();
  if (news.pool) begin(std::move(*news.pool));
  for (const HbmPage& page : news.copied) land(page);
  if (!news.copied.empty()) under_way_ = 0;
  if (news.trouble && news.over) end(*news.trouble);
  if (news.trouble && !news.over) wait(*news.trouble);
  pump();
}

void HbmTier::wait(const std::string& reason) {
  if (reason_ != reason) state_.events.add("hbm_waiting", reason);
  reason_ = reason;
  health_ = "waiting";
}

void HbmTier::begin(HbmCopier::Pool pool) {
  const Slots& slots = state_.arena.slots();
  const uint64_t slab = HbmPlaces::slab_bytes_for(pool.bytes, state_.arena.slab_bytes());
  if (pool.bytes < slab)
    return end("the HBM tier has " + std::to_string(pool.bytes) + " bytes, it needs " +
               std::to_string(slab) + ": use a larger --hbm");
  try {
    table_ =
        std::make_unique<HbmTable>(slots.slot_id(state_.arena.slab_count(), 0),
                                   state_.options.warehouse_id, pool.bytes, pool.device.data());
  } catch (const Error& error) {
    return end(error.what());
  }
  places_.emplace(pool.bytes, slab);
  pool_ = std::move(pool);
  health_ = "ok";
  reason_.clear();
  state_.events.add("hbm_ready", "device=" + std::to_string(state_.options.hbm.device) +
                                     " bytes=" + std::to_string(pool_.bytes));
}

// Serving goes on from DRAM. Copies that are under way in clients read what nobody writes any more.
void HbmTier::end(const std::string& reason) {
  if (std::exchange(off_, true)) return;
  health_ = "failed";
  reason_ = reason + "; pages come from DRAM until the daemon is started again";
  state_.events.add("hbm_failed", reason_);
  if (table_) {
    table_->set_off();
    for (const auto& [slot, copy] : copies_)
      if (copy.published) table_->withdraw(slot);
  }
  copies_.clear();
  policies_.clear();
  leaving_.clear();
  queue_.clear();
  queued_.clear();
  published_ = 0;
}

void HbmTier::tick() {
  if (!serving()) return;
  reap();
  pump();
}

EvictionPolicy& HbmTier::policy_of(SlotId slot) {
  auto& policy = policies_[&state_.pool.class_of(slot)];
  if (!policy) policy = make_policy(state_.options.policy, 0);
  return *policy;
}

SlotId HbmTier::parent_of(const EntryView& view) const {
  const PageId parent = state_.catalog.parent(view.page);
  if (parent == kNoPage) return kNoSlot;
  const auto above = state_.catalog.at(parent);
  return above && above->in_dram() ? above->slot : kNoSlot;
}

bool HbmTier::has(SlotId slot) const {
  const auto found = copies_.find(slot);
  return found != copies_.end() && found->second.published;
}

std::optional<uint64_t> HbmTier::offset_of(SlotId slot) const {
  if (!has(slot)) return std::nullopt;
  return copies_.at(slot).offset;
}

void HbmTier::used(const EntryView& view, bool again) {
  if (!serving() || !view.in_dram()) return;
  if (copies_.contains(view.slot))
    policy_of(view.slot).touched(state_.pool.resident(view.slot));
  else if (again || state_.options.hbm_at_first_use)
    want(view);
}

void HbmTier::released(const EntryView& view) {
  if (copies_.contains(view.slot)) policy_of(view.slot).released(state_.pool.resident(view.slot));
}

void HbmTier::land(const HbmPage& page) {
  const auto found = copies_.find(page.slot);
  if (!serving() || found == copies_.end()) return;
  Copy& copy = found->second;
  const SlotWord word = state_.pool.load(page.slot);
  // The core thread owns the words: what is LIVE now was not written to since the batch was made.
  const bool there =
      !copy.gone && word.state == SlotState::live && word.generation == page.generation;
  const auto view = there ? state_.catalog.at(state_.pool.page_at(page.slot)) : std::nullopt;
  if (view && page.same && may_serve(*view, copy)) {
    copy.published = true;
    ++published_;
    ++pages_promoted_;
    bytes_promoted_ += copy.bytes;
    table_->publish(page.slot, page.generation, copy.offset);
    return;
  }
  if (!copy.gone) policy_of(page.slot).removed(state_.pool.resident(page.slot));
  places_->give_back(copy.offset);
  copies_.erase(found);
  // Its bytes in DRAM are not what was sealed.
  if (view && !page.same) checker_.report(0, {view->key, page.generation, page.slot, 0});
}

// A child whose parent did not make it, or a place whose slab is wanted for another size: not now.
bool HbmTier::may_serve(const EntryView& view, const Copy& copy) const {
  const bool child = state_.catalog.parent(view.page) != kNoPage;
  return (!child || has(parent_of(view))) && !places_->closing(copy.offset) &&
         !state_.is_cleared(view);
}

void HbmTier::left(SlotId slot) {
  const auto found = copies_.find(slot);
  if (found == copies_.end()) return;
  if (found->second.published) return drop(slot, HbmLeaveReason::left_dram);
  if (std::exchange(found->second.gone, true)) return;
  policy_of(slot).removed(state_.pool.resident(slot));
}

void HbmTier::damaged(SlotId slot) {
  if (!has(slot)) return;
  state_.events.add("hbm_copy_dropped", "reason=digest slot=" + std::to_string(slot));
  drop(slot, HbmLeaveReason::damaged);
}

void HbmTier::drop(SlotId slot, HbmLeaveReason why) {
  const auto found = copies_.find(slot);
  table_->withdraw(slot);
  KVW_SEQUENCE_POINT("hbm: withdrawn");
  policy_of(slot).removed(state_.pool.resident(slot));
  leaving_.push_back({slot, found->second.offset, found->second.bytes});
  copies_.erase(found);
  --published_;
  ++left_[static_cast<size_t>(why)];
}

// Who pins a slot after the fence finds no word; who did before is seen here.
void HbmTier::reap() {
  if (leaving_.empty()) return;
  full_fence();
  const PinSet& pins = state_.sessions.pins();
  KVW_SEQUENCE_POINT("hbm: pins read");
  std::erase_if(leaving_, [&](const Leaving& each) {
    if (pins.has_slot(each.slot)) return false;
    places_->give_back(each.offset);
    return true;
  });
}

HbmStatus HbmTier::status() const {
  HbmStatus status;
  status.health = health_;
  status.reason = reason_;
  status.capacity_bytes = off_ ? 0 : pool_.bytes;
  status.used_bytes = places_ && !off_ ? places_->used_bytes() : 0;
  status.pages = published_;
  status.leaving = leaving_.size();
  status.queued = queue_.size() + under_way_;
  status.pages_promoted = pages_promoted_;
  status.bytes_promoted = bytes_promoted_;
  status.left = left_;
  return status;
}

}  // namespace kvw
