#include "gpu/recorded.h"

#include <string>

#include "base/error.h"

namespace kvw::gpu {

Recorded::Recorded(int ordinal, const std::vector<uint64_t>& streams) : Recorded(ordinal) {
  const Device::Current current(*device_);
  for (const uint64_t stream : streams) record(stream);
}

// Asking breaks no capture. Recording does where the default stream cannot be used, and so does a
// look at an event of a stream that is captured.
void Recorded::refuse_captured(CUstream stream) const {
  const Driver& cuda = device_->cuda();
  int status = kCaptureStatusNone;
  CUresult result = cuda.cuStreamIsCapturing(stream, &status);
  if (result == kCudaSuccess && status != kCaptureStatusNone) result = kCudaCaptureUnsupported;
  if (of_a_capture(result)) cuda.check(result, "cuStreamIsCapturing");
}

void Recorded::record(uint64_t stream) {
  const Driver& cuda = device_->cuda();
  // NOLINTNEXTLINE(performance-no-int-to-ptr): how array libraries say it
  const auto handle = reinterpret_cast<CUstream>(stream);
  refuse_captured(handle);
  CUevent made = nullptr;
  cuda.check(cuda.cuEventCreate(&made, kEventDisableTiming), "cuEventCreate");
  events_.push_back(made);
  const CUresult result = cuda.cuEventRecord(made, handle);
  if (result == kCudaInvalidHandle)
    throw Error(ErrorKind::usage, "bad_stream",
                "stream " + std::to_string(stream) + " is not one of device " +
                    std::to_string(device_->ordinal()) +
                    ", where the array is; make a stream of that device the current one, or give "
                    "an event with on_device(after=...)");
  cuda.check(result, "cuEventRecord");
}

Recorded::~Recorded() {
  if (device_->forked()) return;
  const Device::Current current(*device_, std::nothrow);
  for (const CUevent event : events_) device_->cuda().cuEventDestroy(event);
}

}  // namespace kvw::gpu
