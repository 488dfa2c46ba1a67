// When to look whether a device is done with something: a moment after it is, and not all the time.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvw::gpu {

// For one end, which may take any time: it is seen an eighth of that time late at most, or 5 us,
// and half a millisecond at most.
class Looks {
 public:
  static constexpr uint64_t kShortestNs = 5'000;
  static constexpr uint64_t kLongestNs = 500'000;

  // From now to the next look; 0: at once. Called before each.
  uint64_t next_ns(uint64_t now_ns) {
    if (from_ns_ != 0) return std::clamp((now_ns - from_ns_) / 8, kShortestNs, kLongestNs);
    from_ns_ = now_ns;
    return 0;
  }

 private:
  uint64_t from_ns_ = 0;  // the first look
};

}  // namespace kvw::gpu
