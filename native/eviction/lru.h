// Least recently used, leaves first (leaves.h). Not thread-safe.
#pragma once

#include "eviction/leaves.h"

namespace kvw {

class LruPolicy final : public LeavesFirst {
 public:
  static constexpr uint64_t kPageBytes = 2 * kNodeBytes;

  explicit LruPolicy(size_t capacity) : LeavesFirst(capacity, 1) {}

 private:
  Kind used(PageId, Kind kind, Use) override { return kind; }
  Kind bore(PageId, Kind kind) override { return kind; }
  void left(PageId, Kind) override {}
};

}  // namespace kvw
