// Reclaim makes room within its bounds, and never at the price of a wrong byte, a pinned extent or
// a standstill.
#include <fstream>
#include <set>

#include "nvme/format.h"
#include "tests/nvme_world.h"

using namespace kvw;
using namespace kvw::nvme;

namespace {

double write_amplification(const LogStats& stats) {
  return static_cast<double>(stats.written_bytes + stats.relocated_bytes) /
         static_cast<double>(stats.written_bytes);
}

// The lowest life that a start would find.
uint32_t oldest_on_disk(const World& world) {
  uint32_t oldest = UINT32_MAX;
  AlignedBuffer block(kBlockBytes);
  for (const auto& [number, ignored] : world.words) {
    std::ifstream file(world.segment_path(number), std::ios::binary);
    file.read(reinterpret_cast<char*>(block.data()), kBlockBytes);
    if (const auto header = decode_segment_header(block.span()))
      oldest = std::min(oldest, header->life);
  }
  return oldest;
}

}  // namespace

// Incident: tombstones below the oldest segment in use were forgotten, while a free one still held
// what they were of; a start found it again.
TEST(oldest_life_is_that_of_any_file_of_free_segments_too) {
  World world(6);
  world.open();
  for (uint64_t number = 0; number < 600; ++number) {
    world.append_all(number, number + 1);
    CHECK(world.log->stats().oldest_life <= oldest_on_disk(world));
  }
  CHECK(world.log->stats().oldest_life > 1);
  world.stop();
  world.open();
  CHECK_EQ(world.log->stats().oldest_life, oldest_on_disk(world));
}

TEST(oldest_life_is_not_known_while_a_segment_cannot_be_read) {
  World world(6);
  world.open();
  world.append_all(0, 300);
  world.stop();
  world.faults->add({IoKind::read, "00000001.seg", 0, 1, EIO, -1});
  world.open();
  CHECK(world.saw_event("nvme_bad_segment"));
  CHECK_EQ(world.log->stats().oldest_life, 0);
}

TEST(records_of_a_segment_that_cannot_be_read_lie_below_all_that_is_written_beside_it) {
  World world(6);
  world.open();
  world.append_all(0, 300);
  world.flush();
  const uint64_t end = world.log->last_position();
  world.kill();
  world.options.life_ahead = 5000;  // as it was noted: the next run may have come far
  world.open();
  CHECK(world.log->last_position() >= end);
  CHECK(world.log->last_position() >> 32 < 5000);
  world.kill();
  world.faults->add({IoKind::read, "00000001.seg", 0, 1, EIO, -1});
  world.open();
  CHECK(world.log->last_position() >> 32 >= 5000);
}

TEST(reclaim_keeps_the_files_within_the_capacity) {
  World world(6);
  world.open();
  for (uint64_t round = 0; round < 20; ++round) {
    world.append_all(round * 50, round * 50 + 50);
    CHECK(world.bytes_on_disk() <= world.options.capacity_bytes);
  }
  const LogStats stats = world.log->stats();
  CHECK(stats.reclaimed_segments > 5);
  CHECK_EQ(stats.relocated_records, 0);
  CHECK(stats.dropped_records > 0);
  CHECK(world.index.size() < 1000);
  CHECK(world.index.size() >= 100);
  world.check_all_readable();
}

TEST(tier_that_is_full_has_all_of_its_files) {
  World world(8);
  world.open();
  world.append_all(0, 800);
  CHECK_EQ(world.bytes_on_disk(), world.options.capacity_bytes);
}

TEST(reclaim_moves_hot_pages_and_drops_cold_ones) {
  World world(6);
  world.hot = [](uint64_t number) { return number % 10 == 0; };
  world.open();
  world.append_all(0, 600);
  for (uint64_t number = 0; number < 600; number += 10) CHECK(world.index.contains(number));
  CHECK(world.moves > 0);
  CHECK(world.log->stats().relocated_records > 0);
  world.check_all_readable();
}

TEST(reclaim_copies_no_page_that_left_while_it_was_read) {
  World world(6);
  world.hot = [](uint64_t number) { return number % 10 == 0; };
  world.open();
  world.faults->hold_reads(true);
  const uint64_t next = world.append_until_refused(0, 100, 600);
  CHECK(next < 600);
  CHECK(world.copies.empty());
  std::set<uint64_t> left;
  for (const auto& [number, extent] : world.index)
    if (world.hot(number)) left.insert(number);
  for (const uint64_t number : left) world.index.erase(number);
  world.faults->hold_reads(false);
  world.append_all(next, next + 100);
  for (const auto& [number, to] : world.copies) CHECK(!left.contains(number));
}

