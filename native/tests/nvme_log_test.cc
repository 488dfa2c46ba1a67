// The log as its owner sees it: what was written comes back, in bounds, with its queue, its flushes
// and a device that fails.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/fd.h"
#include "tests/descriptor_limit.h"
#include "tests/nvme_world.h"

using namespace kvw;
using namespace kvw::nvme;

namespace {

constexpr uint64_t kRecordBytes = 5 * kBlockBytes;  // make_page's default: a header, two shards

void overwrite(const std::string& path, uint64_t offset, std::span<const std::byte> bytes) {
  const Fd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  CHECK_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset)),
           bytes.size());
}

Fault failing(IoKind kind, int error, uint64_t count = UINT64_MAX, uint64_t skip = 0) {
  return {kind, "/segments/", skip, count, error, -1};
}

}  // namespace

TEST(log_returns_exactly_what_was_written) {
  World world;
  world.open();
  world.append_all(0, 100);
  for (uint64_t number = 0; number < 100; ++number) CHECK(world.read(number));
  const LogStats stats = world.log->stats();
  CHECK_EQ(stats.written_records, 100);
  CHECK_EQ(stats.written_bytes, 100 * kRecordBytes);
  CHECK_EQ(stats.queued_bytes, 0);
  CHECK_EQ(stats.read_records, 100);
  world.stop();
}

TEST(log_counts_the_processor_time_of_digesting_what_it_reads_but_of_no_header) {
  World world;
  world.open();
  world.append_all(0, 100);
  CHECK_EQ(world.log->stats().read_digest_ns, 0);
  bool ended = false;
  CHECK(world.log->read_header(world.index.at(0), key_of(0), [&](const RecordEnd& end) {
    CHECK(end.result == ReadResult::ok);
    ended = true;
  }));
  world.until([&] { return ended; });
  CHECK_EQ(world.log->stats().read_digest_ns, 0);
  for (uint64_t number = 0; number < 100; ++number) CHECK(world.read(number));
  CHECK(world.log->stats().read_digest_ns > 0);
  world.stop();
}

TEST(log_counts_the_segments_of_its_capacity_whether_their_files_exist_or_not) {
  World world;
  world.open();
  const uint64_t all = world.options.capacity_bytes / world.options.segment_bytes;
  for (uint64_t number = 0; number < 400; number += 100) {
    const LogStats stats = world.log->stats();
    CHECK_EQ(stats.segments, all);
    CHECK_EQ(stats.segments - stats.free_segments, stats.used_bytes / world.options.segment_bytes);
    world.append_all(number, number + 100);
  }
  world.stop();
}

TEST(log_reports_pages_in_the_order_in_which_they_came) {
  World world;
  world.open();
  world.append_all(0, 150);
  CHECK_EQ(world.written.size(), 150);
  CHECK(std::ranges::is_sorted(world.written));
}

TEST(log_keeps_pages_of_all_shapes_apart) {
  World world;
  world.open();
  for (uint64_t number = 0; number < 40; ++number)
    world.until([&] { return world.append(number, 1 + number * 997); });
  world.until([&] { return world.waiting.empty(); });
  for (uint64_t number = 0; number < 40; ++number)
    CHECK(world.read(number, world.index.at(number), 1 + number * 997));
}

TEST(append_is_refused_when_the_queue_is_full_and_taken_again_when_it_is_not) {
  World world;
  world.options.queue_bytes = 10 * kRecordBytes;
  world.open();
  world.faults->hold(true);
  uint64_t taken = 0;
  while (world.append(taken)) ++taken;
  CHECK_EQ(taken, 10);
  CHECK(world.log->stats().queued_bytes <= world.options.queue_bytes);
  world.log->poll();
  CHECK(!world.append(taken));
  world.faults->hold(false);
  world.until([&] { return world.waiting.empty(); });
  CHECK(world.append(taken));
  world.until([&] { return world.waiting.empty(); });
}

TEST(append_is_refused_when_the_page_is_larger_than_a_segment) {
  World world;
  world.open();
  CHECK(!world.append(1, 1 << 20, 1));
  CHECK(world.saw_event("nvme_page_too_large"));
  CHECK(world.append(2));
  world.until([&] { return world.waiting.empty(); });
}

