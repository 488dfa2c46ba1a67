// Makes written records durable. A cycle flushes every segment that had unflushed writes when it
// began; when it ends, all that was written before it is durable, or lost and forgotten.
//
// At most one flush per segment is in flight: the kernel reports a failure once, and a second flush
// beside it would succeed and hide it. Core thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <utility>

#include "nvme/context.h"

namespace kvw::nvme {

class Flusher {
 public:
  // A record whose flush failed, before the host is told to forget it.
  using Lost = std::function<void(const Extent&)>;

  explicit Flusher(LogContext& context) : context_(context) {}
  void on_lost(Lost lost) { lost_ = std::move(lost); }

  // Begins a flush of one segment, unless one is in flight.
  void flush(Segment& segment);

  // Asks that all appends up to `sequence` become durable soon.
  void want(uint64_t sequence) { wanted_ = std::max(wanted_, sequence); }
  // The first cycle that begins after this call; ended() tells when it has ended.
  uint64_t next_cycle() const { return cycle_ + 1; }
  void want_cycle() { wanted_cycle_ = next_cycle(); }
  bool ended(uint64_t cycle) const { return ended_cycle_ >= cycle; }

  // `written`: all appends up to it are written or failed.
  void step(uint64_t written);
  uint64_t durable() const { return durable_; }

 private:
  bool cycle_is_due(uint64_t written) const;
  void begin_cycle(uint64_t written);
  void end_cycle();
  struct Snapshot {
    uint64_t writes;
    size_t records;
    uint64_t cycle;
  };
  void flushed(uint32_t number, const Snapshot& before, int error);
  void lose_unflushed(Segment& segment);

  LogContext& context_;
  Lost lost_;
  uint64_t durable_ = 0, wanted_ = 0;
  uint64_t cycle_ = 0, ended_cycle_ = 0, wanted_cycle_ = 0;
  uint64_t target_ = 0;         // of the cycle under way
  std::set<uint32_t> pending_;  // segments that the cycle waits for
  uint64_t last_end_ns_ = 0;
};

}  // namespace kvw::nvme
