// S3-FIFO: what passes through, what stays, what is remembered, and the promises of every policy.
#include "eviction/s3fifo.h"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "tests/check.h"

namespace kvw {
namespace {

class KeepSet final : public Keep {
 public:
  std::set<PageId> pages;
  bool operator()(PageId page) const override { return pages.contains(page); }
};

std::vector<PageId> take(EvictionPolicy& policy, size_t count, const Keep& keep = KeepNone()) {
  std::vector<PageId> out(count);
  out.resize(policy.victims(out, keep));
  return out;
}

void evict(EvictionPolicy& policy, size_t count) {
  for (const PageId page : take(policy, count)) policy.removed(page);
}

using Pages = std::vector<PageId>;

TEST(s3fifo_is_known_by_name) {
  CHECK_EQ(make_policy("s3fifo", 8)->size(), 0u);
  CHECK(std::ranges::count(policy_names(), "s3fifo") == 1);
}

TEST(pages_leave_in_the_order_they_came_when_none_is_used_again) {
  S3FifoPolicy policy(8);
  for (PageId page = 0; page < 5; ++page) policy.inserted(page, kNoPage);
  CHECK(take(policy, 3) == (Pages{0, 1, 2}));
  CHECK(take(policy, 9) == (Pages{0, 1, 2, 3, 4}));  // nothing was removed in between
}

TEST(page_that_was_used_again_outlives_a_scan) {
  S3FifoPolicy policy(8);
  for (PageId page = 0; page < 10; ++page) policy.inserted(page, kNoPage);
  policy.touched(3);
  for (PageId page = 10; page < 200; ++page) {
    evict(policy, 1);
    policy.inserted(page, kNoPage);
  }
  CHECK(policy.heat(3) != 0);
  CHECK_EQ(policy.size(), 10u);
}

TEST(page_that_comes_back_while_it_is_remembered_outlives_a_scan) {
  S3FifoPolicy policy(8);
  const auto insert = [&policy](PageId page, uint64_t identity) {
    policy.announced(page, identity);
    policy.inserted(page, kNoPage);
  };
  for (PageId page = 0; page < 10; ++page) insert(page, page);
  CHECK(take(policy, 1) == Pages{0});
  policy.removed(0);
  insert(50, 0);  // the same content under another id
  for (PageId page = 100; page < 200; ++page) {
    evict(policy, 1);
    insert(page, page);
  }
  CHECK(policy.heat(50) != 0);
}

TEST(page_that_was_never_announced_is_not_remembered) {
  S3FifoPolicy policy(8);
  policy.inserted(0, kNoPage);
  policy.inserted(1, kNoPage);
  policy.removed(0);
  policy.inserted(0, kNoPage);
  CHECK(take(policy, 2) == (Pages{1, 0}));
}

TEST(main_page_goes_round_once_for_each_use_and_then_leaves) {
  S3FifoPolicy policy(8);
  policy.inserted(0, kNoPage);
  for (int i = 0; i < 9; ++i) policy.touched(0);
  CHECK(take(policy, 1) == Pages{0});  // alone, it leaves at last: the search ends
}

TEST(parent_follows_its_last_child) {
  S3FifoPolicy policy(8);
  policy.inserted(0, kNoPage);
  policy.inserted(1, 0);
  policy.inserted(2, 1);
  policy.inserted(3, kNoPage);
  CHECK(take(policy, 2) == (Pages{2, 1}));
  const Pages all = take(policy, 9);
  CHECK_EQ(all.size(), 4u);
  CHECK(std::ranges::find(all, 2u) < std::ranges::find(all, 1u));
  CHECK(std::ranges::find(all, 1u) < std::ranges::find(all, 0u));
}

TEST(kept_page_and_its_ancestors_stay_and_come_back_when_it_is_let_go) {
  S3FifoPolicy policy(8);
  policy.inserted(0, kNoPage);
  policy.inserted(1, 0);
  policy.inserted(2, kNoPage);
  KeepSet keep;
  keep.pages = {1};
  CHECK(take(policy, 9, keep) == Pages{2});
  CHECK(take(policy, 9, keep) == Pages{2});
  CHECK_EQ(take(policy, 9).size(), 3u);
}

TEST(late_touches_and_removals_are_ignored) {
  S3FifoPolicy policy(0);
  policy.touched(7);
  policy.removed(7);
  policy.adopt(7, 8);
  CHECK_EQ(policy.size(), 0u);
  CHECK_EQ(policy.heat(7), 0u);
  CHECK(take(policy, 3).empty());
}

TEST(memory_of_what_left_is_bounded) {
  Ghost ghost;
  for (uint64_t i = 0; i < 1000; ++i) ghost.remember(i % 100, 10);
  CHECK(ghost.size() <= 10);
  CHECK(ghost.recall(99));
  CHECK(!ghost.recall(99));
  CHECK(!ghost.recall(5));
}

// Any order of calls: each search finds only resident pages, none twice, none before a resident
// descendant, none kept; and it finds all that may leave.
TEST(promises_of_every_policy_hold_in_any_order_of_calls) {
  constexpr PageId kIds = 60;
  auto random = check::random("promises_of_every_policy_hold_in_any_order_of_calls");
  const auto any = [&random] { return static_cast<PageId>(random() % kIds); };
  S3FifoPolicy policy(4);
  std::set<PageId> resident;
  std::map<PageId, PageId> parent;  // by id: a smaller one, so that there are no cycles
  const auto below = [&any](PageId page) { return page == 0 ? kNoPage : any() % page; };
  for (uint64_t round = 0; round < check::rounds(20000); ++round) {
    const PageId page = any();
    switch (random() % 6) {
      case 0:
      case 1:
        if (!resident.contains(page)) {
          const PageId above = below(page);
          policy.announced(page, page);
          policy.inserted(page, above);
          resident.insert(page);
          if (above != kNoPage && resident.contains(above)) parent[page] = above;
        }
        break;
      case 2:
        policy.touched(page);
        break;
      case 3:
        policy.removed(page);
        resident.erase(page);
        parent.erase(page);
        std::erase_if(parent, [page](const auto& link) { return link.second == page; });
        break;
      default: {
        KeepSet keep;
        for (int i = 0; i < 6; ++i) keep.pages.insert(any());
        const size_t want = random() % 8 + 1;
        const Pages found = take(policy, want, keep);
        std::set<PageId> gone;
        for (const PageId victim : found) {
          CHECK(resident.contains(victim));
          CHECK(!keep.pages.contains(victim));
          CHECK(gone.insert(victim).second);
          for (const auto& [child, above] : parent)
            if (above == victim) CHECK(gone.contains(child));
        }
        if (found.size() < want) {  // nothing else may leave
          std::set<PageId> blocked = keep.pages;
          for (const PageId each : resident)
            for (PageId at = each; blocked.contains(each) && parent.contains(at);)
              blocked.insert(at = parent[at]);
          for (const PageId each : resident) CHECK(gone.contains(each) || blocked.contains(each));
        }
        if (random() % 2 == 0)
          for (const PageId victim : found) {
            policy.removed(victim);
            resident.erase(victim);
            parent.erase(victim);
          }
      }
    }
    CHECK_EQ(policy.size(), resident.size());
  }
}

}  // namespace
}  // namespace kvw
