// What the core keeps of pages: found by key among others of the same home and tag, dense, and the
// same as a map would keep.
#include "warehouse/page_table.h"

#include <map>
#include <optional>

#include "tests/check.h"

namespace kvw {
namespace {

constexpr uint64_t kPositions = 64;  // and fewer: a window may be larger than its table

// Few homes, the table's last ones among them, and few tags: most keys collide in both.
Key some_key(std::mt19937_64& random) {
  const uint64_t homes[] = {0, 3, 40, kPositions - 2, kPositions - 1};
  const uint64_t tags[] = {0, 1, 2, 0x80, 0xff};  // 0 and 1 are the same tag
  return {homes[random() % 5] + kPositions * (random() % 3),
          tags[random() % 5] << 56 | homes[random() % 5]};
}

EntryView some_entry(const Key& key, PageId page, std::mt19937_64& random) {
  EntryView view;
  view.page = page;
  view.key = key;
  view.flags = static_cast<uint16_t>(kEntryUsed | (random() % 8) << 1);
  view.space = static_cast<uint16_t>(random() % kMaxNamespaces);
  view.slot = static_cast<SlotId>(random());
  view.generation = static_cast<uint32_t>(random());
  if (view.in_nvme())
    view.extent = {static_cast<uint32_t>(random()), static_cast<uint32_t>(random()), 5,
                   static_cast<uint32_t>(random())};
  view.clear_epoch = random();
  return view;
}

bool equal(const EntryView& a, const EntryView& b) {
  return a.page == b.page && a.flags == b.flags && a.space == b.space && a.key == b.key &&
         a.slot == b.slot && a.generation == b.generation && a.extent == b.extent &&
         a.clear_epoch == b.clear_epoch;
}

// The same by looking at every position.
struct Plain {
  uint64_t size;
  std::map<PageId, EntryView> pages;
  std::map<PageId, uint32_t> positions;  // of the nodes

  PageId find(const Key& key) const {
    for (const auto& [page, view] : pages)
      if (view.key == key) return page;
    return kNoPage;
  }
  PageId empty_place(const Key& key) const {
    for (uint32_t place = 0; place < kIndexPlaces; ++place) {
      const PageId page = index_place(key, place, size - 1);
      if (!pages.contains(page)) return page;
    }
    return kNoPage;
  }
};

void remove(PageTable& table, PageId page) {
  const PageNumber number = table.number_at(page);
  table.leave(page);
  table.forget(number);
}

void check_same(const PageTable& table, const Plain& plain, const Key& key) {
  CHECK_EQ(table.find(key), plain.find(key));
  CHECK_EQ(table.empty_place(key), plain.empty_place(key));
  for (PageId page = 0; page < plain.size; ++page) {
    const auto known = plain.pages.find(page);
    CHECK_EQ(table.has(page), known != plain.pages.end());
    if (known == plain.pages.end()) continue;
    CHECK(equal(table.view(page), known->second));
    CHECK_EQ(table.node(page).position, plain.positions.at(page));
  }
}

}  // namespace

TEST(page_table_keeps_what_a_map_keeps_whatever_comes_changes_and_goes) {
  auto random = check::random("page table");
  for (uint64_t round = 0; round < check::rounds(40); ++round) {
    const uint64_t size = round % 4 == 0 ? 2ull << random() % 4 : kPositions;
    PageTable table(size);
    Plain plain{size, {}, {}};
    for (int step = 0; step < 300; ++step) {
      const Key key = some_key(random);
      const PageId at = plain.find(key);
      if (at == kNoPage && plain.pages.size() < table.capacity()) {
        const PageId page = plain.empty_place(key);
        if (page == kNoPage) continue;
        const EntryView view = some_entry(key, page, random);
        table.add(view);
        CHECK_EQ(table.node(page).parent, kNoNumber);
        CHECK_EQ(table.node(page).position, 0);
        plain.pages[page] = view;
        plain.positions[page] = table.node(page).position = static_cast<uint32_t>(random());
      } else if (at != kNoPage && random() % 2 == 0) {
        plain.pages[at] = some_entry(key, at, random);
        table.change(plain.pages[at]);
      } else if (at != kNoPage) {
        remove(table, at);
        plain.pages.erase(at);
        plain.positions.erase(at);
      }
      check_same(table, plain, some_key(random));
    }
  }
}

// A number that is lost or given twice ends in an assertion, or in a page that says another's.
TEST(page_table_has_room_for_as_many_pages_as_it_says_however_often_they_change) {
  auto random = check::random("numbers");
  PageTable table(kPositions);
  std::map<PageId, EntryView> there;
  for (uint64_t step = 0; step < 50 * kPositions; ++step) {
    while (there.size() == table.capacity() || (!there.empty() && random() % 4 == 0)) {
      const auto gone = std::next(there.begin(), static_cast<long>(random() % there.size()));
      remove(table, gone->first);
      there.erase(gone);
    }
    const Key key{random(), random()};
    const PageId page = table.empty_place(key);
    if (page == kNoPage) continue;
    there[page] = some_entry(key, page, random);
    table.add(there[page]);
    for (const auto& [at, view] : there) CHECK(equal(table.view(at), view));
  }
  CHECK_EQ(table.capacity(), kPositions / 2);
}

TEST(page_that_left_and_comes_again_finds_its_children_under_its_number) {
  PageTable table(kPositions);
  EntryView view;
  view.key = {5, 6};
  view.flags = kEntryUsed | kEntryDram;
  view.page = table.empty_place(view.key);
  table.add(view);
  const PageNumber number = table.number_at(view.page);
  table.node(view.page).first_child = 77;
  table.node(view.page).used_at = 3;
  table.leave(view.page);
  CHECK(table.has_left(number));
  CHECK_EQ(table.find(view.key), kNoPage);
  EntryView other = view;  // at its position
  other.key.hi = 7;
  table.add(other);
  CHECK_EQ(table.node(other.page).first_child, kNoNumber);
  view.page = table.empty_place(view.key);
  table.add(view, number);
  CHECK(!table.has_left(number));
  CHECK_EQ(table.number_at(view.page), number);
  CHECK_EQ(table.node(view.page).first_child, 77);
  CHECK_EQ(table.node(view.page).used_at, 0);
}

TEST(page_table_has_nothing_outside_its_positions) {
  PageTable table(kPositions);
  EntryView view;
  view.key = {5, 6};
  view.page = table.empty_place(view.key);
  view.flags = kEntryUsed | kEntryDram;
  table.add(view);
  CHECK(table.has(5));
  // The first tags stand behind the last ones too, for windows that wrap.
  CHECK(!table.has(kPositions + 5));
  CHECK(!table.has(kNoPage));
}

}  // namespace kvw
