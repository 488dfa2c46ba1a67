// The adaptive policy, and its parts: the memory of what left and the duel of hold times.
#include "eviction/adaptive.h"

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "replay/replay.h"
#include "tests/check.h"
#include "tests/eviction_kit.h"

namespace kvw {
namespace {

// --- the memory of what left

TEST(uses_of_a_page_that_left_are_told_once) {
  auto random = check::random("uses_of_a_page_that_left_are_told_once");
  UseMemory memory;
  memory.reserve(1000);
  const uint64_t page = random(), other = random();
  memory.remember(page, 3);
  memory.remember(other, 100);
  CHECK_EQ(memory.recall(page), 3u);
  CHECK_EQ(memory.recall(page), 0u);
  CHECK_EQ(memory.recall(other), UseMemory::kMostUses);
}

TEST(memory_without_room_remembers_nothing) {
  UseMemory memory;
  memory.remember(1, 1);
  CHECK_EQ(memory.recall(1), 0u);
}

TEST(uses_stay_remembered_where_there_is_room_enough) {
  UseMemory memory;
  memory.reserve(1000);
  memory.remember(1, 3);
  memory.reserve(1000);
  memory.reserve(100);
  CHECK_EQ(memory.recall(1), 3u);
}

TEST(oldest_of_a_set_gives_way_only_where_none_is_free) {
  UseMemory memory;
  memory.reserve(64);
  const auto of_set = [](uint64_t page) { return page << 48; };  // all of them of the same
  for (uint64_t page = 1; page <= 4; ++page) memory.remember(of_set(page), 1);
  CHECK_EQ(memory.recall(of_set(2)), 1u);
  memory.remember(of_set(5), 1);
  CHECK_EQ(memory.recall(of_set(1)), 1u);
  memory.remember(of_set(6), 1);
  memory.remember(of_set(7), 1);
  CHECK_EQ(memory.recall(of_set(3)), 0u);
  for (uint64_t page = 4; page <= 7; ++page) CHECK_EQ(memory.recall(of_set(page)), 1u);
}

TEST(uses_are_forgotten_when_as_many_others_left_since) {
  auto random = check::random("uses_are_forgotten_when_as_many_others_left_since");
  UseMemory memory;
  memory.reserve(4096);
  std::vector<uint64_t> pages(3 * 4096);
  for (uint64_t& page : pages) page = random();
  for (const uint64_t page : pages) memory.remember(page, 2);
  size_t old = 0, young = 0;
  for (size_t i = 0; i < 4096; ++i) old += memory.recall(pages[i]) != 0 ? 1 : 0;
  for (size_t i = 2 * 4096 + 2048; i < pages.size(); ++i)
    young += memory.recall(pages[i]) != 0 ? 1 : 0;
  CHECK(old <= 8);          // told of another
  CHECK(young > 2048 / 2);  // sets are full by chance
}

TEST(pages_that_never_left_are_seldom_told_of) {
  auto random = check::random("pages_that_never_left_are_seldom_told_of");
  UseMemory memory;
  memory.reserve(4096);
  for (int i = 0; i < 4096; ++i) memory.remember(random(), 1);
  size_t told = 0;
  for (int i = 0; i < 200000; ++i) told += memory.recall(random()) != 0 ? 1 : 0;
  CHECK(told <= 40);  // 200,000 * 4 / 65,536 are 12
}

// --- the duel

constexpr Duel::HoldTimes kEven = {1, 1, 1, 1, 1, 1, 1};
constexpr Duel::HoldTimes kRows[Duel::kRows] = {
    kEven, {1, 2, 3, 4, 5, 6, 1},   {.1F, 1, 1, 1, 1, 1, 1}, {1, .1F, 1, 1, 1, 1, 1}, kEven,
    kEven, {1, 1, 1, 1, 1, 1, .01F}};

constexpr float kYoung = 3;

// One row's cache, searched from end to end.
class SlowRow {
 public:
  explicit SlowRow(const Duel::HoldTimes& hold) : hold_(hold) {}