TEST(append_throws_when_the_facts_contradict_themselves) {
  World world;
  world.open();
  Page page = make_page(1);
  page.facts.digests.pop_back();
  CHECK_THROWS(world.log->append(1, page.facts, page.payload.data()), "unsound_page");
}

TEST(flush_reaches_its_number_when_everything_before_it_is_on_stable_media) {
  World world;
  world.open();
  CHECK_EQ(world.log->request_flush(), world.log->durable_through());
  world.append_all(0, 5);
  const uint64_t wanted = world.log->request_flush();
  CHECK_EQ(wanted, 5);
  world.until([&] { return world.log->durable_through() >= wanted; });
  CHECK(world.log->stats().flushes >= 1);
}

TEST(flush_happens_by_itself_after_the_interval) {
  World world;
  world.open();
  world.append_all(0, 5);
  world.until([&] { return world.log->durable_through() >= 5; });
}

TEST(stop_fails_what_is_unwritten_and_leaves_nothing_waiting) {
  World world;
  world.open();
  world.append_all(0, 1);
  world.faults->hold(true);
  for (uint64_t number = 1; number < 100; ++number) world.append(number);
  world.log->poll();
  world.faults->hold(false);
  world.stop();
  CHECK(!world.failed.empty());
  for (const auto& [number, reason] : world.failed) CHECK_EQ(reason, "stopped");
  CHECK_EQ(world.failed.size() + world.written.size(), 100);
}

TEST(read_is_a_mismatch_when_key_life_or_place_is_not_the_records) {
  World world;
  world.open();
  world.append_all(0, 3);
  const Extent good = world.index.at(1);
  for (auto change : {+[](Extent& e) { ++e.life; }, +[](Extent& e) { --e.life; },
                      +[](Extent& e) { ++e.offset_blocks; }, +[](Extent& e) { ++e.blocks; },
                      +[](Extent& e) { e.segment += 1; }, +[](Extent& e) { e.segment = 70000; }}) {
    Extent wrong = good;
    change(wrong);
    CHECK(!world.read(1, wrong));
    CHECK(world.last_read == ReadResult::mismatch);
  }
  CHECK(!world.read(2, good));
  CHECK(world.last_read == ReadResult::mismatch);
  CHECK(world.read(1, good));
  CHECK_EQ(world.log->stats().mismatches, 7);
}

TEST(read_is_a_mismatch_when_a_byte_on_the_device_changed) {
  World world;
  world.open();
  world.append_all(0, 2);
  const Extent extent = world.index.at(1);
  const uint64_t offset = uint64_t{extent.offset_blocks} * kBlockBytes;
  for (uint64_t at : {offset + 60, offset + 4000, offset + 4096, offset + 4096 + 4999}) {
    std::byte before{};
    const Fd fd(::open(world.segment_path(extent.segment).c_str(), O_RDONLY | O_CLOEXEC));
    CHECK_EQ(::pread(fd.get(), &before, 1, static_cast<off_t>(at)), 1);
    const std::byte after = before ^ std::byte{0x10};
    overwrite(world.segment_path(extent.segment), at, {&after, 1});
    CHECK(!world.read(1));
    CHECK(world.last_read == ReadResult::mismatch);
    overwrite(world.segment_path(extent.segment), at, {&before, 1});
  }
  CHECK(world.read(1));
}

TEST(read_is_an_io_error_when_the_device_fails_and_the_tier_stays) {
  World world;
  world.open();
  world.append_all(0, 2);
  world.faults->add(failing(IoKind::read, EIO, 1));
  CHECK(!world.read(1));
  CHECK(world.last_read == ReadResult::io_error);
  CHECK_EQ(world.log->stats().read_errors, 1);
  CHECK(world.read(1));
}

