#include "nvme/health.h"

#include <cerrno>
#include <cstring>

namespace kvw::nvme {

namespace {
constexpr unsigned kFailuresInARow = 3;
}

std::string_view reason_of(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "no_space";
    case EROFS:
      return "read_only";
    case ECANCELED:
      return "stopped";
    default:
      return "io_error";
  }
}

std::string event_detail(uint32_t segment, int error) {
  const char* name = strerrorname_np(error);
  return "segment=" + std::to_string(segment) + " error=" + (name != nullptr ? name : "unknown");
}

void Health::write_failed(int error) {
  if (++write_failures_ >= kFailuresInARow) become_read_only(reason_of(error));
}

void Health::flush_failed(int error) {
  if (++flush_failures_ >= kFailuresInARow) become_read_only(reason_of(error));
}

void Health::become_read_only(std::string_view reason) {
  probe_at_ns_ = clock_.boot_ns() + retry_interval_ns_;
  if (!writable()) return;
  state_ = LogHealth::read_only;
  reason_ = reason;
  host_.on_event("nvme_read_only", "reason=" + reason_);
}

void Health::probe_ended(int error) {
  if (writable()) return;
  probe_at_ns_ = clock_.boot_ns() + retry_interval_ns_;
  if (error != 0) {
    reason_ = reason_of(error);
    return;
  }
  state_ = LogHealth::ok;
  reason_.clear();
  write_failures_ = flush_failures_ = 0;
  host_.on_event("nvme_healed", "");
}

}  // namespace kvw::nvme