  bool has(uint64_t page) const { return pages_.contains(page); }
  void push(uint64_t page, uint32_t cls, uint64_t now, size_t room) {
    pages_[page] = {cls, now, ++orders_};
    while (pages_.size() > room) {
      const auto riper = [&](const auto& a, const auto& b) {
        const auto &x = a.second, &y = b.second;
        if (x.cls == y.cls) return x.order > y.order;  // of a class the one that came first
        return ripeness(x, now) < ripeness(y, now);
      };
      // Of each class the oldest, so that the order above is one.
      std::map<uint32_t, std::pair<uint64_t, Page>> oldest;
      for (const auto& each : pages_) {
        const auto found = oldest.find(each.second.cls);
        if (found == oldest.end() || riper(found->second, each)) oldest[each.second.cls] = each;
      }
      std::pair<uint64_t, Page> ripest = oldest.begin()->second;
      for (const auto& [cls_of_it, each] : oldest)
        if (riper(ripest, each)) ripest = each;
      pages_.erase(ripest.first);
    }
  }

 private:
  struct Page {
    uint32_t cls = 0;
    uint64_t used_at = 0, order = 0;
  };
  float ripeness(const Page& page, uint64_t now) const {
    return ripeness_of(static_cast<float>(now - page.used_at + 1), hold_[page.cls], kYoung);
  }

  Duel::HoldTimes hold_;
  std::map<uint64_t, Page> pages_;
  uint64_t orders_ = 0;
};

uint64_t followed(uint64_t page) { return page; }  // its upper half is 0: every sample has it

TEST(duel_scores_what_slow_caches_would_have_hit) {
  auto random = check::random("duel_scores_what_slow_caches_would_have_hit");
  constexpr size_t kPages = 60;
  Duel duel(kRows);
  duel.resize(kPages);
  duel.fill(true);
  duel.grace(kYoung);
  const size_t room = kPages / 4;
  std::vector<SlowRow> rows(std::begin(kRows), std::end(kRows));
  std::vector<double> scores(Duel::kRows);
  std::map<uint64_t, uint32_t> classes;
  for (uint64_t now = 1; now < check::rounds(20000); ++now) {
    const uint64_t page = followed(random() % 40);
    const auto cls = static_cast<uint32_t>(random() % Duel::kClasses);
    const bool there = std::ranges::any_of(rows, [&](const SlowRow& row) { return row.has(page); });
    if (random() % 4 == 0) {
      duel.became(page, cls, now);
      if (!there || classes[page] == cls) continue;
    } else {
      duel.used(page, cls, now);
      const bool all = std::ranges::all_of(rows, [&](const SlowRow& row) { return row.has(page); });
      for (size_t i = 0; !all && i < scores.size(); ++i) scores[i] += rows[i].has(page) ? 1 : 0;
    }
    classes[page] = cls;
    for (SlowRow& row : rows) row.push(page, cls, now, room);
    for (size_t i = 0; i < scores.size(); ++i) CHECK_EQ(duel.score(i), scores[i]);
    CHECK(duel.followed() <= Duel::kRows * room);
  }
}

TEST(row_that_hits_more_leads_and_the_first_where_none_does) {
  Duel duel(kRows);
  duel.resize(64);  // 16 pages of a sample
  duel.fill(true);
  uint64_t now = 0;
  const auto scan = [&](uint32_t cls_of_the_hot) {
    for (uint64_t page = 1000; page < 1400; ++page) {
      duel.used(followed(page), cls_of_the_hot == 0 ? 1 : 0, ++now);
      if (page % 20 == 0)
        for (uint64_t hot = 0; hot < 8; ++hot) duel.used(followed(hot), cls_of_the_hot, ++now);
    }
    return duel.decide();
  };
  CHECK_EQ(duel.decide(), 0u);
  const size_t by_uses = scan(1);
  CHECK(by_uses == 1 || by_uses == 2);
  size_t leader = by_uses;
  for (int i = 0; i < 10; ++i) leader = scan(0);
  CHECK_EQ(leader, 3u);
}

TEST(leader_leads_until_another_is_clearly_ahead_and_what_was_long_ago_counts_less) {
  Duel duel(kRows);
  duel.resize(64);
  duel.fill(true);
  uint64_t now = 0, once = 1000;
  const auto hit_by_uses_alone = [&] {  // 16 others push it out of the first row
    for (int i = 0; i < 16; ++i) duel.used(followed(once++), 0, ++now);
    duel.used(followed(1), 1, ++now);
  };
  duel.used(followed(1), 1, ++now);
  hit_by_uses_alone();
  hit_by_uses_alone();
  CHECK_EQ(duel.score(0), 0.0);
  CHECK_EQ(duel.score(1), 2.0);
  CHECK_EQ(duel.decide(), 0u);
  CHECK(duel.score(1) < 2.0);
  hit_by_uses_alone();
  CHECK_EQ(duel.decide(), 1u);
}

TEST(scores_are_of_the_sample_that_there_is) {
  Duel duel(kRows);
  duel.resize(64);
  duel.fill(true);
  uint64_t now = 0;
  duel.used(followed(1), 1, ++now);
  for (uint64_t page = 100; page < 116; ++page) duel.used(followed(page), 0, ++now);
  duel.used(followed(1), 1, ++now);
  CHECK_EQ(duel.score(1), 1.0);
  duel.resize(512 * 64);  // a 64th in place of a 4th
  CHECK_EQ(duel.score(1), 1.0 / 16);
  CHECK(!duel.follows(uint64_t{4} << 32));
  duel.resize(64);
  CHECK_EQ(duel.score(1), 1.0);
  CHECK(duel.follows(uint64_t{4} << 32));
}

TEST(rows_evict_nothing_while_the_cache_has_room) {
  Duel duel(kRows);
  duel.resize(8);
  for (uint64_t page = 0; page < 100; ++page) duel.used(followed(page), 0, page + 1);
  CHECK_EQ(duel.followed(), 100u);
  duel.fill(true);
  duel.used(followed(100), 0, 200);
  CHECK(duel.followed() <= Duel::kRows * 2);
}

TEST(sample_of_a_larger_cache_is_a_part_of_the_smaller_ones) {
  auto random = check::random("sample_of_a_larger_cache_is_a_part_of_the_smaller_ones");
  Duel duel(kRows);
  std::vector<uint64_t> pages(10000);
  uint64_t now = 0;
  for (uint64_t& page : pages) page = random();
  for (const size_t size : {100u, 5000u, 100000u, 1000000u}) {
    duel.resize(size);
    for (const uint64_t page : pages)
      if (duel.follows(page)) duel.used(page, 0, ++now);
    size_t expected = 0;
    for (const uint64_t page : pages) expected += duel.follows(page) ? 1 : 0;
    CHECK_EQ(duel.followed(), expected);
  }
}

// --- the policy

// A cache of so many pages, with the policy's ids used again as the daemon uses them.
class Cache {
 public:
  explicit Cache(size_t pages) : pages_(pages), policy_(pages) {
    for (PageId id = static_cast<PageId>(pages); id-- > 0;) free_.push_back(id);
  }

