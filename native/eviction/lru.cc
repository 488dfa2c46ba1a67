#include "eviction/lru.h"

#include "base/error.h"

namespace kvw {

// One call of victims(). A page that it takes leaves its list and its parent's children until the
// end of the call, so that a parent whose children are all taken looks like the leaf it will be.
struct LruPolicy::Search {
  std::span<PageId> out;
  const Keep& keep;
  size_t found = 0;

  bool done() const { return found == out.size(); }
};

LruPolicy::LruPolicy(size_t capacity) {
  nodes_.reserve(capacity + kFirstPage);
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
    nodes_[place_of(page)] = Node{.colder = kParked};
    ++size_;
  }
  touched(page);
  adopt(parent, page);
}

void LruPolicy::adopt(PageId parent, PageId child) {
  if (parent == child || !resident(parent) || !resident(child)) return;
  if (nodes_[place_of(child)].parent == place_of(parent)) return;
  unpark_leaf(unlink_child(place_of(child)));
  link_child(place_of(parent), place_of(child));
}

void LruPolicy::touched(PageId page) {
  if (!resident(page)) return;
  const Place place = place_of(page);
  nodes_[place].used_at = tick();
  if (nodes_[place].hotter == kMain) return;  // the hottest already
  park(place);
  push_hot(kMain, place);
}

void LruPolicy::removed(PageId page) {
  if (!resident(page)) return;
  const Place place = place_of(page);
  for (Place child = nodes_[place].first_child; child != kNone;) {
    const Place next = nodes_[child].next_sibling;
    nodes_[child].parent = nodes_[child].next_sibling = nodes_[child].previous_sibling = kNone;
    child = next;
  }
  unpark_leaf(unlink_child(place));
  park(place);
  nodes_[place] = Node{};
  --size_;
}

size_t LruPolicy::victims(std::span<PageId> out, const Keep& keep) {
  Search search{out, keep};
  sweep_aside(search, out.size());
  sweep_main(search);
  if (!search.done()) sweep_aside(search, SIZE_MAX);
  for (size_t i = search.found; i-- > 0;) {
    const Place place = place_of(out[i]);
    push_cold(kMain, place);
    if (nodes_[place].parent != kNone) link_child(nodes_[place].parent, place);
  }
  return search.found;
}

uint64_t LruPolicy::heat(PageId page) const {
  return resident(page) ? nodes_[place_of(page)].used_at : 0;
}

// --- search
// ---------------------------------------------------------------------------------------

void LruPolicy::sweep_main(Search& search) {
  while (!search.done() && coldest(kMain) != kMain) meet(search, coldest(kMain));
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
  park(place);
  if (nodes_[place].first_child != kNone) return;
  if (search.keep(place - kFirstPage)) {
    push_hot(kAside, place);
  } else {
    take(search, place);
  }
}

// Takes the page, and the colder ancestors that have no other descendants: they are parked, and
// hence the coldest there are.
void LruPolicy::take(Search& search, Place place) {
  for (;;) {
    search.out[search.found++] = place - kFirstPage;
    const Place parent = unlink_child(place);
    if (parent == kNone || nodes_[parent].first_child != kNone) return;
    if (nodes_[parent].colder != kParked) return;
    if (search.done()) return;
    if (search.keep(parent - kFirstPage)) {
      push_hot(kAside, parent);
      return;
    }
    place = parent;
  }
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

void LruPolicy::park(Place place) {
  Node& node = nodes_[place];
  if (node.colder == kParked) return;
  nodes_[node.colder].hotter = node.hotter;
  nodes_[node.hotter].colder = node.colder;
  node.colder = kParked;
  node.hotter = kNone;
}

void LruPolicy::unpark_leaf(Place place) {
  if (place == kNone || nodes_[place].first_child != kNone) return;
  if (nodes_[place].colder == kParked) push_cold(kMain, place);
}

void LruPolicy::link_child(Place parent, Place child) {
  Node& node = nodes_[child];
  node.parent = parent;
  node.previous_sibling = kNone;
  node.next_sibling = nodes_[parent].first_child;
  if (node.next_sibling != kNone) nodes_[node.next_sibling].previous_sibling = child;
  nodes_[parent].first_child = child;
}

LruPolicy::Place LruPolicy::unlink_child(Place child) {
  Node& node = nodes_[child];
  if (node.parent == kNone) return kNone;
  if (node.previous_sibling != kNone) {
    nodes_[node.previous_sibling].next_sibling = node.next_sibling;
  } else {
    nodes_[node.parent].first_child = node.next_sibling;
  }
  if (node.next_sibling != kNone)
    nodes_[node.next_sibling].previous_sibling = node.previous_sibling;
  node.next_sibling = node.previous_sibling = kNone;
  return node.parent;
}

}  // namespace kvw
