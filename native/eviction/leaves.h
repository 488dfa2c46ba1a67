// Pages in a forest, leaves first: the next victim is the ripest page that has no resident
// children.
//
// Each page is of a class, which the policy chooses at each use. Within a class the coldest leaf
// goes first; of the coldest of each class, the one whose age is the largest part of its class's
// hold time. What was used a moment ago waits until there is nothing older. Hold times are the
// policy's, and may change at any time: they move no page. With one class this is least recently
// used.
//
// Pages without children are in a list from cold to hot, one a class, those with children in none:
// they wait until the last child leaves. Such a page is as a rule the coldest of its class then,
// since whoever used the child used it, too, and before. Where others used it since, it goes by its
// last use into a heap beside the list, and the coldest of a class is the colder of the list's
// coldest and the heap's. So no search passes a page with children, however many there are.
//
// What was released goes first, whatever its class: it is in a list of its own while it has no
// children.
//
// An exempt page that a search meets is set aside in a list of its own, of which each search looks
// at some.
//
// Of its children a page knows how many there are, not which: so it leaves without a look at them.
// kNodeBytes a page, and 4 of one in a heap. Not thread-safe.
#pragma once

#include <array>

#include "eviction/policy.h"
#include "eviction/rings.h"

namespace kvw {

// Larger is riper to leave: by age over hold time, above 1, and below 1 for what is younger than
// `grace`, by its age alone. Ages in ticks, from 1 on.
inline float ripeness_of(float age, float hold_time, float grace) {
  return age > grace ? 1 + age / hold_time : age / grace;
}

class LeavesFirst : public EvictionPolicy {
 public:
  static constexpr uint64_t kNodeBytes = 32;
  static constexpr uint32_t kClasses = 7;  // at most
  // Above 0. Their ratios say what goes first; what they are themselves counts in heat() alone.
  using HoldTimes = std::array<float, kClasses>;

  void inserted(PageId page, PageId parent) final;
  void adopt(PageId parent, PageId child) final;
  void touched(PageId page) final;
  void released(PageId page) final;
  void removed(PageId page) final;
  size_t victims(std::span<PageId> out, const Exempt& exempt) final;
  // The time of the last use, as if the page's class held for as long as one of hold time 1; 1 of
  // what was released.
  uint64_t heat(PageId page) const final;
  size_t size() const final { return size_; }

 protected:
  using Class = uint8_t;
  // What a policy notes of a page beside its class; 0 when it comes.
  using Mark = uint8_t;
  struct Kind {
    Class cls = 0;
    Mark mark = 0;
  };
  struct Use {
    uint64_t now, before;  // ticks; before: of the last use, 0 for a page that has just come
  };

  LeavesFirst(size_t capacity, Class classes);

  // What a page is from now on: it was used, it has its first child. All are resident.
  virtual Kind used(PageId page, Kind kind, Use use) = 0;
  virtual Kind bore(PageId page, Kind kind) = 0;
  virtual void left(PageId page, Kind kind) = 0;

  // A page that was used less than `grace` ticks ago goes only if all leaves were.
  void hold(const HoldTimes& times, float grace) { hold_ = times, grace_ = grace; }

 private:
  // A place in nodes_: the heads of the lists, then the pages. Links are places; of a page in a
  // heap `hotter` is where.
  using Place = uint32_t;
  static constexpr Place kReleased = kClasses;  // the classes' lists are before it
  static constexpr Place kAside = kReleased + 1;
  static constexpr Place kFirstPage = kAside + 1;
  static constexpr Place kNone = UINT32_MAX;

  // Values of `colder` of a page that is in no list: with children, in its class's heap, not
  // resident.
  static constexpr Place kWaits = UINT32_MAX - 1;
  static constexpr Place kInHeap = UINT32_MAX - 2;
  static constexpr Place kAbsent = UINT32_MAX - 3;

  struct Node {
    Place colder = kAbsent;  // rings.h
    Place hotter = kNone;
    Place parent = kNone;
    uint32_t parent_life = 0;  // and which page there: another life, and the parent has left
    uint32_t life = 0;         // how many pages have left this place
    uint32_t children = 0;
    uint64_t used_at : 51 = 0;
    uint64_t released : 1 = 0;
    uint64_t cls : 4 = 0;
    uint64_t mark : 8 = 0;

    Kind kind() const { return {static_cast<Class>(cls), static_cast<Mark>(mark)}; }
    void become(Kind kind) { cls = kind.cls, mark = kind.mark; }
  };
  static_assert(sizeof(Node) == kNodeBytes);

  struct Search;

  static Place place_of(PageId page) { return page + kFirstPage; }
  static PageId page_of(Place place) { return place - kFirstPage; }
  bool resident(PageId page) const;
  Place coldest(Place list) const { return rings::coldest(nodes_, list); }
  uint64_t used_at(Place place) const { return nodes_[place].used_at; }
  float ripeness(Place place) const;

  void grow_to(Place place);
  void push_hot(Place list, Place place) { rings::push_hot(nodes_, list, place); }
  void push_cold(Place list, Place place) { rings::push_cold(nodes_, list, place); }
  // Out of the list or the heap that it is in.
  void unlink(Place place);
  // A page without children, in no list: to where its last use belongs, or among the released.
  void place_leaf(Place place);
  void gain_child(Place parent);
  void lose_child(Place parent);  // both ignore kNone
  // kNone: it has none, or that left.
  Place parent_of(Place child) const;
  Place coldest_leaf(Class cls) const;  // kNone: there is none, but for those set aside
  Place ripest_leaf() const;            // likewise

  std::vector<Place>& heap_of(Place place) { return heaps_[nodes_[place].cls]; }
  void put(std::vector<Place>& heap, size_t at, Place place);
  bool is_colder(const std::vector<Place>& heap, size_t at, size_t other) const {
    return used_at(heap[at]) < used_at(heap[other]);
  }
  void sift_up(std::vector<Place>& heap, size_t at);
  void sift_down(std::vector<Place>& heap, size_t at);

  void sweep_leaves(Search& search);
  void sweep_aside(Search& search, size_t pages);
  // Takes the leaf, or sets it aside.
  void meet(Search& search, Place place);

  std::vector<Node> nodes_;
  std::array<std::vector<Place>, kClasses> heaps_;  // the coldest first
  Class classes_;
  HoldTimes hold_;
  float grace_ = 0;
  size_t size_ = 0;
};

}  // namespace kvw