  // True: it was there.
  bool use(uint64_t page, uint64_t parent = kNone) {
    if (const auto found = ids_.find(page); found != ids_.end()) {
      policy_.touched(found->second);
      return true;
    }
    if (free_.empty()) evict_one(parent);
    const PageId id = free_.back();
    free_.pop_back();
    policy_.announced(id, page);
    const auto above = ids_.find(parent);
    policy_.inserted(id, above == ids_.end() ? kNoPage : above->second);
    ids_[page] = id;
    return false;
  }
  bool has(uint64_t page) const { return ids_.contains(page); }
  AdaptivePolicy& policy() { return policy_; }
  PageId id(uint64_t page) const { return ids_.at(page); }

  static constexpr uint64_t kNone = UINT64_MAX;

 private:
  void evict_one(uint64_t parent) {
    const PageId kept = parent == kNone || !has(parent) ? kNoPage : ids_.at(parent);
    PageId victim = kNoPage;
    CHECK_EQ(
        policy_.victims(std::span(&victim, 1), ExemptIf([&](PageId id) { return id == kept; })),
        1u);
    policy_.removed(victim);
    std::erase_if(ids_, [victim](const auto& each) { return each.second == victim; });
    free_.push_back(victim);
  }

  size_t pages_;
  AdaptivePolicy policy_;
  std::map<uint64_t, PageId> ids_;
  std::vector<PageId> free_;
};

TEST(pages_leave_as_by_lru_before_anything_is_known) {
  AdaptivePolicy policy(8);
  for (PageId page = 0; page < 5; ++page) policy.inserted(page, kNoPage);
  policy.touched(0);
  CHECK(take(policy, 9) == (Pages{1, 2, 3, 4, 0}));
}

// Of 100 pages 40 come back more seldom than 100 others come, and LRU has none of them then.
TEST(pages_that_come_back_outlive_those_that_do_not_once_it_is_seen) {
  Cache cache(100);
  uint64_t once = 1000, hits = 0;
  for (int round = 0; round < 400; ++round) {
    for (uint64_t page = 0; page < 40; ++page) hits += cache.use(page) && round >= 300 ? 1 : 0;
    for (int i = 0; i < 150; ++i) cache.use(once++);
  }
  CHECK(hits > 100 * 40 * 9 / 10);
}

// What is popular changes for good: what was is given up.
TEST(pages_that_were_popular_give_way_to_those_that_are) {
  Cache cache(100);
  uint64_t once = 100000, hits = 0;
  for (int round = 0; round < 600; ++round) {
    const uint64_t first = round < 300 ? 0 : 1000;
    for (uint64_t page = first; page < first + 40; ++page)
      hits += cache.use(page) && round >= 500 ? 1 : 0;
    for (int i = 0; i < 150; ++i) cache.use(once++);
  }
  CHECK(hits > 100 * 40 * 9 / 10);
}

// A cache of 100 pages that holds what is used again for longer by now, for it pays.
class Taught {
 public:
  Taught() { cache_.policy().share_clock(clock_); }

