#include "gpu/recorded.h"

#include <string>

#include "base/error.h"

namespace kvw::gpu {

Recorded::Recorded(int ordinal, const std::vector<uint64_t>& streams) : Recorded(ordinal) {
  const Device::Current current(device_);
  for (const uint64_t stream : streams) record(stream);
}

void Recorded::record(uint64_t stream) {
  const Driver& cuda = device_.cuda();
  CUevent made = nullptr;
  cuda.check(cuda.cuEventCreate(&made, kEventDisableTiming), "cuEventCreate");
  events_.push_back(made);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): how array libraries say it
  const CUresult result = cuda.cuEventRecord(made, reinterpret_cast<CUstream>(stream));
  if (result == kCudaInvalidHandle)
    throw Error(ErrorKind::usage, "bad_stream",
                "stream " + std::to_string(stream) + " is not one of device " +
                    std::to_string(device_.ordinal()) +
                    ", where the array is; make a stream of that device the current one, or give "
                    "an event with on_device(after=...)");
  cuda.check(result, "cuEventRecord");
}

Recorded::~Recorded() {
  if (device_.forked()) return;
  const Device::Current current(device_, std::nothrow);
  for (const CUevent event : events_) device_.cuda().cuEventDestroy(event);
}

}  // namespace kvw::gpu
