// The catalog's links: children find their parent whatever comes first, and a page leaves without
// a look at its siblings.
#include "warehouse/catalog.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "tests/check.h"
#include "tests/index_table.h"

namespace kvw {
namespace {

constexpr Key kParent{7, 7};

struct Table : IndexTable {
  explicit Table(uint64_t entries)
      : IndexTable(entries), catalog(std::make_unique<Catalog>(index)) {}
  PageId add(const Key& key, const Key& parent, uint32_t position) {
    EntryView view;
    view.page = kNoPage;
    view.key = key;
    view.flags = kEntryUsed | kEntryDram;
    return catalog->insert(view, parent, position);
  }
  void remove(const Key& key) { catalog->remove(*catalog->find(key)); }
  std::set<PageId> orphans(size_t limit) {
    const auto pages = catalog->orphans_to_drop(limit, [](const Key&) { return false; });
    return {pages.begin(), pages.end()};
  }

  std::unique_ptr<Catalog> catalog;
};

Key key_of(uint64_t number) { return {number * 0x9e3779b97f4a7c15ull, number}; }

TEST(parent_of_a_hundred_thousand_children_comes_and_goes_and_they_leave_one_by_one) {
  constexpr uint64_t kChildren = 100'000;
  Table table(1 << 19);
  table.add(kParent, {}, 0);
  for (uint64_t child = 1; child <= kChildren; ++child) table.add(key_of(child), kParent, 1);
  table.remove(kParent);
  CHECK_EQ(table.catalog->orphans(), kChildren);
  // A look at each child each time would take minutes.
  for (int again = 0; again < 10'000; ++again) {
    table.add(kParent, {}, 0);
    CHECK_EQ(table.catalog->orphans(), 0);
    table.remove(kParent);
  }
  CHECK_EQ(table.catalog->orphans(), kChildren);
  const PageId parent = table.add(kParent, {}, 0);
  const auto any = [](const PageNode&) { return true; };
  for (int again = 0; again < 1'000'000; ++again)
    CHECK_EQ(table.catalog->count_children(parent, any, 1), 1);
  CHECK_EQ(table.catalog->count_children(parent, any), kChildren);
  table.remove(kParent);
  // Far from the place where those were listed that leave first, too.
  for (uint64_t child = 1; child <= kChildren; child += 2) table.remove(key_of(child));
  for (uint64_t child = kChildren; child >= 2; child -= 2) table.remove(key_of(child));
  CHECK_EQ(table.catalog->orphans(), 0);
  CHECK_EQ(table.catalog->pages(), 0);
}

TEST(orphans_have_their_turn_whatever_cannot_be_dropped_before_them) {
  Table table(1024);
  for (uint64_t child = 1; child <= 30; ++child)
    table.add(key_of(child), key_of(1000 + child % 3), 1);
  std::set<PageId> seen;
  for (int call = 0; call < 3; ++call) seen.merge(table.orphans(10));
  CHECK_EQ(seen.size(), 30);
}

// Parents, children and grandchildren in any order, against a plain count.
TEST(links_hold_over_any_order_of_coming_and_going) {
  auto random = check::random("catalog links");
  Table table(1024);
  constexpr uint64_t kKeys = 60;
  const auto parent_of = [](uint64_t number) { return number / 8; };
  std::set<uint64_t> there;
  for (uint64_t round = 0; round < check::rounds(20'000); ++round) {
    const uint64_t number = 1 + random() % kKeys;
    if (there.erase(number) != 0)
      table.remove(key_of(number));
    else {
      table.add(key_of(number), key_of(parent_of(number)), parent_of(number) == 0 ? 0 : 1);
      there.insert(number);
    }
    std::set<PageId> orphans;
    for (const uint64_t at : there) {
      const auto view = table.catalog->find(key_of(at));
      CHECK(view.has_value());
      const auto parent = table.catalog->find(key_of(parent_of(at)));
      CHECK_EQ(table.catalog->parent(view->page), parent ? parent->page : kNoPage);
      if (parent_of(at) == 0) continue;
      CHECK_EQ(table.catalog->is_orphan(view->page), !parent);
      if (!parent) orphans.insert(view->page);
    }
    CHECK_EQ(table.catalog->orphans(), orphans.size());
    if (random() % 4 == 0) CHECK(table.orphans(1 + random() % 5).size() <= orphans.size());
    if (random() % 16 == 0) CHECK(table.orphans(kKeys) == orphans);
  }
}

TEST(position_that_is_claimed_is_nobody_elses_until_it_is_filled_or_given_up) {
  Table table(128);
  Catalog& catalog = *table.catalog;
  std::set<PageId> claimed;
  const auto key = [](uint64_t number) { return Key{5, 128 * number + 64}; };  // of the same homes
  for (uint64_t number = 0; number < kIndexPlaces; ++number)
    claimed.insert(catalog.claim(key(number)));
  CHECK_EQ(claimed.size(), kIndexPlaces);
  CHECK(!claimed.contains(kNoPage));
  CHECK_EQ(catalog.claim(key(99)), kNoPage);
  for (const PageId page : {7, 70}) {  // of either window
    catalog.unclaim(page);
    CHECK_EQ(catalog.claim(key(99)), page);
    EntryView view;
    view.page = page;
    view.key = key(99);
    view.flags = kEntryDram;
    catalog.insert(view, {}, 0);
    CHECK_EQ(catalog.page_of(key(99)), page);
    CHECK_EQ(catalog.claimed(), kIndexPlaces - 1);
    table.remove(key(99));
    CHECK_EQ(catalog.claim(key(99)), page);
  }
  // Half of the positions are capacity, claimed ones too.
  for (uint64_t number = 0; number < kIndexPlaces; ++number)
    CHECK(catalog.claim({30, 128 * number + 100}) != kNoPage);
  CHECK_EQ(catalog.claim({25, 50}), kNoPage);
  catalog.unclaim(7);
  CHECK(catalog.claim({25, 50}) != kNoPage);
}

TEST(those_above_a_page_and_no_others_are_taken_out) {
  auto random = check::random("those above");
  Table table(1024);
  constexpr uint64_t kKeys = 100;
  std::vector<uint64_t> above(kKeys + 1);  // the parent's number
  std::vector<uint32_t> position(kKeys + 1);
  for (uint64_t number = 1; number <= kKeys; ++number) {
    above[number] = random() % std::min<uint64_t>(number, 60);  // 0: none
    position[number] = above[number] == 0 ? 0 : position[above[number]] + 1;
    table.add(key_of(number), key_of(above[number]), position[number]);
  }
  // One that left: there is nothing above those below it.
  table.remove(key_of(3));
  above[3] = 0;
  for (uint64_t round = 0; round < check::rounds(2'000); ++round) {
    const auto some = [&] { return 1 + random() % kKeys; };
    const uint64_t page = some();
    if (page == 3) continue;
    std::vector<uint64_t> others;
    for (int at = 0; at < 16; ++at)
      if (const uint64_t other = some(); other != 3) others.push_back(other);
    std::ranges::sort(others, std::greater{}, [&](uint64_t at) { return position[at]; });
    std::vector<PageId> pages, expected;
    for (size_t at = 0; at < others.size(); ++at) {
      uint64_t up = page;
      while (up != 0 && up != others[at]) up = above[up];
      pages.push_back(table.catalog->page_of(key_of(others[at])));
      if (up == 0 || at < 2) expected.push_back(pages.back());
    }
    table.catalog->remove_those_above(table.catalog->page_of(key_of(page)), pages, 2);
    CHECK(pages == expected);
  }
}

// What clients say of parents and positions may be anything: each page that says another position
// waits for a parent that may never come, and a ring would need one that does.
TEST(page_is_the_parent_of_those_at_the_next_position_alone) {
  auto random = check::random("catalog positions");
  Table table(1024);
  constexpr uint64_t kKeys = 12;
  struct Said {
    uint64_t parent;
    uint32_t position;
  };
  std::map<uint64_t, Said> there;
  for (uint64_t round = 0; round < check::rounds(20'000); ++round) {
    const uint64_t number = random() % kKeys;
    if (there.erase(number) != 0)
      table.remove(key_of(number));
    else {
      const Said said{random() % kKeys, static_cast<uint32_t>(random() % 3)};
      table.add(key_of(number), key_of(said.parent), said.position);
      there[number] = said;
    }
    const auto page_of = [&](uint64_t at) { return table.catalog->page_of(key_of(at)); };
    std::set<PageId> orphans;
    for (const auto& [at, said] : there) {
      if (said.position == 0) continue;
      const auto parent = there.find(said.parent);
      const bool fits = parent != there.end() && parent->second.position + 1 == said.position;
      // One that left and came again at another position and back finds those that wait no longer.
      const bool orphan = table.catalog->is_orphan(page_of(at));
      if (!fits) CHECK(orphan);
      CHECK_EQ(table.catalog->parent(page_of(at)), orphan ? kNoPage : page_of(said.parent));
      if (orphan) orphans.insert(page_of(at));
    }
    CHECK_EQ(table.catalog->orphans(), orphans.size());
    if (random() % 8 == 0) CHECK(table.orphans(kKeys) == orphans);
    for (const auto& [at, said] : there) {
      uint32_t steps = 0;
      for (PageId page = page_of(at); page != kNoPage; page = table.catalog->parent(page)) ++steps;
      CHECK(steps <= said.position + 1);
    }
  }
}

}  // namespace
}  // namespace kvw
