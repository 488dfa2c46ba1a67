// Keeps: prompts whose pages stay until a time, whatever is asked for meanwhile. No page of a keep
// leaves DRAM for another page of its size, nor NVMe as long as what is kept takes no more than
// half of it. A clear, an operator's evict and damage take it all the same, and so does another
// page size of which no page could leave.
//
// A page is held by each keep that ends with it and by each page behind it that is held, so what
// prompts share is held once and counted once, and a keep that ends costs no more than the pages
// that nobody else holds. A page that left goes on holding the page above it until nobody holds it:
// of a prompt that loses its end the rest stays. Bounded in bytes, pages, keeps and ends. Core
// thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/sharded_map.h"
#include "base/types.h"
#include "warehouse/catalog.h"

namespace kvw {

using KeepId = uint64_t;

// When a keep ends, on the boot clock.
struct KeepTime {
  uint64_t until_ns = 0;
  uint64_t renewed_ns = 0;  // each use moves the end to so long after it; 0: none does
};

// Why a page is not kept.
enum class KeepRefusal : uint8_t { none, keeps, ends, pages, bytes, gone };
const char* keep_refusal_name(KeepRefusal refusal);

// A page of prompts that are to be kept, one after the other.
struct PageOfRun {
  Key key;
  bool begins = false;  // its prompt; else it is behind the one before
};

// What became of some of them.
struct KeepStep {
  KeepRefusal refusal = KeepRefusal::none;  // of the first that is not kept for want of room
  bool is_broken = false;                   // a page of the last prompt was not stored
  std::vector<Key> on_nvme;                 // of those that are kept, those in no other tier
};

struct KeepReport {
  KeepId id = 0;
  KeepTime time;
  uint64_t pages = 0, bytes = 0;  // of its prompts, those that other keeps have as well among them
};

class Keeps {
 public:
  static constexpr uint64_t kMostKeeps = 4096 + 64;    // some that are being made among them
  static constexpr uint64_t kMostKeptPages = 1 << 20;  // and half of what the index has room for
  static constexpr uint64_t kMostKeepEnds = 1 << 16;   // a search for what may leave meets each
  static constexpr uint64_t kMostEndsOfKeep = 1 << 12;
  static constexpr size_t kLetGoPerStep = 4096;
  static constexpr size_t kLostPerLook = 1 << 16;  // pages that left, above ends

  // bytes_of: a page's that is there, in DRAM.
  Keeps(const Catalog& catalog, uint64_t limit_bytes, std::function<uint64_t(PageId)> bytes_of);

  // A new keep, without pages.
  KeepRefusal begin(KeepId id, KeepTime time);
  // The page is the next of the keep: behind its last one, or where that is not above it the
  // beginning of another prompt.
  KeepRefusal add(KeepId id, PageId page);
  // The page and all those above it; "gone" where one of them is missing.
  KeepRefusal add_prompt(KeepId id, PageId last);
  // The page begins a prompt, or is behind the keep's last one.
  bool follows(KeepId id, PageId page, bool begins) const;
  // False: there is no such keep.
  bool set_time(KeepId id, KeepTime time);
  // Its pages are as all others again, but for those that other keeps have; go_on() lets them go.
  bool end(KeepId id);

  bool has(PageId page) const { return used_pages_ != 0 && pages_.of(page).contains(page); }
  // The page leaves its last tier; the catalog has it still.
  void left(PageId page);
  // Ends what is over, and what has no page any more.
  void tick(uint64_t boot_ns);
  bool goes_on() const { return !let_go_.empty(); }
  void go_on();

  std::optional<KeepReport> report(KeepId id) const;
  std::vector<KeepReport> reports() const;
  // The last pages of a keep's prompts.
  std::vector<Key> ends(KeepId id) const;
  size_t size() const { return keeps_.size(); }
  uint64_t used_pages() const { return used_pages_; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t limit_bytes() const { return limit_bytes_; }
  // Ever: what pages cost that left while they were kept.
  uint64_t looks_at_lost() const { return looks_at_lost_; }

 private:
  // Which page a hold is on: the serial tells it from another at its place, and from itself when it
  // comes back. 0: on none.
  struct Hold {
    PageId page = kNoPage;
    uint32_t serial = 0;
  };
  struct KeptPage {
    uint32_t serial;
    uint32_t holders;  // keeps that end here, and pages behind it that are or were kept
    uint32_t above;    // the serial of the page above, which it holds
  };
  // Of one that left, by its serial.
  struct LostPage {
    uint32_t holders;
    Hold above;
  };
  struct Keep {
    KeepTime time;
    std::vector<Hold> ends;
    bool had_pages = false;
    uint16_t used_at = 0;  // of the last page
  };

  KeptPage* find(Hold hold);
  const KeptPage* find(Hold hold) const { return const_cast<Keeps*>(this)->find(hold); }
  KeepRefusal room_for(uint64_t bytes) const;
  // A page that is not kept yet; the hold that is given on the page above becomes its own.
  Hold insert(PageId page, uint64_t bytes, Hold above);
  void add_end(Keep& keep, Hold end);
  bool is_over(Keep& keep, uint64_t boot_ns);
  // Ends on pages that left go up to what is there; of many such pages the next looks do the rest.
  void settle();
  void erase(PageId page);
  void take(Hold hold);
  void give_up(Hold hold);
  KeepReport report_of(KeepId id, const Keep& keep) const;

  const Catalog& catalog_;
  uint64_t limit_bytes_;
  std::function<uint64_t(PageId)> bytes_of_;
  ShardedMap<PageId, KeptPage> pages_;
  std::unordered_map<uint32_t, LostPage> lost_;
  std::map<KeepId, Keep> keeps_;
  std::vector<Hold> let_go_;  // holds that are to be given up
  uint64_t used_pages_ = 0, used_bytes_ = 0, ends_ = 0, looks_at_lost_ = 0;
  uint32_t serial_ = 0;
  uint64_t next_look_ns_ = 0;
};

}  // namespace kvw
