#include "warehouse/warehouse.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "digest/digest.h"
#include "eviction/lru.h"
#include "warehouse/versions.h"

namespace kvw {

namespace {

constexpr size_t kEventsKept = 1024;
constexpr uint64_t kMiB = 1ull << 20;
constexpr uint64_t kSegmentOwnBytes = 64 * 1024;
constexpr size_t kOrphansPerTick = 1024;
constexpr uint32_t kAdopted = 1024;         // children of one page that comes
constexpr uint64_t kUseNs = kSecondNs / 2;  // one use of a page takes less than two of them

// The largest page whose record fits an NVMe segment, beside what a segment has of its own.
uint64_t record_payload_max(const WarehouseOptions& options) {
  if (options.nvme_dir.empty()) return UINT64_MAX;
  const uint64_t segment = segment_bytes_for(options);
  return segment - std::min<uint64_t>(segment, kSegmentOwnBytes);
}

uint32_t segment_words_for(const WarehouseOptions& options) {
  return options.nvme_dir.empty() ? 0 : nvme::kMaxSegments;
}

// Pages are rarely smaller than 64 KiB; a table for more of them would cost memory for nothing.
// Never more than pages of 4 KiB could fill, nor a table above a sixteenth of the DRAM tier beside
// it.
uint64_t index_entries_for(const WarehouseOptions& options) {
  constexpr uint64_t kUsual = 65536, kMost = 1ull << 30;  // pages; a PageId has 32 bits
  if (options.index_pages > kMost)
    throw Error(ErrorKind::usage, "index_too_large",
                "--index-pages " + std::to_string(options.index_pages) + " is above the limit of " +
                    std::to_string(kMost));
  const uint64_t bytes = options.dram_bytes + options.nvme_capacity_bytes;
  uint64_t pages = options.index_pages;
  if (pages == 0) {
    const uint64_t most =
        std::max<uint64_t>(options.dram_bytes / 16 / (2 * sizeof(IndexEntry)), 1024);
    pages = std::clamp(bytes / (64 * 1024), std::min({kUsual, bytes / kBlockBytes, most}), most);
  }
  return std::bit_ceil(pages * 2);
}

ArenaOptions arena_options(const WarehouseOptions& options) {
  if (options.secret.size() != kSecretBytes)
    throw Error(ErrorKind::usage, "bad_secret",
                "the domain's secret has " + std::to_string(options.secret.size()) +
                    " bytes, it needs " + std::to_string(kSecretBytes));
  ArenaOptions arena{options.arena_dir,
                     options.warehouse_id,
                     std::span<const std::byte, kSecretBytes>(options.secret.data(), kSecretBytes),
                     options.dram_bytes,
                     index_entries_for(options),
                     segment_words_for(options)};
  return arena;
}

// Before anything is opened: what opens also writes.
WarehouseOptions checked(WarehouseOptions options) {
  check_options(options);
  return options;
}

}  // namespace

uint64_t segment_bytes_for(const WarehouseOptions& options) {
  if (options.nvme_segment_bytes != 0) return options.nvme_segment_bytes;
  return std::clamp(std::bit_floor(std::max<uint64_t>(options.nvme_capacity_bytes / 8, 1)), kMiB,
                    256 * kMiB);
}

uint64_t index_bytes_for(const WarehouseOptions& options) {
  return index_bytes(index_entries_for(options));
}

uint64_t table_bytes(uint64_t pages, uint64_t slots, bool nvme) {
  // Of the standard library's: what an element takes, its share of the buckets or of the
  // allocator's headers with it.
  constexpr uint64_t kHashed = 56, kOrdered = 64;
  const uint64_t parents = pages / 2;  // with several children, which the catalog counts
  const uint64_t catalog = PageTable::bytes(pages) + parents * kHashed;
  // What grows by doubling is there twice while it does.
  const uint64_t pool = slots * (sizeof(PageId) + sizeof(SlotId) + 2 * LruPolicy::kPageBytes);
  return catalog + pool + (nvme ? std::min(pages, slots) * kOrdered : 0);  // unwritten ones
}

uint64_t table_bytes_for(const WarehouseOptions& options) {
  constexpr uint64_t kSlotBytes = 32 * 1024;
  return table_bytes(index_entries_for(options) / 2, options.dram_bytes / kSlotBytes,
                     !options.nvme_dir.empty());
}

void check_options(const WarehouseOptions& options) {
  refuse_newer_files(options.arena_dir, options.nvme_dir);
  check_dram(options.dram_bytes);
  index_entries_for(options);
  if (!options.nvme_dir.empty())
    nvme::check_sizes(options.nvme_capacity_bytes, segment_bytes_for(options));
}

const char* leave_reason_name(LeaveReason reason) {
  static constexpr const char* kNames[] = {"evicted",   "window",      "rebalanced",
                                           "reclaimed", "cleared",     "operator",
                                           "orphaned",  "quarantined", "lost"};
  static_assert(sizeof kNames / sizeof *kNames == kLeaveReasons);
  return kNames[static_cast<size_t>(reason)];
}

Warehouse::Warehouse(WarehouseOptions options, const Clock& clock)
    : options_(checked(std::move(options))),
      clock_(clock),
      arena_(arena_options(options_)),
      pool_(arena_, options_.policy),
      catalog_(arena_.index()),
      spaces_(kMaxNamespaces),
      started_ns_(clock.boot_ns()),
      epoch_(options_.epoch),
      draining_(options_.inspect) {
  const uint64_t arena_bytes = arena_.slab_count() * arena_.slab_bytes();
  // One session takes half of it at most: an eighth of the arena, which is what it goes by.
  reserve_limit_bytes_ = arena_bytes / 4;
  promote_limit_bytes_ = std::min(arena_bytes / 8, kPromoteBytes);
  if (options_.write_queue_bytes == 0)
    options_.write_queue_bytes = std::min(arena_bytes / 4, 1024 * kMiB);
  sessions_ = std::make_unique<Registry>(arena_.sessions_directory(), options_.warehouse_id, clock_,
                                         options_.grace_ns,
                                         [this](SessionId id) { return !unsettled(id).empty(); });
  ControlPage& control = arena_.control();
  // An arena that survived knows the clears of its time, whatever became of the ledger.
  epoch_ = std::max(epoch_, control.clear_epoch.value.load());
  control.pin_limit_bytes.value.store(arena_bytes / 2);
  control.reserve_limit_bytes.value.store(reserve_limit_bytes_ / 2);
  control.clear_epoch.value.store(epoch_);
}

void Warehouse::open_log() {
  if (options_.nvme_dir.empty()) return;
  nvme::LogOptions log;
  log.directory = options_.nvme_dir;
  log.warehouse_id = options_.warehouse_id;
  log.capacity_bytes = options_.nvme_capacity_bytes;
  log.segment_bytes = segment_bytes_for(options_);
  log.queue_bytes = options_.write_queue_bytes;
  log.flush_interval_ns = options_.flush_interval_ns;
  log.retry_interval_ns = options_.nvme_retry_ns;
  log.answer_ns = options_.nvme_answer_ns;
  log.io_engine = options_.io_engine;
  log.make_engine = options_.make_engine;
  log.allocate = options_.allocate;
  log.epoch_now = epoch_;
  log.inspect = options_.inspect;
  for (const auto& [key, position] : tombstones_)
    log.life_floor = std::max(log.life_floor, static_cast<uint32_t>(position >> 32));
  log_ = nvme::open_log(log, *this, clock_);
}

Warehouse::~Warehouse() { stop(); }

void Warehouse::stop() {
  hbm_.reset();
  if (log_) log_->stop();
  wake_loaders();
  arena_.control().state.value.store(static_cast<uint64_t>(ControlState::stopped));
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
  if (const int known = ordinal_of(shape.id); known >= 0) {
    Space& space = spaces_[known];
    if (!(space.shape == shape))
      refuse("namespace " + to_hex(shape.id) + " has another shape here");
    space.clear_epoch = std::max(space.clear_epoch, clear_epoch);
    publish_row(static_cast<uint32_t>(known));
    return static_cast<uint32_t>(known);
  }
  uint32_t ordinal = wish;
  if (ordinal >= kMaxNamespaces || spaces_[ordinal].shape.shards != 0)
    for (ordinal = 0; ordinal < kMaxNamespaces && spaces_[ordinal].shape.shards != 0;) ++ordinal;
  if (ordinal == kMaxNamespaces)
    throw Error(ErrorKind::capacity, "too_many_namespaces",
                "this warehouse has " + std::to_string(kMaxNamespaces) + " namespaces");
  Space& space = spaces_[ordinal];
  // One that was there before the segments became smaller keeps its pages, in DRAM alone.
  if (recovered_ && shape.slot_bytes() > record_payload_max(options_))
    throw Error(ErrorKind::usage, "page_too_large",
                "a page of " + std::to_string(shape.slot_bytes()) +
                    " bytes fits no NVMe segment of " +
                    std::to_string(segment_bytes_for(options_)) +
                    " bytes; use fewer tokens per page, or a larger --nvme-capacity");
  space.cls = &pool_.class_of(shape);
  space.shape = shape;
  space.clear_epoch = clear_epoch;
  ordinals_[shape.id] = static_cast<uint16_t>(ordinal);
  publish_row(ordinal);
  note_index_share(shape);
  return ordinal;
}

// Also of a namespace that is there again: that is a use of it.
void Warehouse::publish_row(uint32_t ordinal) {
  Space& space = spaces_[ordinal];
  space.used_ns = clock_.boot_ns();
  const NamespaceShape& shape = space.shape;
  NamespaceWord& row = arena_.control().namespaces[ordinal];
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

bool Warehouse::in_use(uint32_t ordinal) const {
  return catalog_.counts(static_cast<uint16_t>(ordinal)).pages != 0 || feeds_.follow(ordinal);
}

std::optional<Key> Warehouse::forget_namespace(uint32_t ordinal) {
  count_stores();
  std::vector<bool> written(kMaxNamespaces);
  for (const auto& [slot, group] : groups_)
    if (!group.limbo) written[group.space] = true;
  std::optional<uint32_t> found;
  for (uint32_t each = 0; each < kMaxNamespaces; ++each) {
    if (spaces_[each].shape.shards == 0 || (ordinal != kMaxNamespaces && each != ordinal)) continue;
    if (written[each] || in_use(each)) continue;
    if (!found || spaces_[each].used_ns < spaces_[*found].used_ns) found = each;
  }
  if (!found) return std::nullopt;
  const Key id = spaces_[*found].shape.id;
  SlotClass& cls = *spaces_[*found].cls;
  arena_.control().namespaces[*found].ready.store(0);
  ordinals_.erase(id);
  curve_.forget(static_cast<uint16_t>(*found));
  spaces_[*found] = {};
  cls.unused = std::ranges::none_of(spaces_, [&](const Space& each) { return each.cls == &cls; });
  return id;
}

int Warehouse::ordinal_of(const Key& namespace_id) const {
  const auto found = ordinals_.find(namespace_id);
  return found == ordinals_.end() ? -1 : found->second;
}

void Warehouse::make_resident(SlotId slot, const EntryView& view) {
  // The policy learns of parents and children that are resident too.
  SlotClass& cls = pool_.class_of(slot);
  pool_.page_at(slot) = view.page;
  const auto resident_of = [&](PageId page) -> uint32_t {
    if (page == kNoPage) return kNoPage;
    const auto other = catalog_.at(page);
    if (!other || !other->in_dram() || &pool_.class_of(other->slot) != &cls) return kNoPage;
    return pool_.resident(other->slot);
  };
  const uint32_t own = pool_.resident(slot);
  cls.policy->announced(own, view.key.lo);
  cls.policy->inserted(own, resident_of(catalog_.parent(view.page)));
  // The use of a page is its parent's too, so of what is not told here most leaves before it all
  // the same; the rest is seen when its turn comes.
  PageId child = catalog_.first_child(view.page);
  for (uint32_t looks = 0; child != kNoPage && looks < kAdopted; ++looks) {
    if (const uint32_t resident = resident_of(child); resident != kNoPage)
      cls.policy->adopt(own, resident);
    child = catalog_.next_sibling(child);
  }
}

void Warehouse::touch(PageId page) {
  if (page == kNoPage) return;
  catalog_.node(page).used = true;
  const auto view = catalog_.at(page);
  if (view && view->in_dram())
    pool_.class_of(view->slot).policy->touched(pool_.resident(view->slot));
}

void Warehouse::apply_touches() {
  count_stores();
  std::vector<MissRatioCurve::Use> used;
  sessions_->drain_touches([this, &used](PageId page, uint32_t tag) {
    const auto view = catalog_.at(page);
    if (!view || static_cast<uint32_t>(view->key.lo) != tag) return;
    touch(page);
    const uint16_t before = catalog_.node(page).used_at;
    if (is_new_use(page)) used.push_back(use_of(*view));
    // A page that is used all the time is one use of the curve's, and the hottest of all.
    if (hbm_) hbm_->used(*view, before != 0 && before != catalog_.node(page).used_at);
  });
  curve_.use(used);
}

uint16_t Warehouse::use_time() const {
  return static_cast<uint16_t>(1 + clock_.boot_ns() / kUseNs);
}

// A pin and the load behind it, and the loads of all ranks, are one use of a page.
bool Warehouse::is_new_use(PageId page) {
  const uint16_t now = use_time();
  uint16_t& used_at = catalog_.node(page).used_at;
  const bool again = used_at == now || static_cast<uint16_t>(used_at + 1) == now;
  used_at = now;
  return !again;
}

MissRatioCurve::Use Warehouse::use_of(const EntryView& view) const {
  const uint64_t dram = arena_.slab_count() * arena_.slab_bytes();
  const uint64_t held = view.in_dram() ? dram : std::max(dram, options_.nvme_capacity_bytes);
  return {view.key, view.space, spaces_[view.space].shape.slot_bytes(), held};
}

MissRatioReport Warehouse::miss_ratio(int ordinal) {
  count_stores();
  return {curve_.curve(ordinal), sessions_->touches_lost(), clock_.boot_ns() - started_ns_};
}

void Warehouse::tick() {
  const uint64_t now = clock_.boot_ns();
  arena_.control().heartbeat_ns.value.store(now, std::memory_order_release);
  look_at_files();
  checker_.tick(now);
  if (options_.inspect) return;
  sessions_->reap();
  settle_groups();
  free_retired();
  apply_touches();
  keep_free();
  sweep(kOrphansPerTick);
  forget_read_failures();
  std::erase_if(refused_, [now](const auto& item) { return item.second <= now; });
  if (log_) log_->tick();
  if (log_ && spill(spilling_)) spilling_ = {};
  if (hbm_) hbm_->tick();
  publish_rates();
}

void Warehouse::go_on() {
  if (checker_.goes_on()) checker_.go_on();
  free_some_retired();
}

// Said once each; who hears that a file was cut ends the daemon.
void Warehouse::look_at_files() {
  const Arena::Damage damage = arena_.damage();
  const int found = damage.file == nullptr ? 0 : damage.cut ? 2 : 1;
  if (found <= files_lost_ || events_.size() >= kEventsKept) return;
  files_lost_ = found;
  on_event("memory_lost",
           std::string("file=") + damage.file + " reason=" + (damage.cut ? "cut" : "no_memory"));
}

void Warehouse::publish_rates() {
  if (!log_) return;
  const nvme::LogStats stats = log_->stats();
  ControlPage& control = arena_.control();
  control.nvme_read_bytes_per_s.value.store(stats.read_bytes_per_s, std::memory_order_relaxed);
  control.nvme_write_bytes_per_s.value.store(stats.write_bytes_per_s, std::memory_order_relaxed);
  control.nvme_reads_queued.value.store(stats.reads_in_flight, std::memory_order_relaxed);
  control.nvme_write_queue_bytes.value.store(stats.queued_bytes, std::memory_order_relaxed);
  control.durable.value.store(log_->durable_through(), std::memory_order_release);
}

void Warehouse::drain() {
  draining_ = true;
  arena_.control().state.value.store(static_cast<uint64_t>(ControlState::draining));
}

void Warehouse::undrain() {
  if (options_.inspect) return;
  draining_ = false;
  arena_.control().state.value.store(static_cast<uint64_t>(ControlState::serving));
}

std::optional<uint32_t> Warehouse::next_slab_to_populate() const {
  if (next_slab_ >= arena_.slab_count() || options_.inspect) return std::nullopt;
  return next_slab_;
}

void Warehouse::slab_populated(uint32_t slab, int err) {
  note_growth(err);
  if (err != 0) return;
  pool_.slab_ready(slab);
  if (log_) log_->register_memory(arena_.slab(slab));
  while (next_slab_ < arena_.slab_count() && arena_.slots().layout(next_slab_).populated != 0)
    ++next_slab_;
}

void Warehouse::on_event(std::string_view name, std::string_view detail) {
  if (events_.size() >= kEventsKept) {
    ++events_dropped_;
    return;
  }
  events_.emplace_back(name, detail);
}

std::vector<std::pair<std::string, std::string>> Warehouse::take_events() {
  return std::exchange(events_, {});
}

WarehouseStatus Warehouse::status() const {
  WarehouseStatus status;
  status.incarnation = arena_.incarnation();
  status.uptime_ns = clock_.boot_ns() - started_ns_;
  status.draining = draining_;
  status.dram_capacity_bytes = arena_.slab_count() * arena_.slab_bytes();
  status.dram_populated_bytes = pool_.populated_slabs() * arena_.slab_bytes();
  for (const auto& cls : pool_.classes()) {
    status.dram_used_bytes += (cls->live + cls->reserved + cls->limbo) * cls->layout.slot_bytes();
    status.free_slots += cls->free.size();
    status.reserved_slots += cls->reserved;
    status.limbo_slots += cls->limbo;
  }
  status.zombie_slots = retired_slots_.size();
  const bool growing = next_slab_ < arena_.slab_count();
  status.dram_health = !growth_error_.empty() ? growth_error_ : growing ? "populating" : "ok";
  status.dram_pages = catalog_.dram_pages();
  status.nvme_pages = catalog_.nvme_pages();
  status.has_nvme = log_ != nullptr;
  if (log_) status.log = log_->stats();
  if (hbm_) status.hbm = hbm_->status();
  status.index_pages = catalog_.pages();
  status.index_capacity = catalog_.capacity();
  status.index_bound = index_bound_;
  status.page_bytes_max = std::min(arena_.slab_bytes(), record_payload_max(options_));
  status.orphan_pages = catalog_.orphans();
  status.sessions = sessions_->size();
  status.pins = sessions_->pins().size();
  status.promotions_in_flight = promoting_.size();
  status.pages_sealed = pages_sealed_;
  status.bytes_sealed = bytes_sealed_;
  status.pages_promoted = pages_promoted_;
  status.clients = sessions_->totals();
  status.not_admitted = not_admitted_;
  status.left_dram = left_dram_;
  status.left_nvme = left_nvme_;
  status.quarantined = quarantined_;
  status.events_dropped = events_dropped_;
  for (uint32_t ordinal = 0; ordinal < spaces_.size(); ++ordinal) {
    const Space& space = spaces_[ordinal];
    if (space.shape.shards == 0) continue;
    const SpaceCounts& counts = catalog_.counts(static_cast<uint16_t>(ordinal));
    status.spaces.push_back(
        {ordinal, space.shape, space.clear_epoch, counts.pages, counts.dram, counts.nvme});
  }
  return status;
}

std::vector<PageInfo> Warehouse::pages(int ordinal, PageId& cursor, size_t limit) const {
  std::vector<PageInfo> found;
  const uint64_t entries = catalog_.index().entries();
  const uint64_t end = std::min(entries, cursor + kListedPerStep);
  for (; cursor < end && found.size() < limit; ++cursor) {
    const PageId page = cursor;
    const auto view = catalog_.at(page);
    if (!view || (ordinal >= 0 && view->space != ordinal)) continue;
    PageInfo info{page,
                  view->key,
                  {},
                  catalog_.node(page).position,
                  view->space,
                  hbm_ != nullptr && view->in_dram() && hbm_->has(view->slot),
                  view->in_dram(),
                  view->in_nvme(),
                  spaces_[view->space].shape.slot_bytes(),
                  0};
    if (view->in_dram()) {
      const SlotMeta* meta = pool_.meta(view->slot);
      info.parent = meta->parent;
      info.stored_at_ns = meta->stored_at_ns;
    }
    found.push_back(info);
  }
  if (cursor >= entries) cursor = kNoPage;
  return found;
}

}  // namespace kvw
