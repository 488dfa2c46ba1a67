// The optimum, against hits counted by hand and against one that looks at every page each time.
#include "replay/optimum.h"

#include <algorithm>
#include <vector>

#include "tests/check.h"

namespace kvw {
namespace {

using Chain = std::vector<PageId>;

struct Found {
  std::vector<uint32_t> hits;
  TierCounts counts;
};

Found optimum(const std::vector<Chain>& chains, size_t ids, uint64_t capacity) {
  std::vector<PageId> pages;
  std::vector<uint64_t> ends;
  for (const Chain& chain : chains) {
    pages.insert(pages.end(), chain.begin(), chain.end());
    ends.push_back(pages.size());
  }
  Found found;
  found.hits.resize(chains.size());
  found.counts = optimal_hits(pages, ends, ids, capacity, found.hits);
  return found;
}

bool has(const Chain& pages, PageId page) { return std::ranges::find(pages, page) != pages.end(); }

// Keeps those of all pages at hand that are asked for soonest, root first: sorts all of them after
// each request, with a look through the future for each.
std::vector<uint32_t> slow_optimum(const std::vector<Chain>& chains, uint64_t capacity) {
  std::vector<uint32_t> hits;
  Chain kept;
  for (size_t now = 0; now < chains.size(); ++now) {
    const Chain& chain = chains[now];
    const auto missed = std::ranges::find_if(chain, [&](PageId page) { return !has(kept, page); });
    hits.push_back(static_cast<uint32_t>(missed - chain.begin()));
    for (const PageId page : chain)
      if (!has(kept, page)) kept.push_back(page);
    std::vector<std::pair<std::pair<size_t, size_t>, PageId>> sorted;
    for (const PageId page : kept)
      for (size_t later = now + 1; later < chains.size(); ++later)
        if (const auto at = std::ranges::find(chains[later], page); at != chains[later].end()) {
          sorted.push_back({{later, at - chains[later].begin()}, page});
          break;
        }
    std::ranges::sort(sorted);
    kept.clear();
    for (const auto& [order, page] : sorted)
      if (kept.size() < capacity) kept.push_back(page);
  }
  return hits;
}

// A page's parent is always the same, and has a higher number.
std::vector<Chain> random_chains(std::mt19937_64& random, PageId ids, size_t requests) {
  std::vector<Chain> chains(requests);
  for (Chain& chain : chains) {
    for (PageId page = static_cast<PageId>(random() % ids);; page = (page - 1) / 2) {
      chain.push_back(ids - 1 - page);
      if (page == 0) break;
    }
    std::ranges::reverse(chain);
  }
  return chains;
}

TEST(optimum_keeps_what_is_asked_for_soonest) {
  // With one place: 1 is asked for before 0 again, and 2 never.
  const Found found = optimum({{0}, {1}, {1}, {2}, {1}, {0}}, 3, 1);
  CHECK(found.hits == std::vector<uint32_t>({0, 0, 1, 0, 1, 0}));
  CHECK_EQ(found.counts.written, 2);
}

TEST(optimum_of_a_chain_that_does_not_fit_is_its_beginning) {
  const Found found = optimum({{3, 2, 1, 0}, {3, 2, 1, 0}, {3, 2, 1, 0}}, 4, 2);
  CHECK(found.hits == std::vector<uint32_t>({0, 2, 2}));
}

TEST(optimum_without_a_bound_hits_all_that_was_asked_before) {
  const Found found = optimum({{0, 1}, {0, 1, 2}, {0, 3}, {0, 1, 2}}, 4, kEndless);
  CHECK(found.hits == std::vector<uint32_t>({0, 2, 1, 3}));
  CHECK_EQ(found.counts.refused, 0);
}

TEST(optimum_is_that_of_a_slow_look_at_every_page) {
  auto random = check::random("optimum");
  for (const PageId ids : {7u, 60u, 400u}) {
    const auto chains = random_chains(random, ids, 300);
    for (const uint64_t capacity : {1, 2, 5, 20, 100, 400})
      CHECK(optimum(chains, ids, capacity).hits == slow_optimum(chains, capacity));
  }
}

// The heap holds an item for each time that a page was asked for, until it is swept.
TEST(optimum_of_a_small_cache_that_is_asked_a_hundred_thousand_times) {
  std::vector<Chain> chains(100'000, Chain{0, 1, 2});
  for (size_t at = 0; at < chains.size(); at += 1000) chains[at] = {0, 1, 3};
  const Found found = optimum(chains, 4, 3);
  uint64_t hits = 0;
  for (const uint32_t each : found.hits) hits += each;
  // The first misses all three, the second page 2, and the other chain page 3 each time.
  CHECK_EQ(hits, 3 * chains.size() - 3 - 1 - 99);
}

}  // namespace
}  // namespace kvw
