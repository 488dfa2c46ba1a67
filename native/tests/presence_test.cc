// The presence filter: what was put is found with its day, what was not is seldom found, days drop
// whole, and neither damage nor a writer that died makes more of it than that.
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <limits>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "presence/presence.h"
#include "tests/check.h"

using namespace kvw;

namespace {

const Key kFleet{11, 13};
constexpr uint32_t kToday = 20785;
constexpr uint64_t kEpoch = 7;

using Put = PresenceWriter::Put;

struct Table {
  explicit Table(uint64_t buckets, uint32_t days = kPresenceDays)
      : fd(::memfd_create("kvw-presence", MFD_CLOEXEC)), bytes(presence_bytes(buckets)) {
    CHECK_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
    mapping = Mapping(fd.get(), bytes, true);
    Presence::format(mapping, kFleet, buckets, days);
  }
  Presence attach() const {
    const auto table = Presence::attach(mapping, kFleet);
    CHECK(table.has_value());
    return *table;
  }
  std::optional<uint32_t> day_of(const Key& key, uint64_t epoch = kEpoch) const {
    return attach().look(epoch).day_of(key);
  }
  PresenceHeader* header() const { return mapping.at<PresenceHeader>(0); }

  Fd fd;
  uint64_t bytes;
  Mapping mapping;
};

PresenceWriter writer_of(const Table& table, uint32_t today = kToday) {
  PresenceWriter writer(table.attach());
  writer.advance(today);
  return writer;
}

// The same in every run: rates are compared with theory.
std::vector<Key> keys(uint64_t seed, size_t count) {
  std::mt19937_64 random(seed);
  std::vector<Key> made(count);
  for (Key& key : made) key = {random(), random()};
  return made;
}

double found_share(const Table& table, const std::vector<Key>& asked) {
  const Presence::Look look = table.attach().look(kEpoch);
  size_t found = 0;
  for (const Key& key : asked) found += look.day_of(key).has_value() ? 1 : 0;
  return static_cast<double>(found) / static_cast<double>(asked.size());
}

}  // namespace

TEST(object_that_was_put_is_found_with_its_day) {
  const Table table(presence_buckets(4000));
  PresenceWriter writer = writer_of(table);
  const auto some = keys(1, 400);
  for (size_t i = 0; i < some.size(); ++i)
    CHECK(writer.put(some[i], kEpoch, kToday - i % kPresenceDays) == Put::added);
  for (size_t i = 0; i < some.size(); ++i)
    CHECK_EQ(*table.day_of(some[i]), kToday - i % kPresenceDays);
  CHECK_EQ(writer.objects(), some.size());
  CHECK_EQ(writer.objects(kToday - 3), some.size() / kPresenceDays);
}

// The next daemon goes on with it: another value is another version.
TEST(table_of_version_1_has_the_bytes_that_it_always_had) {
  const Table table(presence_buckets(1000));
  PresenceWriter writer = writer_of(table);
  const auto some = keys(18, 500);
  for (size_t i = 0; i < some.size(); ++i) writer.put(some[i], i % 3, kToday - i % 4);
  CHECK_EQ(XXH3_64bits(table.mapping.data(), table.bytes), 0x9ae7ea0c3f578273ull);
}

// Whatever its fingerprint would be: 0 is no cell's.
TEST(every_object_is_found_where_there_is_room) {
  const Table table(presence_buckets(400000));
  PresenceWriter writer = writer_of(table);
  const auto some = keys(17, 50000);
  for (const Key& key : some) writer.put(key, kEpoch, kToday);
  CHECK_EQ(found_share(table, some), 1.0);
}

TEST(empty_table_finds_nothing) {
  const Table table(presence_buckets(1000));
  writer_of(table);
  CHECK_EQ(found_share(table, keys(2, 100000)), 0.0);
}

// 2 * 8 * load / 8192 of absent keys, within five standard deviations.
TEST(absent_object_is_found_as_seldom_as_theory_says) {
  constexpr size_t kObjects = 200000, kAsked = 2000000;
  const Table table(presence_buckets(kObjects));
  PresenceWriter writer = writer_of(table);
  for (const Key& key : keys(3, kObjects)) writer.put(key, kEpoch, kToday);
  const double load =
      static_cast<double>(writer.objects()) / static_cast<double>(table.attach().cells());
  CHECK(load > 0.79 && load <= 0.81);
  const double expected = 2.0 * kPresenceCells * load / 8192;
  const double deviation = std::sqrt(expected / kAsked);
  const double seen = found_share(table, keys(4, kAsked));
  CHECK(std::abs(seen - expected) < 5 * deviation);
}

