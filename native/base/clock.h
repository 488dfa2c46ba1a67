// Time as a seam. Heartbeats, deadlines and TTLs use the boot clock, which counts suspended time
// and never steps; wall time is information only.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

namespace kvw {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual uint64_t boot_ns() const = 0;
  virtual uint64_t wall_ns() const = 0;
};

inline uint64_t clock_ns(clockid_t id) {
  timespec t{};
  clock_gettime(id, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

// What the calling thread has had of the processor, kernel and user together. A call to the kernel.
inline uint64_t thread_cpu_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

class BootClock final : public Clock {
 public:
  uint64_t boot_ns() const override { return clock_ns(CLOCK_BOOTTIME); }
  uint64_t wall_ns() const override { return clock_ns(CLOCK_REALTIME); }
};

// Moves only when told to, and then also with each look at it where creep_ns() said so, as time
// does.
class FakeClock final : public Clock {
 public:
  uint64_t boot_ns() const override { return now_.fetch_add(creep_ns_); }
  uint64_t wall_ns() const override { return now_.load(); }
  void advance_ns(uint64_t ns) { now_ += ns; }
  void creep_ns(uint64_t ns) { creep_ns_ = ns; }

 private:
  mutable std::atomic<uint64_t> now_{1000000000ull};
  uint64_t creep_ns_ = 0;
};

const Clock& system_clock();

inline constexpr uint64_t kSecondNs = 1000000000ull;
inline constexpr uint64_t kMillisecondNs = 1000000ull;

}  // namespace kvw
