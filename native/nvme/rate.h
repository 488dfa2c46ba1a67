// Bytes per second while there was work, smoothed. Idle time does not count: it is what the device
// can do, not what was asked of it. One thread writes; any thread reads value().
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace kvw::nvme {

class Rate {
 public:
  void began(uint64_t now_ns) {
    if (in_flight_++ == 0) since_ns_ = now_ns;
  }

  void ended(uint64_t now_ns, uint64_t bytes) {
    busy_ns_ += now_ns - since_ns_;
    since_ns_ = now_ns;
    bytes_ += bytes;
    --in_flight_;
    if (busy_ns_ >= kWindowNs) close_window();
  }

  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint64_t kWindowNs = 20 * kMillisecondNs;

  void close_window() {
    const double now = static_cast<double>(bytes_) * 1e9 / static_cast<double>(busy_ns_);
    const double before = static_cast<double>(value());
    value_.store(static_cast<uint64_t>(before == 0 ? now : 0.8 * before + 0.2 * now),
                 std::memory_order_relaxed);
    bytes_ = busy_ns_ = 0;
  }

  uint64_t since_ns_ = 0, busy_ns_ = 0, bytes_ = 0;
  unsigned in_flight_ = 0;
  std::atomic<uint64_t> value_{0};
};

}  // namespace kvw::nvme
