// Pages copied together within a device's memory, each into one run, by one launch on a stream of
// the caller's: for an engine whose blocks have a piece in each of its layers and may not wait.
//
// The caller makes the memory, so that it comes from its framework's allocator and goes back to it
// in the order of that stream: `table_bytes` pinned, and `device_bytes` of the device's, into which
// it queues the copy of the tables. Nothing waits for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "client/regions.h"
#include "gpu/batch.h"

namespace kvw {

// What a launch is to copy. Immutable.
class GatherPlan {
 public:
  // Page i of the regions goes to `to` + i * page_bytes, in the memory of the same device.
  GatherPlan(const Regions& regions, uint64_t to);
  size_t table_bytes() const;
  size_t device_bytes() const;
  // Into table_bytes of host memory, 8-byte aligned.
  void write(std::byte* tables) const;

 private:
  friend class DeviceGather;
  uint64_t page_bytes_;
  std::vector<gpu::PageWork> pages_;
  std::vector<gpu::PagePiece> pieces_;
};

class DeviceGather {
 public:
  // Throws Error as gpu::Device.
  DeviceGather(int ordinal, const std::string& image) : device_(ordinal, image) {}
  // tables: device_bytes of device memory, 8-byte aligned, which begin with what was written by the
  // time that the stream comes to it. Blocks for nothing. Throws Error as Driver::check.
  void launch(const GatherPlan& plan, uint64_t tables, gpu::CUstream stream) const;

 private:
  gpu::Device device_;
};

}  // namespace kvw
