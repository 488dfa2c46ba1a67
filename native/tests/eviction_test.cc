// The eviction policies, against a model that searches all pages for the coldest leaf each time.
#include "tests/check.h"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "eviction/policy.h"
#include "tests/eviction_kit.h"

namespace kvw {
namespace {

// Inserts pages [first, first + count) as a chain below `parent`.
void insert_chain(EvictionPolicy& policy, PageId first, size_t count, PageId parent = kNoPage) {
  for (size_t i = 0; i < count; ++i) {
    policy.inserted(static_cast<PageId>(first + i), parent);
    parent = static_cast<PageId>(first + i);
  }
}

// The rule, without any speed: of the pages that have no children left, the coldest.
class Model {
 public:
  void inserted(PageId page, PageId parent) {
    used_[page] = ++clock_;
    adopt(parent, page);
  }
  void adopt(PageId parent, PageId child) {
    if (parent != child && resident(parent) && resident(child)) parent_[child] = parent;
  }
  void touched(PageId page) {
    released_.erase(page);
    if (resident(page)) used_[page] = ++clock_;
  }
  void released(PageId page) {
    if (resident(page)) released_.insert(page);
  }
  bool is_released(PageId page) const { return released_.contains(page); }
  void removed(PageId page) {
    used_.erase(page);
    released_.erase(page);
    parent_.erase(page);
    std::erase_if(parent_, [page](const auto& link) { return link.second == page; });
  }
  bool resident(PageId page) const { return used_.contains(page); }
  PageId parent(PageId page) const {
    const auto found = parent_.find(page);
    return found == parent_.end() ? kNoPage : found->second;
  }
  bool is_ancestor(PageId ancestor, PageId page) const {
    for (; page != kNoPage; page = parent(page))
      if (page == ancestor) return true;
    return false;
  }
  size_t size() const { return used_.size(); }
  uint64_t heat(PageId page) const {
    if (!resident(page)) return 0;
    return is_released(page) ? 1 : 1 + used_.at(page);
  }

  // Pages that may go next when those of `gone` have gone.
  Pages candidates(const std::set<PageId>& gone, const std::set<PageId>& kept) const {
    std::set<PageId> blocked = kept;
    for (const auto& [child, parent] : parent_)
      if (!gone.contains(child)) blocked.insert(parent);
    Pages result;
    for (const auto& [page, used] : used_)
      if (!gone.contains(page) && !blocked.contains(page)) result.push_back(page);
    return result;
  }

  Pages victims(size_t count) const {
    Pages result;
    std::set<PageId> gone;
    while (result.size() < count) {
      const Pages next = candidates(gone, {});
      if (next.empty()) break;
      result.push_back(*std::min_element(next.begin(), next.end(), [this](PageId a, PageId b) {
        return used_.at(a) < used_.at(b);
      }));
      gone.insert(result.back());
    }
    return result;
  }

 private:
  std::map<PageId, uint64_t> used_;
  std::map<PageId, PageId> parent_;
  std::set<PageId> released_;
  uint64_t clock_ = 0;
};

// A policy and its model, driven together.
struct Pair {
  static constexpr PageId kIds = 40;

  std::unique_ptr<EvictionPolicy> policy;  // grows past its hint
  Model model;
  std::mt19937_64 random;

  explicit Pair(const char* name, const char* of = "lru")
      : policy(make_policy(of, 4)), random(check::random(name)) {}

  PageId any() { return static_cast<PageId>(random() % kIds); }

