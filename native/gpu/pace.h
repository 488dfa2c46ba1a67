// How long the device takes, and when to look whether it is done. Each look takes a lock of the
// driver's that the engine's launches want, and a look too late is time in which a bus rests.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvw::gpu {

// Of works of one kind, one after the other, how long one takes at least. A late thread, or a bus
// that others use too, makes a work seem long: that is believed by and by. Not thread-safe.
class Pace {
 public:
  uint64_t expected_ns(uint64_t bytes) const {
    // What is larger takes no less than what was seen.
    return static_cast<uint64_t>(ns_ * std::min(1.0, share(bytes)));
  }
  // When a work that was queued at begun_ns began, at the earliest that is known.
  uint64_t from_ns(uint64_t begun_ns) const {
    return closely_ ? std::max(begun_ns, done_ns_) : begun_ns;
  }
  // Times of one clock. `closely`: a look before that one found that it was not done; else it may
  // have been done long ago.
  void learn(uint64_t bytes, uint64_t begun_ns, uint64_t done_ns, bool closely) {
    const uint64_t from_ns = this->from_ns(begun_ns);
    const auto took_ns = static_cast<double>(done_ns - std::min(done_ns, from_ns));
    const bool known = closely && (closely_ || begun_ns >= done_ns_);
    done_ns_ = done_ns;
    closely_ = closely;
    const double expected_ns = ns_ * share(bytes);
    if (known && share(bytes) >= kComparable) {
      ns_ = std::min(took_ns, expected_ns * 9 / 8);
      bytes_ = static_cast<double>(bytes);
    } else if (took_ns < expected_ns) {
      ns_ = took_ns / share(bytes);
    }
    ns_ = std::max(ns_, kLeastNs);
  }

 private:
  static constexpr double kComparable = 0.75;  // what any work costs besides counts little
  static constexpr double kLeastNs = 1000;

  double share(uint64_t bytes) const { return static_cast<double>(bytes) / bytes_; }

  // The largest work, of late, and its time. At first as fast as any bus.
  double bytes_ = 64 << 10, ns_ = kLeastNs;
  uint64_t done_ns_ = 0;  // when the last was seen done
  bool closely_ = false;
};

// When to look for one end. After the first look it is seen an eighth of its time late at most, or
// 5 us, and half a millisecond at most; where its time is known, by the second look or the third.
// The first is too late by as much as was expected too long.
class Looks {
 public:
  Looks() = default;  // of what begins with the first look, and may take any time
  Looks(uint64_t from_ns, uint64_t expected_ns)
      : from_ns_(from_ns), first_ns_(from_ns + expected_ns / 10 * 9) {}

  // From now to the next look; 0: at once. Called before each.
  uint64_t next_ns(uint64_t now_ns) {
    if (from_ns_ == 0) from_ns_ = now_ns;
    if (looks_++ == 0) return first_ns_ - std::min(first_ns_, now_ns);
    return std::clamp((now_ns - from_ns_) / 8, kShortestNs, kLongestNs);
  }
  // Whether one look found it not done, so that the end is near the last.
  bool closely() const { return looks_ > 1; }

 private:
  static constexpr uint64_t kShortestNs = 5'000;
  static constexpr uint64_t kLongestNs = 500'000;

  uint64_t from_ns_ = 0, first_ns_ = 0;
  uint64_t looks_ = 0;
};

}  // namespace kvw::gpu
