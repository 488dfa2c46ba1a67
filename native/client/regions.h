// Where pages lie in the caller's memory.
#pragma once

#include <cstddef>
#include <vector>

#include "copy/copy.h"
#include "gpu/device.h"

namespace kvw {

// Memory of a GPU, in which regions lie, and the events of streams that must have happened before
// they are read or written. They are the caller's, and outlive the call.
struct DevicePlace {
  int ordinal = 0;
  std::vector<gpu::CUevent> ready;
};

class Regions {
 public:
  virtual ~Regions() = default;
  virtual size_t count() const = 0;       // pages
  virtual size_t page_bytes() const = 0;  // of one shard
  virtual bool writable() const = 0;
  // Null: in host memory, and pieces may be followed by this process.
  virtual const DevicePlace* device() const { return nullptr; }
  // The pieces of a page, in page order, appended to `out` after clearing it.
  virtual void pieces(size_t page, std::vector<Piece>& out) const = 0;
};

}  // namespace kvw
