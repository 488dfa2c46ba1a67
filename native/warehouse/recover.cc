// What an earlier daemon left: sealed pages and free space, nothing else.
//
// LIVE and CLOSING with a good checksum become LIVE and unverified: each load checks the digest.
// RESERVED, FILLING and LIMBO become LIMBO: their writers may still be writing. What cannot be
// believed is freed only when no living session pins it.
#include <algorithm>
#include <map>
#include <tuple>

#include "base/error.h"
#include "warehouse/placement.h"
#include "warehouse/warehouse.h"

namespace kvw {

namespace {

constexpr size_t kAhead = 16;  // pages

// What decides whether a page has a namespace.
PageFacts shape_facts_of(const SlotMeta& meta) {
  PageFacts facts;
  facts.namespace_id = meta.namespace_id;
  facts.page_tokens = meta.page_tokens;
  facts.shards = meta.shards;
  facts.shard_bytes = meta.shard_bytes;
  facts.clear_epoch = meta.clear_epoch;
  return facts;
}

// What is kept of a record until all have been read: there is one for each page on NVMe, and a
// few namespaces.
struct LogRecord {
  Key key, parent;
  nvme::Extent extent;
  uint32_t position = 0;
  uint32_t shape = 0;  // which of those met
  uint64_t clear_epoch = 0;
};
// What a start is told that it takes.
static_assert(sizeof(LogRecord) + sizeof(Key) + kPlaceBytes == kRecoveredRecordBytes);
static_assert(sizeof(SlotId) + sizeof(Key) + kPlaceBytes == kRecoveredSlotBytes);

// One look at what was left. `tombstones`: records of a key up to a log position are dead.
class Recovery {
 public:
  using Tombstones = std::unordered_map<Key, uint64_t, KeyHash>;

  Recovery(Warehouse& warehouse, WarehouseState& state, Removal& removal,
           const Tombstones& tombstones)
      : warehouse_(warehouse), state_(state), removal_(removal), tombstones_(tombstones) {}

  RecoverySummary run();

 private:
  std::vector<SlotId> recover_slots();
  bool recover_slot(SlotId slot, const SlabLayout& layout);
  void close_recovered(SlotId slot);
  LogRecord kept(const nvme::RecoveredRecord& record);
  bool believed(const LogRecord& record);
  bool recovered_space(const PageFacts& facts);
  int adopt_namespace(const PageFacts& facts);
  void insert_recovered(std::span<const SlotId> sealed, std::span<const LogRecord> records);
  void insert_slot(SlotId slot, PageId page);
  void insert_record(const LogRecord& record, PageId page);
  void forget_undeclared();

