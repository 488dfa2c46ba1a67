// Memory of a device that several processes have: made by one, handed over as a file descriptor,
// mapped by the others. The driver frees it when the last process has let go of it, so the death of
// its maker takes nothing from those who read it (as CUDA's older IPC handles would).
//
// After NVIDIA's "CUDA Driver API" reference, section Virtual Memory Management: sizes are whole
// granules, a mapping is usable once access to it was set, and unmapped before its addresses go.
// Immutable once made; thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "base/fd.h"
#include "gpu/device.h"

namespace kvw::gpu {

class SharedMemory {
 public:
  // At most `bytes` of it: whole granules of the device. Throws Error as Driver::check; usage
  // "no_shared_memory" where the device cannot, or `bytes` is less than one granule.
  static std::unique_ptr<SharedMemory> create(std::shared_ptr<const Device> device, uint64_t bytes);
  // What create() made elsewhere, as export_fd() gave it; `bytes` of it. To be read here, and
  // written only where the driver has no read-only mappings. The descriptor stays the caller's.
  static std::unique_ptr<SharedMemory> import(std::shared_ptr<const Device> device, int fd,
                                              uint64_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  uint64_t address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  Fd export_fd() const;

 private:
  SharedMemory(std::shared_ptr<const Device> device, uint64_t bytes)
      : device_(std::move(device)), bytes_(bytes) {}
  void map(uint64_t alignment);
  CUresult set_access(int flags) const;

  std::shared_ptr<const Device> device_;
  uint64_t bytes_;
  CUmemHandle handle_ = 0;
  CUdeviceptr address_ = 0;
  bool has_handle_ = false, mapped_ = false;
};

}  // namespace kvw::gpu
