#include "warehouse/operator_eviction.h"

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "warehouse/warehouse.h"

namespace kvw {

namespace {

constexpr PageId kLooksPerStep = 8192;  // index positions
constexpr size_t kLeavePerStep = 512;   // pages

}  // namespace

OperatorEviction::OperatorEviction(Warehouse& warehouse, int ordinal, uint64_t pages,
                                   std::string_view tiers)
    : warehouse_(warehouse), ordinal_(ordinal), pages_(pages) {
  warehouse_.apply_touches();
  if (tiers == "hbm") {
    if (!warehouse_.hbm())
      throw Error(ErrorKind::usage, "bad_tiers",
                  "tiers is 'hbm', and this daemon has no HBM tier (serve --hbm)");
    left_ = warehouse_.hbm()->evict(ordinal, pages);
    pages_ = left_;
    return;
  }
  dram_ = tiers == "dram" || tiers == "all";
  nvme_ = tiers == "nvme" || tiers == "all";
  if (!dram_ && !nvme_)
    throw Error(ErrorKind::usage, "bad_tiers",
                "tiers is '" + std::string(tiers) + "', it must be hbm, dram, nvme or all");
}

bool OperatorEviction::meant(PageId page) const { return meant(warehouse_.catalog_.node(page)); }

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
      std::min<uint64_t>(warehouse_.catalog_.index().entries(), uint64_t{cursor_} + kLooksPerStep));
  for (; cursor_ < end; ++cursor_)
    if (const auto view = warehouse_.catalog_.at(cursor_); view && meant(cursor_)) consider(*view);
  if (cursor_ != warehouse_.catalog_.index().entries()) return;
  cursor_ = kNoPage;
  std::make_heap(leaves_.begin(), leaves_.end(), std::greater<>());
}

void OperatorEviction::consider(const EntryView& view) {
  const Candidate own{warehouse_.heat(view), view.page};
  if (leaves_.size() == pages_ && !(own < leaves_.front())) return;
  if (children_of(view.page, 1) != 0) return;
  if (leaves_.size() == pages_) {
    std::pop_heap(leaves_.begin(), leaves_.end());
    leaves_.pop_back();
  }
  leaves_.push_back(own);
  std::push_heap(leaves_.begin(), leaves_.end());
}

uint32_t OperatorEviction::children_of(PageId page, uint32_t most) const {
  return warehouse_.catalog_.count_children(
      page, [this](const PageNode& child) { return meant(child); }, most);
}

void OperatorEviction::leave() {
  std::vector<EntryView> views;
  const uint64_t most = std::min<uint64_t>(kLeavePerStep, pages_ - left_);
  while (views.size() < most && !leaves_.empty()) {
    std::pop_heap(leaves_.begin(), leaves_.end(), std::greater<>());
    const PageId page = leaves_.back().second;
    leaves_.pop_back();
    // Others were served since it was looked at: it may have gone, or have got a child.
    const auto view = warehouse_.catalog_.at(page);
    if (!view || !meant(page)) continue;
    const bool is_parent = children_left_.erase(view->key) != 0;
    if (!is_parent && children_of(page, 1) != 0) continue;
    views.push_back(*view);
    const PageId parent = warehouse_.catalog_.parent(page);
    const auto above = warehouse_.catalog_.at(parent);
    if (!above || !meant(parent)) continue;
    const auto [children, first] = children_left_.try_emplace(above->key, 0);
    if (first) children->second = children_of(parent);
    if (--children->second != 0) continue;
    leaves_.emplace_back(warehouse_.heat(*above), parent);
    std::push_heap(leaves_.begin(), leaves_.end(), std::greater<>());
  }
  leave(views);
}

void OperatorEviction::leave(const std::vector<EntryView>& views) {
  if (dram_) warehouse_.evict_views(views, Gone::operator_);
  for (const EntryView& view : views) {
    const auto rest = warehouse_.catalog_.find(view.key);
    const bool gone_from_dram = view.in_dram() && !(rest && rest->in_dram());
    const bool on_nvme = nvme_ && rest && rest->in_nvme();
    if (on_nvme) {
      tombstones_.emplace_back(view.key, warehouse_.last_position(*rest));
      warehouse_.stray_copies_.erase(view.key);
      warehouse_.leave_nvme(*rest, Gone::operator_);
    }
    left_ += gone_from_dram || on_nvme ? 1 : 0;
  }
}

std::vector<std::pair<Key, uint64_t>> Warehouse::evict(int ordinal, uint64_t pages,
                                                       std::string_view tiers, uint64_t& left) {
  OperatorEviction eviction(*this, ordinal, pages, tiers);
  while (eviction.step()) continue;
  left = eviction.left();
  return eviction.take_tombstones();
}

}  // namespace kvw
