// Memory for objects of the remote tier, kept for those that follow: the kernel's zeros for new
// memory take longer than the copy and the digests that fill it. What is lent still has what was in
// it, so whoever borrows writes all of it. Thread-safe; lives until all is given back.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "nvme/aligned_buffer.h"

namespace kvw {

class ObjectMemory : public std::enable_shared_from_this<ObjectMemory> {
 public:
  // Of what was given back, the last: so many, and together at most so large.
  static constexpr size_t kKept = 8;
  static constexpr uint64_t kKeptBytes = 64ull << 20;

  ObjectMemory() { kept_.reserve(kKept); }

  // As AlignedBuffer(bytes), but for what is in it. Given back with the last reference.
  std::shared_ptr<nvme::AlignedBuffer> lend(size_t bytes);
  uint64_t kept_bytes();

 private:
  nvme::AlignedBuffer take(size_t bytes);
  void keep(nvme::AlignedBuffer buffer) noexcept;

  std::mutex mutex_;
  std::vector<nvme::AlignedBuffer> kept_;  // the oldest first
  uint64_t kept_bytes_ = 0;
};

}  // namespace kvw
