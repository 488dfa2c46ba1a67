#include "warehouse/page_table.h"

#include <bit>
#include <cstring>
#include <new>
#include <type_traits>

namespace kvw {

namespace {

constexpr uint64_t kOnes = 0x0101010101010101ull, kLow7 = 0x7f7f7f7f7f7f7f7full;
static_assert(kIndexWindow == 16 && std::endian::native == std::endian::little);

uint8_t tag_of(const Key& key) {
  // Not of the word that says where its home is. 0 is for empty positions.
  const auto byte = static_cast<uint8_t>(key.hi >> 56);
  return byte == 0 ? 1 : byte;
}

// 0x80 in each byte that is 0, exactly: no carry leaves a byte.
uint64_t zero_bytes(uint64_t word) { return ~(((word & kLow7) + kLow7) | word | kLow7); }

template <class T>
T* zeros(uint64_t count) {
  static_assert(std::is_trivially_destructible_v<T> && std::is_trivially_copyable_v<T>);
  void* memory = std::calloc(count, sizeof(T));
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<T*>(memory);
}

uint32_t step_of(uint64_t bits) { return static_cast<uint32_t>(std::countr_zero(bits)) / 8; }

}  // namespace

PageTable::PageTable(uint64_t positions)
    : mask_(positions - 1),
      capacity_(positions / 2),
      tags_(zeros<uint8_t>(positions + kIndexWindow - 1)),
      numbers_(zeros<PageNumber>(positions)),
      pages_(zeros<Page>(positions)),
      extents_(zeros<nvme::Extent>(positions)) {
  assert(std::has_single_bit(positions));
}

template <class Meant>
PageId PageTable::first_place(const Key& key, uint8_t tag, Meant meant) const {
  for (const PageId home : homes(key)) {
    std::array<uint64_t, 2> halves;  // of the window's tags
    std::memcpy(halves.data(), &tags_[home], sizeof halves);
    for (uint32_t at = 0; at < 2; ++at)
      for (uint64_t bits = zero_bytes(halves[at] ^ kOnes * tag); bits != 0; bits &= bits - 1) {
        const auto page = static_cast<PageId>((home + 8 * at + step_of(bits)) & mask_);
        if (meant(page)) return page;
      }
  }
  return kNoPage;
}

PageId PageTable::find(const Key& key) const {
  return first_place(key, tag_of(key),
                     [&](PageId page) { return pages_[numbers_[page]].key == key; });
}

PageId PageTable::empty_place(const Key& key) const {
  return first_place(key, 0, [this](PageId page) { return numbers_[page] != kNoNumber; });
}

void PageTable::set_tag(PageId page, uint8_t tag) {
  for (uint64_t at = page; at < mask_ + kIndexWindow; at += mask_ + 1) tags_[at] = tag;
}

EntryView PageTable::view(PageId page) const {
  const PageNumber number = number_at(page);
  const Page& kept = pages_[number];
  EntryView view;
  view.page = page;
  view.flags = static_cast<uint16_t>(kEntryUsed | kept.node.tiers << 1);
  view.space = kept.node.space;
  view.key = kept.key;
  view.slot = kept.slot;
  view.generation = kept.generation;
  if (view.in_nvme()) view.extent = extents_[number];
  view.clear_epoch = kept.clear_epoch;
  return view;
}

PageNumber PageTable::free_number() {
  const PageNumber number = first_free_;
  if (number != kNoNumber) {
    first_free_ = pages_[number].node.next;
    return number;
  }
  assert(given_ <= mask_);
  return given_++;
}

void PageTable::add(const EntryView& view, PageNumber left) {
  assert(!has(view.page));
  const PageNumber number = left == kNoNumber ? add_left(view.key) : left;
  assert(has_left(number) && pages_[number].key == view.key);
  pages_[number].node = PageNode{.first_child = numbered(number).first_child};
  numbers_[view.page] = number;
  set_tag(view.page, tag_of(view.key));
  change(view);
}

PageNumber PageTable::add_left(const Key& key) {
  const PageNumber number = free_number();
  pages_[number].key = key;
  pages_[number].node = PageNode{};
  return number;
}

void PageTable::change(const EntryView& view) {
  static_assert(kEntryUsed == 1 && (kEntryDram | kEntryNvme | kEntryUnverified) >> 1 == 7);
  const PageNumber number = number_at(view.page);
  Page& kept = pages_[number];
  assert(kept.key == view.key);
  kept.clear_epoch = view.clear_epoch;
  kept.slot = view.slot;
  kept.generation = view.generation;
  kept.node.tiers = static_cast<uint16_t>(view.flags >> 1) & 7;
  kept.node.space = view.space & (kMaxNamespaces - 1);
  if (view.in_nvme()) extents_[number] = view.extent;
}

void PageTable::leave(PageId page) {
  node(page).tiers = 0;
  set_tag(page, 0);
}

void PageTable::forget(PageNumber number) {
  assert(has_left(number));
  pages_[number].node.next = first_free_;
  first_free_ = number;
}

}  // namespace kvw
