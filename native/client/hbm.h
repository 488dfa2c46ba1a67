// A client's share of the daemon's HBM tier: the table that says which slots have a copy, and the
// pool of device memory that they are in, mapped in this process. Old ones stay as they are for as
// long as somebody holds them: the pool of a daemon that ended is written by nobody.
//
// A view is immutable, with readers on any thread; HbmCopies is thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "base/fd.h"
#include "base/fork.h"
#include "gpu/shared_memory.h"
#include "hbm/table.h"

namespace kvw {

class DaemonLink;

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

// A daemon's copies, by the device that they are in, as far as somebody asked for them.
class HbmCopies {
 public:
  explicit HbmCopies(bool has_tier) : has_tier_(has_tier) {}
  // Null: the daemon has none in that device, or does not say so in a moment; asked again a little
  // later then.
  std::shared_ptr<const HbmView> of(const std::shared_ptr<gpu::Device>& device, DaemonLink& link,
                                    uint64_t deadline_ns);
  // Those that are mapped already, of any device; for as long as this object. Null: none. No call.
  const HbmView* mapped();

 private:
  struct Answer {
    std::shared_ptr<const HbmView> view;  // stays once it is there
    uint64_t ask_again_ns;
  };

  const bool has_tier_;
  std::mutex mutex_;
  std::map<int, Answer> answers_;
};

}  // namespace kvw
