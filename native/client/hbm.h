// A client's share of the daemon's HBM tier: the table that says which slots have a copy, and the
// pool of device memory that they are in, mapped in this process. Old ones stay as they are for as
// long as somebody holds them: the pool of a daemon that ended is written by nobody.
//
// Immutable; readers on any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "base/fd.h"
#include "base/fork.h"
#include "gpu/shared_memory.h"
#include "hbm/table.h"

namespace kvw {

class HbmView {
 public:
  // Null: the pool is another device's. Throws Error storage "bad_files" when the table is not of
  // this version, and as gpu::SharedMemory does.
  static std::unique_ptr<HbmView> open(const std::shared_ptr<const gpu::Device>& device,
                                       const ParentFd& table, const ParentFd& pool);

  // The daemon still serves it.
  bool serving() const {
    return header_->state.load(std::memory_order_acquire) ==
           static_cast<uint64_t>(HbmState::serving);
  }
  // Whether the slot had a copy just now: without a pin a hint, no more.
  bool hints(SlotId slot, uint32_t generation) const { return find(slot, generation).has_value(); }
  // Where the page in the slot is in this device's memory. Good for as long as the slot is pinned,
  // and was LIVE in the generation after the pin's fence: find it after that.
  std::optional<uint64_t> find(SlotId slot, uint32_t generation) const;

 private:
  explicit HbmView(Mapping table) : table_(std::move(table)) {}

  Mapping table_;
  const HbmHeader* header_ = nullptr;
  uint32_t slots_ = 0;
  std::unique_ptr<gpu::SharedMemory> pool_;
};

}  // namespace kvw
