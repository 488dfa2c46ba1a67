// Keeps: prompts whose pages stay until a time, whatever is asked for meanwhile. No page of a keep
// leaves DRAM or NVMe to make room for others. A clear, an operator's evict and damage take it all
// the same.
//
// A page is held by each keep that ends with it and by each page behind it that is held, so what
// prompts share is held once and counted once, and a keep that ends costs no more than the pages
// that nobody else holds. Bounded in bytes, pages, keeps and ends. Core thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
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

// Pages of prompts, as they are to be kept: one after the other, run by run.
struct PageOfRun {
  Key key;
  bool begins = false;  // its run; else it is behind the one before
};

struct KeptRun {
  bool has_room = true;
  bool is_broken = false;    // a page of the run that is under way is not stored
  std::vector<Key> on_nvme;  // of the pages of this step, those in no other tier
};

struct KeepReport {
  KeepId id = 0;
  KeepTime time;
  uint64_t pages = 0, bytes = 0;  // of its prompts, those that other keeps have as well among them
  std::vector<Key> ends;          // the last page of each of them, to make it from again
};

class Keeps {
 public:
  static constexpr uint64_t kMostKeeps = 4096;
  static constexpr uint64_t kMostKeptPages = 1 << 20;  // and half of what the index has room for
  static constexpr uint64_t kMostKeepEnds = 1 << 15;   // a search for what may leave meets each
  static constexpr uint64_t kMostEndsOfKeep = 1 << 12;
  static constexpr size_t kLetGoPerStep = 4096;

  // bytes_of: a page's that is there, in DRAM.
  Keeps(const Catalog& catalog, uint64_t limit_bytes, std::function<uint64_t(PageId)> bytes_of);

  // A new keep without pages. False: there are too many.
  bool begin(KeepId id, KeepTime time);
  // The page is the next of the keep: behind its last one, or where that is not above it the
  // beginning of another prompt. False: there is no more room, or no such keep any more; the page
  // is not in it.
  bool add(KeepId id, PageId page);
  // The page, and all those above it up to the prompt's beginning; nothing where one is missing.
  bool add_prompt(KeepId id, PageId last);
  // False: there is no such keep.
  bool set_time(KeepId id, KeepTime time);
  // Its pages are as all others from now on, but for those that other keeps have.
  bool end(KeepId id);

  bool has(PageId page) const { return used_pages_ != 0 && pages_.of(page).contains(page); }
  // The page leaves its last tier; the catalog has it still.
  void left(PageId page);
  // Ends what is over, and what has no page any more.
  void tick(uint64_t boot_ns);
  // Pages of keeps that ended are still to be let go.
  bool goes_on() const { return !let_go_.empty(); }
  void go_on() { let_go(kLetGoPerStep); }

  std::optional<KeepReport> report(KeepId id) const;
  std::vector<KeepReport> reports() const;  // without `ends`
  size_t size() const { return keeps_.size(); }
  uint64_t used_pages() const { return used_pages_; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  struct KeptPage {
    uint32_t holders;  // keeps that end here, and pages below that are kept
    uint32_t serial;   // tells it from another at its place, and from itself when it comes back
    uint32_t above;    // the serial of the page above, which it holds; 0: of none
  };
  struct End {
    PageId page = kNoPage;
    uint32_t serial = 0;
  };
  struct Keep {
    KeepTime time;
    std::vector<End> ends;
    uint64_t pages = 0, bytes = 0;
    uint16_t used_at = 0;  // of the last page
  };

  const KeptPage* find(PageId page) const;  // null: it is not kept
  const KeptPage* find(End end) const;
  template <class Which>
  KeptPage* find(Which which) {
    return const_cast<KeptPage*>(std::as_const(*this).find(which));
  }
  bool has_room(uint64_t bytes) const;
  bool is_there(const Keep& keep) const;
  bool is_over(Keep& keep, uint64_t boot_ns) const;
  void erase(PageId page);
  void let_go(size_t steps);
  static KeepReport report_of(KeepId id, const Keep& keep);

  const Catalog& catalog_;
  uint64_t limit_bytes_;
  std::function<uint64_t(PageId)> bytes_of_;
  ShardedMap<PageId, KeptPage> pages_;
  std::map<KeepId, Keep> keeps_;
  std::vector<End> let_go_;  // a hold on each of them is to be given up
  uint64_t used_pages_ = 0, used_bytes_ = 0, ends_ = 0;
  uint32_t serial_ = 0;
  uint64_t next_look_ns_ = 0;
};

}  // namespace kvw
