#include "eviction/use_memory.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

namespace kvw {

void UseMemory::Free::operator()(Entry* entries) const { std::free(entries); }

void UseMemory::reserve(size_t pages) {
  if (pages <= size_) return;
  size_ = std::bit_ceil(std::max<size_t>(pages, 64));
  // Zeros of the kernel's, which become memory where they are written to.
  entries_.reset(static_cast<Entry*>(std::calloc(size_, sizeof(Entry))));
  if (!entries_) throw std::bad_alloc();
  unit_ = std::max<uint64_t>(1, size_ / (kAges / 8));
}

UseMemory::Entry* UseMemory::set_of(uint64_t identity) const {
  return &entries_[(identity & (size_ / kWays - 1)) * kWays];
}

void UseMemory::remember(uint64_t identity, uint32_t uses) {
  if (size_ == 0) return;
  ++count_;
  Entry* const set = set_of(identity);
  Entry* const entry = std::max_element(set, set + kWays, [this](const Entry& a, const Entry& b) {
    const auto rank = [this](const Entry& each) { return each.uses == 0 ? kAges : age(each); };
    return rank(a) < rank(b);
  });
  entry->tag = static_cast<uint32_t>(identity >> 48);
  entry->uses = std::min(uses, kMostUses);
  entry->at = now();
}

uint32_t UseMemory::recall(uint64_t identity) {
  if (size_ == 0) return 0;
  Entry* const set = set_of(identity);
  Entry* const entry = std::find_if(set, set + kWays, [identity](const Entry& each) {
    return each.uses != 0 && each.tag == identity >> 48;
  });
  if (entry == set + kWays) return 0;
  const uint32_t uses = uint64_t{age(*entry)} * unit_ <= size_ ? entry->uses : 0;
  entry->uses = 0;
  return uses;
}

}  // namespace kvw
