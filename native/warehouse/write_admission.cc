#include "warehouse/write_admission.h"

#include <utility>

namespace kvw {

namespace {

constexpr size_t kSpilledPages = 8192;   // that one step of a walk looks at
constexpr uint64_t kWalkNs = kSecondNs;  // between walks over what nothing is urgent of

}  // namespace

bool WriteAdmission::admissible(PageId page, std::string& reason) const {
  if (state_.catalog.node(page).position == 0) return true;
  const auto parent = state_.catalog.at(state_.catalog.parent(page));
  if (parent && (parent->in_nvme() || (parent->in_dram() && writing_.contains(parent->slot))))
    return true;
  reason = "parent_not_admitted";
  return false;
}

bool WriteAdmission::affords(bool reused) {
  if (!budget_.bounded()) return true;
  settle();
  return budget_.allows(reused, state_.log->queued_bytes());
}

void WriteAdmission::settle() {
  const uint64_t written = state_.log->written_bytes();
  budget_.spend(written - std::exchange(spent_bytes_, written));
}

// What was stored before and left is asked for again, too.
bool WriteAdmission::worth_writing(PageId page) {
  if (affords(false)) return true;
  if (!affords(true)) return false;
  const PageNode& node = state_.catalog.node(page);
  if (node.used_at != 0 || node.used || state_.keeps.has(page)) return true;
  return state_.absences.left(state_.catalog.key(page)).has_value();
}

bool WriteAdmission::append(const EntryView& view, SlotId slot) {
  // A damaged header must not become a record, nor be followed.
  if (!state_.has_good_header(slot)) return false;
  if (!state_.log->append(slot, facts_of(*state_.pool.meta(slot)), state_.pool.payload(slot)))
    return false;
  if (writing_.insert(slot).second) ++state_.pool.class_of(slot).writing;
  set_written(place_of(view.page));
  return true;
}

void WriteAdmission::admit(const EntryView& view, SlotId slot) {
  if (!state_.log || view.in_nvme() || writing_.contains(slot)) return;
  std::string reason;
  NotOnNvme why = NotOnNvme::missed;
  if (!worth_writing(view.page)) {
    reason = "write_budget";
    why = NotOnNvme::spared;
  } else if (admissible(view.page, reason)) {
    if (append(view, slot)) return;
    reason = state_.log->health() == nvme::LogHealth::ok ? "queue_full" : "read_only";
  } else if (is_spared(state_.catalog.parent(view.page))) {
    why = NotOnNvme::spared;  // both at once, when the parent is
  }
  set_unwritten(place_of(view.page), why);
  ++not_admitted_[reason];
}

bool WriteAdmission::spill(Spill& walk) {
  if (state_.log->health() != nvme::LogHealth::ok) return true;
  auto at = unwritten_.lower_bound(walk.next);
  for (size_t looked = 0; at != unwritten_.end(); ++looked) {
    const auto [place, why] = *at;
    walk.next = place;
    if (looked == kSpilledPages) return false;
    if (state_.log->queued_bytes() >= state_.options.write_queue_bytes / 2) return false;
    if (!affords(true)) return true;
    ++at;  // the one before may go
    if (!walk.whole) {
      if (why == NotOnNvme::taken_out || (why == NotOnNvme::made_room && !state_.log->has_room()))
        continue;
      if (!worth_writing(place.second)) {
        if (why == NotOnNvme::missed) set_unwritten(place, NotOnNvme::spared);
        continue;
      }
    }
    const EntryView view = *state_.catalog.at(place.second);
    std::string reason;
    if (!admissible(view.page, reason) || append(view, view.slot)) continue;
    // Larger than what is left of the queue; what an empty queue refuses is refused for good.
    if (walk.whole && state_.log->queued_bytes() != 0) return false;
  }
  return true;
}

bool WriteAdmission::has_room_for_unwritten() {
  return !unwritten_.empty() && state_.log->health() == nvme::LogHealth::ok &&
         state_.log->has_room_soon() && affords(true);
}

FlushReport WriteAdmission::report() const {
  FlushReport report;
  report.not_admitted = state_.log ? unwritten_.size() : state_.catalog.dram_pages();
  report.pending = writing_.size();
  report.flushed = state_.catalog.nvme_pages();
  return report;
}

// A slab stays with its page size while a slot of it is being written.
void WriteAdmission::ended(SlotId slot) {
  if (writing_.erase(slot) != 0) --state_.pool.class_of(slot).writing;
}

void WriteAdmission::written(SlotId slot, const nvme::Extent& extent) {
  ended(slot);
  const SlotMeta* meta = state_.pool.meta(slot);
  auto view = state_.catalog.find(meta->key);
  // Cleared or quarantined while it was being written: the record is dead on arrival.
  if (!view || view->slot != slot || !view->in_dram()) return;
  view->flags |= kEntryNvme;
  view->extent = extent;
  state_.catalog.update(*view);
  state_.catalog.node(view->page).used = false;
}

void WriteAdmission::failed(SlotId slot, std::string_view reason) {
  ended(slot);
  if (const PageId page = state_.pool.page_at(slot); page != kNoPage)
    set_unwritten(place_of(page), NotOnNvme::missed);
  ++not_admitted_[std::string(reason)];
}

void WriteAdmission::recovered() {
  for (PageId page = 0; page < state_.catalog.index().entries(); ++page)
    if (const auto view = state_.catalog.at(page); view && view->in_dram() && !view->in_nvme())
      set_unwritten(place_of(page), NotOnNvme::missed);
}

void WriteAdmission::tick() {
  const uint64_t now = state_.now.boot_ns;
  budget_.earn(now);
  settle();
  if (missed_ == 0 && now < next_walk_ns_) return;
  if (!spill(spilling_)) return;
  spilling_ = {};
  next_walk_ns_ = now + kWalkNs;
}

void WriteAdmission::left_nvme(PageId page, LeaveReason reason) {
  NotOnNvme why = NotOnNvme::taken_out;
  if (reason == LeaveReason::lost || reason == LeaveReason::quarantined) why = NotOnNvme::missed;
  // An orphan's record made room because it was one; its parent may come back.
  if (reason == LeaveReason::reclaimed)
    why = state_.catalog.is_orphan(page) ? NotOnNvme::missed : NotOnNvme::made_room;
  set_unwritten(place_of(page), why);
}

void WriteAdmission::set_unwritten(Unwritten place, NotOnNvme why) {
  set_written(place);
  unwritten_.emplace(place, why);
  missed_ += why == NotOnNvme::missed ? 1 : 0;
}

void WriteAdmission::set_written(Unwritten place) {
  const auto at = unwritten_.find(place);
  if (at == unwritten_.end()) return;
  missed_ -= at->second == NotOnNvme::missed ? 1 : 0;
  unwritten_.erase(at);
}

bool WriteAdmission::is_unwritten(PageId page, NotOnNvme why) const {
  if (page == kNoPage) return false;
  const auto at = unwritten_.find(place_of(page));
  return at != unwritten_.end() && at->second == why;
}

bool WriteAdmission::catches_up(uint64_t page_bytes) {
  return missed_ != 0 && state_.log && state_.log->health() == nvme::LogHealth::ok &&
         missed_ * page_bytes <= state_.options.write_queue_bytes && affords(true);
}

}  // namespace kvw
