// Events behind what streams of others have queued by now: what their array libraries (CuPy, torch)
// say that an array's bytes are computed on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/device.h"

namespace kvw::gpu {

class Recorded {
 public:
  // streams: handles of the device's, or CUDA's numbers for the default streams: 1, which is one
  // for all threads, and 2, this thread's own. Waits for none of them. Throws Error usage
  // "bad_stream" for one that is another device's, capacity "gpu_capture" for one that is captured,
  // or that cannot be used beside a capture, which goes on; and as Driver::check.
  Recorded(int ordinal, const std::vector<uint64_t>& streams);
  ~Recorded();
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

  // They end with this object, whatever became of them.
  const std::vector<CUevent>& events() const { return events_; }

 private:
  explicit Recorded(int ordinal) : device_(device_at_hand(ordinal)) {}
  void record(uint64_t stream);
  void refuse_captured(CUstream stream) const;

  std::shared_ptr<const Device> device_;  // whose context is the array's, and there already
  std::vector<CUevent> events_;
};

}  // namespace kvw::gpu