TEST(table_has_twenty_bits_an_object_at_most) {
  CHECK(presence_bytes(presence_buckets(10000000)) <= 25000000);
}

TEST(full_table_has_all_but_few_of_its_objects) {
  constexpr size_t kObjects = 200000;
  const Table table(presence_buckets(kObjects));
  PresenceWriter writer = writer_of(table);
  const auto put = keys(5, kObjects);
  for (const Key& key : put) writer.put(key, kEpoch, kToday);
  CHECK(found_share(table, put) > 0.9995);
}

// Eight days' puts at the size that the table was made for: what has no room is of the oldest day.
TEST(table_that_is_full_every_day_loses_no_more_than_two_in_a_hundred) {
  constexpr size_t kOfDay = 10000;
  const Table table(presence_buckets(kOfDay * kPresenceDays));
  PresenceWriter writer = writer_of(table);
  std::deque<std::vector<Key>> days;
  for (uint32_t day = 0; day < 40; ++day) {
    writer.advance(kToday + day);
    days.push_back(keys(100 + day, kOfDay));
    for (const Key& key : days.back()) writer.put(key, kEpoch, kToday + day);
    if (days.size() > kPresenceDays) days.pop_front();
  }
  double found = 0;
  for (const auto& day : days) found += found_share(table, day);
  CHECK(found / kPresenceDays > 0.98);
  CHECK(found_share(table, days.back()) > 0.999);
  CHECK(writer.objects() <= table.attach().cells());
}

TEST(object_of_another_epoch_is_not_found) {
  const Table table(presence_buckets(20000));
  PresenceWriter writer = writer_of(table);
  const auto put = keys(6, 10000);
  for (const Key& key : put) writer.put(key, kEpoch, kToday);
  const Presence::Look later = table.attach().look(kEpoch + 1);
  size_t found = 0;
  for (const Key& key : put) found += later.day_of(key).has_value() ? 1 : 0;
  CHECK(found < put.size() / 100);
}

TEST(day_drops_whole_when_it_expires_and_its_room_is_used_again) {
  constexpr uint32_t kDays = 3;
  const Table table(presence_buckets(4000), kDays);
  PresenceWriter writer = writer_of(table);
  const auto first = keys(7, 1000), second = keys(8, 1000);
  for (const Key& key : first) writer.put(key, kEpoch, kToday);
  writer.advance(kToday + 2);
  for (const Key& key : second) writer.put(key, kEpoch, kToday + 2);
  CHECK_EQ(found_share(table, first), 1.0);
  writer.advance(kToday + 3);
  CHECK(found_share(table, first) < 0.01);
  CHECK_EQ(found_share(table, second), 1.0);
  CHECK_EQ(writer.objects(), second.size());
  CHECK_EQ(writer.objects(kToday), 0);
  writer.advance(kToday + 100);
  CHECK_EQ(found_share(table, second), 0.0);
  CHECK_EQ(writer.objects(), 0);
}

// Its three bits come back after eight days.
TEST(object_is_not_taken_for_one_of_eight_days_later) {
  const Table table(presence_buckets(1000));
  PresenceWriter writer = writer_of(table);
  const auto put = keys(9, 500);
  for (const Key& key : put) writer.put(key, kEpoch, kToday);
  for (uint32_t day = 1; day <= 7; ++day) writer.advance(kToday + day);
  for (const Key& key : put) CHECK_EQ(*table.day_of(key), kToday);
  writer.advance(kToday + 8);
  CHECK_EQ(found_share(table, put), 0.0);
}