TEST(log_says_once_that_memory_is_not_registered_and_serves_as_before) {
  World world;
  world.open();
  const AlignedBuffer not_shared(4096);  // which no engine takes
  world.log->register_memory(not_shared.span());
  world.until([&] { return world.saw_event("nvme_memory_not_registered"); });
  world.log->register_memory(not_shared.span());
  world.append_all(0, 8);
  CHECK_EQ(std::ranges::count_if(world.events,
                                 [](const auto& each) { return each.starts_with("nvme_memory"); }),
           1);
  CHECK_EQ(world.log->stats().registered_bytes, 0u);
  world.check_all_readable();
}

TEST(read_asks_to_come_again_when_too_many_are_queued) {
  World world;
  world.open();
  world.append_all(0, 2);
  world.faults->hold(true);
  AlignedBuffer into(make_page(1).facts.payload_bytes());
  uint64_t queued = 0;
  while (world.log->read(1000 + queued, world.index.at(1), key_of(1), into.data()))
    world.reading.insert(1000 + queued++);
  CHECK(queued >= 32);
  CHECK(queued <= 1024);
  world.faults->hold(false);
  world.until([&] { return world.reading.empty(); });
}

TEST(write_failure_fails_its_pages_and_the_next_segment_takes_over) {
  World world;
  world.open();
  world.append_all(0, 10);
  world.faults->add(failing(IoKind::write, EIO, 1));
  CHECK(world.append(10));
  world.until([&] { return world.waiting.empty(); });
  CHECK_EQ(world.failed.size(), 1);
  CHECK_EQ(world.failed[0].second, "io_error");
  CHECK_EQ(world.log->stats().write_errors, 1);
  world.append_all(11, 20);
  CHECK(world.index.at(11).segment != world.index.at(0).segment);
  for (uint64_t number = 0; number < 20; ++number)
    if (number != 10) CHECK(world.read(number));
  CHECK(world.log->stats().health == LogHealth::ok);
}

TEST(tier_is_read_only_after_three_write_failures_and_heals_by_itself) {
  World world;
  world.open();
  world.append_all(0, 10);
  world.faults->add(failing(IoKind::write, EIO));
  uint64_t number = 100;
  world.until([&] {
    if (world.waiting.empty()) world.append(number++);
    return world.log->stats().health == LogHealth::read_only;
  });
  CHECK_EQ(world.log->stats().health_reason, "io_error EIO");
  CHECK(world.saw_event("nvme_read_only"));
  world.until([&] { return world.waiting.empty(); });
  CHECK(!world.append(number));
  CHECK(world.read(3));
  // A probe that fails leaves it as it is.
  const uint64_t struck = world.faults->struck();
  world.clock.advance_ns(world.options.retry_interval_ns);
  world.until([&] { return world.faults->struck() > struck; });
  CHECK(world.log->stats().health == LogHealth::read_only);
  world.faults->clear();
  world.clock.advance_ns(world.options.retry_interval_ns);
  world.until([&] { return world.log->stats().health == LogHealth::ok; });
  CHECK(world.saw_event("nvme_healed"));
  world.append_all(number, number + 10);
  for (uint64_t each = number; each < number + 10; ++each) CHECK(world.read(each));
}

TEST(flush_failure_forgets_everything_since_the_last_good_one) {
  World world;
  world.options.flush_interval_ns = 3600 * kSecondNs;
  world.open();
  world.append_all(0, 10);
  world.flush();
  world.append_all(10, 20);
  // Of the pages' segment: the next one may be syncing its header just now.
  Fault fault = failing(IoKind::sync, EIO, 1);
  char name[32];
  std::snprintf(name, sizeof name, "%08u.seg", world.index.at(10).segment);
  fault.path = name;
  world.faults->add(fault);
  world.flush();  // known to have failed is an answer as well
  CHECK_EQ(world.lost.size(), 10);
  for (uint64_t number = 10; number < 20; ++number) CHECK(world.lost.contains(number));
  for (uint64_t number = 0; number < 10; ++number) CHECK(world.read(number));
  CHECK_EQ(world.log->stats().flush_errors, 1);
  world.append_all(20, 30);
  world.flush();
  CHECK_EQ(world.lost.size(), 10);
  CHECK(world.log->stats().health == LogHealth::ok);
}

