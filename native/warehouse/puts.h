// Runs of pages that a remote store shall have: a bounded queue, first come first served, which the
// worker of the remote tier is given from (server/put_link.h). Core thread only.
//
// A run is named by its last page, as the object that it becomes (remote/object.h). All else is
// looked up when it is handed out: a page that left meanwhile, or was cleared, or whose run the
// store has by then, is passed over there. So nothing has to take a run out of the queue.
//
// Invariants:
//  - A run is in the queue or under way at most once at a time.
//  - At most kQueued are in the queue, and as many under way as the worker asks for.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>

#include "index/index.h"
#include "presence/presence_file.h"
#include "remote/object.h"
#include "warehouse/options.h"

namespace kvw {

struct WarehouseState;

class Puts {
 public:
  static constexpr size_t kQueued = 8192;

  explicit Puts(WarehouseState& state) : state_(state) {}

  // The file `presence` says what the store has, as far as known. Without it all runs are queued,
  // and looked up when they are handed out. False: there is none of this fleet.
  bool open_filter();
  void close_filter() { filter_.reset(); }

  // A page was used. `again`: and before that, some other time since it came.
  void used(const EntryView& view, bool again);
  // A page has been stored.
  void sealed(const EntryView& view);

  // The next run, under way from here until done(). Looks at a bounded number of them: nothing may
  // also mean that there are more.
  std::optional<remote::RunToPut> next();
  // However it ended. What was offered meanwhile is so again: it may have been cleared and stored
  // anew, and what was under way was of before that.
  void done(const Key& key);

  PutsStatus status() const;

 private:
  // What the filter says of a run.
  enum class Seen { nowhere, today, earlier };
  enum class Known { queued, under_way, under_way_and_offered };
  Seen look(const Key& key, uint64_t epoch, std::optional<uint32_t>& day) const;
  void offer(const EntryView& view, bool anew);
  bool waits_for_epoch(const Key& key) const;
  std::optional<remote::RunToPut> run_of(const Key& key);
  void drop(PutDrop why) { ++dropped_[static_cast<size_t>(why)]; }

  WarehouseState& state_;
  std::optional<PresenceReader> filter_;
  std::deque<Key> queue_;
  std::unordered_map<Key, Known, KeyHash> known_;
  uint64_t offered_ = 0, refreshes_ = 0;
  std::array<uint64_t, kPutDrops> dropped_{};
};

}  // namespace kvw
