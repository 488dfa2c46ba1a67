// Identities of pages that left, first in first out: what a policy remembers of them. A page that
// comes back while it is remembered was evicted too early. Not thread-safe. Bounded by the limit
// that each remember() is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>

namespace kvw {

class Ghost {
 public:
  // Remembers `identity` as the newest, and forgets the oldest beyond `limit`.
  void remember(uint64_t identity, size_t limit);
  // Whether it was remembered; it no longer is.
  bool recall(uint64_t identity);
  size_t size() const { return stamps_.size(); }

 private:
  struct Entry {
    uint64_t identity;
    uint64_t stamp;
  };
  // An entry whose stamp is not that of its identity is a recalled or renewed one: it only waits
  // to fall off the end.
  std::deque<Entry> order_;
  std::unordered_map<uint64_t, uint64_t> stamps_;
  uint64_t next_stamp_ = 0;
};

}  // namespace kvw
