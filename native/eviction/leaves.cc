#include "eviction/leaves.h"

#include "base/error.h"

namespace kvw {

namespace {

constexpr size_t kKeptLooks = 1024;  // of a search that finds nothing else

// Above all ages over all hold times, so that heat is above 0.
constexpr uint64_t kHeatOrigin = uint64_t{1} << 62;

}  // namespace

// One call of victims(). A page that it takes leaves its list and its parent's children until the
// end of the call, so that a parent whose children are all taken is the leaf that it will be.
struct LeavesFirst::Search {
  std::span<PageId> out;
  const Exempt& exempt;
  size_t found = 0;

  bool done() const { return found == out.size(); }
};

LeavesFirst::LeavesFirst(size_t capacity, Class classes) : classes_(classes) {
  nodes_.reserve(capacity + kFirstPage);
  for (Class cls = 0; cls < classes; ++cls) heaps_[cls].reserve(capacity);
  nodes_.resize(kFirstPage);
  for (Place list = 0; list < kFirstPage; ++list) rings::make_head(nodes_, list);
  hold_.fill(1);
}

bool LeavesFirst::resident(PageId page) const {
  return page < nodes_.size() - kFirstPage && nodes_[place_of(page)].colder != kAbsent;
}

void LeavesFirst::inserted(PageId page, PageId parent) {
  if (page >= kAbsent - kFirstPage)
    throw Error(ErrorKind::internal, "page_id",
                "page id " + std::to_string(page) + " is not dense; ids are below " +
                    std::to_string(kAbsent - kFirstPage));
  if (!resident(page)) {
    grow_to(place_of(page));
    nodes_[place_of(page)].colder = kWaits;
    ++size_;
  }
  touched(page);
  adopt(parent, page);
}

void LeavesFirst::adopt(PageId parent, PageId child) {
  if (parent == child || !resident(parent) || !resident(child)) return;
  const Place before = parent_of(place_of(child)), now = place_of(parent);
  if (before == now) return;
  lose_child(before);
  nodes_[place_of(child)].parent = now;
  nodes_[place_of(child)].parent_life = nodes_[now].life;
  gain_child(now);
}

void LeavesFirst::touched(PageId page) {
  if (!resident(page)) return;
  const Place place = place_of(page);
  Node& node = nodes_[place];
  const uint64_t before = node.used_at;
  node.used_at = tick();
  node.released = 0;
  const Kind kind = classes_ == 1 ? Kind{} : used(page, node.kind(), {node.used_at, before});
  const bool moves = node.children == 0 && (node.hotter != kind.cls || node.colder == kInHeap);
  if (moves) unlink(place);  // it is the hottest already, or waits
  node.become(kind);
  if (moves) push_hot(kind.cls, place);
}

void LeavesFirst::released(PageId page) {
  if (!resident(page)) return;
  const Place place = place_of(page);
  if (nodes_[place].released) return;
  nodes_[place].released = 1;
  if (nodes_[place].children != 0) return;
  unlink(place);
  push_hot(kReleased, place);
}

void LeavesFirst::removed(PageId page) {
  if (!resident(page)) return;
  const Place place = place_of(page);
  const Place parent = parent_of(place);
  left(page, nodes_[place].kind());
  unlink(place);
  lose_child(parent);
  nodes_[place] = Node{.life = nodes_[place].life + 1};
  --size_;
}

size_t LeavesFirst::victims(std::span<PageId> out, const Exempt& exempt) {
  Search search{out, exempt};
  sweep_aside(search, out.size());
  sweep_leaves(search);
  if (!search.done()) {
    sweep_aside(search, kKeptLooks);
    sweep_leaves(search);  // above those that are exempt no more
  }
  const auto taken = out.first(search.found);
  for (const PageId page : taken) gain_child(parent_of(place_of(page)));
  for (size_t i = taken.size(); i-- > 0;)
    if (const Place place = place_of(taken[i]); nodes_[place].children == 0) place_leaf(place);
  return search.found;
}

uint64_t LeavesFirst::heat(PageId page) const {
  if (!resident(page)) return 0;
  const Node& node = nodes_[place_of(page)];
  if (node.released) return 1;
  const double age = static_cast<double>(now() - node.used_at);
  const float hold_time = age > static_cast<double>(grace_) ? hold_[node.cls] : 1;
  return kHeatOrigin + now() - static_cast<uint64_t>(age / static_cast<double>(hold_time));
}

// --- search
// ---------------------------------------------------------------------------------------

void LeavesFirst::sweep_leaves(Search& search) {
  while (!search.done()) {
    const Place place = ripest_leaf();
    if (place == kNone) return;
    meet(search, place);
  }
}

void LeavesFirst::sweep_aside(Search& search, size_t pages) {
  const Place last = nodes_[kAside].colder;
  while (pages-- > 0 && !search.done() && coldest(kAside) != kAside) {
    const Place place = coldest(kAside);
    meet(search, place);
    if (place == last) return;
  }
}

void LeavesFirst::meet(Search& search, Place place) {
  unlink(place);
  const PageId page = page_of(place);
  if (search.exempt(page)) {
    push_hot(kAside, place);
    return;
  }
  search.out[search.found++] = page;
  lose_child(parent_of(place));
}

// --- links
// ----------------------------------------------------------------------------------------

void LeavesFirst::grow_to(Place place) {
  if (place >= nodes_.size()) nodes_.resize(size_t{place} + 1);
}

void LeavesFirst::unlink(Place place) {
  Node& node = nodes_[place];
  if (node.colder == kWaits) return;
  if (node.colder == kInHeap) {
    auto& heap = heap_of(place);
    const size_t at = node.hotter;
    const Place last = heap.back();
    heap.pop_back();
    if (at != heap.size()) {
      put(heap, at, last);
      sift_up(heap, at);
      sift_down(heap, nodes_[last].hotter);
    }
  } else {
    rings::take_out(nodes_, place);
  }
  node.colder = kWaits;
  node.hotter = kNone;
}

void LeavesFirst::place_leaf(Place place) {
  if (nodes_[place].released) return push_cold(kReleased, place);
  const Place list = nodes_[place].cls, first = coldest(list);
  if (first == list || used_at(place) <= used_at(first)) {
    push_cold(list, place);
    return;
  }
  auto& heap = heap_of(place);
  nodes_[place].colder = kInHeap;
  heap.push_back(place);
  put(heap, heap.size() - 1, place);
  sift_up(heap, heap.size() - 1);
}

void LeavesFirst::gain_child(Place parent) {
  if (parent == kNone) return;
  Node& node = nodes_[parent];
  if (node.children++ != 0) return;
  unlink(parent);
  node.become(bore(page_of(parent), node.kind()));
}

void LeavesFirst::lose_child(Place parent) {
  if (parent != kNone && --nodes_[parent].children == 0) place_leaf(parent);
}

LeavesFirst::Place LeavesFirst::parent_of(Place child) const {
  const Node& node = nodes_[child];
  return node.parent != kNone && nodes_[node.parent].life == node.parent_life ? node.parent : kNone;
}

LeavesFirst::Place LeavesFirst::coldest_leaf(Class cls) const {
  const Place list = cls, first = coldest(list);
  const auto& heap = heaps_[cls];
  if (heap.empty()) return first == list ? kNone : first;
  return first != list && used_at(first) < used_at(heap.front()) ? first : heap.front();
}

float LeavesFirst::ripeness(Place place) const {
  return ripeness_of(static_cast<float>(now() - used_at(place) + 1), hold_[nodes_[place].cls],
                     grace_);
}

LeavesFirst::Place LeavesFirst::ripest_leaf() const {
  if (const Place place = coldest(kReleased); place != kReleased) return place;
  if (classes_ == 1) return coldest_leaf(0);
  Place ripest = kNone;
  float most = 0;
  for (Class cls = 0; cls < classes_; ++cls) {
    const Place place = coldest_leaf(cls);
    if (place == kNone || ripeness(place) <= most) continue;
    ripest = place;
    most = ripeness(place);
  }
  return ripest;
}

// --- the heaps
// ----------------------------------------------------------------------------------------

void LeavesFirst::put(std::vector<Place>& heap, size_t at, Place place) {
  heap[at] = place;
  nodes_[place].hotter = static_cast<Place>(at);
}

void LeavesFirst::sift_up(std::vector<Place>& heap, size_t at) {
  for (; at != 0 && is_colder(heap, at, (at - 1) / 2); at = (at - 1) / 2) {
    const Place above = heap[(at - 1) / 2];
    put(heap, (at - 1) / 2, heap[at]);
    put(heap, at, above);
  }
}

void LeavesFirst::sift_down(std::vector<Place>& heap, size_t at) {
  for (;;) {
    size_t least = at;
    for (const size_t below : {2 * at + 1, 2 * at + 2})
      if (below < heap.size() && is_colder(heap, below, least)) least = below;
    if (least == at) return;
    const Place colder = heap[least];
    put(heap, least, heap[at]);
    put(heap, at, colder);
    at = least;
  }
}

}  // namespace kvw
