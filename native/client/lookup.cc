// Lookups and tiers: where pages are now, from the index in shared memory.
#include <algorithm>

#include "client/client.h"

namespace kvw {

namespace {

constexpr size_t kPrefetchAhead = 16;

}  // namespace

// Finds pages in order; asks for the index entries of those ahead, since each is a cache miss.
class Finder {
 public:
  Finder(const Client::Open& call, Prompt& prompt)
      : index_(call.view->index()),
        prompt_(prompt),
        ordinal_(call.row.ordinal),
        epoch_(call.view->clear_epoch(call.row.ordinal)) {}

  // Found only where the page counts.
  EntryGlance find(size_t page) {
    const size_t until = std::min(prompt_.pages(), page + kPrefetchAhead);
    for (prefetched_ = std::max(prefetched_, page); prefetched_ < until; ++prefetched_)
      index_.prefetch(prompt_.key(prefetched_));
    const EntryGlance entry = index_.glance(prompt_.key(page));
    if (entry.space != ordinal_ || entry.clear_epoch < epoch_) return {};
    return entry;
  }

 private:
  const Index& index_;
  Prompt& prompt_;
  uint16_t ordinal_;
  uint64_t epoch_;
  size_t prefetched_ = 0;
};

void Client::count_lookup(ClientSession& session, const LookupResult& found, size_t asked) {
  session.count(Counter::lookups);
  session.count(Counter::lookup_hit_dram, found.dram);
  session.count(Counter::lookup_hit_nvme, found.nvme);
  session.count(Counter::lookup_missed, asked - found.pages);
}

LookupResult Client::lookup(const Key& namespace_id, Prompt& prompt) {
  const Open call = open(namespace_id, prompt, false, 0);
  Finder finder(call, prompt);
  LookupResult result;
  for (size_t page = 0; page < prompt.pages(); ++page) {
    const EntryGlance entry = finder.find(page);
    if (!entry.found()) break;
    ++result.pages;
    ++(entry.in_dram() ? result.dram : result.nvme);
  }
  count_lookup(*call.session, result, prompt.pages());
  return result;
}

std::vector<PageTier> Client::tiers(const Key& namespace_id, Prompt& prompt, bool counted) {
  const Open call = open(namespace_id, prompt, false, 0);
  Finder finder(call, prompt);
  std::vector<PageTier> tiers(prompt.pages(), PageTier::missing);
  LookupResult result;
  for (size_t page = 0; page < prompt.pages();) {
    const EntryGlance entry = finder.find(page);
    if (!entry.found()) {
      page = prompt.run_end(page);
      continue;
    }
    ++result.pages;
    ++(entry.in_dram() ? result.dram : result.nvme);
    tiers[page++] = entry.in_dram() ? PageTier::dram : PageTier::nvme;
  }
  if (counted) count_lookup(*call.session, result, prompt.pages());
  return tiers;
}

std::vector<uint64_t> Client::tags(const Key& namespace_id, Prompt& prompt) {
  open(namespace_id, prompt, false, 0);
  std::vector<uint64_t> tags(prompt.pages());
  for (size_t page = 0; page < tags.size(); ++page) tags[page] = prompt.key(page).lo;
  return tags;
}

}  // namespace kvw
