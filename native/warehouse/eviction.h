// Room in DRAM: free slots, slabs that grow the arena or go from one page size to another, and what
// is evicted for them. Slabs go by age: a model that nobody asks any more gives way to the one that
// took its place, and two that are both in use keep what they have. Core thread only.
//
// slabs.cc has what is about slabs, eviction.cc the rest.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "warehouse/removal.h"
#include "warehouse/state.h"
#include "warehouse/uses.h"
#include "warehouse/write_admission.h"

namespace kvw {

class Eviction {
 public:
  Eviction(WarehouseState& state, WriteAdmission& writes, Removal& removal, Uses& uses)
      : state_(state), writes_(writes), removal_(removal), uses_(uses) {}

  // Of a page that NVMe does not have yet, and will in a moment.
  enum class Unwritten : uint8_t { leaves, stays };

  // A free slot, evicting if it must. `spare` (a parent about to get a child) is not evicted for
  // it. A read (state "filling") can wait: it takes no page's room that is about to be written.
  SlotId take_slot(SlotClass& cls, SlotState state, SlotId spare);
  size_t evict_some(SlotClass& cls, size_t want, SlotId spare, Unwritten unwritten);
  void keep_free();
  // UINT64_MAX: it has no page that could leave.
  uint64_t coldest_heat(SlotClass& cls) const;
  // A slab that goes to another page size, whose pages leave in steps.
  bool goes_on() const { return move_.has_value(); }
  void go_on() {
    if (move_) step_of_move();
  }
  // A store that found none may come again.
  bool room_is_coming() const;

  // Slabs are allocated elsewhere, one after the other.
  std::optional<uint32_t> next_slab_to_populate() const;
  void slab_populated(uint32_t slab, int err);
  // Passes over the slabs that are there.
  void skip_populated();
  // "ok", "populating" or why it cannot grow.
  std::string health() const;

 private:
  // A fiftieth of a class is kept free, so that what was evicted stays readable for a while.
  static constexpr uint64_t kFreeShare = 50;

  // For a read. True: there is room, or it comes with what is being written now.
  bool evict_written(SlotClass& cls, size_t want, SlotId spare);
  // A page whose child is being written: without it the child could never be found. Not where NVMe
  // keeps the chain whole.
  bool awaits_child(SlotId slot) const;

  bool take_spare_slab(SlotClass& needy);  // that another class has no use for
  struct Move {
    uint32_t slab;
    std::vector<SlotId> live;  // still to leave
    SlotClass* needy = nullptr;
  };

  // That holds pages of another class which are colder than this one's coldest.
  bool take_colder_slab(SlotClass& needy);
  // At least half of whose pages are colder than `heat`; of several the one by which the fewest
  // pages are lost. True: it is there, and not on its way.
  bool take_slab(SlotClass& needy, uint64_t heat);
  bool step_of_move();  // true: it was the last, and the slab is there
  // Whatever it holds; after a vain look no other for a while.
  void take_any_slab(SlotClass& needy);
  // The coldest first, of those not kept nor seen pinned; how many.
  size_t coldest(SlotClass& cls, std::span<PageId> residents) const;
  // Pages elsewhere that nobody finds any more once those of the slab have left: those below them,
  // where NVMe does not have what leaves. Counts to `most` or kMostBelow.
  size_t lost_below(const Move& move, size_t most) const;
  SlotClass* donor_for(const SlotClass& needy, uint64_t heat);
  std::vector<uint32_t> slabs_to_look_at(SlotClass& donor);
  bool grow(SlotClass& cls);  // by a slab that is ready; says so where there is no room for it
  bool can_cut(uint32_t slab, const SlotClass& cls);  // says so, too, where there is none
  void note_growth();
  bool is_whole() const { return next_slab_ == state_.arena.slab_count(); }
  bool still_growing() const { return !is_whole() && growth_error_.empty(); }

  WarehouseState& state_;
  WriteAdmission& writes_;
  Removal& removal_;
  Uses& uses_;
  std::optional<Move> move_;
  uint32_t next_slab_ = 0;  // to be populated
  int populate_errno_ = 0;  // of the last slab that was to come
  std::string growth_error_;
  uint64_t next_slab_move_ns_ = 0;
  size_t next_slab_look_ = 0;
  size_t next_donor_ = 0;  // 0: the coldest; those before it had no slab that could move
};

}  // namespace kvw
