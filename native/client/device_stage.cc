#include "client/device_stage.h"

#include <utility>

#include "base/error.h"
#include "base/keep.h"

namespace kvw {

struct DeviceStage::Held {
  Held(std::shared_ptr<gpu::Device> on, size_t bytes) : device(std::move(on)), memory(*device) {
    const gpu::Device::Current current(*device);
    memory.need(bytes);
  }
  std::shared_ptr<gpu::Device> device;
  gpu::Memory<true> memory;
};

DeviceStage::DeviceStage(std::shared_ptr<gpu::Device> device, size_t bytes)
    : ordinal_(device->ordinal()),
      bytes_(bytes),
      held_(std::make_unique<Held>(std::move(device), bytes)),
      address_(held_->memory.address()) {}

DeviceStage::~DeviceStage() {
  if (held_ != nullptr && held_->device->forked()) keep_forever(std::move(held_));  // the parent's
}

uint64_t DeviceStage::deliver(Extents& extents, uint64_t first, uint64_t count, const Regions& to,
                              uint64_t deadline_ns) {
  if (held_ == nullptr)
    // Nothing of this delivery is under way: its pages are the caller's again.
    throw Error(ErrorKind::storage, "gpu_error",
                "device " + std::to_string(ordinal_) +
                    " has not finished an earlier delivery; start this process again, and see "
                    "nvidia-smi and the kernel's log (Xid)");
  const std::shared_ptr<gpu::Device> device = held_->device;
  const gpu::Device::Borrowed mover = device->borrow(deadline_ns);
  if (mover == nullptr || !device->wait(to.device()->ready, deadline_ns)) return 0;
  gpu::Batch& batch = mover->batch(0);
  uint64_t done = 0;
  bool good = true, wanted = true;
  while (wanted && done < count) {
    const uint64_t moved = move(batch, extents, first + done, count - done, to);
    for (uint64_t at = 0; wanted && at < moved; ++at) {
      const Extents::Page& page = extents.pages()[first + done];
      good = batch.digest(at, page.entry.key, extents.shard()) == page.digest;
      wanted = good && extents.current(first + done);
      done += wanted ? 1 : 0;
    }
  }
  extents.count_delivered(first, done, !good);
  return done;
}

uint64_t DeviceStage::move(gpu::Batch& batch, const Extents& extents, uint64_t first,
                           uint64_t count, const Regions& to) {
  std::vector<Piece> pieces;
  uint64_t added = 0;
  batch.begin(gpu::Way::to_device, extents.page_bytes(), nullptr);
  for (; added < count; ++added) {
    to.pieces(first + added, pieces);
    if (!batch.add_from_device(pieces, address_ + extents.pages()[first + added].staged_at)) break;
  }
  try {
    batch.start();
    batch.finish();
  } catch (const Error&) {
    if (!batch.settle()) keep_forever(std::move(held_));
    throw;
  }
  return added;
}

}  // namespace kvw
