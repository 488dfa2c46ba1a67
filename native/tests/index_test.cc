// The index: places, and the sequence that keeps readers from ever seeing half an entry, also
// while the writer hammers and after it died in one.
#include "index/index.h"

#include <sys/wait.h>

#include <array>
#include <atomic>
#include <thread>

#include "tests/check.h"
#include "tests/index_table.h"
#include "tests/warehouse_world.h"

namespace kvw {
namespace {

struct Table : IndexTable {
  using IndexTable::IndexTable;
  IndexEntry& raw(PageId page) { return mapping.at<IndexEntry>(kBlockBytes)[page]; }
};

EntryView entry_of(const Key& key, PageId page) {
  EntryView view;
  view.page = page;
  view.key = key;
  view.flags = kEntryUsed | kEntryDram;
  return view;
}

// All fields follow from the version, so that any mixture shows.
EntryView version_of(const Key& key, PageId page, uint64_t version) {
  EntryView view = entry_of(key, page);
  const auto word = [version](uint64_t salt) { return mixed(version * 16 + salt); };
  view.space = static_cast<uint16_t>(version);
  view.slot = static_cast<SlotId>(word(1));
  view.generation = static_cast<uint32_t>(version);
  view.extent = {static_cast<uint32_t>(word(2)), static_cast<uint32_t>(word(3)),
                 static_cast<uint32_t>(word(4)), static_cast<uint32_t>(word(5))};
  view.clear_epoch = word(6);
  return view;
}

bool is_whole(const EntryView& view) {
  const EntryView same = version_of(view.key, view.page, view.generation);
  return view.space == same.space && view.slot == same.slot && view.generation == same.generation &&
         view.extent == same.extent && view.clear_epoch == same.clear_epoch;
}

// Whether it is of any one version.
bool is_whole(const EntrySummary& peek) {
  constexpr uint64_t kMostVersions = 1 << 26;
  for (uint64_t version = peek.space; version < kMostVersions; version += 1 << 16)
    if (version_of({}, 0, version).clear_epoch == peek.clear_epoch) return true;
  return false;
}

void check_peek_finds_the_same(const Index& index, const Key& key) {
  const auto found = index.find(key);
  const EntrySummary peek = index.peek(key);
  CHECK_EQ(peek.found(), found.has_value());
  if (!found) return;
  CHECK_EQ(peek.flags, found->flags);
  CHECK_EQ(peek.space, found->space);
  CHECK_EQ(peek.slot, found->slot);
  CHECK_EQ(peek.generation, found->generation);
  CHECK_EQ(peek.clear_epoch, found->clear_epoch);
}

TEST(index_finds_what_was_written_and_nothing_else) {
  Table table(1024);
  std::vector<Key> keys;
  for (uint64_t i = 0; i < 300; ++i) keys.push_back({mixed(i), i});
  for (const Key& key : keys) {
    const PageId page = table.index.empty_place(key);
    CHECK(page != kNoPage);
    table.index.write(version_of(key, page, key.hi));
  }
  for (const Key& key : keys) {
    const auto found = table.index.find(key);
    CHECK(found.has_value());
    CHECK_EQ(found->generation, key.hi);
    CHECK(is_whole(*found));
    CHECK(!table.index.find({key.lo, key.hi + 1000}));  // same home, another key
    check_peek_finds_the_same(table.index, key);
    check_peek_finds_the_same(table.index, {key.lo, key.hi + 1000});
  }
  for (const Key& key : keys) table.index.erase(table.index.find(key)->page);
  for (const Key& key : keys) {
    CHECK(!table.index.find(key));
    check_peek_finds_the_same(table.index, key);
  }
}

TEST(index_keeps_a_key_found_when_others_of_its_windows_leave) {
  Table table(1024);
  const auto key = [](uint64_t i) { return Key{1020, 1024 * i + 500}; };  // the first window wraps
  std::array<Key, kIndexPlaces> keys;
  for (uint32_t i = 0; i < kIndexPlaces; ++i) {
    keys[i] = key(i);
    const PageId page = table.index.empty_place(keys[i]);
    CHECK_EQ(page, i < kIndexWindow ? (1020 + i) % 1024 : 500 + i - kIndexWindow);
    table.index.write(entry_of(keys[i], page));
  }
  CHECK_EQ(table.index.empty_place(key(99)), kNoPage);
  CHECK_EQ(table.index.empty_place({1020, 300}), 300);  // its second window is another
  for (uint32_t i = 0; i < kIndexPlaces; i += 2) table.index.erase(table.index.find(keys[i])->page);
  for (uint32_t i = 0; i < kIndexPlaces; ++i) {
    CHECK_EQ(table.index.find(keys[i]).has_value(), i % 2 == 1);
    check_peek_finds_the_same(table.index, keys[i]);
  }
  CHECK_EQ(table.index.empty_place(key(99)), 1020);
}

TEST(index_entry_is_a_miss_when_its_writer_died_in_it) {
  Table table(1024);
  const Key key{5, 6};
  table.index.write(version_of(key, 5, 7));
  table.raw(5).sequence.fetch_add(1);  // odd for ever
  CHECK(!table.index.find(key));
  CHECK(!table.index.peek(key).found());
  CHECK(!table.index.at(5));
  // A writer that takes over makes it whole again.
  table.index.write(version_of(key, 5, 8));
  CHECK_EQ(table.index.find(key)->generation, 8);
}

TEST(index_at_is_nothing_outside_the_table) {
  Table table(1024);
  CHECK(!table.index.at(1024));
  CHECK(!table.index.at(kNoPage));
}

// One writer, readers on other threads: every entry a reader gets is one version, whole.
TEST(index_reader_never_sees_a_mixed_entry_under_a_hammering_writer) {
  Table table(1024);
  const std::array<Key, 3> keys{Key{40, 1}, Key{40, 2}, Key{41, 3}};
  const uint64_t writes = check::rounds(400000);
  std::atomic<bool> done{false};
  std::atomic<uint64_t> mixed_seen{0}, backwards{0}, found{0};
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 3; ++reader)
    readers.emplace_back([&, reader] {
      std::array<uint64_t, 3> newest{};
      for (uint64_t i = 0; !done.load(std::memory_order_relaxed); ++i) {
        const size_t which = (i + static_cast<uint64_t>(reader)) % keys.size();
        const auto view = table.index.find(keys[which]);
        const EntrySummary peek = table.index.peek(keys[which]);
        if (peek.found() && !is_whole(peek)) ++mixed_seen;
        if (!view) continue;
        if (!is_whole(*view) || !(view->key == keys[which])) ++mixed_seen;
        if (view->generation < newest[which]) ++backwards;
        newest[which] = view->generation;
        ++found;
      }
    });
  for (uint64_t version = 1; version <= writes; ++version) {
    const size_t which = version % keys.size();
    const auto old = table.index.find(keys[which]);
    const PageId page = old ? old->page : table.index.empty_place(keys[which]);
    table.index.write(version_of(keys[which], page, version));
    // Some leave: another key may get the place, and a reader must not take it for the first.
    if (version % 7 == 0) table.index.erase(page);
  }
  for (uint64_t version = writes; found.load() == 0; ++version)  // readers that got no turn yet
    table.index.write(version_of(keys[0], table.index.home(keys[0]), version));
  done = true;
  for (std::thread& reader : readers) reader.join();
  CHECK_EQ(mixed_seen.load(), 0);
  CHECK_EQ(backwards.load(), 0);
}

// A page that changes its tier is there before and after it: a reader that meets its writer waits.
TEST(index_reader_misses_no_entry_that_is_being_rewritten) {
  Table table(1024);
  constexpr uint64_t kKeys = 64;
  const auto key = [](uint64_t at) { return Key{at * 16, at}; };
  for (uint64_t at = 0; at < kKeys; ++at)
    table.index.write(version_of(key(at), table.index.home(key(at)), 1));
  std::atomic<bool> done{false};
  // A writer that loses its processor in an entry for longer than readers wait is no bug.
  std::atomic<uint64_t> missed_early{0}, found{0};
  const auto check_waits = [&](auto is_found) {
    const uint64_t begun_ns = system_clock().boot_ns();
    if (is_found())
      ++found;
    else if (system_clock().boot_ns() < begun_ns + kWriterPatienceNs)
      ++missed_early;
  };
  std::vector<std::thread> readers;
  for (uint64_t reader = 0; reader < 3; ++reader)
    readers.emplace_back([&, reader] {
      for (uint64_t i = reader; !done.load(std::memory_order_relaxed); ++i) {
        const Key wanted = key(i % kKeys);
        check_waits([&] { return table.index.find(wanted).has_value(); });
        check_waits([&] { return table.index.peek(wanted).found(); });
        check_waits([&] { return table.index.at(table.index.home(wanted)).has_value(); });
      }
    });
  const uint64_t writes = check::rounds(1000000);
  for (uint64_t i = 0; i < writes || found.load() == 0; ++i)
    table.index.write(version_of(key(i % kKeys), table.index.home(key(i % kKeys)), i));
  done = true;
  for (std::thread& reader : readers) reader.join();
  CHECK_EQ(missed_early.load(), 0);
}

// The same across processes, the writer killed at any moment: a miss or a whole entry is left.
TEST(index_entry_is_whole_or_a_miss_when_its_writer_was_killed) {
  Table table(1024);
  const Key key{77, 1};
  auto random = check::random("index_entry_is_whole_or_a_miss_when_its_writer_was_killed");
  for (uint64_t round = 0; round < check::rounds(20); ++round) {
    const pid_t writer = ::fork();
    if (writer == 0) {
      Mapping own(table.fd.get(), index_bytes(1024), true);  // a parent's mapping does not follow
      Index index(own);
      for (uint64_t version = 1;; ++version) index.write(version_of(key, 77, version));
    }
    uint64_t seen = 0;
    for (uint64_t i = 0; i < 2000 + random() % 5000; ++i)
      if (const auto view = table.index.find(key)) {
        CHECK(is_whole(*view));
        ++seen;
      }
    ::kill(writer, SIGKILL);
    ::waitpid(writer, nullptr, 0);
    if (const auto view = table.index.find(key)) CHECK(is_whole(*view));
    table.index.erase(77);  // the next writer of the entry, whatever state it is in
    CHECK(!table.index.find(key));
  }
}

}  // namespace
}  // namespace kvw
