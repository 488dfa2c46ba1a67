// The HBM tier: copies of the hottest pages of the DRAM tier in a pool of device memory, for
// clients that load into the same device. A page is in HBM only while it is in its slot, so leaving
// HBM means dropping a copy, a restart begins without any, and no file has a word of it.
//
// Belongs to the core thread, which copies nothing: a thread of its own does (hbm/copier.h).
//
// Invariants:
//  - A word of the table names a slot's generation only while that generation is LIVE in the slot
//    or leaving it, and its place has what was sealed for it.
//  - A place is given out again only after the word was withdrawn, a full fence, and a scan that
//    found no pin on the slot: so no copy that is under way reads a place that is written.
//  - A page is promoted after its parent, and demoted before it. A copy that was damaged, or whose
//    page left DRAM, goes at once; what was below it is found again when it is back.
//  - Pages waiting are at most kWanted; one batch is on its way at a time.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "eviction/policy.h"
#include "hbm/copier.h"
#include "hbm/places.h"
#include "hbm/status.h"
#include "hbm/table.h"
#include "index/index.h"

namespace kvw {

class Checker;
struct WarehouseState;
struct SlotClass;

class HbmTier {
 public:
  static constexpr size_t kWanted = 8192;

  HbmTier(WarehouseState& state, Checker& checker);

  int event_fd() const { return copier_.event_fd(); }
  // What the copier has done, and what it shall do next.
  void poll();
  void tick();

  // A page of the DRAM tier was used. `again`: and before that, some other time since it came.
  void used(const EntryView& view, bool again);
  // Whoever used it needs it no more.
  void released(const EntryView& view);
  // Its page leaves the slot. Before the slot's next transition.
  void left(SlotId slot);
  // A reader could not verify the page, and the slot has what was sealed.
  void damaged(SlotId slot);
  // The coldest copies of a namespace (-1: of all) are dropped. Returns how many.
  uint64_t evict(int ordinal, uint64_t pages);
  bool has(SlotId slot) const;

  // What a client is given: null until there is a pool, and when it is off.
  const HbmTable* table() const { return off_ ? nullptr : table_.get(); }
  int pool_fd() const { return pool_.fd.get(); }
  uint64_t pool_address() const { return pool_.address; }
  // Of a copy, in the pool. For tests.
  std::optional<uint64_t> offset_of(SlotId slot) const;

  HbmStatus status() const;

 private:
  struct Copy {
    uint64_t generation, offset, bytes;
    bool published = false;
    bool gone = false;  // its page left while it was copied
  };
  struct Wanted {
    SlotId slot;
    uint64_t generation;
  };
  struct Leaving {
    SlotId slot;
    uint64_t offset, bytes;
  };

  bool serving() const { return table_ != nullptr && !off_; }
  void begin(HbmCopier::Pool pool);
  void wait(const std::string& reason);
  void end(const std::string& reason);
  void land(const HbmPage& page);
  bool may_serve(const EntryView& view, const Copy& copy) const;
  void want(const EntryView& view);
  void pump();
  std::optional<EntryView> still_wanted(const Wanted& wanted) const;
  std::optional<uint64_t> place_for(const EntryView& view, uint64_t bytes);
  size_t demote(const EntryView& candidate, SlotId parent);
  void take_slab();
  void drop_chain(SlotId slot);
  HbmPage page_of(const EntryView& view, uint64_t generation, uint64_t offset) const;
  void drop(SlotId slot, HbmLeaveReason why);
  void reap();
  EvictionPolicy& policy_of(SlotId slot);
  SlotId parent_of(const EntryView& view) const;  // in DRAM, else kNoSlot

  WarehouseState& state_;
  Checker& checker_;
  HbmCopier::Pool pool_;
  std::unique_ptr<HbmTable> table_;
  std::optional<HbmPlaces> places_;
  std::unordered_map<const SlotClass*, std::unique_ptr<EvictionPolicy>> policies_;
  std::unordered_map<SlotId, Copy> copies_;  // and those on their way
  std::vector<Leaving> leaving_;
  std::deque<Wanted> queue_;
  std::unordered_set<SlotId> queued_;
  size_t under_way_ = 0;  // pages of the batch
  bool off_ = false;
  std::string health_ = "starting", reason_;
  uint64_t published_ = 0, pages_promoted_ = 0, bytes_promoted_ = 0;
  std::array<uint64_t, static_cast<size_t>(HbmLeaveReason::count)> left_{};
  HbmCopier copier_;  // last: its thread ends first
};

}  // namespace kvw
