// Which pages of the DRAM tier go to NVMe, and which have yet to: a page is offered to the log
// after its parent, when it is stored, or in a later tick where the queue was full. Core thread
// only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "nvme/write_budget.h"
#include "warehouse/state.h"

namespace kvw {

class WriteAdmission {
 public:
  using Unwritten = std::pair<uint32_t, PageId>;  // position and page
  // A walk over the pages that are in DRAM only, ancestors before descendants.
  struct Spill {
    bool whole = false;  // whatever the reason why they are not on NVMe
    Unwritten next{};
  };

  explicit WriteAdmission(WarehouseState& state)
      : state_(state), budget_(state.options.nvme_bytes_per_day, state.options.nvme_bytes_left) {}

  // Of a page in DRAM: offers it to the log, unless it is on NVMe or on its way there.
  void admit(const EntryView& view, SlotId slot);
  // Offers what the walk meets to the log, a bounded stretch at a time, while its queue is less
  // than half full; true at the end. Ticks walk over what missed the queue, over what made room
  // once there is room that nobody has to make, as on a disk that others had filled, and over what
  // was spared once it is worth it; a flush walks over all, and again while
  // has_room_for_unwritten(). Neither goes beyond the write budget.
  bool spill(Spill& walk);
  // Pages are in DRAM only, and NVMe takes pages without making more room than it makes already.
  bool has_room_for_unwritten();
  void tick();
  void written(SlotId slot, const nvme::Extent& extent);
  void failed(SlotId slot, std::string_view reason);

  // The slot is being written: it may not be given out again.
  bool is_writing(SlotId slot) const { return writing_.contains(slot); }
  bool is_idle() const { return writing_.empty(); }
  // Of one page size.
  bool is_idle(const SlotClass& cls) const { return cls.writing == 0; }
  // The page missed the queue, and a tick will offer it again.
  bool is_missed(PageId page) const { return is_unwritten(page, NotOnNvme::missed); }
  // The write budget was not enough for the page.
  bool is_spared(PageId page) const { return is_unwritten(page, NotOnNvme::spared); }
  // Pages of that size missed the queue, no more than it holds: they are written in a moment. A
  // longer backlog is a device that is too slow, and nobody waits for it.
  bool catches_up(uint64_t page_bytes);

  // Takes up the pages that an earlier daemon has left in DRAM only.
  void recovered();
  // Of a page that is in DRAM still.
  void left_nvme(PageId page, LeaveReason reason);
  void left_dram(PageId page) { set_written(place_of(page)); }

  FlushReport report() const;
  const std::map<std::string, uint64_t>& not_admitted() const { return not_admitted_; }
  double budget_left_bytes() const {
    const uint64_t unspent = state_.log ? state_.log->written_bytes() - spent_bytes_ : 0;
    return budget_.left() - static_cast<double>(unspent);
  }

 private:
  enum class NotOnNvme : uint8_t {
    missed,     // the queue, or was lost: a tick writes it
    made_room,  // for others: a tick writes it where none has to make room for it, or there would
                // be no end of it in a tier smaller than DRAM
    taken_out,  // by an operator: only a flush writes it
    spared,     // by the budget: a tick writes it once it was used, or more is left
  };

  bool append(const EntryView& view, SlotId slot);
  void ended(SlotId slot);
  bool admissible(PageId page, std::string& reason) const;
  // As far as the budget goes: for pages that somebody is likely to ask for again, first.
  bool worth_writing(PageId page);
  // The write budget has enough for a page more, behind what is queued.
  bool affords(bool reused);
  // Takes what the log has written since the last call out of the budget.
  void settle();
  bool is_unwritten(PageId page, NotOnNvme why) const;
  void set_unwritten(Unwritten place, NotOnNvme why);
  void set_written(Unwritten place);
  Unwritten place_of(PageId page) const { return {state_.catalog.node(page).position, page}; }

  WarehouseState& state_;
  nvme::WriteBudget budget_;
  uint64_t spent_bytes_ = 0;                      // of what the log has written
  std::unordered_set<SlotId> writing_;            // being written to NVMe
  std::map<Unwritten, NotOnNvme> unwritten_;      // in DRAM, neither on NVMe nor on the way there
  uint64_t missed_ = 0;                           // of these, those of that reason
  Spill spilling_;                                // of the ticks
  uint64_t next_walk_ns_ = 0;                     // where nothing was missed
  std::map<std::string, uint64_t> not_admitted_;  // by reason
};

}  // namespace kvw