TEST(tier_is_read_only_after_three_flush_failures_and_heals_by_itself) {
  World world;
  world.open();
  world.append_all(0, 3);
  world.flush();
  world.faults->add(failing(IoKind::sync, EIO));
  uint64_t number = 100;
  world.until([&] {
    if (world.waiting.empty()) world.append(number++);
    return world.log->stats().health == LogHealth::read_only;
  });
  world.faults->clear();
  world.clock.advance_ns(world.options.retry_interval_ns);
  world.until([&] { return world.log->stats().health == LogHealth::ok; });
  world.append_all(number, number + 3);
  CHECK(world.read(0));
  CHECK(world.read(number));
}

// Incident: in a control group at its limit of tasks the kernel cancels what it has no worker for.
// That was taken for the end of the tier: no flush ever ended again, and nobody was told.
TEST(what_the_kernel_cancels_is_an_error_of_the_device) {
  World world;
  world.options.flush_interval_ns = 3600 * kSecondNs;
  world.open();
  world.append_all(0, 10);
  Fault fault = failing(IoKind::sync, ECANCELED, 1);
  fault.path = world.segment_path(world.index.at(0).segment);
  world.faults->add(fault);
  world.flush();
  CHECK_EQ(world.log->stats().flush_errors, 1);
  CHECK_EQ(world.lost.size(), 10);
  world.append_all(10, 20);
  world.flush();
  world.faults->add(failing(IoKind::write, ECANCELED));
  uint64_t number = 100;
  world.until([&] {
    if (world.waiting.empty()) world.append(number++);
    return world.log->stats().health == LogHealth::read_only;
  });
  CHECK_EQ(world.log->stats().health_reason, "io_error EIO");
  CHECK(world.bytes_on_disk() < world.options.capacity_bytes);
  world.faults->clear();
  world.clock.advance_ns(world.options.retry_interval_ns);
  world.until([&] { return world.log->stats().health == LogHealth::ok; });
  world.check_all_readable();
}

TEST(no_space_shrinks_the_tier_to_the_files_that_exist_until_there_is_room) {
  World world;
  uint64_t files = 0, allowed = 3;
  world.options.allocate = [&](int fd, uint64_t bytes) {
    if (bytes == kBlockBytes) return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    if (files >= allowed) return ENOSPC;
    ++files;
    return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  };
  world.open();
  world.append_all(0, 300);
  CHECK(world.saw_event("nvme_no_space"));
  CHECK_EQ(world.bytes_on_disk(), 3 << 20);
  CHECK_EQ(world.log->stats().capacity_bytes, 3 << 20);
  CHECK(world.log->stats().health == LogHealth::ok);
  world.check_all_readable();
  // It is asked again, with nobody writing, and so is known to have room once it has some.
  CHECK(!world.log->has_room());
  world.clock.advance_ns(world.options.retry_interval_ns);
  world.until([&] { return world.log->stats().capacity_bytes == 3 << 20; });
  CHECK(!world.log->has_room());
  allowed = 100;
  world.clock.advance_ns(world.options.retry_interval_ns);
  world.until([&] { return world.log->has_room(); });
  CHECK_EQ(world.bytes_on_disk(), 4 << 20);
  world.append_all(300, 800);
  CHECK(world.bytes_on_disk() > 3 << 20);
  CHECK(world.bytes_on_disk() <= world.options.capacity_bytes);
}

// Reclaim begins by what is to come: it must not drop pages because the disk is being asked.
TEST(asking_a_full_disk_for_room_takes_nothing_from_what_is_to_come) {
  World world;
  std::atomic<uint64_t> files = 0, allowed = 3;
  std::atomic<bool> held = false, asked = false;
  world.options.allocate = [&](int fd, uint64_t bytes) {
    if (bytes == kBlockBytes) return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    if (held) asked = true;
    while (held) std::this_thread::yield();
    if (files >= allowed) return ENOSPC;
    ++files;
    return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  };
  world.open();
  world.append_all(0, 300);
  allowed = 100;
  held = true;
  world.clock.advance_ns(world.options.retry_interval_ns);
  const uint64_t to_come = world.log->stats().free_segments;
  world.until([&] { return asked.load(); });
  const uint64_t meanwhile = world.log->stats().free_segments;
  held = false;
  CHECK_EQ(meanwhile, to_come);
  world.until([&] { return world.log->has_room(); });
}