  Warehouse& warehouse_;
  WarehouseState& state_;
  Removal& removal_;
  const Tombstones& tombstones_;
  RecoverySummary summary_;
  std::vector<PageFacts> shapes_;  // those of records, as shape_facts_of has them
  std::map<std::tuple<uint64_t, uint64_t, uint32_t, uint32_t, uint64_t>, uint32_t> shape_numbers_;
  uint64_t without_room_dram_ = 0, without_room_nvme_ = 0;
};

RecoverySummary Recovery::run() {
  // First what can be believed, without effects: headers, records and slots know of clears that a
  // lost ledger forgot, and all are judged by the highest epoch seen anywhere.
  std::vector<LogRecord> records;
  if (state_.log) {
    summary_.log = state_.log->recover(
        [&](nvme::RecoveredRecord&& record) { records.push_back(kept(record)); });
    warehouse_.raise_epoch(summary_.log.epoch_seen);
  }
  std::vector<SlotId> sealed = recover_slots();
  for (const SlotId slot : sealed) warehouse_.raise_epoch(state_.pool.meta(slot)->clear_epoch);
  for (const auto& record : records) warehouse_.raise_epoch(record.clear_epoch);
  std::erase_if(sealed, [&](SlotId slot) {
    if (recovered_space(shape_facts_of(*state_.pool.meta(slot)))) return false;
    close_recovered(slot);
    return true;
  });
  std::erase_if(records, [&](const auto& record) { return !believed(record); });
  insert_recovered(sealed, records);
  if (const Arena::Shrunk& shrunk = state_.arena.shrunk(); shrunk.slabs != 0)
    state_.events.add("arena_shrunk",
                      "bytes=" + std::to_string(shrunk.slabs * state_.arena.slab_bytes()) +
                          " dropped_pages=" + std::to_string(shrunk.pages));
  forget_undeclared();
  summary_.orphans = state_.catalog.orphans();
  summary_.sessions = state_.sessions.size();
  summary_.epoch = state_.epoch;
  summary_.pages_dram = state_.catalog.dram_pages();
  summary_.pages_nvme = state_.catalog.nvme_pages();
  return summary_;
}

void Recovery::forget_undeclared() {
  // Rows of the last daemon's namespaces stood until now, so that its clients' lookups went on.
  for (uint32_t ordinal = 0; ordinal < kMaxNamespaces; ++ordinal)
    if (state_.spaces[ordinal].shape.shards == 0)
      state_.arena.control().namespaces[ordinal].ready.store(0);
}

std::vector<SlotId> Recovery::recover_slots() {
  std::vector<SlotId> sealed;
  const Slots& slots = state_.arena.slots();
  for (uint32_t slab = 0; slab < state_.arena.slab_count(); ++slab) {
    const SlabLayout layout = slots.layout(slab);
    if (layout.populated == 0) continue;
    if (state_.log) state_.log->register_memory(state_.arena.slab(slab));
    if (slots.slots_in(layout) == 0) {
      state_.pool.slab_ready(slab);
      continue;
    }
    const uint32_t used = state_.pool.attach(slab, layout);
    for (uint32_t place = 0; place < used; ++place)
      if (const SlotId slot = slots.slot_id(slab, place); recover_slot(slot, layout))
        sealed.push_back(slot);
  }
  return sealed;
}

// True if it holds a page that can be believed.
bool Recovery::recover_slot(SlotId slot, const SlabLayout& layout) {
  SlotMeta* meta = state_.pool.meta(slot);
  const bool fits = meta_fits(*meta, layout.meta_bytes(), layout.slot_bytes());
  const SlotWord word = state_.pool.load(slot);
  switch (word.state) {
    case SlotState::free:
      state_.pool.adopt_free(slot);
      return false;
    case SlotState::live:
    case SlotState::closing:
      state_.pool.restore(slot, SlotState::live);
      if (fits && meta->checksum == meta_checksum(*meta, word.generation)) return true;
      ++summary_.dropped_slots;
      close_recovered(slot);
      return false;
    default: {
      ++summary_.unfinished_slots;
      if (!fits) {  // the daemon ended before it wrote whom it was for: nobody was granted it
        std::memset(static_cast<void*>(meta), 0, sizeof *meta);
        meta->shards = 1;
      }
      // The old daemon's reads may still land in FILLING, and in what a second crash left of it.
      const bool dma = word.state != SlotState::reserved;
      state_.pool.restore(slot, SlotState::limbo);
      const uint64_t* owners = owners_of(meta);
      const uint64_t granted = meta->granted.load() & all_shards(meta->shards);
      const SessionId first = granted == 0 ? 0 : owners[__builtin_ctzll(granted)];
      Group& group = state_.groups.recovered(slot, meta->shards, first, layout.slot_bytes());
      group.generation = word.generation;
      group.key = meta->key;
      group.not_before_ns = dma ? state_.clock.boot_ns() + state_.options.grace_ns : 0;
      group.granted = granted;
      group.settled = meta->settled.load() & granted;
      for (uint32_t shard = 0; shard < meta->shards; ++shard)
        group.shards[shard].owner = owners[shard];
      return false;
    }
  }
}

// Not believed, or without a place, but perhaps pinned: it waits, closed, until nobody reads it.
void Recovery::close_recovered(SlotId slot) {
  state_.pool.close(slot);
  removal_.retire(slot);
}

LogRecord Recovery::kept(const nvme::RecoveredRecord& record) {
  const PageFacts& facts = record.facts;
  const auto [number, first] =
      shape_numbers_.try_emplace({facts.namespace_id.lo, facts.namespace_id.hi, facts.page_tokens,
                                  facts.shards, facts.shard_bytes},
                                 static_cast<uint32_t>(shapes_.size()));
  if (first) shapes_.push_back(facts);
  return {facts.key,      facts.parent,   record.extent,
          facts.position, number->second, facts.clear_epoch};
}

bool Recovery::believed(const LogRecord& record) {
  PageFacts& facts = shapes_[record.shape];
  facts.clear_epoch = record.clear_epoch;
  if (!recovered_space(facts)) return false;
  const auto dead = tombstones_.find(record.key);
  if (dead == tombstones_.end() || record.extent.position() > dead->second) return true;
  ++summary_.cleared;
  return false;
}

// Whether pages like this one have a namespace, and are not older than its last clear.
bool Recovery::recovered_space(const PageFacts& facts) {
  int ordinal = state_.ordinal_of(facts.namespace_id);
  if (ordinal < 0 && facts.clear_epoch < std::min(state_.options.epoch_floor, state_.epoch)) {
    ++summary_.cleared;  // what forgotten namespaces have left takes no place among those that are
    return false;
  }
  if (ordinal < 0) ordinal = adopt_namespace(facts);
  if (ordinal < 0) {
    ++summary_.unknown_namespace;
    return false;
  }
  const Space& space = state_.spaces[ordinal];
  const bool same = space.shape.page_tokens == facts.page_tokens &&
                    space.shape.shards == facts.shards &&
                    space.shape.shard_bytes == facts.shard_bytes;
  if (same && facts.clear_epoch >= space.clear_epoch) return true;
  ++(same ? summary_.cleared : summary_.dropped_slots);
  return false;
}

int Recovery::adopt_namespace(const PageFacts& facts) {
  // A page of a namespace that the ledger does not know (it was lost, or could not be written):
  // the page says what shape it has. Its full identity comes when a client opens it again, which
  // it has to: until then no client finds it. Whether it was cleared before the loss nobody knows.
  NamespaceShape shape;
  shape.id = facts.namespace_id;
  shape.page_tokens = facts.page_tokens;
  shape.shards = facts.shards;
  shape.shard_bytes = facts.shard_bytes;
  try {
    const uint32_t ordinal = warehouse_.add_namespace(
        kMaxNamespaces, shape, std::min(state_.options.epoch_floor, state_.epoch));
    state_.arena.control().namespaces[ordinal].ready.store(0);
    return static_cast<int>(ordinal);
  } catch (const Error&) {
    return -1;  // fits no slab of this arena
  }
}

void Recovery::insert_recovered(std::span<const SlotId> sealed,
                                std::span<const LogRecord> records) {
  std::vector<Key> keys;
  keys.reserve(sealed.size() + records.size());
  for (const SlotId slot : sealed) keys.push_back(state_.pool.meta(slot)->key);
  for (const LogRecord& record : records) keys.push_back(record.key);
  const std::vector<PageId> pages =
      place(keys, state_.catalog.index().entries(), state_.catalog.capacity());
  size_t next = 0;
  // All over the table: what a page's turn touches is on its way while those before it have theirs.
  const auto page = [&] {
    if (const size_t ahead = next + kAhead; ahead < keys.size()) {
      state_.catalog.prefetch(keys[ahead]);
      if (pages[ahead] != kNoPage) state_.catalog.prefetch_write(pages[ahead]);
    }
    return pages[next++];
  };
  for (const SlotId slot : sealed) insert_slot(slot, page());
  for (const LogRecord& record : records) insert_record(record, page());
  const uint64_t dram = without_room_dram_, nvme = without_room_nvme_;
  if (dram + nvme == 0) return;
  removal_.count_without_room(dram, nvme);
  state_.events.add(
      "index_too_small",
      "capacity=" + std::to_string(state_.catalog.capacity()) +
          " dropped_dram=" + std::to_string(dram) + " dropped_nvme=" + std::to_string(nvme) +
          " enough=--index-pages=" + std::to_string(state_.catalog.pages() + dram + nvme));
}

void Recovery::insert_slot(SlotId slot, PageId page) {
  const SlotMeta& meta = *state_.pool.meta(slot);
  if (page == kNoPage) {
    // A key that is there already: one of the two slots is damaged.
    if (state_.catalog.find(meta.key))
      ++summary_.dropped_slots;
    else
      ++without_room_dram_;
    return close_recovered(slot);
  }
  EntryView view;
  view.page = page;
  view.flags = kEntryUsed | kEntryDram | kEntryUnverified;
  view.space = static_cast<uint16_t>(state_.ordinal_of(meta.namespace_id));
  view.key = meta.key;
  view.slot = slot;
  view.generation = static_cast<uint32_t>(state_.pool.load(slot).generation);
  view.clear_epoch = meta.clear_epoch;
  state_.catalog.insert(view, meta.parent, meta.position);
  state_.make_resident(slot, view);
}

void Recovery::insert_record(const LogRecord& record, PageId page) {
  if (auto there = state_.catalog.find(record.key)) {
    if (there->in_nvme() && there->extent.position() >= record.extent.position()) return;
    there->flags |= kEntryNvme;
    there->extent = record.extent;
    return state_.catalog.update(*there);
  }
  if (page == kNoPage) {
    ++without_room_nvme_;
    return;
  }
  EntryView view;
  view.page = page;
  view.flags = kEntryUsed | kEntryNvme;
  view.space = static_cast<uint16_t>(state_.ordinal_of(shapes_[record.shape].namespace_id));
  view.key = record.key;
  view.extent = record.extent;
  view.clear_epoch = record.clear_epoch;
  state_.catalog.insert(view, record.parent, record.position);
}

}  // namespace

RecoverySummary Warehouse::recover() {
  const uint64_t begin = state_.clock.boot_ns();
  open_log();
  RecoverySummary summary = Recovery(*this, state_, removal_, tombstones_).run();
  tombstones_.clear();
  recovered_ = true;
  if (state_.log) writes_.recovered();
  if (!state_.options.inspect) removal_.free_retired();
  eviction_.skip_populated();
  summary.seconds = static_cast<double>(state_.clock.boot_ns() - begin) / 1e9;
  ControlPage& control = state_.arena.control();
  control.heartbeat_ns.value.store(state_.clock.boot_ns());
  control.state.value.store(static_cast<uint64_t>(ControlState::serving),
                            std::memory_order_release);
  if (state_.options.hbm.bytes != 0 && !state_.options.inspect)
    state_.hbm = std::make_unique<HbmTier>(state_, checker_);
  if (state_.options.remote_write != RemoteWrite::none && !state_.options.inspect)
    state_.puts = std::make_unique<Puts>(state_);
  if (state_.options.remote_read && !state_.options.inspect)
    state_.fetches = std::make_unique<Fetches>(state_);
  return summary;
}

}  // namespace kvw
