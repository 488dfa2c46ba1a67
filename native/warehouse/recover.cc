// What an earlier daemon left: sealed pages and free space, nothing else.
//
// LIVE and CLOSING with a good checksum become LIVE, unverified until somebody checks the digest.
// RESERVED, FILLING and LIMBO become LIMBO: their writers may still be writing. What cannot be
// believed is freed only when no living session pins it.
#include <algorithm>

#include "base/error.h"
#include "warehouse/warehouse.h"

namespace kvw {

RecoverySummary Warehouse::recover() {
  RecoverySummary summary;
  const uint64_t begin = clock_.boot_ns();
  // The log first, without callbacks' effects on DRAM: its headers know of clears that a lost
  // ledger forgot, and slots are judged by the highest epoch seen anywhere.
  open_log();
  std::vector<nvme::RecoveredRecord> records;
  if (log_) {
    summary.log = log_->recover(
        [&](nvme::RecoveredRecord&& record) { records.push_back(std::move(record)); });
    raise_epoch(summary.log.epoch_seen);
  }
  recover_slots(summary);
  recover_records(records, summary);
  forget_undeclared();
  note_unwritten();
  summary.orphans = catalog_.orphans();
  summary.sessions = sessions_->size();
  summary.epoch = epoch_;
  if (!options_.inspect) retry_zombies();
  while (next_slab_ < arena_.slab_count() && arena_.slots().cut(next_slab_).populated != 0)
    ++next_slab_;
  summary.pages_dram = catalog_.dram_pages();
  summary.pages_nvme = catalog_.nvme_pages();
  tombstones_.clear();
  summary.seconds = static_cast<double>(clock_.boot_ns() - begin) / 1e9;
  ControlPage& control = arena_.control();
  control.heartbeat_ns.value.store(clock_.boot_ns());
  control.state.value.store(static_cast<uint64_t>(ControlState::serving),
                            std::memory_order_release);
  if (options_.hbm.bytes != 0 && !options_.inspect)
    hbm_ = std::make_unique<HbmTier>(*this, options_.hbm, options_.hbm_at_first_use);
  return summary;
}

void Warehouse::forget_undeclared() {
  // Rows of the last daemon's namespaces stood until now, so that its clients' lookups went on.
  for (uint32_t ordinal = 0; ordinal < kMaxNamespaces; ++ordinal)
    if (spaces_[ordinal].shape.shards == 0) arena_.control().namespaces[ordinal].ready.store(0);
}

void Warehouse::note_unwritten() {
  if (!log_) return;
  for (PageId page = 0; page < catalog_.index().entries(); ++page)
    if (const auto view = catalog_.at(page); view && view->in_dram() && !view->in_nvme())
      unwritten_.insert(page);
}

void Warehouse::recover_slots(RecoverySummary& summary) {
  const Slots& slots = arena_.slots();
  for (uint32_t slab = 0; slab < arena_.slab_count(); ++slab) {
    const SlabCut cut = slots.cut(slab);
    if (cut.populated == 0) continue;
    if (log_) log_->register_memory(arena_.slab(slab));
    if (slots.slots_in(cut) == 0) {
      pool_.slab_ready(slab);
      continue;
    }
    pool_.attach(slab, cut);
    for (uint32_t place = 0; place < slots.slots_in(cut); ++place)
      recover_slot(slots.slot_id(slab, place), cut, summary);
  }
}

void Warehouse::recover_slot(SlotId slot, const SlabCut& cut, RecoverySummary& summary) {
  SlotMeta* meta = pool_.meta(slot);
  const bool fits = meta_fits(*meta, cut.meta_bytes(), cut.slot_bytes());
  const SlotWord word = pool_.load(slot);
  switch (word.state) {
    case SlotState::free:
      pool_.adopt_free(slot);
      return;
    case SlotState::live:
    case SlotState::closing:
      pool_.restore(slot, SlotState::live);
      if (fits && recover_live(slot, *meta, summary)) return;
      if (!fits) ++summary.dropped_slots;
      // Not believed, but perhaps pinned: it waits, closed, until nobody reads it.
      pool_.close(slot);
      zombies_.push_back(slot);
      return;
    default: {
      ++summary.unfinished_slots;
      if (!fits) {  // the daemon ended before it wrote whom it was for: nobody was granted it
        std::memset(static_cast<void*>(meta), 0, sizeof *meta);
        meta->shards = 1;
      }
      // The old daemon's reads may still land in FILLING, and in what a second crash left of it.
      const bool dma = word.state != SlotState::reserved;
      pool_.restore(slot, SlotState::limbo);
      groups_[slot] = {word.generation, meta->key, 0,
                       dma ? clock_.boot_ns() + options_.grace_ns : 0, true};
    }
  }
}

bool Warehouse::recover_live(SlotId slot, const SlotMeta& meta, RecoverySummary& summary) {
  const SlotWord word = pool_.load(slot);
  if (meta.checksum != meta_checksum(meta, word.generation)) {
    ++summary.dropped_slots;
    return false;
  }
  PageFacts facts;
  facts.namespace_id = meta.namespace_id;
  facts.page_tokens = meta.page_tokens;
  facts.shards = meta.shards;
  facts.shard_bytes = meta.shard_bytes;
  facts.clear_epoch = meta.clear_epoch;
  const int ordinal = recovered_space(facts, summary);
  if (ordinal < 0) return false;
  if (catalog_.find(meta.key) || (!catalog_.has_room(meta.key))) {
    ++summary.dropped_slots;
    ++left_dram_[static_cast<size_t>(Gone::window)];
    return false;
  }
  EntryView view;
  view.flags = kEntryUsed | kEntryDram | kEntryUnverified;
  view.space = static_cast<uint16_t>(ordinal);
  view.key = meta.key;
  view.slot = slot;
  view.generation = static_cast<uint32_t>(word.generation);
  view.clear_epoch = meta.clear_epoch;
  view.digest = digests_of(&meta)[0];
  std::vector<PageId> adopted;
  view.page = catalog_.insert(view, meta.parent, meta.position, adopted);
  make_resident(slot, view);
  return true;
}

int Warehouse::recovered_space(const PageFacts& facts, RecoverySummary& summary) {
  int ordinal = ordinal_of(facts.namespace_id);
  if (ordinal < 0) ordinal = adopt_namespace(facts);
  if (ordinal < 0) {
    ++summary.unknown_namespace;
    return -1;
  }
  const Space& space = spaces_[ordinal];
  const bool same = space.shape.page_tokens == facts.page_tokens &&
                    space.shape.shards == facts.shards &&
                    space.shape.shard_bytes == facts.shard_bytes;
  // Without the ledger nobody knows which namespaces were cleared, only that some were.
  const uint64_t floor = options_.ledger_lost ? epoch_ : space.clear_epoch;
  if (same && facts.clear_epoch >= floor) return ordinal;
  ++(same ? summary.cleared : summary.dropped_slots);
  return -1;
}

int Warehouse::adopt_namespace(const PageFacts& facts) {
  // A page of a namespace that the ledger does not know (it was lost, or could not be written):
  // the page says what shape it has. Its full identity comes when a client opens it again.
  NamespaceShape shape;
  shape.id = facts.namespace_id;
  shape.page_tokens = facts.page_tokens;
  shape.shards = facts.shards;
  shape.shard_bytes = facts.shard_bytes;
  try {
    return static_cast<int>(add_namespace(kMaxNamespaces, shape, 0));
  } catch (const Error&) {
    return -1;  // fits no slab or segment of this start's sizes
  }
}

void Warehouse::recover_records(std::vector<nvme::RecoveredRecord>& records,
                                RecoverySummary& summary) {
  std::vector<PageId> adopted;
  for (nvme::RecoveredRecord& record : records) {
    const PageFacts& facts = record.facts;
    const int ordinal = recovered_space(facts, summary);
    if (ordinal < 0) continue;
    if (const auto dead = tombstones_.find(facts.key);
        dead != tombstones_.end() && record.extent.position() <= dead->second) {
      ++summary.cleared;
      continue;
    }
    if (auto view = catalog_.find(facts.key)) {
      const bool newer = !view->in_nvme() || view->extent.position() < record.extent.position();
      if (!newer) continue;
      view->flags |= kEntryNvme;
      view->extent = record.extent;
      catalog_.update(*view);
      continue;
    }
    if (!catalog_.has_room(facts.key)) {
      ++left_nvme_[static_cast<size_t>(Gone::window)];
      continue;
    }
    EntryView view;
    view.flags = kEntryUsed | kEntryNvme;
    view.space = static_cast<uint16_t>(ordinal);
    view.key = facts.key;
    view.extent = record.extent;
    view.clear_epoch = facts.clear_epoch;
    adopted.clear();
    catalog_.insert(view, facts.parent, facts.position, adopted);
  }
}

}  // namespace kvw
