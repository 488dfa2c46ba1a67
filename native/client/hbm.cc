#include "client/hbm.h"

#include <sys/stat.h>

#include <cstring>

#include "base/error.h"

namespace kvw {

std::unique_ptr<HbmView> HbmView::open(const std::shared_ptr<const gpu::Device>& device,
                                       const ParentFd& table, const ParentFd& pool) {
  struct stat info{};
  const auto bad = [] {
    return Error(ErrorKind::storage, "bad_files",
                 "the daemon's table of its HBM tier is not in this version's format; use the same "
                 "kvwarehouse on both sides");
  };
  if (::fstat(table.get(), &info) != 0 || static_cast<size_t>(info.st_size) < kBlockBytes)
    throw bad();
  std::unique_ptr<HbmView> made(
      new HbmView(Mapping(table.get(), static_cast<size_t>(info.st_size), false)));
  const auto* header = made->table_.at<const HbmHeader>(0);
  if (header->magic != kHbmMagic || header->version != kHbmVersion ||
      hbm_table_bytes(header->slots) > made->table_.bytes())
    throw bad();
  made->header_ = header;
  made->slots_ = header->slots;
  const gpu::CUuuid own = device->uuid();
  if (std::memcmp(own.bytes, header->device, sizeof own.bytes) != 0) return nullptr;
  made->pool_ = gpu::SharedMemory::import(device, pool.get(), header->pool_bytes);
  return made;
}

std::optional<uint64_t> HbmView::find(SlotId slot, uint32_t generation) const {
  if (slot >= slots_) return std::nullopt;
  const auto* words = table_.at<const std::atomic<uint64_t>>(kBlockBytes);
  const auto offset = hbm_offset(words[slot].load(std::memory_order_acquire), generation);
  if (!offset || *offset >= pool_->bytes()) return std::nullopt;
  return pool_->address() + *offset;
}

}  // namespace kvw
