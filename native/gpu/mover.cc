#include "gpu/mover.h"

namespace kvw::gpu {

Mover::Mover(const Device& device) : device_(device) {
  const Device::Current current(device_);
  const Driver& cuda = device_.cuda();
  cuda.check(cuda.cuStreamCreate(&stream_, kStreamNonBlocking), "cuStreamCreate");
  try {
    for (std::unique_ptr<Batch>& batch : batches_)
      batch = std::make_unique<Batch>(device_, stream_);
  } catch (...) {
    for (std::unique_ptr<Batch>& batch : batches_) batch.reset();
    cuda.cuStreamDestroy(stream_);
    throw;
  }
}

Mover::~Mover() {
  if (device_.forked()) return;
  const Device::Current current(device_, std::nothrow);
  for (std::unique_ptr<Batch>& batch : batches_) batch.reset();
  device_.cuda().cuStreamDestroy(stream_);
}

}  // namespace kvw::gpu
