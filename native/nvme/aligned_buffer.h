// Memory for direct I/O: 4 KiB aligned, a multiple of 4 KiB, zeroed. Larger than most headers of
// records, where KV lies, it is not in core dumps. Movable; not thread-safe.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>

#include "base/dumps.h"
#include "base/types.h"

namespace kvw::nvme {

struct AlignedRelease {
  void operator()(std::byte* memory) const {
    if (mapped_bytes > 0)
      ::munmap(memory, mapped_bytes);
    else
      std::free(memory);
  }
  size_t mapped_bytes = 0;  // 0: of the heap
};

class AlignedBuffer {
 public:
  static constexpr size_t kHeapBytes = 4 * kBlockBytes;  // that much is made and freed often

  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes) : bytes_(round_up(bytes, kBlockBytes)) {
    if (bytes_ > kHeapBytes) {
      void* mapped =
          ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      leave_out_of_dumps(mapped, bytes_);
      data_ = Memory(static_cast<std::byte*>(mapped), AlignedRelease{bytes_});
      return;
    }
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes_)));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_.get(), 0, bytes_);
  }

  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }
  std::span<std::byte> part(size_t offset, size_t bytes) const {
    return span().subspan(offset, bytes);
  }

 private:
  using Memory = std::unique_ptr<std::byte, AlignedRelease>;
  Memory data_;
  size_t bytes_ = 0;
};

}  // namespace kvw::nvme
