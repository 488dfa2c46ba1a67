// Memory of a GPU where pages land that a client reads past the daemon (client/extents.h), and the
// way from there: the device scatters them to where they belong and digests them on the way, and a
// page counts when the device's digest is the one of its record.
//
// Not thread-safe. Whatever writes to the memory must have ended before a call and before the end
// of the object; where the device may still be reading it, it stays for as long as the process.
#pragma once

#include <cstdint>
#include <memory>

#include "client/extents.h"
#include "gpu/device.h"
#include "gpu/mover.h"

namespace kvw {

class DeviceStage {
 public:
  // Throws Error capacity "gpu_memory".
  DeviceStage(std::shared_ptr<gpu::Device> device, size_t bytes);
  ~DeviceStage();
  DeviceStage(const DeviceStage&) = delete;
  DeviceStage& operator=(const DeviceStage&) = delete;

  int ordinal() const { return ordinal_; }
  size_t bytes() const { return bytes_; }
  uint64_t address() const { return address_; }

  // As Extents::deliver, of pages that were planned for a stage and have landed in this one, to
  // regions of the same device, once these may be written. Fewer than `count` also where the
  // deadline (boot clock) was over before the device could begin. Throws Error storage "gpu_error"
  // and "gpu_stalled", capacity "gpu_memory".
  uint64_t deliver(Extents& extents, uint64_t first, uint64_t count, const Regions& to,
                   uint64_t deadline_ns);

 private:
  struct Held;

  // Moves what fits a batch. Returns how many pages that are; they may be read after.
  uint64_t move(gpu::Batch& batch, const Extents& extents, uint64_t first, uint64_t count,
                const Regions& to);

  int ordinal_;
  size_t bytes_;
  std::unique_ptr<Held> held_;  // null: the device was not done with it
  uint64_t address_;
};

}  // namespace kvw
