// S3-FIFO: what passes through, what stays, and what is remembered.
#include "eviction/s3fifo.h"

#include <algorithm>

#include "tests/check.h"
#include "tests/eviction_kit.h"

namespace kvw {
namespace {

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
  ExemptSet keep;
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

}  // namespace
}  // namespace kvw
