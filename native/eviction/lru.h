// Least recently used, leaves first: the next victim is the coldest page that has no resident
// children. A page that is colder than its children waits for them and follows the last of them.
//
// All pages are in one list from cold to hot, except those that a search met and could not take:
// a page with children is *parked* in no list (its last child's removal brings it back, to the cold
// end: it was colder than its child), a kept page is set *aside* in a second list, of which each
// search looks at some. So no search passes the same page again, and each step of it is paid for
// by the insertion, touch or removal that had put the page into the list.
//
// Of its children a page knows how many there are, not which: so it leaves without a look at them.
// kPageBytes a page. Not thread-safe.
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
  // A place in nodes_: the heads of the two lists, then the pages. Links are places.
  using Place = uint32_t;
  static constexpr Place kMain = 0;
  static constexpr Place kAside = 1;
  static constexpr Place kFirstPage = 2;
  static constexpr Place kNone = UINT32_MAX;

  // Values of `colder` of a page that is in no list.
  static constexpr Place kParked = UINT32_MAX - 1;
  static constexpr Place kAbsent = UINT32_MAX - 2;

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

  void grow_to(Place place);
  void link_between(Place place, Place colder, Place hotter);
  void push_hot(Place list, Place place);
  void push_cold(Place list, Place place);
  // Out of whichever list it is in, to parked.
  void park(Place place);
  // Back to the cold end if it was parked and that was its last child. Ignores kNone.
  void lose_child(Place parent);
  // kNone: it has none, or that left.
  Place parent_of(Place child) const;

  void sweep_main(Search& search);
  void sweep_aside(Search& search, size_t pages);
  // The page is the coldest of its list. Takes it, or parks it, or sets it aside.
  void meet(Search& search, Place place);
  void take(Search& search, Place place);

  std::vector<Node> nodes_;
  size_t size_ = 0;
};

}  // namespace kvw
