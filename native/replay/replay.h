// A trace against tiers: the eviction policies that the daemon runs, fed with a trace's page ids
// instead of an arena's. No memory, no disk, no clock of its own. Not thread-safe.
//
// A request asks for a chain of pages, root first. Its hits are the pages up to the first one that
// is in no tier. Then all its pages are used, root first: what is missing from DRAM becomes
// resident there (loaded from NVMe, or computed and stored), and what is missing from NVMe is
// written to it, as write-behind does: as far as the write budget goes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "eviction/policy.h"
#include "nvme/write_budget.h"

namespace kvw {

inline constexpr uint64_t kEndless = UINT64_MAX;

struct ReplayOptions {
  std::string policy = "lru";
  uint64_t dram_pages = kEndless;
  uint64_t nvme_pages = 0;  // 0: no such tier
  // Tell the policies each page's parent, as the daemon does: leaves leave first and prefixes have
  // no gaps. Without it each page stands alone, as in the published figures of block-wise caches.
  bool leaves_first = false;
  uint64_t nvme_pages_per_day = 0;  // that may be written; 0: no bound
};

struct RequestHits {
  uint32_t dram = 0;
  uint32_t nvme = 0;
};

struct TierCounts {
  uint64_t written = 0;
  uint64_t evicted = 0;
  uint64_t refused = 0;  // pages that found no room: every page was an ancestor of theirs
  uint64_t spared = 0;   // that the write budget was not enough for
};

// One tier: a policy and a bound.
class ReplayTier {
 public:
  // `ids`: page ids are below it.
  ReplayTier(const std::string& policy, uint64_t capacity, size_t ids);

  bool has(PageId page) const { return resident_[page] != 0; }
  // Touches the page, or makes room and inserts it. False: there was no room, because nothing but
  // `parent` could have left.
  bool use(PageId page, PageId parent);
  void spare() { ++counts_.spared; }
  const TierCounts& counts() const { return counts_; }
  uint64_t size() const { return policy_->size(); }

 private:
  bool make_room(PageId parent);

  std::unique_ptr<EvictionPolicy> policy_;
  uint64_t capacity_;
  std::vector<uint8_t> resident_;
  TierCounts counts_;
};

class Replay {
 public:
  // Throws Error (usage): an unknown policy, no DRAM, more ids than fit a PageId.
  Replay(const ReplayOptions& options, size_t ids);

  // All ids below that of the constructor. `at_ns` does not fall, and counts where there is a write
  // budget, half of which is there at the first request.
  RequestHits request(std::span<const PageId> chain, uint64_t at_ns = 0);

  TierCounts dram() const { return dram_.counts(); }
  TierCounts nvme() const { return nvme_ ? nvme_->counts() : TierCounts{}; }

 private:
  RequestHits hits(std::span<const PageId> chain) const;
  void use_dram(std::span<const PageId> chain);
  void use_nvme(std::span<const PageId> chain);

  bool leaves_first_;
  ReplayTier dram_;
  std::unique_ptr<ReplayTier> nvme_;
  nvme::WriteBudget budget_;
  std::vector<uint8_t> asked_;  // by page, before this request; only with a budget
};

}  // namespace kvw
