#include "warehouse/index_room.h"

#include <algorithm>
#include <functional>
#include <set>
#include <utility>
#include <vector>

namespace kvw {

namespace {

constexpr uint64_t kMarginShare = 64;  // of the index: kept free
constexpr PageId kLooks = 128;         // positions, for a page on NVMe alone
constexpr uint16_t kLately = 1200;     // half seconds
constexpr size_t kAtOnce = 16;         // pages that leave the arena for it

}  // namespace

// A tier that the index cannot name never fills, which looks like a cache that does not work. The
// bound is the operator's to move: said with the number, again only where a model asks for more.
void IndexRoom::note_shape(const NamespaceShape& shape) {
  const uint64_t page = shape.slot_bytes();
  const uint64_t pages =
      state_.options.dram_bytes / page + state_.options.nvme_capacity_bytes / (page + kBlockBytes);
  if (pages <= std::max<uint64_t>(state_.catalog.capacity(), wanted_)) return;
  wanted_ = pages;
  state_.events.add("index_small", "capacity=" + std::to_string(state_.catalog.capacity()) +
                                       " page_bytes=" + std::to_string(page) +
                                       " enough=--index-pages=" + std::to_string(pages));
}

void IndexRoom::say_bound() {
  if (std::exchange(bound_, true)) return;
  state_.events.add("index_bound", "capacity=" + std::to_string(state_.catalog.capacity()) +
                                       " (see --index-pages)");
}

PageId IndexRoom::claim(const Key& key, const Key& parent, SlotId parent_slot) {
  keep_room(parent, parent_slot);
  PageId page = state_.catalog.claim(key);
  if (page == kNoPage && make_place(key, parent)) page = state_.catalog.claim(key);
  if (page == kNoPage) say_bound();
  return page;
}

void IndexRoom::keep_room(const Key& parent, SlotId parent_slot) {
  const uint64_t capacity = state_.catalog.capacity();
  // Those being written come into it when they are sealed.
  const uint64_t pages = state_.catalog.pages() + state_.catalog.claimed();
  if (pages + std::max<uint64_t>(1, capacity / kMarginShare) <= capacity) return;
  say_bound();
  if (drop_cold_on_nvme(parent)) return;
  SlotClass* coldest = nullptr;
  uint64_t best = UINT64_MAX;
  for (const auto& cls : state_.pool.classes())
    if (const uint64_t heat = eviction_.coldest_heat(*cls); heat < best) {
      best = heat;
      coldest = cls.get();
    }
  // What NVMe has as well stays in the index: its turn to leave that comes with the next store.
  if (coldest != nullptr)
    eviction_.evict_some(*coldest, kAtOnce, parent_slot, Eviction::Unwritten::leaves);
}

// Nothing orders pages that are on NVMe alone, but their records were written one after the other:
// of those looked at, other ones each time, the one with the oldest record, not kept and not used
// lately. Its last descendant goes, and in the next calls the pages above that.
bool IndexRoom::drop_cold_on_nvme(const Key& parent) {
  if (state_.catalog.nvme_pages() == 0) return false;
  PageId page = victim_;
  if (const auto view = state_.catalog.at(page); !view || view->in_dram() || stays(page))
    page = oldest_record();
  if (page == kNoPage) return false;
  page = last_below(page);
  if (state_.keeps.has(page)) {  // below one that was lost, and stored anew
    victim_ = kNoPage;
    return false;
  }
  victim_ = state_.catalog.parent(page);
  const EntryView leaf = *state_.catalog.at(page);
  if (leaf.key == parent || state_.groups.has_open_child(leaf.key)) return false;
  return removal_.leave(leaf, LeaveReason::window);
}

PageId IndexRoom::last_below(PageId page) const {
  while (state_.catalog.has_children(page)) page = state_.catalog.first_child(page);
  return page;
}

// It is kept, or was used lately.
bool IndexRoom::stays(PageId page) const {
  const uint16_t used_at = state_.catalog.node(page).used_at;
  return state_.keeps.has(page) ||
         (used_at != 0 && static_cast<uint16_t>(uses_.time() - used_at) < kLately);
}

PageId IndexRoom::oldest_record() {
  PageId oldest = kNoPage;
  uint64_t best = UINT64_MAX;
  const auto entries = static_cast<PageId>(state_.catalog.index().entries());
  for (PageId look = 0; look < std::min(kLooks, entries); ++look) {
    const auto view = state_.catalog.at(hand_);
    hand_ = (hand_ + 1) % entries;
    if (!view || view->in_dram() || view->extent.position() >= best || stays(view->page)) continue;
    best = view->extent.position();
    oldest = view->page;
  }
  return oldest;
}

// All places of the key are taken, or the index is full: a page goes from them. One without
// children before one with, the coldest first. Of those with children none above the page that is
// to come, nor one that has another of them below it: what a prompt loses is its end.
bool IndexRoom::make_place(const Key& key, const Key& parent) {
  const uint64_t mask = state_.catalog.index().entries() - 1;
  std::set<PageId> places;
  for (uint32_t place = 0; place < kIndexPlaces; ++place)
    places.insert(index_place(key, place, mask));
  std::vector<PageId> leaves, others;
  for (const PageId place : places) {
    const auto view = state_.catalog.at(place);
    if (!view || view->key == parent || state_.groups.has_open_child(view->key)) continue;
    if (state_.keeps.has(place) || (view->in_dram() && writes_.is_writing(view->slot))) continue;
    (state_.catalog.has_children(view->page) ? others : leaves).push_back(view->page);
  }
  if (leaves.empty()) {
    const auto position = [this](PageId page) { return state_.catalog.node(page).position; };
    std::ranges::sort(others, std::greater{}, position);
    const PageId above = state_.catalog.page_of(state_.groups.first_above(parent));
    if (above != kNoPage) state_.catalog.remove_those_above(above, others);
    for (size_t at = 0; at < others.size(); ++at)
      state_.catalog.remove_those_above(others[at], others, at + 1);
    leaves = std::move(others);
  }
  const auto heat_of = [this](PageId page) { return state_.heat(*state_.catalog.at(page)); };
  const auto coldest = std::ranges::min_element(leaves, {}, heat_of);
  return coldest != leaves.end() &&
         removal_.leave(*state_.catalog.at(*coldest), LeaveReason::window);
}

}  // namespace kvw
