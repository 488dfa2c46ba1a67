// Verifies stored pages while the daemon serves: in DRAM where they lie, on NVMe by reading them
// through the log. A page that is in both tiers is two copies, and each is judged by itself.
//
// Work comes in stretches of the index, one after the other. Owned by the core thread, which never
// waits: it looks at kLooksPerStep positions and digests kBytesPerStep of DRAM, a part of a page if
// need be, and serves others before it goes on; and it hears of reads as they end. Bounds:
// kMaxStretches waiting, and kMaxReadBytes, or one record, being read; and one read at a time while
// promotions are under way, for which somebody waits.
//
// What clients report is judged here too, kReportedBytesPerTick of it a tick, however often it is
// reported: a page waits once, a session has kReportsPerSession waiting, and what was found good is
// not looked at again within a second. What is too much is forgotten; the next reader reports it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "exchange/messages.h"
#include "index/index.h"
#include "nvme/log.h"
#include "session/registry.h"

namespace kvw {

class Promotions;
class Quarantine;
struct WarehouseState;

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

  Checker(WarehouseState& state, Quarantine& quarantine, const Promotions& promotions)
      : state_(state), quarantine_(quarantine), promotions_(promotions) {}

  // Does the first step. `end` is called once, from here or later; never, if the warehouse ends
  // before. Throws Error capacity "check_busy".
  void begin(const CheckRequest& request, End end);
  // One more step; there is one to do.
  void go_on();
  bool goes_on() const { return !stretches_.empty() && !stretches_.front().collected; }
  // Goes on with reads that had to wait. Cheap when there is nothing.
  void step();
  // A session (0: the core itself) saw bytes that are not the page's. Nothing is believed: the page
  // in DRAM is judged, now or in later ticks, and leaves where it is bad.
  void report(SessionId session, const Report& report);
  void tick(uint64_t now_ns);

  static constexpr size_t kMaxStretches = 16;
  static constexpr uint64_t kLooksPerStep = 8192;
  static constexpr uint64_t kBytesPerStep = 4ull << 20;  // below a millisecond of digesting
  static constexpr uint64_t kMaxReadBytes = 8ull << 20;
  static constexpr uint64_t kReportedBytesPerTick = 16ull << 20;  // a few milliseconds of digesting
  static constexpr size_t kReportsPerSession = 16;

 private:
  // A page in DRAM, and how far it was digested.
  struct Digested {
    SlotId slot = kNoSlot;
    uint64_t generation = 0;
    uint32_t shard = 0;
    std::vector<uint64_t> leaves;  // of that shard
  };
  struct Stretch {
    CheckRequest request;  // `after` is where it goes on
    End end;
    CheckReport report;
    Digested digested;  // the page there
    size_t found = 0;
    bool collected = false;
    std::deque<Key> unread;  // copies on NVMe that are still to be read
  };
  struct Reported {
    SessionId session;
    Key key;
    Digested digested;
  };
  struct Good {
    uint64_t generation, until_ns;
  };

  void judge_reported();
  bool is_there(const Digested& page, const std::optional<EntryView>& view) const;
  // False: there is more to digest than `bytes`, of which it takes what it digested.
  bool digest(Digested& page, const EntryView& view, uint64_t& bytes, const char*& problem);
  bool digest_shard(Digested& page, uint64_t& bytes, const char*& problem);
  void collect(Stretch& stretch);
  bool check_dram(Stretch& stretch, const EntryView& view, uint64_t& bytes);
  bool may_read(uint64_t bytes) const;
  bool read_next(Stretch& stretch);
  void read_ended(const Key& key, const nvme::Extent& extent, const nvme::RecordEnd& end);
  void judge(Stretch& stretch, const EntryView& view, const nvme::RecordEnd& end);

  WarehouseState& state_;
  Quarantine& quarantine_;
  const Promotions& promotions_;
  std::deque<Stretch> stretches_;  // the first is being worked on
  size_t reads_ = 0;               // of the first
  uint64_t read_bytes_ = 0;
  bool stepping_ = false;
  std::deque<Reported> reported_;          // the first is being digested
  std::unordered_map<SlotId, Good> good_;  // of what was reported lately
  uint64_t reported_bytes_left_ = kReportedBytesPerTick, now_ns_ = 0;
};

}  // namespace kvw