TEST(no_space_for_more_than_one_segment_still_serves) {
  World world;
  uint64_t files = 0;
  world.options.allocate = [&](int fd, uint64_t bytes) {
    if (bytes != kBlockBytes && files++ >= 1) return ENOSPC;
    return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  };
  world.hot = [](uint64_t) { return true; };
  world.open();
  world.append_all(0, 300);
  CHECK_EQ(world.bytes_on_disk(), 1 << 20);
  world.check_all_readable();
}

TEST(no_space_at_all_is_read_only_and_heals_when_there_is_some) {
  World world;
  bool full = true;
  world.options.allocate = [&](int fd, uint64_t bytes) {
    if (bytes != kBlockBytes && full) return ENOSPC;
    return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  };
  world.open();
  CHECK(world.append(1));
  world.until([&] { return world.waiting.empty(); });
  CHECK_EQ(world.log->stats().health_reason, "no_space");
  full = false;
  world.clock.advance_ns(world.options.retry_interval_ns);
  world.until([&] { return world.log->stats().health == LogHealth::ok; });
  world.append_all(2, 10);
}

// Incident: the disk had filled up under a daemon that went on with its files, and the next start
// was read-only for as long as the disk was full.
TEST(no_space_at_a_start_serves_with_the_files_that_exist) {
  World world;
  bool full = false;
  world.options.allocate = [&](int fd, uint64_t bytes) {
    return full ? ENOSPC : ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  };
  world.open();
  world.append_all(0, 150);
  world.flush();
  world.stop();
  const uint64_t bytes = world.bytes_on_disk();
  full = true;
  world.open();
  CHECK(world.log->stats().health == LogHealth::ok);
  world.append_all(150, 600);
  CHECK_EQ(world.bytes_on_disk(), bytes);
  CHECK(world.log->stats().health == LogHealth::ok);
  world.check_all_readable();
}

TEST(tier_that_was_read_only_for_another_reason_heals_on_a_full_disk) {
  World world;
  bool full = false;
  world.options.allocate = [&](int fd, uint64_t bytes) {
    return full ? ENOSPC : ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  };
  world.open();
  world.append_all(0, 150);
  full = true;
  world.faults->add(failing(IoKind::write, EIO));
  uint64_t number = 1000;
  world.until([&] {
    if (world.waiting.empty()) world.append(number++);
    return world.log->stats().health == LogHealth::read_only;
  });
  world.faults->clear();
  world.clock.advance_ns(world.options.retry_interval_ns);
  world.until([&] { return world.log->stats().health == LogHealth::ok; });
  world.append_all(number, number + 300);
  CHECK(world.log->stats().health == LogHealth::ok);
  world.check_all_readable();
}

// A crash while a file is made leaves it short.
TEST(no_space_for_a_file_that_is_too_short_removes_it_and_counts_no_failure_of_the_disk) {
  World world;
  bool full = false;
  world.options.allocate = [&](int fd, uint64_t bytes) {
    return full ? ENOSPC : ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  };
  world.open();
  world.append_all(0, 150);
  world.flush();
  world.stop();
  for (uint32_t number = 10; number < 14; ++number)
    std::ofstream(world.segment_path(number)) << std::string(10000, 'x');
  full = true;
  world.open();
  world.append_all(150, 600);
  for (uint32_t number = 10; number < 14; ++number)
    CHECK(!std::filesystem::exists(world.segment_path(number)));
  CHECK(!world.saw_event("nvme_open_failed"));
  CHECK(world.log->stats().health == LogHealth::ok);
}

