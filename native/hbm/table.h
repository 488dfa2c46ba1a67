// Which slots of the DRAM tier have a copy in HBM, and where: a table in shared memory that the
// daemon writes and hands to clients together with the pool of device memory. One word a slot, so
// that a reader sees all of an entry or none of it; docs/protocol.md has the order around it.
//
// A file in memory without a name, as the pool is: both end with the last process that has them.
// Clients cannot map it for writing (F_SEAL_FUTURE_WRITE). The writer belongs to the core thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "base/fd.h"
#include "base/types.h"

namespace kvw {

inline constexpr uint64_t kHbmMagic = 0x31424d4248564bull;  // "KVHBMB1"
inline constexpr uint32_t kHbmVersion = 1;

enum class HbmState : uint64_t { serving = 1, off = 2 };

struct HbmHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t slots;  // words that follow, from kBlockBytes on
  Key warehouse_id;
  uint64_t pool_bytes;
  uint8_t device[16];  // the UUID that CUDA gives the pool's device
  std::atomic<uint64_t> state;
};
static_assert(sizeof(HbmHeader) == 64);

// A word: 0 for none, else the low half of the slot's generation and the place in the pool, in
// blocks, plus one.
constexpr uint64_t hbm_word(uint64_t generation, uint64_t offset) {
  return (offset / kBlockBytes + 1) << 32 | (generation & 0xffffffff);
}
// The place that a word has for a generation.
constexpr std::optional<uint64_t> hbm_offset(uint64_t word, uint32_t generation) {
  if (word >> 32 == 0 || static_cast<uint32_t>(word) != generation) return std::nullopt;
  return ((word >> 32) - 1) * kBlockBytes;
}

constexpr uint64_t hbm_table_bytes(uint32_t slots) {
  return round_up(kBlockBytes + uint64_t{slots} * 8, kBlockBytes);
}

class HbmTable {
 public:
  // Throws Error (storage) where the system gives no memory file.
  HbmTable(uint32_t slots, const Key& warehouse_id, uint64_t pool_bytes, const uint8_t* device);

  int fd() const { return fd_.get(); }
  // The copy is whole: readers may find it from here on.
  void publish(SlotId slot, uint64_t generation, uint64_t offset) {
    word(slot).store(hbm_word(generation, offset), std::memory_order_release);
  }
  // Who finds it still has pinned the slot before: a full fence, then the pins say whether.
  void withdraw(SlotId slot) { word(slot).store(0, std::memory_order_release); }
  void set_off();

 private:
  std::atomic<uint64_t>& word(SlotId slot) const {
    return mapping_.at<std::atomic<uint64_t>>(kBlockBytes)[slot];
  }
  Fd fd_;
  Mapping mapping_;
};

}  // namespace kvw
