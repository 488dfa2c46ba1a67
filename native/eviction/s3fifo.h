// S3-FIFO, leaves first. Two first-in first-out queues: new pages enter the *small* one, a tenth of
// all; what was used again before it reaches the cold end goes on to the *main* one, the rest
// leaves and is remembered. What comes back while it is remembered enters main at once. A scan
// passes through small and leaves main alone. (Yang, Zhang, Qiu, Yue, Vigfusson: "FIFO queues are
// all you need for cache eviction", SOSP 2023.)
//
// A page with resident children that reaches the cold end, and was not used again, is *parked* in
// no queue; its last child's removal brings it back to that end. An exempt page is set *aside*;
// each search looks at some of them. Uses only count, they move nothing: a touch writes one node.
//
// What left is remembered by the identity that announced() gave; without announcements (ids of
// slots that are used again say nothing about what was in them) there is no memory, and only what
// is used again in small reaches main.
//
// 48 bytes a page, and as much again for what is remembered. Not thread-safe.
#pragma once

#include "eviction/ghost.h"
#include "eviction/policy.h"
#include "eviction/rings.h"

namespace kvw {

class S3FifoPolicy final : public EvictionPolicy {
 public:
  static constexpr uint64_t kPageBytes = 4 * 48;  // with what is remembered

  explicit S3FifoPolicy(size_t capacity);

  void announced(PageId page, uint64_t identity) override;
  void inserted(PageId page, PageId parent) override;
  void adopt(PageId parent, PageId child) override;
  void touched(PageId page) override;
  void removed(PageId page) override;
  size_t victims(std::span<PageId> out, const Exempt& exempt) override;
  uint64_t heat(PageId page) const override;
  size_t size() const override { return size_; }

 private:
  // A place in nodes_: the heads of the three lists, then the pages. Links are places.
  using Place = uint32_t;
  static constexpr Place kSmall = 0;
  static constexpr Place kMain = 1;
  static constexpr Place kAside = 2;
  static constexpr Place kFirstPage = 3;
  static constexpr Place kNone = UINT32_MAX;

  // Values of `colder` of a page that is in no list.
  static constexpr Place kParked = UINT32_MAX - 1;
  static constexpr Place kAbsent = UINT32_MAX - 2;

  static constexpr uint8_t kMostUses = 3;

  struct Node {
    Place colder = kAbsent;  // rings.h
    Place hotter = kNone;
    Place parent = kNone;
    Place first_child = kNone;
    Place next_sibling = kNone;
    Place previous_sibling = kNone;
    uint64_t identity = 0;
    uint64_t used_at : 61 = 0;
    uint64_t uses : 2 = 0;
    uint64_t in_main : 1 = 0;
    bool known = false;  // has an identity
  };

  struct Search;

  static Place place_of(PageId page) { return page + kFirstPage; }
  bool resident(PageId page) const;
  Place coldest(Place list) const { return rings::coldest(nodes_, list); }
  Place queue_of(Place place) const { return nodes_[place].in_main ? kMain : kSmall; }

  void push_hot(Place list, Place place) { rings::push_hot(nodes_, list, place); }
  void push_cold(Place list, Place place) { rings::push_cold(nodes_, list, place); }
  void park(Place place);
  void unpark_leaf(Place place);
  void link_child(Place parent, Place child);
  // Leaves the child's `parent` as it is. Returns the parent, or kNone.
  Place unlink_child(Place child);

  // Brings up to `pages` pages that are exempt no more back from aside. Returns how many.
  size_t wake(const Exempt& exempt, size_t pages);
  void hunt(Search& search);
  // Looks at the coldest of the queue: it goes on, stays, or is taken. False: the queue is empty.
  bool step(Search& search, Place queue);
  bool goes_on(Place place);
  void take(Search& search, Place place);

  std::vector<Node> nodes_;
  Ghost ghost_;
  size_t size_ = 0;
  size_t small_size_ = 0;  // pages whose queue is small, wherever they are now
  PageId announced_ = kNoPage;
  uint64_t identity_ = 0;
};

}  // namespace kvw
