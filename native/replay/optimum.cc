#include "replay/optimum.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"

namespace kvw {

namespace {

constexpr uint32_t kNever = UINT32_MAX;

// When a page is asked for next, and where in its chain: the greatest leaves first. 0: not kept.
using Order = uint64_t;

Order order_of(uint32_t request, size_t position) {
  return Order{request} << 32 | static_cast<uint32_t>(position);
}

class Kept {
 public:
  Kept(size_t ids, uint64_t capacity) : order_(ids), capacity_(capacity) {}

  bool has(PageId page) const { return order_[page] != 0; }

  void asked(PageId page, Order next) {
    order_[page] = next;
    heap_.push_back({next, page});
    std::ranges::push_heap(heap_);
    if (heap_.size() > 2 * size_ + kSpare) sweep();
  }

  // False: all that is kept is asked for before it.
  bool take_in(PageId page, Order next) {
    if (size_ >= capacity_ && !make_room(next)) {
      ++counts_.refused;
      return false;
    }
    ++size_;
    ++counts_.written;
    asked(page, next);
    return true;
  }

  void remove(PageId page) {
    order_[page] = 0;
    --size_;
    ++counts_.evicted;
  }

  const TierCounts& counts() const { return counts_; }

 private:
  struct Item {
    Order order;
    PageId page;
    auto operator<=>(const Item&) const = default;
  };
  static constexpr size_t kSpare = 1024;

  bool stale(const Item& item) const { return order_[item.page] != item.order; }

  bool make_room(Order next) {
    while (!heap_.empty() && stale(heap_.front())) pop();
    if (heap_.empty() || heap_.front().order <= next) return false;
    remove(heap_.front().page);
    pop();
    return true;
  }

  void pop() {
    std::ranges::pop_heap(heap_);
    heap_.pop_back();
  }

  // Of items that were asked for since, which lie below the top for long.
  void sweep() {
    std::erase_if(heap_, [this](const Item& item) { return stale(item); });
    std::ranges::make_heap(heap_);
  }

  std::vector<Order> order_;  // by page
  std::vector<Item> heap_;    // and some that are stale
  uint64_t capacity_, size_ = 0;
  TierCounts counts_;
};

// Of each page asked for: the next request that asks for it.
std::vector<uint32_t> next_requests(std::span<const PageId> pages, std::span<const uint64_t> ends,
                                    size_t ids) {
  std::vector<uint32_t> next(pages.size(), kNever), later(ids, kNever);
  for (size_t request = ends.size(); request-- > 0;) {
    const uint64_t begin = request == 0 ? 0 : ends[request - 1];
    for (uint64_t at = begin; at < ends[request]; ++at) next[at] = later[pages[at]];
    for (uint64_t at = begin; at < ends[request]; ++at)
      later[pages[at]] = static_cast<uint32_t>(request);
  }
  return next;
}

}  // namespace

TierCounts optimal_hits(std::span<const PageId> pages, std::span<const uint64_t> ends, size_t ids,
                        uint64_t capacity, std::span<uint32_t> hits) {
  if (ends.size() >= kNever)
    throw Error(ErrorKind::usage, "bad_trace",
                "the trace has " + std::to_string(ends.size()) + " requests; fewer than " +
                    std::to_string(kNever) + " can be replayed at once");
  const std::vector<uint32_t> next = next_requests(pages, ends, ids);
  Kept kept(ids, capacity);
  uint64_t begin = 0;
  for (size_t request = 0; request < ends.size(); begin = ends[request++]) {
    const uint64_t end = ends[request];
    uint64_t at = begin;
    while (at < end && kept.has(pages[at])) ++at;
    hits[request] = static_cast<uint32_t>(at - begin);
    // What is never asked for again makes room first.
    for (at = begin; at < end; ++at) {
      if (!kept.has(pages[at])) continue;
      if (next[at] == kNever)
        kept.remove(pages[at]);
      else
        kept.asked(pages[at], order_of(next[at], at - begin));
    }
    for (at = begin; at < end && next[at] != kNever; ++at)
      if (!kept.has(pages[at]) && !kept.take_in(pages[at], order_of(next[at], at - begin))) break;
  }
  return kept.counts();
}

}  // namespace kvw
