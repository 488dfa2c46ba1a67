// Replays, against answers computed by hand and by a plain LRU written the slow way.
#include "replay/replay.h"

#include <algorithm>
#include <list>
#include <vector>

#include "tests/check.h"

namespace kvw {
namespace {

using Chain = std::vector<PageId>;

ReplayOptions tiers(uint64_t dram, uint64_t nvme = 0, bool leaves_first = false) {
  return {"lru", dram, nvme, leaves_first};
}

// A list that is searched from end to end: nothing to get wrong.
class SlowLru {
 public:
  explicit SlowLru(size_t capacity) : capacity_(capacity) {}

  uint32_t request(const Chain& chain) {
    uint32_t hits = 0;
    while (hits < chain.size() && has(chain[hits])) ++hits;
    for (const PageId page : chain) {
      std::erase(pages_, page);
      pages_.push_back(page);
      if (pages_.size() > capacity_) pages_.pop_front();
    }
    return hits;
  }

 private:
  bool has(PageId page) const { return std::ranges::find(pages_, page) != pages_.end(); }

  size_t capacity_;
  std::list<PageId> pages_;
};

// Requests over `ids` pages with the structure of prompts: a page's parent is always the same.
Chain random_chain(std::mt19937_64& random, PageId ids) {
  Chain chain;
  for (PageId page = static_cast<PageId>(random() % ids);; page = (page - 1) / 2) {
    chain.push_back(page);
    if (page == 0) break;
  }
  std::ranges::reverse(chain);
  return chain;
}

TEST(endless_tier_hits_what_was_asked_before) {
  Replay run(tiers(kEndless), 4);
  CHECK_EQ(run.request(Chain{0, 1, 2}).dram, 0u);
  CHECK_EQ(run.request(Chain{0, 1, 3}).dram, 2u);
  CHECK_EQ(run.request(Chain{0, 1, 2}).dram, 3u);
  CHECK_EQ(run.dram().written, 4u);
  CHECK_EQ(run.dram().evicted, 0u);
}

TEST(hits_end_at_the_first_gap) {
  Replay run(tiers(2), 3);
  run.request(Chain{0, 1, 2});  // page 0 is the coldest and leaves
  CHECK_EQ(run.request(Chain{0, 1, 2}).dram, 0u);
}

TEST(leaves_first_keeps_the_root_of_a_chain_that_does_not_fit) {
  Replay run(tiers(2, 0, true), 3);
  run.request(Chain{0, 1});
  run.request(Chain{0, 2});  // the leaf 1 leaves
  CHECK_EQ(run.request(Chain{0, 1}).dram, 1u);
}

TEST(chain_longer_than_the_tier_is_refused_its_end_when_leaves_go_first) {
  Replay run(tiers(2, 0, true), 4);
  run.request(Chain{0, 1, 2, 3});
  CHECK_EQ(run.dram().refused, 1u);
  CHECK_EQ(run.request(Chain{0, 1, 2, 3}).dram, 2u);
}

TEST(nvme_serves_what_dram_lost_and_dram_has_it_again) {
  Replay run(tiers(2, 4), 4);
  run.request(Chain{0, 1});
  run.request(Chain{2, 3});
  const RequestHits hits = run.request(Chain{0, 1});
  CHECK_EQ(hits.dram, 0u);
  CHECK_EQ(hits.nvme, 2u);
  CHECK_EQ(run.request(Chain{0, 1}).dram, 2u);
  CHECK_EQ(run.nvme().written, 4u);  // once each: a promotion writes nothing
  CHECK_EQ(run.nvme().evicted, 0u);
}

TEST(tier_of_one_page_and_a_page_asked_twice_in_a_request_are_no_trouble) {
  for (const bool leaves_first : {false, true}) {
    Replay run(tiers(1, 1, leaves_first), 2);
    run.request(Chain{0, 0, 1, 0});
    run.request(Chain{});
    run.request(Chain{1});
    CHECK(run.dram().evicted <= 4);
  }
}

constexpr uint64_t kHourNs = nvme::WriteBudget::kDayNs / 24;

TEST(write_budget_goes_to_what_is_asked_for_again) {
  ReplayOptions options = tiers(1, 100, true);
  options.nvme_pages_per_day = 24;  // of which half is there: for what was asked for before
  Replay run(options, 100);
  run.request(Chain{0, 1, 2}, 0);
  CHECK_EQ(run.nvme().written, 0u);
  CHECK_EQ(run.nvme().spared, 3u);
  run.request(Chain{0, 1, 3}, 0);
  CHECK_EQ(run.nvme().written, 2u);
  CHECK_EQ(run.request(Chain{0, 1, 2}, 0).nvme, 1u);  // DRAM has the first
  CHECK_EQ(run.nvme().written, 3u);
  // An hour brings one page; nine of half a day are left: more than half after four of them.
  run.request(Chain{10}, 3 * kHourNs);
  CHECK_EQ(run.nvme().written, 3u);
  run.request(Chain{11, 12}, 4 * kHourNs);
  CHECK_EQ(run.nvme().written, 4u);
  CHECK_EQ(run.nvme().spared, 6u);
}

TEST(write_budget_that_is_used_up_writes_nothing_until_more_comes_in) {
  ReplayOptions options = tiers(1, 100, false);
  options.nvme_pages_per_day = 24;
  Replay run(options, 100);
  Chain chain;
  for (PageId page = 0; page < 50; ++page) chain.push_back(page);
  run.request(chain, 0);
  run.request(chain, 0);
  CHECK_EQ(run.nvme().written, 12u);
  run.request(chain, 5 * kHourNs);
  CHECK_EQ(run.nvme().written, 17u);
  run.request(chain, 365 * 24 * kHourNs);
  CHECK_EQ(run.nvme().written, 17u + 24);
}

TEST(bad_options_are_refused) {
  CHECK_THROWS(Replay(tiers(0), 1), "no_dram");
  CHECK_THROWS(Replay(tiers(1), size_t{1} << 33), "too_many_pages");
  CHECK_THROWS(Replay({"odd", 1, 0, false}, 1), "eviction_policy");
}

TEST(lru_page_by_page_is_the_plain_lru) {
  auto random = check::random("lru_page_by_page_is_the_plain_lru");
  for (const size_t capacity : {1, 2, 7, 30, 100}) {
    Replay run(tiers(capacity), 200);
    SlowLru slow(capacity);
    for (uint64_t round = 0; round < check::rounds(400); ++round) {
      const Chain chain = random_chain(random, 200);
      CHECK_EQ(run.request(chain).dram, slow.request(chain));
    }
  }
}

TEST(leaves_first_never_leaves_a_gap) {
  auto random = check::random("leaves_first_never_leaves_a_gap");
  for (const std::string& policy : policy_names()) {
    ReplayTier tier(policy, 20, 200);
    for (uint64_t round = 0; round < check::rounds(400); ++round) {
      PageId parent = kNoPage;
      for (const PageId page : random_chain(random, 200)) {
        if (!tier.use(page, parent)) break;
        parent = page;
      }
      for (PageId page = 1; page < 200; ++page)
        if (tier.has(page)) CHECK(tier.has((page - 1) / 2));
      CHECK(tier.size() <= 20);
    }
  }
}

}  // namespace
}  // namespace kvw
