// Memory for headers of records, kept from one read to the next: to make and free aligned memory
// for each was an eighth of what the core thread did for a page of 256 KiB. Bounded. Not
// thread-safe: of the core thread, like the log.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "nvme/aligned_buffer.h"

namespace kvw::nvme {

class SpareBuffers {
 public:
  static constexpr size_t kMaxBuffers = 256;
  static constexpr size_t kMaxBytes = AlignedBuffer::kHeapBytes;  // of one: larger are rare, and go

  // Room for `bytes`, which begins with a block of zeros: what was read before is no record.
  AlignedBuffer take(size_t bytes) {
    const auto found = std::ranges::find(spare_, round_up(bytes, kBlockBytes),
                                         [](const AlignedBuffer& each) { return each.bytes(); });
    if (found == spare_.end()) return AlignedBuffer(bytes);
    AlignedBuffer buffer = std::exchange(*found, std::move(spare_.back()));
    spare_.pop_back();
    std::memset(buffer.data(), 0, kBlockBytes);
    return buffer;
  }

  void keep(AlignedBuffer buffer) {
    if (buffer.bytes() != 0 && buffer.bytes() <= kMaxBytes && spare_.size() < kMaxBuffers)
      spare_.push_back(std::move(buffer));
  }

  size_t kept() const { return spare_.size(); }

 private:
  std::vector<AlignedBuffer> spare_;
};

}  // namespace kvw::nvme
