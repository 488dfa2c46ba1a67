#include "nvme/health.h"

#include <cerrno>
#include <cstring>

namespace kvw::nvme {

namespace {
constexpr unsigned kFailuresInARow = 3;

std::string name_of(int error) {
  const char* name = strerrorname_np(error);
  return name != nullptr ? name : "unknown";
}

std::string named_reason(int error) {
  const std::string reason(reason_of(error));
  return reason == "io_error" ? reason + " " + name_of(error) : reason;
}
}  // namespace

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
  return "segment=" + std::to_string(segment) + " error=" + name_of(error);
}

void Health::write_failed(int error) {
  if (++write_failures_ >= kFailuresInARow) become_read_only(error);
}

void Health::flush_failed(int error) {
  if (++flush_failures_ >= kFailuresInARow) become_read_only(error);
}

void Health::become_read_only(int error) {
  probe_at_ns_ = clock_.boot_ns() + retry_interval_ns_;
  if (!writable()) return;
  state_ = LogHealth::read_only;
  reason_ = named_reason(error);
  host_.on_event("nvme_read_only",
                 "reason=" + std::string(reason_of(error)) + " error=" + name_of(error));
}

void Health::probe_ended(int error) {
  if (writable()) return;
  probe_at_ns_ = clock_.boot_ns() + retry_interval_ns_;
  if (error != 0) {
    reason_ = named_reason(error);
    return;
  }
  state_ = LogHealth::ok;
  reason_.clear();
  write_failures_ = flush_failures_ = 0;
  host_.on_event("nvme_healed", "");
}

}  // namespace kvw::nvme
