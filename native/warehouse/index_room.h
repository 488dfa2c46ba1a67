// Room in the index. A page must stand in one of its 32 places, so a full index could choose among
// so few that with chains each choice were a page that others build on, and its whole tail went
// with it. So the index is not let become full: near its bound the coldest pages of all leave, as
// from the arena. What is left for claim() are places that are taken all the same, once in hundreds
// of thousands of pages. Core thread only.
#pragma once

#include <cstdint>

#include "warehouse/eviction.h"
#include "warehouse/removal.h"
#include "warehouse/state.h"
#include "warehouse/uses.h"
#include "warehouse/write_admission.h"

namespace kvw {

class IndexRoom {
 public:
  IndexRoom(WarehouseState& state, WriteAdmission& writes, Removal& removal, Uses& uses,
            Eviction& eviction)
      : state_(state), writes_(writes), removal_(removal), uses_(uses), eviction_(eviction) {}

  // Says how many pages of this shape the tiers have room for, where the index has not.
  void note_shape(const NamespaceShape& shape);
  // A position for a page that is about to be stored below `parent`; kNoPage: there is none.
  // `parent_slot` is not evicted for it.
  PageId claim(const Key& key, const Key& parent, SlotId parent_slot);
  // Pages left, or were not stored, for want of room in it.
  bool was_bound() const { return bound_; }

 private:
  void keep_room(const Key& parent, SlotId parent_slot);
  bool drop_cold_on_nvme(const Key& parent);
  PageId last_below(PageId page) const;
  bool stays(PageId page) const;
  PageId oldest_record();
  bool make_place(const Key& key, const Key& parent);
  void say_bound();

  WarehouseState& state_;
  WriteAdmission& writes_;
  Removal& removal_;
  Uses& uses_;
  Eviction& eviction_;
  PageId hand_ = 0, victim_ = kNoPage;
  uint64_t wanted_ = 0;  // pages of the tiers, as was said
  bool bound_ = false;   // and it was said
};

}  // namespace kvw
