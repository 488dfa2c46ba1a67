#include "hbm/table.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace kvw {

HbmTable::HbmTable(uint32_t slots, const Key& warehouse_id, uint64_t pool_bytes,
                   const uint8_t* device) {
  const uint64_t bytes = hbm_table_bytes(slots);
  fd_ = Fd(::memfd_create("kvwarehouse_hbm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd_.valid() || ::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0)
    throw storage_error("cannot make the table of the HBM tier", errno);
  mapping_ = Mapping(fd_.get(), bytes, true);
  auto* header = mapping_.at<HbmHeader>(0);
  header->magic = kHbmMagic;
  header->version = kHbmVersion;
  header->slots = slots;
  header->warehouse_id = warehouse_id;
  header->pool_bytes = pool_bytes;
  std::memcpy(header->device, device, sizeof header->device);
  header->state.store(static_cast<uint64_t>(HbmState::serving), std::memory_order_release);
  if (::fcntl(fd_.get(), F_ADD_SEALS,
              F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0)
    throw storage_error("cannot seal the table of the HBM tier", errno);
}

void HbmTable::set_off() {
  mapping_.at<HbmHeader>(0)->state.store(static_cast<uint64_t>(HbmState::off),
                                         std::memory_order_release);
}

}  // namespace kvw
