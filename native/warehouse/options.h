// How a warehouse is set up, and what it reports. Plain values.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "eviction/miss_ratio.h"
#include "hbm/copier.h"
#include "hbm/status.h"
#include "io/io_engine.h"
#include "nvme/log.h"
#include "remote/get_link.h"
#include "session/session_file.h"

namespace kvw {

struct ArenaOptions;

inline constexpr uint64_t kLedgerLost = UINT64_MAX;

// Which runs of pages a remote store gets.
enum class RemoteWrite { none, reused, all };
// "", "reused" or "all"; throws Error usage "bad_remote_write".
RemoteWrite remote_write_from(std::string_view name);

struct WarehouseOptions {
  std::string arena_dir;
  uint64_t dram_bytes = 0;
  std::string nvme_dir;  // empty: no NVMe tier
  uint64_t nvme_capacity_bytes = 0;
  uint64_t nvme_segment_bytes = 0;  // 0: an eighth of the capacity, 1 MiB to 256 MiB
  uint64_t index_pages = 0;         // 0: one per 64 KiB of both tiers together, within bounds
  Key warehouse_id;
  std::vector<std::byte> secret;  // kSecretBytes
  uint64_t epoch = 0;             // the ledger's clear epoch
  // Of namespaces that nobody declared, pages reserved before it are gone; kLedgerLost: before the
  // highest epoch that is seen anywhere.
  uint64_t epoch_floor = 0;
  // Of an NVMe tier that is not there, or cannot be read whole: no record in it lies above this log
  // position. 0: there never was one.
  uint64_t log_end = 0;
  std::string policy = "lru";
  std::string io_engine = "auto";
  uint64_t limbo_after_ns = 30 * kSecondNs;
  uint64_t grace_ns = 5 * kSecondNs;
  uint64_t flush_interval_ns = kSecondNs;
  uint64_t nvme_retry_ns = 30 * kSecondNs;  // when a sick NVMe tier is tried again
  uint64_t nvme_answer_ns = UINT64_MAX;     // how long recover() waits for each answer of the disk
  uint64_t write_queue_bytes = 0;           // 0: a quarter of the DRAM tier
  uint64_t nvme_bytes_per_day = 0;          // that NVMe may be written; 0: no bound
  double nvme_bytes_left = 0;               // of a day's worth, as the last daemon left it
  uint64_t keep_bytes = 0;                  // that keeps may hold
  RemoteWrite remote_write = RemoteWrite::none;
  bool remote_read = false;  // pages are fetched from the remote store
  Key remote_fleet;          // of the presence filter
  HbmOptions hbm;
  bool hbm_at_first_use = false;  // a page is promoted when it was used once, not twice
  // For a look at what an earlier daemon left: nothing is stored, evicted, swept, freed or written
  // to NVMe, and no memory is taken.
  bool inspect = false;
  // Seams for tests; unset means the engine named above, and fallocate().
  std::function<std::unique_ptr<IoEngine>()> make_engine;
  std::function<int(int fd, uint64_t bytes)> allocate;
};

// The size of the NVMe tier's segments: what was asked for, or chosen from the capacity.
uint64_t segment_bytes_for(const WarehouseOptions& options);
// The largest page whose record fits an NVMe segment, beside what a segment has of its own.
uint64_t record_payload_max(const WarehouseOptions& options);
// Throws Error usage "bad_secret", "index_too_large".
ArenaOptions arena_options_for(const WarehouseOptions& options);
// Of the index's file.
uint64_t index_bytes_for(const WarehouseOptions& options);
// Memory that the core's own tables take beside it once it names `pages` and the DRAM tier has
// `slots`, at most.
uint64_t table_bytes(std::string_view policy, uint64_t pages, uint64_t slots, bool nvme);
// What recovery takes beside them, for a while, of so many records and slots with a page.
inline constexpr uint64_t kRecoveredRecordBytes = 92, kRecoveredSlotBytes = 32;
// Both, with all pages that the index has room for, of 32 KiB and more, and the files of sessions.
uint64_t table_bytes_for(const WarehouseOptions& options);

// Refuses what no warehouse can be opened with, before any file is written: sizes, and files of a
// newer version. Says nothing of the identity and the secret. Blocks for a few small reads. Throws
// Error usage, or storage "newer_files".
void check_options(const WarehouseOptions& options);

struct RecoverySummary {
  uint64_t pages_dram = 0;
  uint64_t pages_nvme = 0;
  uint64_t dropped_slots = 0;     // bad checksum or identity, or a page that another slot has
  uint64_t unfinished_slots = 0;  // reserved when the daemon ended
  uint64_t cleared = 0;           // older than a clear, or not provably younger
  uint64_t unknown_namespace = 0;
  uint64_t orphans = 0;
  uint64_t sessions = 0;
  uint64_t epoch = 0;  // the highest clear epoch seen anywhere: the ledger's from now on
  double seconds = 0;
  nvme::RecoveryReport log;
};

struct MissRatioReport {
  MissRatioCurve::Curve curve;
  uint64_t uses_lost = 0;  // that came too fast to be counted
  uint64_t since_ns = 0;   // how long it was watched
};

struct FlushReport {
  uint64_t flushed = 0;       // pages on stable media
  uint64_t not_admitted = 0;  // in DRAM only
  uint64_t pending = 0;       // still being written when the time ran out
};

// One page as listings show it.
struct PageInfo {
  PageId page;
  Key key, parent;
  uint32_t position;
  uint16_t space;
  bool hbm, dram, nvme;
  uint64_t bytes;
  uint64_t stored_at_ns;  // 0: known only to the record on NVMe
};

// Why pages left, as metric labels.
enum class LeaveReason : uint32_t {
  evicted,     // coldest, to make room in DRAM
  window,      // its places were taken, or the index was full
  rebalanced,  // its slab went to another page size
  reclaimed,   // its NVMe segment was reused
  cleared,
  operator_,
  orphaned,
  quarantined,
  lost,          // written, but a flush failed
  write_budget,  // to make room in DRAM; it was not on NVMe because the budget had not allowed it
  count
};
const char* leave_reason_name(LeaveReason reason);
inline constexpr size_t kLeaveReasons = static_cast<size_t>(LeaveReason::count);

// Why runs were not given to the worker of the remote tier, as metric labels.
enum class PutDrop : uint32_t {
  queue_full,
  too_large,    // its pages, for an object
  not_in_dram,  // when its turn came
  cleared,
  already,  // in the store by then
  count
};
const char* put_drop_name(PutDrop why);
inline constexpr size_t kPutDrops = static_cast<size_t>(PutDrop::count);

struct PutsStatus {
  uint64_t queued = 0, under_way = 0;
  uint64_t offered = 0;    // that entered the queue
  uint64_t refreshes = 0;  // of them, those that the store had of an earlier day
  std::array<uint64_t, kPutDrops> dropped{};
};

struct FetchesStatus {
  uint64_t asked = 0;   // runs
  uint64_t joined = 0;  // of them, those that were on their way by then
  uint64_t later = 0;   // and those that there was no room for
  uint64_t queued = 0, under_way = 0, under_way_bytes = 0;
  std::array<uint64_t, static_cast<size_t>(remote::GetEnd::count)> ends{};
};

// A snapshot; every figure is the core's own.
struct WarehouseStatus {
  uint64_t incarnation = 0, uptime_ns = 0;
  bool draining = false;
  uint64_t dram_capacity_bytes = 0, dram_populated_bytes = 0, dram_used_bytes = 0;
  uint64_t dram_pages = 0, free_slots = 0, reserved_slots = 0, limbo_slots = 0, zombie_slots = 0;
  std::string dram_health;  // "ok", "populating" or why it cannot grow
  bool has_nvme = false;
  uint64_t nvme_pages = 0;
  nvme::LogStats log;
  uint64_t nvme_bytes_per_day = 0;  // that may be written; 0: no bound
  double nvme_bytes_left = 0;       // of a day's worth
  HbmStatus hbm;
  PutsStatus puts;
  FetchesStatus fetches;
  uint64_t index_pages = 0, index_capacity = 0, orphan_pages = 0;
  uint64_t released_pages = 0;
  uint64_t keeps = 0, kept_pages = 0, kept_bytes = 0, keep_capacity_bytes = 0;
  bool index_bound = false;     // pages left, or were not stored, for want of room in it
  uint64_t page_bytes_max = 0;  // of all shards of a page, each rounded up to 4 KiB
  std::string policy;
  uint64_t sessions = 0, pins = 0, promotions_in_flight = 0;
  uint64_t pages_sealed = 0, bytes_sealed = 0, pages_promoted = 0;
  std::array<uint64_t, kLeaveReasons> stored_again{};
  std::array<uint64_t, kCounters> clients{};
  std::map<std::string, uint64_t> not_admitted;  // to NVMe, by reason
  std::array<uint64_t, kLeaveReasons> left_dram{}, left_nvme{};
  uint64_t quarantined = 0, events_dropped = 0;
  struct Space {
    uint32_t ordinal;
    NamespaceShape shape;
    uint64_t clear_epoch, pages, dram, nvme;
  };
  std::vector<Space> spaces;
};

}  // namespace kvw
