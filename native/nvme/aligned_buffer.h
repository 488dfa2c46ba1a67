// Memory for direct I/O: 4 KiB aligned, a multiple of 4 KiB, zeroed. Movable; not thread-safe.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>

#include "base/types.h"

namespace kvw::nvme {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes) : bytes_(round_up(bytes, kBlockBytes)) {
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
  struct Release {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Release> data_;
  size_t bytes_ = 0;
};

}  // namespace kvw::nvme
