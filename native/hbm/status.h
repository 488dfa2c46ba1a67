// What the HBM tier says of itself. Plain values.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace kvw {

// Why a copy left HBM, as metric labels.
enum class HbmLeaveReason : uint32_t {
  demoted,     // colder than what took its place
  left_dram,   // its page left DRAM
  rebalanced,  // its slab went to another page size
  damaged,     // a reader's digest was not the sealed one
  operator_,
  count
};
const char* hbm_leave_reason_name(HbmLeaveReason reason);

struct HbmStatus {
  std::string health = "off";  // "off", "starting", "ok", "waiting" or "failed"
  std::string reason;          // why it waits or failed
  uint64_t capacity_bytes = 0, used_bytes = 0, pages = 0, leaving = 0, queued = 0;
  uint64_t pages_promoted = 0, bytes_promoted = 0;
  std::array<uint64_t, static_cast<size_t>(HbmLeaveReason::count)> left{};
};

}  // namespace kvw
