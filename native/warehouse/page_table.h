// What the core keeps of each page, found by key or by the position of the page's entry in the
// shared index. It has the index's shape, its homes and places, so that a page's position says
// where both have it; but of a position it keeps five bytes, and what there is to say of a page
// lies densely beside the other pages'. So memory goes by pages rather than by the size of the
// table, a key that is not there costs two looks at sixteen bytes, and pages that were stored one
// after the other are neighbours. A page that left keeps its number for as long as it has children,
// so that they need not hear of it. Owned by the core thread.
//
// Invariants:
//  - A position's tag is 0 exactly while no page is there; else it is a byte of the page's key.
//  - Pages at positions have different numbers; a number that is at none is that of a page that
//    left, waits in the free list or was never given. Numbers given are never more than the most
//    pages there were at one time, and those that left.
#pragma once

#include <array>
#include <cassert>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "base/types.h"
#include "index/index.h"

namespace kvw {

using PageNumber = uint32_t;
constexpr PageNumber kNoNumber = UINT32_MAX;

// Private links between parents and children, which the shared table does not need, and uses.
struct PageNode {
  PageNumber parent = kNoNumber;
  PageNumber first_child = kNoNumber;
  PageNumber next = kNoNumber;  // sibling
  PageNumber previous = kNoNumber;
  uint32_t position = 0;
  uint16_t used_at = 0;   // when its last use began, in half seconds; 0: not since it came
  uint16_t used : 1 = 0;  // loaded since it was written to NVMe: reclaim relocates it
  // Of the entry, here because there is room for them.
  uint16_t tiers : 3 = 0;  // its flags above kEntryUsed; none: it left
  uint16_t space : 12 = 0;

  bool in_dram() const { return (tiers << 1 & kEntryDram) != 0; }
  bool in_nvme() const { return (tiers << 1 & kEntryNvme) != 0; }
};
static_assert(sizeof(PageNode) == 24 && kMaxNamespaces <= 1 << 12);

class PageTable {
  struct Page {
    Key key;
    uint64_t clear_epoch;
    SlotId slot;
    uint32_t generation;
    PageNode node;
  };
  static_assert(sizeof(Page) == 56);

 public:
  // `positions`: of the index, a power of two; half as many pages at most.
  explicit PageTable(uint64_t positions);

  // Memory of one that has room for so many pages, when they are there.
  static constexpr uint64_t bytes(uint64_t pages) {
    return pages *
           (2 * (sizeof(uint8_t) + sizeof(PageNumber)) + sizeof(Page) + sizeof(nvme::Extent));
  }

  uint64_t capacity() const { return capacity_; }
  // Brings what find() looks at first into the cache.
  void prefetch(const Key& key) const {
    for (const PageId home : homes(key)) __builtin_prefetch(&tags_[home]);
    __builtin_prefetch(&numbers_[homes(key)[0]]);
  }
  // What is looked at of a page that is there, one step after the other.
  void prefetch_place(PageId page) const {
    __builtin_prefetch(&tags_[page]);
    __builtin_prefetch(&numbers_[page]);
  }
  void prefetch_page(PageId page) const {
    const auto* own = reinterpret_cast<const std::byte*>(&pages_[number_at(page)]);
    __builtin_prefetch(own, 1);
    __builtin_prefetch(own + sizeof(Page) - 1, 1);
  }
  // kNoPage: it is not there.
  PageId find(const Key& key) const;
  // The first of the key's places without a page that nobody has claimed, or kNoPage.
  PageId empty_place(const Key& key) const;
  // Kept for a page that is to come: until it is added there, or the claim is given up.
  void claim(PageId page) {
    assert(!has(page));
    numbers_[page] = kNoNumber;
  }
  void unclaim(PageId page) { numbers_[page] = 0; }
  bool claimed(PageId page) const { return !has(page) && numbers_[page] == kNoNumber; }
  bool has(PageId page) const { return page <= mask_ && tags_[page] != 0; }

  // Of a page that is there: its entry.
  EntryView view(PageId page) const;
  // Of a page that is there.
  PageNode& node(PageId page) { return pages_[number_at(page)].node; }
  const PageNode& node(PageId page) const { return pages_[number_at(page)].node; }
  PageNumber number_at(PageId page) const {
    assert(has(page));
    return numbers_[page];
  }

  // By number: of pages that are there and of pages that left.
  PageNode& numbered(PageNumber number) { return pages_[number].node; }
  const PageNode& numbered(PageNumber number) const { return pages_[number].node; }
  const Key& key(PageNumber number) const { return pages_[number].key; }
  bool has_left(PageNumber number) const { return numbered(number).tiers == 0; }

  // Adds a page at view.page, an empty one of its places; under the number of the same page
  // that left, with its children, else with fresh links. Precondition: less than capacity() pages
  // are there.
  void add(const EntryView& view, PageNumber left = kNoNumber);
  // A page that is not there yet. Precondition: those that left are no more than those there.
  PageNumber add_left(const Key& key);
  // Precondition: it is there, under the same key.
  void change(const EntryView& view);
  void leave(PageId page);
  // Of a page that left: its number is free.
  void forget(PageNumber number);

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  template <class T>
  using Zeros = std::unique_ptr<T[], Free>;

  PageNumber free_number();
  std::array<PageId, 2> homes(const Key& key) const {
    return {index_place(key, 0, mask_), index_place(key, kIndexWindow, mask_)};
  }
  // The first of the key's places with such a tag that is `meant`, or kNoPage.
  template <class Meant>
  PageId first_place(const Key& key, uint8_t tag, Meant meant) const;
  void set_tag(PageId page, uint8_t tag);

  uint64_t mask_, capacity_;
  // Zeros from the system, so that what is never used takes no memory.
  Zeros<uint8_t> tags_;  // and again behind the last one, so that no window wraps
  Zeros<PageNumber> numbers_;
  Zeros<Page> pages_;            // by number
  Zeros<nvme::Extent> extents_;  // by number, of pages on NVMe; apart, for where there is no NVMe
  PageNumber given_ = 0;
  PageNumber first_free_ = kNoNumber;  // linked through node.next
};

}  // namespace kvw
