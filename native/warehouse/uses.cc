#include "warehouse/uses.h"

#include <algorithm>
#include <utility>

namespace kvw {

namespace {

constexpr size_t kPrefetchAhead = 8;
constexpr size_t kAbove = 65536;  // pages that a pass marks above those that were used

// A page is of use to whoever uses what is behind it: of an engine that has a prompt's beginning
// itself no load touches that. Without it NVMe would let the beginning go, and lose the rest.
// Prompts are told page by page, so that it is enough to go up from the first page of each.
class Above {
 public:
  explicit Above(Catalog& catalog) : catalog_(catalog) {}
  ~Above() { mark(); }

  void used(PageId page) {
    const PageId parent = catalog_.parent(page);
    if (page != parent_ && parent != last_) mark();
    if (parent != last_ || last_ == kNoPage) parent_ = parent;
    last_ = page;
  }

 private:
  void mark() {
    for (; parent_ != kNoPage && left_ > 0; --left_, parent_ = catalog_.parent(parent_))
      catalog_.node(parent_).used = true;
    parent_ = kNoPage;
  }

  Catalog& catalog_;
  PageId last_ = kNoPage;    // that was used
  PageId parent_ = kNoPage;  // of the first of its prompt
  size_t left_ = kAbove;
};

}  // namespace

void Uses::count_stores() {
  for (size_t at = 0; at < stores_.size(); ++at) {
    if (at + kPrefetchAhead < stores_.size())
      state_.absences.prefetch(stores_[at + kPrefetchAhead].key);
    if (const auto left = state_.absences.left(stores_[at].key)) ++stored_again_[left->why];
  }
  curve_.use(stores_);
  stores_.clear();
}

void Uses::apply_touches() {
  count_stores();
  std::vector<MissRatioCurve::Use> used;
  Above above(state_.catalog);
  state_.sessions.drain_touches([this, &used, &above](PageId word, uint32_t tag) {
    const PageId page = word & ~kReleasedPage;
    const PageId released = std::exchange(released_, kNoPage);
    const auto view = state_.catalog.at(page);
    if (!view || static_cast<uint32_t>(view->key.lo) != tag) return;
    if (word != page) return release(*view, released);
    const PageNode before = state_.catalog.node(page);
    state_.touch(page);
    if (state_.log) above.used(page);
    const bool is_another = is_new(page);
    if (is_another) used.push_back(use_of(*view, before.used));
    const bool again = is_another && before.used_at != 0;
    if (state_.hbm) state_.hbm->used(*view, again);
    if (state_.puts) state_.puts->used(*view, again);
  });
  curve_.use(used);
}

// A page with a child goes on being of use to whoever stored that, unless it was released the
// moment before: clients say the last page of a prompt first.
void Uses::release(const EntryView& view, PageId before) {
  const PageId child = state_.catalog.first_child(view.page);
  const bool ends =
      child == kNoPage || (child == before && state_.catalog.next_sibling(child) == kNoPage);
  if (!ends) return;
  state_.release(view);
  released_ = view.page;
  ++released_pages_;
}

// A pin and the load behind it, and the loads of all ranks, are one use of a page. One that is used
// all the time is another use each second.
bool Uses::is_new(PageId page) {
  const uint16_t now = time();
  uint16_t& used_at = state_.catalog.node(page).used_at;
  if (used_at == now || static_cast<uint16_t>(used_at + 1) == now) return false;
  used_at = now;
  return true;
}

// `was_used`: before this use, since it came. At the first use of a page that the curve does not
// know that is a promotion: NVMe has held it, and DRAM not.
MissRatioCurve::Use Uses::use_of(const EntryView& view, bool was_used) const {
  const uint64_t dram = state_.arena.bytes();
  const bool of_dram = view.in_dram() && !was_used;
  const uint64_t held = of_dram ? dram : std::max(dram, state_.options.nvme_capacity_bytes);
  return {view.key, view.space, state_.spaces[view.space].shape.slot_bytes(), held};
}

MissRatioReport Uses::miss_ratio(int ordinal) {
  count_stores();
  return {curve_.curve(ordinal), state_.sessions.touches_lost(), uptime_ns()};
}

}  // namespace kvw
