#include "eviction/lru.h"

#include "base/error.h"

namespace kvw {

namespace {

constexpr size_t kKeptLooks = 1024;  // of a search that finds nothing else

}  // namespace

// One call of victims(). A page that it takes leaves its list and its parent's children until the
// end of the call, so that a parent whose children are all taken is the leaf that it will be.
struct LruPolicy::Search {
  std::span<PageId> out;
  const Keep& keep;
  size_t found = 0;

  bool done() const { return found == out.size(); }
};

LruPolicy::LruPolicy(size_t capacity) {
  nodes_.reserve(capacity + kFirstPage);
  heap_.reserve(capacity);
  nodes_.resize(kFirstPage);
  for (const Place list : {kMain, kAside}) nodes_[list].colder = nodes_[list].hotter = list;
}

bool LruPolicy::resident(PageId page) const {
  return page < nodes_.size() - kFirstPage && nodes_[place_of(page)].colder != kAbsent;
}

void LruPolicy::inserted(PageId page, PageId parent) {
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

void LruPolicy::adopt(PageId parent, PageId child) {
  if (parent == child || !resident(parent) || !resident(child)) return;
  const Place before = parent_of(place_of(child)), now = place_of(parent);
  if (before == now) return;
  lose_child(before);
  nodes_[place_of(child)].parent = now;
  nodes_[place_of(child)].parent_life = nodes_[now].life;
  gain_child(now);
}

void LruPolicy::touched(PageId page) {
  if (!resident(page)) return;
  const Place place = place_of(page);
  Node& node = nodes_[place];
  node.used_at = tick();
  if (node.children != 0) return;
  if (node.hotter == kMain && node.colder != kInHeap) return;  // the hottest already
  unlink(place);
  push_hot(kMain, place);
}

void LruPolicy::removed(PageId page) {
  if (!resident(page)) return;
  const Place place = place_of(page);
  const Place parent = parent_of(place);
  unlink(place);
  lose_child(parent);
  nodes_[place] = Node{.life = nodes_[place].life + 1};
  --size_;
}

size_t LruPolicy::victims(std::span<PageId> out, const Keep& keep) {
  Search search{out, keep};
  sweep_aside(search, out.size());
  sweep_leaves(search);
  if (!search.done()) {
    sweep_aside(search, kKeptLooks);
    sweep_leaves(search);  // above those that are kept no more
  }
  const auto taken = out.first(search.found);
  for (const PageId page : taken) gain_child(parent_of(place_of(page)));
  for (size_t i = taken.size(); i-- > 0;)
    if (const Place place = place_of(taken[i]); nodes_[place].children == 0) place_leaf(place);
  return search.found;
}

uint64_t LruPolicy::heat(PageId page) const {
  return resident(page) ? nodes_[place_of(page)].used_at : 0;
}

// --- search
// ---------------------------------------------------------------------------------------

void LruPolicy::sweep_leaves(Search& search) {
  while (!search.done()) {
    const Place place = coldest_leaf();
    if (place == kNone) return;
    meet(search, place);
  }
}

void LruPolicy::sweep_aside(Search& search, size_t pages) {
  const Place last = nodes_[kAside].colder;
  while (pages-- > 0 && !search.done() && coldest(kAside) != kAside) {
    const Place place = coldest(kAside);
    meet(search, place);
    if (place == last) return;
  }
}

void LruPolicy::meet(Search& search, Place place) {
  unlink(place);
  const PageId page = place - kFirstPage;
  if (search.keep(page)) {
    push_hot(kAside, place);
    return;
  }
  search.out[search.found++] = page;
  lose_child(parent_of(place));
}

// --- links
// ----------------------------------------------------------------------------------------

void LruPolicy::grow_to(Place place) {
  if (place >= nodes_.size()) nodes_.resize(size_t{place} + 1);
}

void LruPolicy::link_between(Place place, Place colder, Place hotter) {
  nodes_[place].colder = colder;
  nodes_[place].hotter = hotter;
  nodes_[colder].hotter = place;
  nodes_[hotter].colder = place;
}

void LruPolicy::push_hot(Place list, Place place) {
  link_between(place, nodes_[list].colder, list);
}

void LruPolicy::push_cold(Place list, Place place) {
  link_between(place, list, nodes_[list].hotter);
}

void LruPolicy::unlink(Place place) {
  Node& node = nodes_[place];
  if (node.colder == kWaits) return;
  if (node.colder == kInHeap) {
    const size_t at = node.hotter;
    const Place last = heap_.back();
    heap_.pop_back();
    if (at != heap_.size()) {
      put(at, last);
      sift_up(at);
      sift_down(nodes_[last].hotter);
    }
  } else {
    nodes_[node.colder].hotter = node.hotter;
    nodes_[node.hotter].colder = node.colder;
  }
  node.colder = kWaits;
  node.hotter = kNone;
}

void LruPolicy::place_leaf(Place place) {
  const Place first = coldest(kMain);
  if (first == kMain || used_at(place) <= used_at(first)) {
    push_cold(kMain, place);
    return;
  }
  nodes_[place].colder = kInHeap;
  heap_.push_back(place);
  put(heap_.size() - 1, place);
  sift_up(heap_.size() - 1);
}

void LruPolicy::gain_child(Place parent) {
  if (parent != kNone && nodes_[parent].children++ == 0) unlink(parent);
}

void LruPolicy::lose_child(Place parent) {
  if (parent != kNone && --nodes_[parent].children == 0) place_leaf(parent);
}

LruPolicy::Place LruPolicy::parent_of(Place child) const {
  const Node& node = nodes_[child];
  return node.parent != kNone && nodes_[node.parent].life == node.parent_life ? node.parent : kNone;
}

LruPolicy::Place LruPolicy::coldest_leaf() const {
  const Place first = coldest(kMain);
  if (heap_.empty()) return first == kMain ? kNone : first;
  return first != kMain && used_at(first) < used_at(heap_.front()) ? first : heap_.front();
}

// --- the heap
// -----------------------------------------------------------------------------------------

void LruPolicy::put(size_t at, Place place) {
  heap_[at] = place;
  nodes_[place].hotter = static_cast<Place>(at);
}

void LruPolicy::sift_up(size_t at) {
  for (; at != 0 && is_colder(at, (at - 1) / 2); at = (at - 1) / 2) {
    const Place above = heap_[(at - 1) / 2];
    put((at - 1) / 2, heap_[at]);
    put(at, above);
  }
}

void LruPolicy::sift_down(size_t at) {
  for (;;) {
    size_t least = at;
    for (const size_t below : {2 * at + 1, 2 * at + 2})
      if (below < heap_.size() && is_colder(below, least)) least = below;
    if (least == at) return;
    const Place colder = heap_[least];
    put(least, heap_[at]);
    put(at, colder);
    at = least;
  }
}

}  // namespace kvw
