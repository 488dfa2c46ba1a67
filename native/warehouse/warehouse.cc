#include "warehouse/warehouse.h"

#include <algorithm>

#include "base/error.h"

namespace kvw {

namespace {

constexpr size_t kOrphansPerTick = 1024;
constexpr uint64_t kPinLimitTicks = 5;  // a pass over all pins may take ten milliseconds

}  // namespace

Warehouse::Warehouse(WarehouseOptions options, const Clock& clock)
    : state_(std::move(options), clock) {
  ControlPage& control = state_.arena.control();
  control.pin_limit_bytes.value.store(state_.arena.bytes() / 2);
  control.clear_epoch.value.store(state_.epoch);
  // What an earlier daemon has said of its remote tier.
  control.remote.serving.value.store(0);
  for (NamespaceWord& row : control.namespaces) row.remote_epoch.store(0);
}

void Warehouse::open_log() {
  if (state_.options.nvme_dir.empty()) return;
  nvme::LogOptions log;
  log.directory = state_.options.nvme_dir;
  log.warehouse_id = state_.options.warehouse_id;
  log.capacity_bytes = state_.options.nvme_capacity_bytes;
  log.segment_bytes = segment_bytes_for(state_.options);
  log.queue_bytes = state_.options.write_queue_bytes;
  log.flush_interval_ns = state_.options.flush_interval_ns;
  log.retry_interval_ns = state_.options.nvme_retry_ns;
  log.answer_ns = state_.options.nvme_answer_ns;
  log.io_engine = state_.options.io_engine;
  log.make_engine = state_.options.make_engine;
  log.allocate = state_.options.allocate;
  log.epoch_now = state_.epoch;
  log.inspect = state_.options.inspect;
  log.life_ahead = static_cast<uint32_t>(state_.options.log_end >> 32);
  for (const auto& [key, position] : tombstones_)
    log.life_floor = std::max(log.life_floor, static_cast<uint32_t>(position >> 32));
  state_.log = nvme::open_log(log, *this, state_.clock);
}

Warehouse::~Warehouse() { stop(); }

void Warehouse::stop() {
  state_.hbm.reset();
  if (state_.log) state_.log->stop();
  if (state_.fetches) state_.fetches->off();
  wake_waiters();
  state_.arena.control().state.value.store(static_cast<uint64_t>(ControlState::stopped));
}

uint32_t Warehouse::add_namespace(uint32_t wish, const NamespaceShape& shape,
                                  uint64_t clear_epoch) {
  const auto refuse = [](const std::string& message) {
    throw Error(ErrorKind::usage, "bad_namespace", message);
  };
  if (shape.shards == 0 || shape.shards > kMaxShards)
    refuse("shards is " + std::to_string(shape.shards) + ", it must be 1 to " +
           std::to_string(kMaxShards));
  if (shape.page_tokens == 0 || shape.page_tokens > kMaxPageTokens)
    refuse("page_tokens is " + std::to_string(shape.page_tokens) + ", it must be 1 to " +
           std::to_string(kMaxPageTokens));
  if (shape.shard_bytes == 0 || shape.shard_bytes > kMaxShardBytes)
    refuse("page_bytes is " + std::to_string(shape.shard_bytes) + ", it must be 1 to " +
           std::to_string(kMaxShardBytes));
  if (const int known = state_.ordinal_of(shape.id); known >= 0) {
    Space& space = state_.spaces[known];
    if (!(space.shape == shape))
      refuse("namespace " + to_hex(shape.id) + " has another shape here");
    raise_clear_epoch(static_cast<uint32_t>(known), clear_epoch);
    publish_row(static_cast<uint32_t>(known));
    return static_cast<uint32_t>(known);
  }
  uint32_t ordinal = wish;
  if (ordinal >= kMaxNamespaces || state_.spaces[ordinal].shape.shards != 0)
    for (ordinal = 0; ordinal < kMaxNamespaces && state_.spaces[ordinal].shape.shards != 0;)
      ++ordinal;
  if (ordinal == kMaxNamespaces)
    throw Error(ErrorKind::capacity, "too_many_namespaces",
                "this warehouse has " + std::to_string(kMaxNamespaces) + " namespaces");
  Space& space = state_.spaces[ordinal];
  // One that was there before the segments became smaller keeps its pages, in DRAM alone.
  if (recovered_ && shape.slot_bytes() > record_payload_max(state_.options))
    throw Error(ErrorKind::usage, "page_too_large",
                "a page of " + std::to_string(shape.slot_bytes()) +
                    " bytes fits no NVMe segment of " +
                    std::to_string(segment_bytes_for(state_.options)) +
                    " bytes; use fewer tokens per page, or a larger --nvme-capacity");
  space.cls = &state_.pool.class_of(shape);
  space.shape = shape;
  space.clear_epoch = clear_epoch;
  state_.ordinals[shape.id] = static_cast<uint16_t>(ordinal);
  publish_row(ordinal);
  index_room_.note_shape(shape);
  return ordinal;
}

// Also of a namespace that is there again: that is a use of it.
void Warehouse::publish_row(uint32_t ordinal) {
  Space& space = state_.spaces[ordinal];
  space.used_ns = state_.clock.boot_ns();
  const NamespaceShape& shape = space.shape;
  NamespaceWord& row = state_.arena.control().namespaces[ordinal];
  const NamespaceShape before{{row.id_lo.load(), row.id_hi.load()},
                              row.page_tokens.load(),
                              row.shards.load(),
                              row.shard_bytes.load()};
  if (!(before == shape)) {
    row.ready.store(0);
    row.last_ready = std::max<uint64_t>(row.last_ready, 1) + 1;  // 1: of an older daemon
    row.id_lo.store(shape.id.lo);
    row.id_hi.store(shape.id.hi);
    row.shard_bytes.store(shape.shard_bytes);
    row.page_tokens.store(shape.page_tokens);
    row.shards.store(shape.shards);
  }
  row.clear_epoch.store(space.clear_epoch, std::memory_order_release);
  row.ready.store(std::max<uint64_t>(row.last_ready, 1), std::memory_order_release);
}

bool Warehouse::set_remote_epoch(const Key& namespace_id, uint64_t fleet_epoch,
                                 uint64_t clear_epoch) {
  const int ordinal = state_.ordinal_of(namespace_id);
  if (ordinal < 0 || state_.spaces[ordinal].clear_epoch != clear_epoch) return false;
  if (fleet_epoch == UINT64_MAX) return false;
  publish_remote(static_cast<uint32_t>(ordinal), fleet_epoch);
  return true;
}

void Warehouse::stop_remote(const Key& namespace_id) {
  const int ordinal = state_.ordinal_of(namespace_id);
  if (ordinal >= 0) publish_remote(static_cast<uint32_t>(ordinal), std::nullopt);
}

void Warehouse::publish_remote(uint32_t ordinal, std::optional<uint64_t> epoch) {
  state_.spaces[ordinal].remote_epoch = epoch;
  state_.arena.control().namespaces[ordinal].remote_epoch.store(epoch ? *epoch + 1 : 0,
                                                                std::memory_order_release);
  state_.waiters.note();  // who waits for a page from there asks again
}

bool Warehouse::in_use(uint32_t ordinal) const {
  return state_.catalog.counts(static_cast<uint16_t>(ordinal)).pages != 0 || feeds_.follow(ordinal);
}

std::optional<Key> Warehouse::forget_namespace(uint32_t ordinal) {
  uses_.count_stores();
  std::vector<bool> written(kMaxNamespaces);
  for (const auto& [slot, group] : state_.groups)
    if (!group.limbo) written[group.space] = true;
  std::optional<uint32_t> found;
  for (uint32_t each = 0; each < kMaxNamespaces; ++each) {
    if (state_.spaces[each].shape.shards == 0 || (ordinal != kMaxNamespaces && each != ordinal))
      continue;
    if (written[each] || in_use(each)) continue;
    if (!found || state_.spaces[each].used_ns < state_.spaces[*found].used_ns) found = each;
  }
  if (!found) return std::nullopt;
  const Key id = state_.spaces[*found].shape.id;
  SlotClass& cls = *state_.spaces[*found].cls;
  publish_remote(*found, std::nullopt);
  state_.arena.control().namespaces[*found].ready.store(0);
  state_.ordinals.erase(id);
  uses_.forget(*found);
  state_.spaces[*found] = {};
  cls.unused =
      std::ranges::none_of(state_.spaces, [&](const Space& each) { return each.cls == &cls; });
  return id;
}

void Warehouse::tick() {
  const uint64_t now = state_.clock.boot_ns();
  state_.now = {now, state_.clock.wall_ns()};
  state_.arena.control().heartbeat_ns.value.store(now, std::memory_order_release);
  look_at_files();
  checker_.tick(now);
  if (state_.options.inspect) return;
  state_.sessions.pins_are_old();
  state_.sessions.reap();
  reservations_.tick();
  removal_.free_retired();
  uses_.apply_touches();
  eviction_.keep_free();
  sweep(kOrphansPerTick);
  promotions_.tick();
  state_.keeps.tick(now);
  feeds_.drop_closed();
  if (state_.fetches) state_.fetches->tick();
  if (state_.log) state_.log->tick();
  if (state_.log) writes_.tick();
  if (state_.hbm) state_.hbm->tick();
  publish_rates();
  if (ticks_++ % kPinLimitTicks == 0) publish_pin_limit();
}

void Warehouse::go_on() {
  if (checker_.goes_on()) checker_.go_on();
  removal_.go_on();
  eviction_.go_on();
  state_.keeps.go_on();
}

// Said once each; who hears that a file was cut ends the daemon.
void Warehouse::look_at_files() {
  const Arena::Damage damage = state_.arena.damage();
  const int found = damage.file == nullptr ? 0 : damage.cut ? 2 : 1;
  if (found <= files_lost_ || state_.events.full()) return;
  files_lost_ = found;
  state_.events.add("memory_lost", std::string("file=") + damage.file +
                                       " reason=" + (damage.cut ? "cut" : "no_memory"));
}

void Warehouse::publish_rates() {
  if (!state_.log) return;
  const nvme::LogStats stats = state_.log->stats();
  ControlPage& control = state_.arena.control();
  control.nvme_read_bytes_per_s.value.store(stats.read_bytes_per_s, std::memory_order_relaxed);
  control.nvme_write_bytes_per_s.value.store(stats.write_bytes_per_s, std::memory_order_relaxed);
  control.nvme_reads_queued.value.store(stats.reads_in_flight, std::memory_order_relaxed);
  control.nvme_write_queue_bytes.value.store(stats.queued_bytes, std::memory_order_relaxed);
  control.durable.value.store(state_.log->durable_through(), std::memory_order_release);
}

// What all leave: a process that pins no more than that has no more than half of what the others
// leave, since its own pins are among them. What several pin between two looks is not foreseen.
void Warehouse::publish_pin_limit() {
  uint64_t pinned = 0;
  state_.sessions.pins().visit_slots([&](SlotId slot) { pinned += state_.pool.slot_bytes(slot); });
  const uint64_t arena = state_.arena.bytes();
  state_.arena.control().pin_limit_bytes.value.store(
      std::min(arena / 2, arena - std::min(arena, pinned)));
}

void Warehouse::drain() {
  reservations_.drain(true);
  if (state_.fetches) state_.fetches->drain(true);
  state_.arena.control().state.value.store(static_cast<uint64_t>(ControlState::draining));
}

void Warehouse::undrain() {
  if (state_.options.inspect) return;
  reservations_.drain(false);
  if (state_.fetches) state_.fetches->drain(false);
  state_.arena.control().state.value.store(static_cast<uint64_t>(ControlState::serving));
}

WarehouseStatus Warehouse::status() {
  WarehouseStatus status;
  status.incarnation = state_.arena.incarnation();
  status.uptime_ns = uses_.uptime_ns();
  status.draining = reservations_.draining();
  status.dram_capacity_bytes = state_.arena.bytes();
  status.dram_populated_bytes = state_.pool.populated_slabs() * state_.arena.slab_bytes();
  for (const auto& cls : state_.pool.classes()) {
    status.dram_used_bytes += (cls->live + cls->reserved + cls->limbo) * cls->layout.slot_bytes();
    status.reserved_slots += cls->reserved;
    status.limbo_slots += cls->limbo;
  }
  status.free_slots = state_.pool.free_slots();
  status.zombie_slots = removal_.retired();
  status.dram_health = eviction_.health();
  status.dram_pages = state_.catalog.dram_pages();
  status.nvme_pages = state_.catalog.nvme_pages();
  status.has_nvme = state_.log != nullptr;
  if (state_.log) status.log = state_.log->stats();
  if (state_.hbm) status.hbm = state_.hbm->status();
  if (state_.puts) status.puts = state_.puts->status();
  if (state_.fetches) status.fetches = state_.fetches->status();
  status.index_pages = state_.catalog.pages();
  status.index_capacity = state_.catalog.capacity();
  status.index_bound = index_room_.was_bound();
  status.page_bytes_max = std::min(state_.arena.slab_bytes(), record_payload_max(state_.options));
  status.policy = state_.options.policy;
  status.orphan_pages = state_.catalog.orphans();
  status.released_pages = uses_.released_pages();
  status.keeps = state_.keeps.size();
  status.kept_pages = state_.keeps.used_pages();
  status.kept_bytes = state_.keeps.used_bytes();
  status.keep_capacity_bytes = state_.keeps.limit_bytes();
  status.sessions = state_.sessions.size();
  status.pins = state_.sessions.pins().size();
  status.promotions_in_flight = promotions_.under_way();
  status.pages_sealed = reservations_.pages_sealed();
  status.bytes_sealed = reservations_.bytes_sealed();
  uses_.count_stores();
  status.stored_again = uses_.stored_again();
  status.pages_promoted = promotions_.pages_promoted();
  status.clients = state_.sessions.totals();
  status.not_admitted = writes_.not_admitted();
  status.nvme_bytes_per_day = state_.options.nvme_bytes_per_day;
  status.nvme_bytes_left = writes_.budget_left_bytes();
  status.left_dram = removal_.left_dram();
  status.left_nvme = removal_.left_nvme();
  status.quarantined = quarantine_.count();
  status.events_dropped = state_.events.dropped();
  for (uint32_t ordinal = 0; ordinal < state_.spaces.size(); ++ordinal) {
    const Space& space = state_.spaces[ordinal];
    if (space.shape.shards == 0) continue;
    const SpaceCounts& counts = state_.catalog.counts(static_cast<uint16_t>(ordinal));
    status.spaces.push_back(
        {ordinal, space.shape, space.clear_epoch, counts.pages, counts.dram, counts.nvme});
  }
  return status;
}

std::vector<PageInfo> Warehouse::pages(int ordinal, PageId& cursor, size_t limit) const {
  std::vector<PageInfo> found;
  const uint64_t entries = state_.catalog.index().entries();
  const uint64_t end = std::min(entries, cursor + kListedPerStep);
  for (; cursor < end && found.size() < limit; ++cursor) {
    const PageId page = cursor;
    const auto view = state_.catalog.at(page);
    if (!view || (ordinal >= 0 && view->space != ordinal)) continue;
    PageInfo info{page,
                  view->key,
                  {},
                  state_.catalog.node(page).position,
                  view->space,
                  state_.hbm != nullptr && view->in_dram() && state_.hbm->has(view->slot),
                  view->in_dram(),
                  view->in_nvme(),
                  state_.spaces[view->space].shape.slot_bytes(),
                  0};
    if (view->in_dram()) {
      const SlotMeta* meta = state_.pool.meta(view->slot);
      info.parent = meta->parent;
      info.stored_at_ns = meta->stored_at_ns;
    }
    found.push_back(info);
  }
  if (cursor >= entries) cursor = kNoPage;
  return found;
}

void Warehouse::forget(const Key& key, const nvme::Extent& extent, bool lost) {
  const auto view = state_.catalog.find(key);
  if (!view || !view->in_nvme() || !(view->extent == extent)) return;
  removal_.leave_nvme(*view, lost ? LeaveReason::lost : LeaveReason::reclaimed);
}

void Warehouse::set_segment_word(uint32_t segment, uint32_t life, bool closing) {
  ControlPage& control = state_.arena.control();
  if (segment < control.segment_words)
    segment_words(&control)[segment].store(segment_word(life, closing), std::memory_order_release);
}

uint64_t Warehouse::log_end() const { return has_log() ? state_.log->last_position() : 0; }

uint64_t Warehouse::segments_held_limit() const {
  constexpr uint64_t kShare = 4;
  return std::max<uint64_t>(
      1, state_.options.nvme_capacity_bytes / segment_bytes_for(state_.options) / kShare);
}

void Warehouse::read_pins() { state_.sessions.pins(); }

bool Warehouse::segment_pinned(uint32_t segment) {
  return state_.sessions.pins_seen().has_segment(segment);
}

}  // namespace kvw
