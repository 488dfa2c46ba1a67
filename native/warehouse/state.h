// What the parts of the warehouse share. Core thread only.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena/arena.h"
#include "base/clock.h"
#include "nvme/log.h"
#include "session/registry.h"
#include "slots/pool.h"
#include "warehouse/absences.h"
#include "warehouse/catalog.h"
#include "warehouse/fetches.h"
#include "warehouse/groups.h"
#include "warehouse/hbm.h"
#include "warehouse/keeps.h"
#include "warehouse/options.h"
#include "warehouse/puts.h"
#include "warehouse/waiters.h"

namespace kvw {

struct Space {
  NamespaceShape shape;
  uint64_t clear_epoch = 0;
  uint64_t cleared_early = 0;  // by stores beside a clear, which counts them
  uint64_t used_ns = 0;        // when it was last opened or stored into
  // Of its objects in the remote store, as of clear_epoch. Nothing: the store is not asked, and
  // gets nothing, as from a clear here until it knows of that.
  std::optional<uint64_t> remote_epoch;
  SlotClass* cls = nullptr;
};

// Things worth a log line, until somebody takes them.
class Events {
 public:
  static constexpr size_t kEventsKept = 1024;

  void add(std::string_view name, std::string_view detail);
  std::vector<std::pair<std::string, std::string>> take() { return std::exchange(kept_, {}); }
  bool full() const { return kept_.size() >= kEventsKept; }
  uint64_t dropped() const { return dropped_; }

 private:
  std::vector<std::pair<std::string, std::string>> kept_;
  uint64_t dropped_ = 0;
};

struct WarehouseState {
  // Throws Error as check_options() and Arena do.
  WarehouseState(WarehouseOptions warehouse_options, const Clock& warehouse_clock);

  // Of a namespace; -1: there is none.
  int ordinal_of(const Key& namespace_id) const;
  // The file of the filter that says what a remote store has; its worker makes it.
  std::string presence_path() const { return arena.directory() + "/presence"; }
  // On its way out: a clear takes a whole index in steps.
  bool is_cleared(const EntryView& view) const {
    return view.clear_epoch < spaces[view.space].clear_epoch;
  }
  bool fits_namespace(const EntryView& view, const PageFacts& facts) const;
  // Of a page that is there, in DRAM.
  uint64_t slot_bytes(PageId page) const;
  bool has_good_header(SlotId slot) const;
  // 0: it is not in DRAM.
  uint64_t heat(const EntryView& view) const;
  // The page is in the slot now: its eviction policy hears of it.
  void make_resident(SlotId slot, const EntryView& view);
  // The page was used, and so were those above it. kNoPage: none.
  void touch(PageId page);
  // Whoever used the page needs it no more.
  void release(const EntryView& view);

  WarehouseOptions options;
  const Clock& clock;
  Arena arena;
  Pool pool;
  Catalog catalog;
  Absences absences;
  Keeps keeps;
  Groups groups;
  Registry sessions;
  Waiters waiters;
  std::unique_ptr<nvme::Log> log;    // null: no NVMe tier, or not recovered yet
  std::unique_ptr<HbmTier> hbm;      // null: no HBM tier
  std::unique_ptr<Puts> puts;        // null: nothing is written to a remote tier
  std::unique_ptr<Fetches> fetches;  // null: nothing is read from one
  std::vector<Space> spaces;         // by ordinal; shape.shards == 0: none
  std::unordered_map<Key, uint16_t, KeyHash> ordinals;
  uint64_t epoch;  // of the last clear
  // As of the last tick: for what a tenth of a second is near enough.
  struct {
    uint64_t boot_ns, wall_ns;
  } now;
  Events events;
};

}  // namespace kvw