  void insert() {
    const PageId page = any();
    if (model.resident(page)) return;
    const PageId parent = random() % 4 == 0 ? kNoPage : any();
    policy->inserted(page, parent);
    model.inserted(page, parent);
  }
  void touch() {
    const PageId page = any();
    policy->touched(page);
    model.touched(page);
  }
  void release() {
    const PageId page = any();
    policy->released(page);
    model.released(page);
  }
  void remove(PageId page) {
    policy->removed(page);
    model.removed(page);
  }
  void adopt() {
    const PageId parent = any();
    const PageId child = any();
    if (model.is_ancestor(child, parent)) return;  // keys are hashes: chains have no cycles
    policy->adopt(parent, child);
    model.adopt(parent, child);
  }
  void compare() {
    CHECK_EQ(policy->size(), model.size());
    const PageId a = any();
    const PageId b = any();
    CHECK_EQ(policy->heat(a) < policy->heat(b), model.heat(a) < model.heat(b));
  }
};

}  // namespace

TEST(lru_yields_the_coldest_page_first_when_pages_are_unrelated) {
  const auto policy = make_policy("lru", 8);
  for (PageId page = 0; page < 4; ++page) policy->inserted(page, kNoPage);
  policy->touched(0);
  CHECK_EQ(take(*policy, 3), (Pages{1, 2, 3}));
}

TEST(lru_yields_descendants_before_ancestors_when_the_root_is_coldest) {
  const auto policy = make_policy("lru", 8);
  insert_chain(*policy, 0, 4);
  CHECK_EQ(take(*policy, 9), (Pages{3, 2, 1, 0}));
}

TEST(lru_spares_a_cold_root_while_a_descendant_is_hot) {
  const auto policy = make_policy("lru", 8);
  insert_chain(*policy, 0, 2);  // shared root 0 and a continuation
  policy->inserted(2, 0);       // another continuation of it
  policy->inserted(3, kNoPage);
  policy->touched(1);
  CHECK_EQ(take(*policy, 9), (Pages{2, 3, 1, 0}));
}

TEST(lru_yields_the_same_victims_again_when_they_were_not_removed) {
  const auto policy = make_policy("lru", 8);
  insert_chain(*policy, 0, 3);
  policy->inserted(3, kNoPage);
  CHECK_EQ(take(*policy, 2), (Pages{2, 1}));
  CHECK_EQ(take(*policy, 9), (Pages{2, 1, 0, 3}));
  CHECK_EQ(take(*policy, 9), (Pages{2, 1, 0, 3}));
}

TEST(lru_skips_kept_pages_and_their_ancestors) {
  const auto policy = make_policy("lru", 8);
  insert_chain(*policy, 0, 4);
  policy->inserted(4, 1);
  ExemptSet keep;
  keep.pages = {2};
  CHECK_EQ(take(*policy, 9, keep), (Pages{3, 4}));
  keep.pages = {0};
  CHECK_EQ(take(*policy, 9, keep), (Pages{3, 2, 4, 1}));
}

TEST(lru_yields_a_page_again_when_it_is_no_longer_kept) {
  const auto policy = make_policy("lru", 8);
  for (PageId page = 0; page < 3; ++page) policy->inserted(page, kNoPage);
  ExemptSet keep;
  keep.pages = {0};
  CHECK_EQ(take(*policy, 1, keep), (Pages{1}));
  CHECK_EQ(take(*policy, 1), (Pages{0}));
}

TEST(lru_makes_children_roots_when_their_parent_leaves) {
  const auto policy = make_policy("lru", 8);
  policy->inserted(0, kNoPage);
  policy->inserted(1, 0);
  policy->inserted(2, 0);
  policy->removed(0);
  policy->inserted(0, kNoPage);  // the id's next life has nothing to do with them
  policy->inserted(3, 0);
  policy->removed(1);
  policy->touched(3);
  CHECK_EQ(take(*policy, 9), (Pages{2, 3, 0}));
}

TEST(lru_links_a_child_that_came_before_its_parent) {
  const auto policy = make_policy("lru", 8);
  policy->inserted(1, kNoPage);
  policy->inserted(0, kNoPage);
  policy->inserted(2, kNoPage);
  policy->adopt(1, 2);
  policy->adopt(0, 1);
  CHECK_EQ(take(*policy, 9), (Pages{2, 1, 0}));
}

TEST(lru_frees_a_parent_when_its_only_child_is_adopted_by_another) {
  const auto policy = make_policy("lru", 8);
  insert_chain(*policy, 0, 2);
  policy->inserted(2, kNoPage);
  CHECK_EQ(take(*policy, 1), (Pages{1}));  // met page 0 and put it by until its child leaves
  policy->adopt(2, 1);
  CHECK_EQ(take(*policy, 9), (Pages{0, 1, 2}));
}

TEST(lru_goes_by_their_last_use_where_pages_lost_their_children) {
  const auto policy = make_policy("lru", 8);
  for (PageId page = 0; page < 8; ++page) policy->inserted(page, kNoPage);
  for (PageId page = 1; page < 8; ++page) policy->inserted(page + 10, page);
  // In this order what takes the place of page 5 in the heap belongs above it.
  for (const PageId page : {4u, 2u, 1u, 5u, 7u, 6u, 3u}) policy->removed(page + 10);
  policy->touched(5);
  CHECK_EQ(take(*policy, 9), (Pages{0, 1, 2, 3, 4, 6, 7, 5}));
}

TEST(lru_ignores_pages_that_are_not_resident) {
  const auto policy = make_policy("lru", 2);
  policy->touched(7);
  policy->removed(7);
  policy->adopt(7, 8);
  policy->touched(kNoPage);
  CHECK_EQ(policy->size(), 0);
  CHECK_EQ(policy->heat(7), 0);
  CHECK_EQ(take(*policy, 3), (Pages{}));
  CHECK_THROWS(policy->inserted(kNoPage, kNoPage), "page_id");
}

TEST(lru_touches_a_page_that_is_inserted_again) {
  const auto policy = make_policy("lru", 4);
  policy->inserted(0, kNoPage);
  policy->inserted(1, kNoPage);
  policy->inserted(0, 1);
  CHECK_EQ(policy->size(), 2);
  CHECK_EQ(take(*policy, 9), (Pages{0, 1}));
}

TEST(lru_equals_the_model_when_victims_are_removed_in_order) {
  Pair pair("lru_equals_the_model");
  for (uint64_t round = 0; round < check::rounds(20000); ++round) {
    switch (pair.random() % 4) {
      case 0:
      case 1:
        pair.insert();
        break;
      case 2:
        pair.touch();
        break;
      default: {
        const size_t count = pair.random() % 6;
        const Pages got = take(*pair.policy, count);
        CHECK_EQ(got, pair.model.victims(count));
        const size_t leaving = got.empty() ? 0 : pair.random() % (got.size() + 1);
        for (size_t i = 0; i < leaving; ++i) pair.remove(got[i]);
      }
    }
    pair.compare();
  }
}

// Every victim may go when it is its turn, none is missing, whatever was removed, adopted or kept.
TEST(lru_finds_all_that_may_leave_and_nothing_else) {
  Pair pair("lru_finds_all");
  ExemptSet keep;
  for (uint64_t round = 0; round < check::rounds(20000); ++round) {
    switch (pair.random() % 8) {
      case 0:
      case 1:
      case 2:
        pair.insert();
        break;
      case 3:
        pair.touch();
        break;
      case 4:
        pair.remove(pair.any());
        break;
      case 5:
        pair.adopt();
        break;
      case 6:
        if (!keep.pages.erase(pair.any())) keep.pages.insert(pair.any());
        break;
      default: {
        const size_t count = pair.random() % 8;
        std::set<PageId> gone;
        for (const PageId page : take(*pair.policy, count, keep)) {
          const Pages may_go = pair.model.candidates(gone, keep.pages);
          CHECK(std::find(may_go.begin(), may_go.end(), page) != may_go.end());
          gone.insert(page);
        }
        if (gone.size() < count) CHECK(pair.model.candidates(gone, keep.pages).empty());
        for (const PageId page : gone)
          if (pair.random() % 2) pair.remove(page);
      }
    }
    pair.compare();
  }
}

TEST(released_pages_go_first_and_the_end_of_a_chain_before_the_rest_of_it) {
  for (const char* name : {"lru", "adaptive"}) {
    const auto policy = make_policy(name, 8);
    policy->inserted(9, kNoPage);  // older than what is released
    insert_chain(*policy, 0, 3);
    insert_chain(*policy, 3, 2);
    for (const PageId page : {2u, 1u, 0u}) policy->released(page);
    CHECK_EQ(policy->heat(1), 1);
    CHECK_EQ(take(*policy, 4), (Pages{2, 1, 0, 9}));
    CHECK_EQ(take(*policy, 4), (Pages{2, 1, 0, 9}));
  }
}

TEST(released_page_is_as_others_when_it_is_used_again) {
  for (const char* name : {"lru", "adaptive"}) {
    const auto policy = make_policy(name, 8);
    for (PageId page = 0; page < 4; ++page) policy->inserted(page, kNoPage);
    for (const PageId page : {3u, 2u}) policy->released(page);
    policy->touched(3);
    CHECK_EQ(take(*policy, 9), (Pages{2, 0, 1, 3}));
    CHECK(policy->heat(3) > policy->heat(1));
    policy->released(7);  // is not there
    CHECK_EQ(policy->size(), 4);
  }
}

TEST(released_page_with_children_waits_for_the_last_of_them) {
  const auto policy = make_policy("lru", 8);
  insert_chain(*policy, 0, 2);
  policy->inserted(2, kNoPage);
  policy->released(0);
  CHECK_EQ(take(*policy, 1), (Pages{1}));
  policy->touched(1);
  CHECK_EQ(take(*policy, 9), (Pages{2, 1, 0}));
  policy->inserted(3, kNoPage);
  policy->removed(1);
  CHECK_EQ(take(*policy, 9), (Pages{0, 2, 3}));
}

TEST(released_page_that_is_kept_goes_when_it_is_kept_no_more) {
  const auto policy = make_policy("lru", 8);
  for (PageId page = 0; page < 3; ++page) policy->inserted(page, kNoPage);
  ExemptSet keep;
  keep.pages = {2};
  policy->released(2);
  CHECK_EQ(take(*policy, 1, keep), (Pages{0}));
  CHECK_EQ(take(*policy, 1), (Pages{2}));
}

// Whatever comes, goes, and is used: none that was not released goes while one may that was.
TEST(released_pages_go_before_all_others_in_every_order_of_events) {
  for (const char* name : {"lru", "adaptive"}) {
    Pair pair("released_pages_go_first", name);
    for (uint64_t round = 0; round < check::rounds(20000); ++round) {
      switch (pair.random() % 8) {
        case 0:
        case 1:
        case 2:
          pair.insert();
          break;
        case 3:
          pair.touch();
          break;
        case 4:
          pair.remove(pair.any());
          break;
        case 5:
          pair.adopt();
          break;
        case 6:
          pair.release();
          break;
        default: {
          std::set<PageId> gone;
          for (const PageId page : take(*pair.policy, pair.random() % 8)) {
            const Pages may_go = pair.model.candidates(gone, {});
            CHECK(std::ranges::count(may_go, page) == 1);
            const auto released = [&](PageId other) { return pair.model.is_released(other); };
            CHECK(released(page) || std::ranges::none_of(may_go, released));
            gone.insert(page);
          }
          for (const PageId page : gone)
            if (pair.random() % 2) pair.remove(page);
        }
      }
      CHECK_EQ(pair.policy->size(), pair.model.size());
      const PageId page = pair.any();
      CHECK_EQ(pair.policy->heat(page) == 1, pair.model.is_released(page));
    }
  }
}

// A search that started from the cold end each time would ask or pass 50 million pages here.
TEST(lru_walks_a_long_chain_once_when_asked_for_one_victim_at_a_time) {
  constexpr size_t kPages = 65536;
  const auto policy = make_policy("lru", kPages);
  insert_chain(*policy, 0, kPages);
  ExemptSet keep;
  for (size_t left = kPages; left > 0; --left) {
    const Pages victims = take(*policy, 1, keep);
    CHECK_EQ(victims, (Pages{static_cast<PageId>(left - 1)}));
    policy->removed(victims[0]);
  }
  CHECK_EQ(keep.asked, kPages);
  CHECK_EQ(policy->size(), 0);
}

TEST(lru_asks_about_kept_pages_a_bounded_number_of_times) {
  constexpr PageId kKept = 10000;
  constexpr PageId kOthers = 1000;
  const auto policy = make_policy("lru", kKept + kOthers);
  ExemptSet keep;
  for (PageId page = 0; page < kKept + kOthers; ++page) {
    policy->inserted(page, kNoPage);
    if (page < kKept) keep.pages.insert(page);
  }
  for (PageId i = 0; i < kOthers; ++i) {
    const Pages victims = take(*policy, 1, keep);
    CHECK_EQ(victims, (Pages{kKept + i}));
    policy->removed(victims[0]);
  }
  CHECK(keep.asked <= kKept + 2 * kOthers);
}

// Incident: where nearly all was pinned, each page of a message asked about all that was.
TEST(lru_asks_about_a_bounded_number_of_pages_where_all_are_kept_and_finds_the_one_that_is_not) {
  constexpr PageId kKept = 10000;
  constexpr size_t kSearches = 100, kLooks = 1024;
  const auto policy = make_policy("lru", kKept);
  ExemptSet keep;
  for (PageId page = 0; page < kKept; ++page) {
    policy->inserted(page, kNoPage);
    keep.pages.insert(page);
  }
  for (size_t i = 0; i < kSearches; ++i) CHECK(take(*policy, 1, keep).empty());
  CHECK(keep.asked <= kKept + kSearches * (kLooks + 1));
  keep.pages.erase(kKept / 2);
  Pages found;
  for (size_t i = 0; i <= kKept / kLooks && found.empty(); ++i) found = take(*policy, 1, keep);
  CHECK_EQ(found, (Pages{kKept / 2}));
}

// Any order of calls: each search finds only resident pages, none twice, none before a resident
// descendant, none kept; and it finds all that may leave.
void keeps_its_promises(EvictionPolicy& policy, std::mt19937_64& random) {
  constexpr PageId kIds = 60;
  const auto any = [&random] { return static_cast<PageId>(random() % kIds); };
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
        ExemptSet keep;
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

TEST(promises_of_every_policy_hold_in_any_order_of_calls) {
  auto random = check::random("promises_of_every_policy_hold_in_any_order_of_calls");
  for (const std::string& name : policy_names()) {
    const auto policy = make_policy(name, 4);
    keeps_its_promises(*policy, random);
  }
}

TEST(policy_lists_the_known_names_when_the_name_is_unknown) {
  CHECK_THROWS(make_policy("lfu", 1), "eviction_policy");
  try {
    make_policy("lfu", 1);
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("lru") != std::string::npos);
  }
  for (const std::string& name : policy_names()) CHECK(make_policy(name, 1) != nullptr);
}

}  // namespace kvw
