#include "client/object_memory.h"

#include <algorithm>
#include <utility>

#include "base/types.h"

namespace kvw {

std::shared_ptr<nvme::AlignedBuffer> ObjectMemory::lend(size_t bytes) {
  auto lent = std::make_unique<nvme::AlignedBuffer>(take(bytes));
  const auto give_back = [owner = shared_from_this()](nvme::AlignedBuffer* buffer) {
    owner->keep(std::move(*buffer));
    delete buffer;
  };
  return {lent.release(), give_back};
}

nvme::AlignedBuffer ObjectMemory::take(size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto as_large = [size = round_up(bytes, kBlockBytes)](const nvme::AlignedBuffer& each) {
      return each.bytes() == size;
    };
    if (const auto found = std::ranges::find_if(kept_, as_large); found != kept_.end()) {
      nvme::AlignedBuffer buffer = std::move(*found);
      kept_.erase(found);
      kept_bytes_ -= buffer.bytes();
      return buffer;
    }
  }
  return nvme::AlignedBuffer(bytes);
}

uint64_t ObjectMemory::kept_bytes() {
  const std::lock_guard lock(mutex_);
  return kept_bytes_;
}

void ObjectMemory::keep(nvme::AlignedBuffer buffer) noexcept {
  const std::lock_guard lock(mutex_);
  if (buffer.bytes() > kKeptBytes) return;
  while (kept_.size() == kKept || kept_bytes_ + buffer.bytes() > kKeptBytes) {
    kept_bytes_ -= kept_.front().bytes();
    kept_.erase(kept_.begin());
  }
  kept_bytes_ += buffer.bytes();
  kept_.push_back(std::move(buffer));
}

}  // namespace kvw
