#include "replay/replay.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace kvw {

namespace {

class ExemptOne final : public Exempt {
 public:
  explicit ExemptOne(PageId page) : page_(page) {}
  bool operator()(PageId page) const override { return page == page_; }

 private:
  PageId page_;
};

constexpr size_t kMostIds = UINT32_MAX - 16;

size_t checked(const ReplayOptions& options, size_t ids) {
  if (options.dram_pages == 0)
    throw Error(
        ErrorKind::usage, "no_dram",
        "a replay needs a DRAM tier of at least one page: what NVMe holds passes through it");
  if (ids > kMostIds)
    throw Error(ErrorKind::usage, "too_many_pages",
                "the trace has " + std::to_string(ids) + " different pages; at most " +
                    std::to_string(kMostIds) + " can be replayed at once");
  return ids;
}

}  // namespace

// --- a tier
// ---------------------------------------------------------------------------------------

ReplayTier::ReplayTier(const std::string& policy, uint64_t capacity, size_t ids)
    : policy_(make_policy(policy, ids)), capacity_(capacity), resident_(ids) {}

bool ReplayTier::use(PageId page, PageId parent) {
  if (has(page)) {
    policy_->touched(page);
    return true;
  }
  if (policy_->size() >= capacity_ && !make_room(parent)) {
    ++counts_.refused;
    return false;
  }
  resident_[page] = 1;
  ++counts_.written;
  policy_->announced(page, page);
  policy_->inserted(page, parent);
  return true;
}

bool ReplayTier::make_room(PageId parent) {
  PageId victim = kNoPage;
  // A page is not evicted for its own child.
  if (policy_->victims(std::span(&victim, 1), ExemptOne(parent)) == 0) return false;
  resident_[victim] = 0;
  policy_->removed(victim);
  ++counts_.evicted;
  return true;
}

// --- the tiers together
// ---------------------------------------------------------------------------

Replay::Replay(const ReplayOptions& options, size_t ids)
    : leaves_first_(options.leaves_first),
      dram_(options.policy, options.dram_pages, checked(options, ids)),
      budget_(options.nvme_pages_per_day, static_cast<double>(options.nvme_pages_per_day) / 2),
      asked_(budget_.bounded() ? ids : 0) {
  if (options.nvme_pages != 0)
    nvme_ = std::make_unique<ReplayTier>(options.policy, options.nvme_pages, ids);
}

RequestHits Replay::request(std::span<const PageId> chain, uint64_t at_ns) {
  const RequestHits found = hits(chain);
  budget_.earn(at_ns);
  use_dram(chain);
  if (nvme_) use_nvme(chain);
  return found;
}

RequestHits Replay::hits(std::span<const PageId> chain) const {
  RequestHits found;
  for (const PageId page : chain) {
    if (dram_.has(page)) {
      ++found.dram;
    } else if (nvme_ && nvme_->has(page)) {
      ++found.nvme;
    } else {
      break;
    }
  }
  return found;
}

void Replay::use_dram(std::span<const PageId> chain) {
  PageId parent = kNoPage;
  for (const PageId page : chain) {
    // What comes after a page that found no room would stand behind a gap.
    if (!dram_.use(page, parent)) return;
    if (leaves_first_) parent = page;
  }
}

// What the budget is not enough for leaves a gap too. The daemon offers it again when it is used.
void Replay::use_nvme(std::span<const PageId> chain) {
  PageId parent = kNoPage;
  bool gap = false;
  for (const PageId page : chain) {
    const bool written = nvme_->has(page);
    const bool reused = !asked_.empty() && std::exchange(asked_[page], 1) != 0;
    gap = gap || (!written && !budget_.allows(reused, 0));
    if (gap) {
      if (!written) nvme_->spare();
      continue;
    }
    if (!nvme_->use(page, parent)) return;
    if (!written) budget_.spend(1);
    if (leaves_first_) parent = page;
  }
}

}  // namespace kvw