// The device gives the reads of hot pages late: new pages wait rather than take their room.
TEST(reclaim_moves_hot_pages_however_fast_new_ones_come) {
  World world(6);
  world.hot = [](uint64_t number) { return number % 10 == 0; };
  world.open();
  for (uint64_t number = 0; number < 600;) {
    world.faults->hold_reads(true);
    number = world.append_until_refused(number, 100, 600);
    world.faults->hold_reads(false);
    world.until([&] { return world.waiting.empty(); });
  }
  CHECK(world.log->stats().relocated_records > 0);
  for (uint64_t number = 0; number < 600; number += 10) CHECK(world.index.contains(number));
  world.check_all_readable();
}

// The last one of a segment may begin at the end of its share: new pages leave it room all the
// same.
TEST(reclaim_moves_a_whole_share_of_large_hot_pages_however_fast_new_ones_come) {
  constexpr uint64_t kShardBytes = 50'000, kFit = 9;  // pages in a segment
  World world(6);
  world.options.moving_bytes = 1;  // each is written before the next one's turn
  world.hot = [](uint64_t) { return true; };
  world.open();
  for (uint64_t number = 0; number < 300;) {
    world.faults->hold_reads(true);
    uint64_t refusals = 0;
    world.until([&] {
      if (world.append(number, kShardBytes))
        ++number;
      else
        ++refusals;
      return number == 300 || refusals == 100;
    });
    world.faults->hold_reads(false);
    world.until([&] { return world.waiting.empty(); });
  }
  const LogStats stats = world.log->stats();
  CHECK(stats.reclaimed_segments > 10);
  // A quarter of each, but of one under way, and but for what is less than a page.
  const uint64_t room = world.options.segment_bytes / kFit;
  const uint64_t shares = (stats.reclaimed_segments - 1) * world.options.segment_bytes / 4;
  CHECK((stats.relocated_records + 1) * room >= shares);
  world.check_all_readable([](uint64_t) { return kShardBytes; });
}

TEST(reclaim_writes_at_most_a_third_more_when_everything_is_hot) {
  World world(4);
  world.hot = [](uint64_t) { return true; };
  world.open();
  world.append_all(0, 2000);
  const LogStats stats = world.log->stats();
  CHECK(stats.relocated_records > 0);
  CHECK(write_amplification(stats) <= 4.0 / 3);
  CHECK(world.bytes_on_disk() <= world.options.capacity_bytes);
  world.check_all_readable();
}