  void teach() {
    for (int round = 0; round < 200; ++round) {
      for (uint64_t page = 0; page < 40; ++page) use(page);
      for (int i = 0; i < 150; ++i) use(once_++);
    }
  }
  // True: it was there. Before it as many uses of another policy's pages as it has.
  bool use(uint64_t page) {
    for (int i = 0; i < others_; ++i) other_->touched(0);
    return cache_.use(page);
  }
  // Until it leaves, of what comes once.
  void use_others_until_gone(uint64_t page) {
    while (cache_.has(page)) use(once_++);
  }
  void share_clock_with_busy_policy() {
    other_ = make_policy("lru", 1);
    other_->share_clock(clock_);
    other_->inserted(0, kNoPage);
    others_ = 50;
  }
  Cache& cache() { return cache_; }
  uint64_t& clock() { return clock_; }

 private:
  uint64_t clock_ = 0, once_ = 1000;
  Cache cache_{100};
  std::unique_ptr<EvictionPolicy> other_;
  int others_ = 0;
};

constexpr uint64_t kFirst = 500, kSecond = 501;

// The end of a prompt of which the next part is yet to come.
TEST(page_that_was_used_a_moment_ago_outlives_what_is_worth_more) {
  Taught taught;
  taught.teach();
  taught.use(kFirst);
  for (uint64_t page = 0; page < 10; ++page) taught.use(page);
  for (uint64_t once = 0; once < 20; ++once) taught.use(900 + once);
  CHECK(taught.cache().has(kFirst));
  for (uint64_t once = 0; once < 80; ++once) taught.use(2'000'000 + once);
  CHECK(!taught.cache().has(kFirst));
  for (uint64_t page = 0; page < 40; ++page) CHECK(taught.cache().has(page));
}

TEST(page_used_again_later_outlives_one_that_is_not) {
  Taught taught;
  taught.teach();
  for (int i = 0; i < 3; ++i) {
    taught.use(kFirst);
    for (uint64_t page = 0; page < 10; ++page) taught.use(page);
  }
  taught.use(kSecond);
  taught.use_others_until_gone(kSecond);
  CHECK(taught.cache().has(kFirst));
}

// The memory is another page size's now, say. A sample of what there was has room for all that
// comes.
TEST(cache_that_became_small_learns_what_pays_in_a_small_one) {
  Taught taught;
  EvictionPolicy& policy = taught.cache().policy();
  constexpr PageId kPast = 200, kPastEnd = 5200;
  for (PageId page = kPast; page < kPastEnd; ++page) {
    policy.announced(page, 1'000'000 + page);
    policy.inserted(page, kNoPage);
  }
  for (PageId page = kPast; page < kPastEnd; ++page) policy.removed(page);
  for (int i = 0; i < 3; ++i) taught.teach();
  int found = 0;
  for (uint64_t page = 0; page < 40; ++page) found += taught.use(page) ? 1 : 0;
  CHECK(found >= 36);
}

TEST(uses_close_to_each_other_are_one) {
  for (const bool busy : {false, true}) {
    Taught taught;
    if (busy) taught.share_clock_with_busy_policy();
    taught.teach();
    for (int i = 0; i < 3; ++i) taught.use(kFirst);
    taught.use(kSecond);
    taught.use_others_until_gone(kSecond);
    CHECK(!taught.cache().has(kFirst));
  }
}

TEST(page_that_left_comes_back_with_its_uses) {
  Taught taught;
  taught.teach();
  taught.use(kFirst);
  taught.use_others_until_gone(kFirst);
  taught.use(kFirst);
  taught.use(kSecond);
  taught.use_others_until_gone(kSecond);
  CHECK(taught.cache().has(kFirst));
}

// Page sizes give each other slabs by this. A hold time is a part of another: where what comes once
// is to go at once, all that waits would look old beside the pages of who follows LRU.
TEST(coldest_pages_are_as_hot_where_as_much_comes_whatever_the_policies_follow) {
  Taught taught;
  Cache other(100);
  other.policy().share_clock(taught.clock());
  uint64_t once = 1000;
  for (int round = 0; round < 200; ++round)
    for (uint64_t i = 0; i < 190; ++i, ++once) {
      taught.use(i < 40 ? i : once);
      other.use(once);
    }
  const auto age = [](Cache& cache, uint64_t used_now) {
    cache.use(used_now);
    const Pages coldest = take(cache.policy(), 1);
    return static_cast<double>(cache.policy().heat(cache.id(used_now)) -
                               cache.policy().heat(coldest[0]));
  };
  const double of_uses = age(taught.cache(), 0), of_lru = age(other, once - 1);
  CHECK(of_uses < of_lru * 2);
  CHECK(of_lru < of_uses * 2);
}

TEST(policies_that_nothing_is_announced_to_go_by_lru) {
  AdaptivePolicy policy(100);
  const auto lru = make_policy("lru", 100);
  auto random = check::random("policies_that_nothing_is_announced_to_go_by_lru");
  for (EvictionPolicy* each : {static_cast<EvictionPolicy*>(&policy), lru.get()})
    for (PageId page = 0; page < 100; ++page)
      each->inserted(page, page % 2 == 0 ? kNoPage : page - 1);
  for (int i = 0; i < 5000; ++i) {
    const auto page = static_cast<PageId>(random() % 90);
    policy.touched(page);
    lru->touched(page);
  }
  CHECK_EQ(take(policy, 100), take(*lru, 100));
}

// A tree of prompts: a few beginnings, of which one in two is continued.
std::vector<std::vector<PageId>> prompts(std::mt19937_64& random, size_t count) {
  std::vector<std::vector<PageId>> made;
  PageId next = 0;
  for (size_t i = 0; i < count; ++i) {
    std::vector<PageId> prompt;
    if (random() % 2 == 0 && made.size() > 40) {
      prompt = made[made.size() - 1 - random() % 40];
      prompt.pop_back();  // its last page was not whole
    }
    const size_t more = 3 + random() % 8;
    for (size_t page = 0; page < more; ++page) prompt.push_back(next++);
    made.push_back(std::move(prompt));
  }
  return made;
}

uint64_t hits_of(const std::string& policy, uint64_t pages,
                 const std::vector<std::vector<PageId>>& prompts) {
  Replay replay({policy, pages, 0, true}, prompts.back().back() + 1);
  uint64_t hits = 0;
  for (const auto& prompt : prompts) hits += replay.request(prompt).dram;
  return hits;
}

TEST(conversations_hit_more_than_by_lru_in_a_small_cache_and_as_much_in_a_large_one) {
  auto random = check::random("conversations_hit_more_than_by_lru");
  const auto asked = prompts(random, 6000);
  const uint64_t lru = hits_of("lru", 250, asked), adaptive = hits_of("adaptive", 250, asked);
  CHECK(adaptive > lru + lru / 40);
  const uint64_t most = hits_of("lru", 5000, asked);
  CHECK(hits_of("adaptive", 5000, asked) >= most - most / 100);
}

// A cache that held what it has for ever would hit nothing: more than it has room for, in turn.
TEST(pages_in_turn_hit_no_less_than_by_lru) {
  std::vector<std::vector<PageId>> asked;
  for (int round = 0; round < 30; ++round)
    for (PageId page = 0; page < 300; ++page) asked.push_back({page + (round / 10) * 300u});
  for (const uint64_t pages : {100u, 200u, 310u, 600u})
    CHECK(hits_of("adaptive", pages, asked) >= hits_of("lru", pages, asked));
}

}  // namespace
}  // namespace kvw
