// Least recently used, leaves first: the next victim is the coldest page that has no resident
// children.
//
// Pages without children are in a list from cold to hot, those with children in none: they wait
// until the last child leaves. Such a page is as a rule the coldest of all then, since whoever used
// the child used it, too, and before. Where others used it since, it goes by its last use into a
// heap beside the list, and the next victim is the colder of the list's coldest and the heap's. So
// no search passes a page with children, however many there are.
//
// A kept page that a search meets is set aside in a second list, of which each search looks at
// some.
//
// Of its children a page knows how many there are, not which: so it leaves without a look at them.
// kPageBytes a page, and 4 of one in the heap. Not thread-safe.
#pragma once

#include "eviction/policy.h"

namespace kvw {

class LruPolicy final : public EvictionPolicy {
 public:
  static constexpr uint64_t kPageBytes = 32;

  explicit LruPolicy(size_t capacity);

  void inserted(PageId page, PageId parent) override;
  void adopt(PageId parent, PageId child) override;
  void touched(PageId page) override;
  void removed(PageId page) override;
  size_t victims(std::span<PageId> out, const Keep& keep) override;
  uint64_t heat(PageId page) const override;
  size_t size() const override { return size_; }

 private:
  // A place in nodes_: the heads of the two lists, then the pages. Links are places; of a page in
  // the heap `hotter` is where.
  using Place = uint32_t;
  static constexpr Place kMain = 0;
  static constexpr Place kAside = 1;
  static constexpr Place kFirstPage = 2;
  static constexpr Place kNone = UINT32_MAX;

  // Values of `colder` of a page that is in no list: with children, in the heap, not resident.
  static constexpr Place kWaits = UINT32_MAX - 1;
  static constexpr Place kInHeap = UINT32_MAX - 2;
  static constexpr Place kAbsent = UINT32_MAX - 3;

  struct Node {
    Place colder = kAbsent;  // the lists are rings through their heads
    Place hotter = kNone;
    Place parent = kNone;
    uint32_t parent_life = 0;  // and which page there: another life, and the parent has left
    uint32_t life = 0;         // how many pages have left this place
    uint32_t children = 0;
    uint64_t used_at = 0;
  };
  static_assert(sizeof(Node) == kPageBytes);

  struct Search;

  static Place place_of(PageId page) { return page + kFirstPage; }
  bool resident(PageId page) const;
  Place coldest(Place list) const { return nodes_[list].hotter; }
  uint64_t used_at(Place place) const { return nodes_[place].used_at; }

  void grow_to(Place place);
  void link_between(Place place, Place colder, Place hotter);
  void push_hot(Place list, Place place);
  void push_cold(Place list, Place place);
  // Out of the list or the heap that it is in.
  void unlink(Place place);
  // A page without children, in no list: to where its last use belongs.
  void place_leaf(Place place);
  void gain_child(Place parent);
  void lose_child(Place parent);  // both ignore kNone
  // kNone: it has none, or that left.
  Place parent_of(Place child) const;
  Place coldest_leaf() const;  // kNone: there is none, but for those set aside

  void put(size_t at, Place place);  // in the heap
  bool is_colder(size_t at, size_t other) const {
    return used_at(heap_[at]) < used_at(heap_[other]);
  }
  void sift_up(size_t at);
  void sift_down(size_t at);

  void sweep_leaves(Search& search);
  void sweep_aside(Search& search, size_t pages);
  // Takes the leaf, or sets it aside.
  void meet(Search& search, Place place);

  std::vector<Node> nodes_;
  std::vector<Place> heap_;  // the coldest first
  size_t size_ = 0;
};

}  // namespace kvw
