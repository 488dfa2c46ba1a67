#include "eviction/lru.h"

#include "base/error.h"

namespace kvw {

namespace {

constexpr size_t kKeptLooks = 1024;  // of a search that finds nothing else

}  // namespace

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
    nodes_[place_of(page)].colder = kParked;
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
  ++nodes_[now].children;
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
  lose_child(parent_of(place));
  park(place);
  nodes_[place] = Node{.life = nodes_[place].life + 1};
  --size_;
}

size_t LruPolicy::victims(std::span<PageId> out, const Keep& keep) {
  Search search{out, keep};
  sweep_aside(search, out.size());
  sweep_main(search);
  if (!search.done()) sweep_aside(search, kKeptLooks);
  for (size_t i = search.found; i-- > 0;) {
    const Place place = place_of(out[i]);
    push_cold(kMain, place);
    if (const Place parent = parent_of(place); parent != kNone) ++nodes_[parent].children;
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
  if (nodes_[place].children != 0) return;
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
    const Place parent = parent_of(place);
    if (parent == kNone || --nodes_[parent].children != 0) return;
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

LruPolicy::Place LruPolicy::parent_of(Place child) const {
  const Node& node = nodes_[child];
  return node.parent != kNone && nodes_[node.parent].life == node.parent_life ? node.parent : kNone;
}

void LruPolicy::lose_child(Place parent) {
  if (parent == kNone || --nodes_[parent].children != 0) return;
  if (nodes_[parent].colder == kParked) push_cold(kMain, parent);
}

}  // namespace kvw