TEST(directory_that_refuses_writes_starts_as_a_read_only_tier_and_heals) {
  World world;
  world.open();
  world.append_all(0, 5);
  world.flush();
  world.stop();
  int error = EROFS;
  world.options.allocate = [&](int fd, uint64_t bytes) {
    return error != 0 ? error : ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  };
  world.open();
  CHECK(world.log->stats().health == LogHealth::read_only);
  CHECK_EQ(world.log->stats().health_reason, "read_only");
  CHECK(!world.append(6));
  CHECK(world.read(3));
  error = 0;
  world.clock.advance_ns(world.options.retry_interval_ns);
  world.until([&] { return world.log->stats().health == LogHealth::ok; });
  world.append_all(6, 10);
}

// Incident: on ext2, which has O_DIRECT and no fallocate(), the tier never made a file.
TEST(filesystem_without_fallocate_gets_its_blocks_written) {
  World world;
  world.options.allocate = [](int, uint64_t) { return EOPNOTSUPP; };
  world.open();
  world.append_all(0, 100);
  world.flush();
  CHECK(world.log->stats().health == LogHealth::ok);
  struct stat facts{};
  CHECK_EQ(::stat(world.segment_path(0).c_str(), &facts), 0);
  CHECK(static_cast<uint64_t>(facts.st_blocks) * 512 >= world.options.segment_bytes);
  world.kill();
  CHECK_EQ(world.open().records, 100);
  world.check_all_readable();
}

TEST(filesystem_that_allocates_nothing_by_direct_writes_is_used_without_them) {
  World world;
  world.options.allocate = [](int fd, uint64_t bytes) {
    if ((::fcntl(fd, F_GETFL) & O_DIRECT) != 0) return EINVAL;
    return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  };
  world.open();
  world.append_all(0, 100);
  CHECK(world.log->stats().health == LogHealth::ok);
  CHECK(!world.log->stats().direct_io);
}

TEST(directory_that_fails_says_how) {
  World world;
  world.options.allocate = [](int, uint64_t) { return ENXIO; };
  world.open();
  CHECK_EQ(world.log->stats().health_reason, "io_error ENXIO");
}

// Incident: the tier of a daemon with few descriptors was read-only for as long as they were short.
TEST(descriptors_that_are_short_are_waited_for_and_no_fault_of_the_disk) {
  World world;
  world.open();
  uint64_t number = 0;
  {
    const DescriptorLimit none(DescriptorLimit::at_present(0));
    world.until([&] {
      if (world.append(number)) ++number;
      return world.saw_event("nvme_no_descriptors");
    });
  }
  world.until([&] { return world.waiting.empty(); });
  world.flush();
  CHECK(world.failed.empty());
  CHECK(world.lost.empty());
  const LogStats stats = world.log->stats();
  CHECK(stats.health == LogHealth::ok);
  CHECK_EQ(stats.write_errors + stats.read_errors + stats.flush_errors, 0);
  world.check_all_readable();
}

TEST(directory_that_cannot_be_created_is_a_clear_error) {
  World world;
  world.options.directory = "/proc/version/nvme";
  CHECK_THROWS(world.open(), "ENOTDIR");
}

TEST(options_are_refused_when_they_cannot_work) {
  World world;
  world.options.capacity_bytes = 3 << 20;
  CHECK_THROWS(world.open(), "nvme_capacity");
  world.options.capacity_bytes = 8 << 20;
  world.options.segment_bytes = 100000;
  CHECK_THROWS(world.open(), "segment_bytes");
  world.options.segment_bytes = 1 << 16;
  world.options.capacity_bytes = 1ull << 40;
  CHECK_THROWS(world.open(), "segment_bytes");
}

TEST(pages_go_on_being_read_while_writes_fail_for_ever) {
  World world;
  world.open();
  world.append_all(0, 60);
  world.faults->add(failing(IoKind::write, EIO));
  world.faults->add(failing(IoKind::sync, EIO));
  auto random = check::random("reads beside failures");
  for (uint64_t round = 0; round < 200; ++round) {
    world.append(1000 + round);
    world.clock.advance_ns(kSecondNs);
    const uint64_t number = random() % 60;
    if (const auto found = world.index.find(number); found != world.index.end())
      CHECK(world.read(number, found->second));
  }
}
