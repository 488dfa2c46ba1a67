#include "eviction/s3fifo.h"

#include <algorithm>

#include "base/error.h"

namespace kvw {

namespace {

constexpr size_t kSmallPart = 10;  // small is a tenth: the paper's choice

}  // namespace

// One call of victims(). A page that it takes leaves its queue and its parent's children until the
// end of the call, so that a parent whose children are all taken looks like the leaf it will be.
struct S3FifoPolicy::Search {
  std::span<PageId> out;
  const Exempt& exempt;
  size_t found = 0;
  size_t found_in_small = 0;

  bool done() const { return found == out.size(); }
};

S3FifoPolicy::S3FifoPolicy(size_t capacity) {
  nodes_.reserve(capacity + kFirstPage);
  nodes_.resize(kFirstPage);
  for (const Place list : {kSmall, kMain, kAside}) rings::make_head(nodes_, list);
}

bool S3FifoPolicy::resident(PageId page) const {
  return page < nodes_.size() - kFirstPage && nodes_[place_of(page)].colder != kAbsent;
}

void S3FifoPolicy::announced(PageId page, uint64_t identity) {
  announced_ = page;
  identity_ = identity;
}

void S3FifoPolicy::inserted(PageId page, PageId parent) {
  if (page >= kAbsent - kFirstPage)
    throw Error(ErrorKind::internal, "page_id",
                "page id " + std::to_string(page) + " is not dense; ids are below " +
                    std::to_string(kAbsent - kFirstPage));
  if (resident(page)) {
    touched(page);
  } else {
    const Place place = place_of(page);
    if (place >= nodes_.size()) nodes_.resize(size_t{place} + 1);
    Node& node = nodes_[place] = Node{};
    node.used_at = tick();
    node.known = announced_ == page;
    node.identity = identity_;
    node.in_main = node.known && ghost_.recall(identity_);
    small_size_ += node.in_main ? 0 : 1;
    ++size_;
    push_hot(queue_of(place), place);
  }
  announced_ = kNoPage;
  adopt(parent, page);
}

void S3FifoPolicy::adopt(PageId parent, PageId child) {
  if (parent == child || !resident(parent) || !resident(child)) return;
  if (nodes_[place_of(child)].parent == place_of(parent)) return;
  unpark_leaf(unlink_child(place_of(child)));
  link_child(place_of(parent), place_of(child));
}

void S3FifoPolicy::touched(PageId page) {
  if (!resident(page)) return;
  Node& node = nodes_[place_of(page)];
  node.used_at = tick();
  if (node.uses < kMostUses) node.uses = node.uses + 1;
}

void S3FifoPolicy::removed(PageId page) {
  if (!resident(page)) return;
  const Place place = place_of(page);
  for (Place child = nodes_[place].first_child; child != kNone;) {
    const Place next = nodes_[child].next_sibling;
    nodes_[child].parent = nodes_[child].next_sibling = nodes_[child].previous_sibling = kNone;
    child = next;
  }
  unpark_leaf(unlink_child(place));
  park(place);
  const Node gone = nodes_[place];
  nodes_[place] = Node{};
  --size_;
  if (gone.in_main) return;
  --small_size_;
  if (gone.known) ghost_.remember(gone.identity, size_ + 1);
}

size_t S3FifoPolicy::victims(std::span<PageId> out, const Exempt& exempt) {
  Search search{out, exempt};
  wake(exempt, out.size());
  hunt(search);
  if (!search.done() && wake(exempt, SIZE_MAX) != 0) hunt(search);
  for (size_t i = search.found; i-- > 0;) {
    const Place place = place_of(out[i]);
    push_cold(queue_of(place), place);
    if (nodes_[place].parent != kNone) link_child(nodes_[place].parent, place);
  }
  return search.found;
}

uint64_t S3FifoPolicy::heat(PageId page) const {
  return resident(page) ? nodes_[place_of(page)].used_at : 0;
}

// --- search
// ---------------------------------------------------------------------------------------

void S3FifoPolicy::hunt(Search& search) {
  while (!search.done()) {
    const size_t small = small_size_ - search.found_in_small;
    const bool small_is_full = small * kSmallPart >= size_ - search.found;
    const Place first = small_is_full ? kSmall : kMain;
    const Place second = small_is_full ? kMain : kSmall;
    if (!step(search, first) && !step(search, second)) return;
  }
}

bool S3FifoPolicy::step(Search& search, Place queue) {
  const Place place = coldest(queue);
  if (place == queue) return false;
  park(place);
  if (goes_on(place) || nodes_[place].first_child != kNone) return true;
  if (search.exempt(place - kFirstPage)) {
    push_hot(kAside, place);
  } else {
    take(search, place);
  }
  return true;
}

// A page of small that was used again moves to main; one of main goes round once more for each use.
bool S3FifoPolicy::goes_on(Place place) {
  Node& node = nodes_[place];
  if (node.uses == 0) return false;
  if (node.in_main) {
    node.uses = node.uses - 1;
  } else {
    node.in_main = 1;
    node.uses = 0;
    --small_size_;
  }
  push_hot(kMain, place);
  return true;
}

void S3FifoPolicy::take(Search& search, Place place) {
  search.out[search.found++] = place - kFirstPage;
  search.found_in_small += nodes_[place].in_main ? 0 : 1;
  unpark_leaf(unlink_child(place));
}

size_t S3FifoPolicy::wake(const Exempt& exempt, size_t pages) {
  const Place last = nodes_[kAside].colder;
  size_t woken = 0;
  while (pages-- > 0 && coldest(kAside) != kAside) {
    const Place place = coldest(kAside);
    park(place);
    if (exempt(place - kFirstPage)) {
      push_hot(kAside, place);
    } else {
      push_cold(queue_of(place), place);
      ++woken;
    }
    if (place == last) break;
  }
  return woken;
}

// --- links
// ----------------------------------------------------------------------------------------

void S3FifoPolicy::park(Place place) {
  Node& node = nodes_[place];
  if (node.colder == kParked) return;
  rings::take_out(nodes_, place);
  node.colder = kParked;
  node.hotter = kNone;
}

void S3FifoPolicy::unpark_leaf(Place place) {
  if (place == kNone || nodes_[place].first_child != kNone) return;
  if (nodes_[place].colder == kParked) push_cold(queue_of(place), place);
}

void S3FifoPolicy::link_child(Place parent, Place child) {
  Node& node = nodes_[child];
  node.parent = parent;
  node.previous_sibling = kNone;
  node.next_sibling = nodes_[parent].first_child;
  if (node.next_sibling != kNone) nodes_[node.next_sibling].previous_sibling = child;
  nodes_[parent].first_child = child;
}

S3FifoPolicy::Place S3FifoPolicy::unlink_child(Place child) {
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
