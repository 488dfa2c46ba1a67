// Whether the tier takes writes. Three failures in a row make it read-only; after the retry
// interval it is probed, and one success makes it whole. Writes and flushes are counted apart: a
// device that takes writes and fails to flush them is not healthy. Core thread only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "nvme/log.h"

namespace kvw::nvme {

// "no_space", "read_only", "stopped" or "io_error": the reasons of LogHost::on_write_failed.
std::string_view reason_of(int error);
// "segment=3 error=EIO".
std::string event_detail(uint32_t segment, int error);

class Health {
 public:
  Health(LogHost& host, const Clock& clock, uint64_t retry_interval_ns)
      : host_(host), clock_(clock), retry_interval_ns_(retry_interval_ns) {}

  bool writable() const { return state_ == LogHealth::ok; }
  LogHealth state() const { return state_; }
  // Of a tier that is read-only: as reason_of(), an "io_error" with its errno ("io_error EINVAL").
  const std::string& reason() const { return reason_; }

  void write_failed(int error);
  void write_succeeded() { write_failures_ = 0; }
  void flush_failed(int error);
  void flush_succeeded() { flush_failures_ = 0; }

  void become_read_only(int error);
  bool probe_due() const { return !writable() && clock_.boot_ns() >= probe_at_ns_; }
  void probe_ended(int error);

 private:
  LogHost& host_;
  const Clock& clock_;
  uint64_t retry_interval_ns_;
  LogHealth state_ = LogHealth::ok;
  std::string reason_;
  unsigned write_failures_ = 0, flush_failures_ = 0;
  uint64_t probe_at_ns_ = 0;
};

}  // namespace kvw::nvme
