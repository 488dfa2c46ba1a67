// Verifies stored pages while the daemon serves: in DRAM where they lie, on NVMe by reading them
// through the log. A page that is in both tiers is two copies, and each is judged by itself.
//
// Work comes in stretches of the index, one after the other. Owned by the core thread, which never
// waits: it digests a bounded stretch of DRAM, and hears of reads as they end. Bounds:
// kMaxStretches waiting, and kMaxReadBytes, or one record, being read; and one read at a time while
// promotions are under way, for which somebody waits.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "index/index.h"
#include "nvme/log.h"

namespace kvw {

class Warehouse;

struct CheckRequest {
  int ordinal = -1;     // of a namespace; -1: of all
  PageId after = 0;     // index position to begin with
  size_t limit = 16;    // pages, fewer where they are large
  bool repair = false;  // drop the copies that are bad
};

struct TierCheck {
  uint64_t pages = 0, bytes = 0;  // verified
  uint64_t bad = 0;
  uint64_t dropped = 0, dropped_bytes = 0;  // of the bad ones
};

struct CheckReport {
  struct Bad {
    Key key;
    const char* tier;  // "dram" or "nvme"
    const char* reason;
  };
  int64_t next = -1;  // index position to go on with; -1: that was all
  TierCheck dram, nvme;
  std::vector<Bad> bad;
};

class Checker {
 public:
  using End = std::function<void(CheckReport&&)>;

  explicit Checker(Warehouse& warehouse) : warehouse_(warehouse) {}

  // `end` is called once, from here or later; never, if the warehouse ends before. Throws Error
  // capacity "check_busy".
  void begin(const CheckRequest& request, End end);
  // Goes on with what had to wait. Cheap when there is nothing.
  void step();

  static constexpr size_t kMaxStretches = 16;
  static constexpr uint64_t kMaxReadBytes = 8ull << 20;

 private:
  struct Stretch {
    CheckRequest request;
    End end;
    CheckReport report;
    bool collected = false;
    std::deque<Key> unread;  // copies on NVMe that are still to be read
  };

  void collect(Stretch& stretch);
  void check_dram(Stretch& stretch, const EntryView& view);
  bool may_read(uint64_t bytes) const;
  bool read_next(Stretch& stretch);
  void read_ended(const Key& key, const nvme::Extent& extent, const nvme::RecordEnd& end);
  void judge(Stretch& stretch, const EntryView& view, const nvme::RecordEnd& end);

  Warehouse& warehouse_;
  std::deque<Stretch> stretches_;  // the first is being worked on
  size_t reads_ = 0;               // of the first
  uint64_t read_bytes_ = 0;
  bool stepping_ = false;
};

}  // namespace kvw