TEST(object_that_is_put_again_has_its_newest_day_and_one_cell) {
  const Table table(presence_buckets(100));
  PresenceWriter writer = writer_of(table);
  const Key key{1, 2};
  CHECK(writer.put(key, kEpoch, kToday - 2) == Put::added);
  CHECK(writer.put(key, kEpoch, kToday) == Put::renewed);
  CHECK(writer.put(key, kEpoch, kToday) == Put::already);
  CHECK(writer.put(key, kEpoch, kToday - 1) == Put::already);
  CHECK_EQ(*table.day_of(key), kToday);
  CHECK_EQ(writer.objects(), 1);
  CHECK_EQ(writer.objects(kToday), 1);
}

TEST(object_of_a_day_outside_the_window_is_not_put) {
  const Table table(presence_buckets(100), 2);
  PresenceWriter writer = writer_of(table);
  CHECK(writer.put({1, 2}, kEpoch, kToday + 1) == Put::outside);
  CHECK(writer.put({1, 2}, kEpoch, kToday - 2) == Put::outside);
  CHECK(writer.put({1, 2}, kEpoch, kToday - 1) == Put::added);
  writer.advance(kToday - 1);  // a clock that went back
  CHECK_EQ(writer.newest(), kToday);
}

TEST(today_is_the_newest_day_unless_the_next_is_told_of) {
  const Table table(presence_buckets(100), 2);
  PresenceWriter writer = writer_of(table);
  const auto today = [&] { return table.attach().look(kEpoch).today(); };
  CHECK_EQ(today(), kToday);
  writer.advance(kToday + 1, kToday);
  CHECK_EQ(today(), kToday);
  CHECK(writer.put({1, 2}, kEpoch, kToday + 1) == Put::added);
  writer.advance(kToday + 1);
  CHECK_EQ(today(), kToday + 1);
  writer.advance(kToday);  // a clock that went back
  CHECK_EQ(today(), kToday);
  CHECK_EQ(writer.newest(), kToday + 1);
  writer.advance(kToday + 3);
  CHECK_EQ(today(), kToday + 3);
}

TEST(full_buckets_give_the_place_of_their_oldest_object_and_no_younger_one) {
  const Table table(1);  // every key has the same bucket
  PresenceWriter writer = writer_of(table);
  const auto put = keys(10, 10);
  for (uint32_t i = 0; i < kPresenceCells; ++i)
    CHECK(writer.put(put[i], kEpoch, kToday - 1 - (i == 5 ? 1 : 0)) == Put::added);
  CHECK(writer.put(put[8], kEpoch, kToday) == Put::replaced);
  CHECK(!table.day_of(put[5]).has_value());
  CHECK_EQ(*table.day_of(put[4]), kToday - 1);
  CHECK(writer.put(put[9], kEpoch, kToday - 1) == Put::no_room);
  CHECK_EQ(*table.day_of(put[8]), kToday);
  CHECK_EQ(writer.objects(), kPresenceCells);
  CHECK_EQ(writer.objects(kToday - 2), 0);
}

TEST(object_that_is_removed_is_not_found_and_its_neighbours_are) {
  const Table table(presence_buckets(1000));
  PresenceWriter writer = writer_of(table);
  const auto put = keys(11, 1000);
  for (const Key& key : put) writer.put(key, kEpoch, kToday);
  CHECK(!writer.remove(put[0], kEpoch, kToday - 1));
  CHECK(!writer.remove(put[0], kEpoch + 1, kToday));
  CHECK(writer.remove(put[0], kEpoch, kToday));
  CHECK(!table.day_of(put[0]).has_value());
  CHECK(!writer.remove(put[0], kEpoch, kToday));
  CHECK(found_share(table, put) > 0.995);
  CHECK_EQ(writer.objects(), PresenceWriter(table.attach()).objects());
}

TEST(next_writer_counts_what_the_last_one_left) {
  const Table table(presence_buckets(1000));
  {
    PresenceWriter writer = writer_of(table);
    const auto put = keys(12, 700);
    for (size_t i = 0; i < put.size(); ++i) writer.put(put[i], kEpoch, kToday - i % 2);
  }
  const PresenceWriter next(table.attach());
  CHECK_EQ(next.newest(), kToday);
  CHECK_EQ(next.objects(kToday) + next.objects(kToday - 1), next.objects());
  CHECK(next.objects() > 690);
}

