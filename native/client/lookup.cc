// Lookups and tiers: where pages are now, from the index in shared memory, and behind what that has
// from the presence filter of the remote store; and which of them are needed no more.
#include <algorithm>

#include "client/client.h"
#include "client/remote_pages.h"

namespace kvw {

namespace {

constexpr size_t kPrefetchAhead = 16;
constexpr size_t kReleasedPages = kTouchCapacity / 2;  // in a call

// Finds pages in order; asks for the index entries of those ahead, since each is a cache miss.
class Finder {
 public:
  explicit Finder(const ClientCall& call)
      : index_(call.view().index()),
        prompt_(call.prompt),
        ordinal_(call.row.ordinal),
        epoch_(call.clear_epoch),
        hbm_(call.daemon->hbm.mapped()) {}

  // Missing too where the page does not count.
  PageTier find(size_t page) {
    const size_t until = std::min(prompt_.pages(), page + kPrefetchAhead);
    for (prefetched_ = std::max(prefetched_, page); prefetched_ < until; ++prefetched_)
      index_.prefetch(prompt_.key(prefetched_));
    const EntrySummary entry = index_.peek(prompt_.key(page));
    if (!entry.found() || entry.space != ordinal_ || entry.clear_epoch < epoch_)
      return PageTier::missing;
    if (!entry.in_dram()) return PageTier::nvme;
    const bool copied = hbm_ != nullptr && hbm_->hints(entry.slot, entry.generation);
    return copied ? PageTier::hbm : PageTier::dram;
  }

 private:
  const Index& index_;
  Prompt& prompt_;
  uint16_t ordinal_;
  uint64_t epoch_;
  const HbmView* hbm_;  // the copies that this client reads; null: none
  size_t prefetched_ = 0;
};

void count_lookup(ClientSession& session, const LookupResult& found, size_t asked) {
  session.count(Counter::lookups);
  session.count(Counter::lookup_hit_hbm, found.hbm);
  session.count(Counter::lookup_hit_dram, found.dram);
  session.count(Counter::lookup_hit_nvme, found.nvme);
  session.count(Counter::lookup_hit_remote, found.remote);
  session.count(Counter::lookup_missed, asked - found.pages());
}

}  // namespace

void LookupResult::add(PageTier tier) {
  hbm += tier == PageTier::hbm;
  dram += tier == PageTier::dram;
  nvme += tier == PageTier::nvme;
  remote += tier == PageTier::remote;
}

LookupResult Client::lookup(const Key& namespace_id, Prompt& prompt) {
  const auto call = ClientCall::open(link_, namespace_id, prompt, false, 0);
  Finder finder(call);
  LookupResult result;
  size_t page = 0;
  for (; page < prompt.pages(); ++page) {
    const PageTier tier = finder.find(page);
    if (tier == PageTier::missing) break;
    result.add(tier);
  }
  if (page < prompt.pages()) result.remote = RemotePages(call).reach(page) - page;
  count_lookup(call.session(), result, prompt.pages());
  return result;
}

std::vector<PageTier> Client::tiers(const Key& namespace_id, Prompt& prompt, bool counted) {
  const auto call = ClientCall::open(link_, namespace_id, prompt, false, 0);
  Finder finder(call);
  std::vector<PageTier> tiers(prompt.pages(), PageTier::missing);
  RemotePages remote(call);
  LookupResult result;
  for (size_t page = 0; page < prompt.pages();) {
    tiers[page] = finder.find(page);
    result.add(tiers[page]);
    if (tiers[page++] != PageTier::missing) continue;
    const size_t gap = page - 1, reach = remote.reach(gap);
    std::fill(tiers.begin() + static_cast<ptrdiff_t>(gap),
              tiers.begin() + static_cast<ptrdiff_t>(reach), PageTier::remote);
    result.remote += reach - gap;
    page = prompt.run_end(gap);
  }
  if (counted) count_lookup(call.session(), result, prompt.pages());
  return tiers;
}

size_t Client::release(const Key& namespace_id, Prompt& prompt, size_t first) {
  const auto call = ClientCall::open(link_, namespace_id, prompt, false, 0);
  std::vector<EntryView> stored;
  for (size_t page = first; page < prompt.pages();) {
    const auto entry = call.find(page);
    if (entry) stored.push_back(*entry);
    page = entry ? page + 1 : prompt.run_end(page);
  }
  // The last first, and of a long prompt its end: what the daemon would not hear is said by nobody.
  const size_t most = std::min<size_t>(stored.size(), kReleasedPages);
  for (size_t said = 0; said < most; ++said)
    call.session().release(stored[stored.size() - 1 - said]);
  return most;
}

std::vector<uint64_t> Client::tags(const Key& namespace_id, Prompt& prompt) {
  const auto call = ClientCall::open(link_, namespace_id, prompt, false, 0);
  std::vector<uint64_t> tags(prompt.pages());
  for (size_t page = 0; page < tags.size(); ++page) tags[page] = prompt.key(page).lo;
  return tags;
}

}  // namespace kvw
