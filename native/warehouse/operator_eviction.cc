#include "warehouse/operator_eviction.h"

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "warehouse/state.h"

namespace kvw {

namespace {

constexpr PageId kLooksPerStep = 8192;   // index positions
constexpr uint32_t kLeavePerStep = 512;  // pages

}  // namespace

OperatorEviction::OperatorEviction(WarehouseState& state, Removal& removal, Quarantine& quarantine,
                                   int ordinal, uint64_t pages, std::string_view tiers)
    : state_(state), removal_(removal), quarantine_(quarantine), ordinal_(ordinal), pages_(pages) {
  if (tiers == "hbm") {
    if (!state_.hbm)
      throw Error(ErrorKind::usage, "bad_tiers",
                  "tiers is 'hbm', and this daemon has no HBM tier (serve --hbm)");
    left_ = state_.hbm->evict(ordinal, pages);
    pages_ = left_;
    return;
  }
  dram_ = tiers == "dram" || tiers == "all";
  nvme_ = tiers == "nvme" || tiers == "all";
  if (!dram_ && !nvme_)
    throw Error(ErrorKind::usage, "bad_tiers",
                "tiers is '" + std::string(tiers) + "', it must be hbm, dram, nvme or all");
}

bool OperatorEviction::meant(PageId page) const { return meant(state_.catalog.node(page)); }

bool OperatorEviction::meant(const PageNode& node) const {
  return (ordinal_ < 0 || node.space == ordinal_) &&
         ((dram_ && node.in_dram()) || (nvme_ && node.in_nvme()));
}

bool OperatorEviction::step() {
  if (left_ >= pages_) return false;
  if (cursor_ != kNoPage) {
    look();
    return true;
  }
  leave();
  return left_ < pages_ && !leaves_.empty();
}

void OperatorEviction::look() {
  const auto end = static_cast<PageId>(
      std::min<uint64_t>(state_.catalog.index().entries(), uint64_t{cursor_} + kLooksPerStep));
  for (; cursor_ < end; ++cursor_)
    if (const auto view = state_.catalog.at(cursor_); view && meant(cursor_)) consider(*view);
  if (cursor_ != state_.catalog.index().entries()) return;
  cursor_ = kNoPage;
  std::make_heap(leaves_.begin(), leaves_.end(), std::greater<>());
}

void OperatorEviction::consider(const EntryView& view) {
  const Candidate own{state_.heat(view), view.page};
  if (leaves_.size() == pages_ && !(own < leaves_.front())) return;
  if (holders(view.page, 1) != 0) return;
  if (leaves_.size() == pages_) {
    std::pop_heap(leaves_.begin(), leaves_.end());
    leaves_.pop_back();
  }
  leaves_.push_back(own);
  std::push_heap(leaves_.begin(), leaves_.end());
}

uint32_t OperatorEviction::holders(PageId page, uint32_t most) const {
  const PageNode& own = state_.catalog.node(page);
  const bool last = (dram_ || !own.in_dram()) && (nvme_ || !own.in_nvme());
  return state_.catalog.count_children(
      page, [&](const PageNode& child) { return last || meant(child); }, most);
}

bool OperatorEviction::is_held(const EntryView& view) const {
  return holders(view.page, 1) != 0 || state_.groups.has_open_child(view.key);
}

void OperatorEviction::leave() {
  std::vector<EntryView> views;
  std::unordered_set<PageId> chosen;
  std::unordered_map<PageId, uint32_t> unchosen;  // children, of their parents
  const uint64_t most = std::min<uint64_t>(kLeavePerStep, pages_ - left_);
  while (views.size() < most && !leaves_.empty()) {
    std::pop_heap(leaves_.begin(), leaves_.end(), std::greater<>());
    const PageId page = leaves_.back().second;
    leaves_.pop_back();
    // Others were served since it was looked at: it may have gone, or have got a child.
    const auto view = state_.catalog.at(page);
    if (!view || !meant(page) || chosen.contains(page)) continue;
    const auto below = unchosen.find(page);
    if ((below == unchosen.end() || below->second != 0) && is_held(*view)) continue;
    views.push_back(*view);
    chosen.insert(page);
    const PageId parent = state_.catalog.parent(page);
    const auto above = state_.catalog.at(parent);
    if (!above || !meant(parent)) continue;
    const auto [children, first] = unchosen.try_emplace(parent, 0);
    // With more than a step takes it stays for the steps to come.
    if (first) children->second = holders(parent, kLeavePerStep + 1);
    if (--children->second != 0) continue;
    leaves_.emplace_back(state_.heat(*above), parent);
    std::push_heap(leaves_.begin(), leaves_.end(), std::greater<>());
  }
  leave(views);
}

void OperatorEviction::leave(const std::vector<EntryView>& views) {
  std::vector<SlotId> slots;
  for (const EntryView& view : views)
    if (dram_ && view.in_dram()) slots.push_back(view.slot);
  const PinSet* pins = removal_.close_slots(slots, LeaveReason::operator_);
  // A start may find records that this run does not know, later ones of a page too: of segments
  // that were reclaimed and not written to again, of those that could not be read, and of a tier
  // that is not there.
  const uint64_t log_end = state_.log ? state_.log->last_position() : state_.options.log_end;
  for (const EntryView& view : views) {
    const bool in_dram = dram_ && view.in_dram();
    if (is_held(view)) {
      if (in_dram) state_.pool.reopen(view.slot);
      continue;
    }
    bool left = in_dram && removal_.leave_or_reopen(view.slot, pins, LeaveReason::operator_);
    if (const auto rest = state_.catalog.find(view.key); nvme_ && rest && rest->in_nvme()) {
      const auto [key, known] = quarantine_.tombstone_for(*rest);
      tombstones_.emplace_back(key, std::max(known, log_end));
      removal_.leave_nvme(*rest, LeaveReason::operator_);
      left = true;
    } else if (left && nvme_ && log_end != 0) {
      tombstones_.emplace_back(view.key, log_end);
    }
    left_ += left ? 1 : 0;
  }
}

}  // namespace kvw