// The window is narrow, and some of the expired cells are there still.
TEST(writer_ends_the_change_of_day_in_which_the_last_one_died) {
  const Table table(presence_buckets(1000));
  PresenceWriter writer = writer_of(table);
  const auto old = keys(13, 100), young = keys(14, 100);
  for (const Key& key : old) writer.put(key, kEpoch, kToday - 7);
  for (const Key& key : young) writer.put(key, kEpoch, kToday);
  table.header()->window.store(uint64_t{kToday} << 8 | 7);
  CHECK_EQ(found_share(table, old), 0.0);
  PresenceWriter next(table.attach());
  CHECK_EQ(next.objects(), young.size());
  next.advance(kToday + 1);
  for (const Key& key : old) CHECK(next.put(key, kEpoch, kToday + 1) != Put::no_room);
  CHECK_EQ(*table.day_of(old[0]), kToday + 1);
  CHECK_EQ(*table.day_of(young[0]), kToday);
}

TEST(header_that_is_damaged_foreign_or_of_another_version_is_refused) {
  const Table table(presence_buckets(100));
  CHECK(!Presence::attach(table.mapping, Key{11, 14}));
  for (size_t at = 0; at < offsetof(PresenceHeader, checksum) + 8; ++at)
    for (int bit = 0; bit < 8; ++bit) {
      const auto flip = static_cast<std::byte>(1 << bit);
      table.mapping.data()[at] ^= flip;
      CHECK(!Presence::attach(table.mapping, kFleet));
      table.mapping.data()[at] ^= flip;
    }
  CHECK(Presence::attach(table.mapping, kFleet).has_value());
}

TEST(table_that_is_shorter_than_its_header_says_is_refused) {
  const Table table(presence_buckets(10000));
  CHECK(!Presence::attach(Mapping(table.fd.get(), table.bytes - kBlockBytes, false), kFleet));
  CHECK(!Presence::attach(Mapping(table.fd.get(), kBlockBytes, false), kFleet));
  CHECK(Presence::attach(Mapping(table.fd.get(), table.bytes, false), kFleet).has_value());
}

// Header, window and cells of noise: what is told is a day of the window, or nothing.
TEST(table_of_noise_tells_days_of_the_window_alone) {
  auto random = check::random("presence noise");
  for (uint64_t round = 0; round < check::rounds(50); ++round) {
    const Table table(1 + random() % 50, static_cast<uint32_t>(1 + random() % kPresenceDays));
    for (uint64_t at = kBlockBytes; at < table.bytes; ++at)
      table.mapping.data()[at] = static_cast<std::byte>(random());
    const uint64_t window = random() % 2 == 0 ? random() : uint64_t{kToday} << 8 | random() % 16;
    table.header()->window.store(window);
    const auto newest = static_cast<uint32_t>(window >> 8);
    const auto all = keys(random(), 200);
    const Presence::Look look = table.attach().look(kEpoch);
    for (const Key& key : all)
      if (const auto day = look.day_of(key)) CHECK(newest - *day < (window & 0xff));
    PresenceWriter writer(table.attach());
    for (const Key& key : all) writer.put(key, kEpoch, writer.newest());
    writer.advance(writer.newest() + 1);
    CHECK(writer.objects() <= table.attach().cells());
  }
}

// A word is stored whole: what stays is found while its neighbours come and go, all in few words.
TEST(reader_beside_the_writer_finds_what_stays) {
  const Table table(8);
  PresenceWriter writer = writer_of(table);
  const auto stay = keys(15, 16), come = keys(16, 24);
  for (const Key& key : stay) CHECK(writer.put(key, kEpoch, kToday) == Put::added);
  const Mapping mapping(table.fd.get(), table.bytes, false);
  constexpr uint64_t kLooks = 500000;
  std::atomic<uint64_t> looks{0};
  std::atomic<bool> ended{false};
  check::Thread reader([&] {
    const auto seen = Presence::attach(mapping, kFleet);
    size_t found = 0;
    for (; looks.load() < kLooks; ++looks) {
      const Presence::Look look = seen->look(kEpoch);
      for (const Key& key : stay) found += look.day_of(key) == kToday ? 1 : 0;
    }
    ended = true;
    CHECK_EQ(found, kLooks * stay.size());
  });
  while (!ended.load()) {
    for (const Key& key : come) writer.put(key, kEpoch, kToday);
    for (const Key& key : come) writer.remove(key, kEpoch, kToday);
  }
  reader.join();
}
