// How often pages that left had been used: 4 bytes a page, in sets of 4 of which the oldest gives
// way. What is remembered of one page is sometimes told of another (4 in 65,536 sets of
// identities), and what is older than as many others as there is room for is forgotten. Not
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvw {

class UseMemory {
 public:
  static constexpr uint32_t kMostUses = 7;
  static constexpr uint64_t kEntryBytes = 4;

  // Room for at least so many pages. Where there is less, all that is remembered is forgotten: a
  // cache grows before it evicts.
  void reserve(size_t pages);
  // `identity`: a hash, all bits of it. `uses`: 1 to kMostUses.
  void remember(uint64_t identity, uint32_t uses);
  // 0: not remembered. It no longer is.
  uint32_t recall(uint64_t identity);

 private:
  static constexpr uint32_t kWays = 4;
  static constexpr uint32_t kAgeBits = 13, kAges = 1 << kAgeBits;
  struct Entry {
    uint32_t tag : 16;
    uint32_t uses : 3;  // 0: free
    uint32_t at : kAgeBits;
  };
  static_assert(sizeof(Entry) == kEntryBytes);
  struct Free {
    void operator()(Entry* entries) const;
  };

  Entry* set_of(uint64_t identity) const;
  uint32_t age(const Entry& entry) const { return (now() - entry.at) % kAges; }
  uint32_t now() const { return static_cast<uint32_t>(count_ / unit_ % kAges); }

  std::unique_ptr<Entry[], Free> entries_;
  size_t size_ = 0;  // a power of two, or 0
  uint64_t count_ = 0, unit_ = 1;
};

}  // namespace kvw