// Also pages of which a segment has three, two or one: each in its turn.
TEST(reclaim_moves_hot_pages_of_any_size_and_writes_at_most_a_third_more) {
  for (const uint64_t shard_bytes : {140'000, 250'000, 500'000}) {
    World world(6);
    world.hot = [](uint64_t) { return true; };
    world.open();
    world.append_all(0, 200, shard_bytes);
    const LogStats stats = world.log->stats();
    CHECK(stats.relocated_records > 10);
    CHECK(write_amplification(stats) <= 4.0 / 3);
    CHECK(world.bytes_on_disk() <= world.options.capacity_bytes);
    world.check_all_readable([&](uint64_t) { return shard_bytes; });
  }
}

TEST(read_of_a_reclaimed_extent_is_a_mismatch) {
  World world(4);
  world.open();
  std::unordered_map<uint64_t, Extent> ever;
  for (uint64_t number = 0; number < 500; number += 10) {
    world.append_all(number, number + 10);
    for (const auto& [each, extent] : world.index) ever[each] = extent;
  }
  CHECK(world.forgotten.size() > 100);
  for (const uint64_t number : world.forgotten) {
    if (world.read(number, ever.at(number))) continue;  // still there: right bytes, and harmless
    CHECK(world.last_read == ReadResult::mismatch);
  }
}

TEST(reclaim_leaves_pinned_segments_alone) {
  World world(6);
  world.open();
  world.append_all(0, 40);
  const uint32_t segment = world.index.at(0).segment;
  const auto kept = world.index;
  world.pinned.insert(segment);
  world.append_all(40, 800);
  for (const auto& [number, extent] : kept)
    if (extent.segment == segment) CHECK(world.read(number, extent));
  CHECK_EQ(world.words.at(segment).second, false);
  world.pinned.clear();
  world.append_all(800, 1600);
  CHECK(!world.index.contains(0));
}

TEST(queue_refuses_while_every_segment_is_pinned_and_goes_on_when_they_are_not) {
  World world(4);
  world.options.queue_bytes = 1 << 20;
  world.open();
  for (uint32_t segment = 0; segment < 4; ++segment) world.pinned.insert(segment);
  const uint64_t number = world.append_until_refused(0, 501);
  CHECK(!world.waiting.empty());
  world.check_all_readable();
  world.pinned.clear();
  world.until([&] { return world.waiting.empty(); });
  world.append_all(number, number + 300);
}

TEST(reclaim_finds_what_is_not_pinned_behind_all_that_is) {
  World world(16);
  world.open();
  world.append_all(0, 300);
  const auto kept = world.index;
  // The coldest six: a session may hold as many for as long as it likes.
  for (const auto& [number, extent] : kept) world.pinned.insert(extent.segment);
  world.append_all(300, 1600);
  CHECK(world.log->stats().reclaimed_segments > 10);
  for (const auto& [number, extent] : kept) CHECK(world.read(number, extent));
}

// The open segment is closed at each start with what it has. Full ones went for those, oldest
// first, so that a daemon that came and went lost its tier.
TEST(reclaim_takes_segments_with_one_page_before_full_ones_at_every_start) {
  auto random = check::random("starts with one page each");
  World world(8);
  world.open();
  world.append_all(0, 250);
  for (uint64_t start = 0; start < 8; ++start) {
    if (random() % 2 == 0) world.flush();
    if (random() % 2 == 0) world.stop();
    world.kill();
    world.open();
    world.append_all(1000 + start, 1001 + start);
    world.until([&] { return world.log->stats().free_segments >= 2; });
    for (uint64_t number = 0; number < 250; ++number) CHECK(world.index.contains(number));
  }
  CHECK(world.index.size() < 258);  // there was no room for a segment each
}

TEST(reclaim_makes_room_for_larger_segments_and_no_more) {
  World world(16, 1 << 19);
  world.open();
  world.append_all(0, 600);
  world.flush();
  world.kill();
  world.options.segment_bytes = 1 << 21;
  const uint64_t found = world.open().records;
  world.until([&] { return world.log->stats().free_segments == 2; });
  CHECK(world.index.size() > found / 3);  // two of them are half of the capacity
  CHECK(world.log->stats().reclaimed_segments <= 8);
}

TEST(reclaim_waits_for_reads_in_flight_on_its_segment) {
  World world(6);
  world.open();
  world.append_all(0, 10);
  const Extent old = world.index.at(0);
  const AlignedBuffer into(make_page(0).facts.payload_bytes());
  // A read that the device keeps: its segment must not begin a new life meanwhile.
  world.faults->hold_reads(true);
  world.reading.insert(7777);
  CHECK(world.log->read(7777, old, key_of(0), into.data()));
  world.append_all(10, 600);
  CHECK(!world.index.contains(0));
  CHECK(world.words.at(old.segment) == std::pair(old.life, true));
  world.faults->hold_reads(false);
  world.until([&] { return world.reading.empty(); });
  CHECK(world.last_read == ReadResult::ok);
  world.append_all(600, 1200);
  CHECK(world.words.at(old.segment).first > old.life);
}

TEST(reclaim_goes_on_after_relocations_fail) {
  World world(4);
  world.hot = [](uint64_t number) { return number % 3 == 0; };
  world.open();
  world.append_all(0, 150);
  auto random = check::random("relocations fail");
  uint64_t number = 150, added = 0;
  world.until([&] {
    // One at a time, however fast this loop is beside the device.
    if (world.faults->struck() == added && random() % 4 == 0) {
      ++added;
      world.faults->add(
          {random() % 2 == 0 ? IoKind::write : IoKind::read, ".seg", random() % 4, 1, EIO, -1});
    }
    if (world.append(number)) ++number;
    world.clock.advance_ns(kSecondNs);
    return number >= 1500;
  });
  world.faults->clear();
  world.until([&] { return world.waiting.empty(); });
  world.check_all_readable();
}

// The copies are lost with the flush, and the originals are where they were.
TEST(reclaim_keeps_what_it_moved_when_the_copies_cannot_be_flushed) {
  World world(6);
  world.options.flush_interval_ns = 3600 * kSecondNs;
  world.hot = [](uint64_t number) { return number < 150 && number % 20 == 0; };
  world.open();
  world.append_all(0, 150);
  world.flush();
  world.on_moved = [&](const Extent& to) {
    world.on_moved = nullptr;
    world.faults->add({IoKind::sync, world.segment_path(to.segment), 0, 1, EIO, -1});
  };
  uint64_t number = 150;
  world.until([&] {
    if (world.waiting.empty() && world.append(number)) ++number;
    return world.log->stats().flush_errors == 1;
  });
  for (uint64_t hot = 0; hot < 150; hot += 20) CHECK(!world.lost.contains(hot));
  for (; number < 900; ++number) world.append_all(number, number + 1);
  CHECK(world.log->stats().health == LogHealth::ok);
  world.stop();
  world.open();
  for (uint64_t hot = 0; hot < 150; hot += 20) CHECK(world.read(hot));
}

TEST(reclaim_keeps_what_it_moves_when_the_copies_cannot_be_written) {
  World world(6);
  world.hot = [](uint64_t number) { return number < 150 && number % 20 == 0; };
  world.open();
  world.append_all(0, 150);
  world.flush();
  auto random = check::random("copies fail");
  // Each costs a segment. With none to spare hot pages are dropped, so that reclaim ends: there is
  // time for one in between, however fast the disk is.
  uint64_t number = 150, next_fault = 150;
  world.on_moving = [&] {  // of a copy that is about to be written
    if (number < next_fault) return;
    next_fault = number + 100 + random() % 50;
    world.faults->add({IoKind::write, ".seg", 0, 1, EIO, -1});
  };
  world.until([&] {
    if (world.waiting.empty() && world.append(number)) ++number;
    world.clock.advance_ns(kSecondNs);
    return number == 1500;
  });
  CHECK(world.faults->struck() > 3);
  for (uint64_t hot = 0; hot < 150; hot += 20) CHECK(world.read(hot));
}

// A dictionary beside the log: random appends, reads, heat, pins, failures and restarts. Every read
// is the page's bytes or a counted miss; nothing leaves the dictionary but by forget().
TEST(log_agrees_with_a_dictionary_whatever_happens) {
  auto random = check::random("dictionary");
  for (uint64_t world_number = 0; world_number < check::rounds(6); ++world_number) {
    World world(4 + random() % 5, 1 << (18 + random() % 3));
    world.options.queue_bytes = 2 << 20;
    std::set<uint64_t> warm;
    world.hot = [&](uint64_t number) { return warm.contains(number); };
    world.open();
    uint64_t next = 0;
    const auto shard_bytes = [](uint64_t number) { return 100 + number * 37 % 9000; };
    for (int step = 0; step < 1500; ++step) {
      const uint64_t what = random() % 100;
      if (what < 70) {
        if (world.append(next, shard_bytes(next))) ++next;
      } else if (what < 85 && !world.index.empty()) {
        auto at = world.index.begin();
        std::advance(at, random() % world.index.size());
        const auto [number, extent] = *at;
        const bool good = world.read(number, extent, shard_bytes(number));
        const auto now = world.index.find(number);
        // It may have been reclaimed while the read was on its way; else the page must be there.
        if (now != world.index.end() && now->second == extent) CHECK(good);
        warm.insert(number);
      } else if (what < 88) {
        warm.clear();
      } else if (what < 90) {
        world.pinned = {static_cast<uint32_t>(random() % 4)};
      } else if (what < 91) {
        world.pinned.clear();
        world.flush();
      }
      world.log->poll();
      world.clock.advance_ns(10 * kMillisecondNs);
      world.log->tick();
    }
    world.pinned.clear();
    world.until([&] { return world.waiting.empty(); });
    CHECK(world.failed.empty());
    const LogStats stats = world.log->stats();
    CHECK(write_amplification(stats) <= 1.34);
    CHECK(world.bytes_on_disk() <= world.options.capacity_bytes);
    world.flush();
    const auto before = world.index;
    world.stop();
    world.open();
    for (const auto& [number, extent] : before) CHECK(world.index.contains(number));
    world.check_all_readable(shard_bytes);
  }
}
