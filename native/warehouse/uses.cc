#include "warehouse/uses.h"

#include <algorithm>
#include <utility>

namespace kvw {

namespace {

constexpr uint64_t kUseNs = kSecondNs / 2;  // one use of a page takes less than two of them

}  // namespace

void Uses::count_stores() {
  curve_.use(stores_);
  stores_.clear();
}

void Uses::apply_touches() {
  count_stores();
  std::vector<MissRatioCurve::Use> used;
  state_.sessions.drain_touches([this, &used](PageId word, uint32_t tag) {
    const PageId page = word & ~kReleasedPage;
    const PageId released = std::exchange(released_, kNoPage);
    const auto view = state_.catalog.at(page);
    if (!view || static_cast<uint32_t>(view->key.lo) != tag) return;
    if (word != page) return release(*view, released);
    state_.touch(page);
    const uint16_t before = state_.catalog.node(page).used_at;
    if (is_new(page)) used.push_back(use_of(*view));
    // A page that is used all the time is one use of the curve's, and the hottest of all.
    const bool again = before != 0 && before != state_.catalog.node(page).used_at;
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

uint16_t Uses::time() const { return static_cast<uint16_t>(1 + state_.clock.boot_ns() / kUseNs); }

// A pin and the load behind it, and the loads of all ranks, are one use of a page.
bool Uses::is_new(PageId page) {
  const uint16_t now = time();
  uint16_t& used_at = state_.catalog.node(page).used_at;
  const bool again = used_at == now || static_cast<uint16_t>(used_at + 1) == now;
  used_at = now;
  return !again;
}

MissRatioCurve::Use Uses::use_of(const EntryView& view) const {
  const uint64_t dram = state_.arena.bytes();
  const uint64_t held = view.in_dram() ? dram : std::max(dram, state_.options.nvme_capacity_bytes);
  return {view.key, view.space, state_.spaces[view.space].shape.slot_bytes(), held};
}

MissRatioReport Uses::miss_ratio(int ordinal) {
  count_stores();
  return {curve_.curve(ordinal), state_.sessions.touches_lost(), uptime_ns()};
}

}  // namespace kvw
