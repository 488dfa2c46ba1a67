// The disk thread is fair: whichever of reads and writes is fewer in flight goes next, whatever the
// length of the other's line.
#include <sys/syscall.h>

#include <fstream>
#include <future>
#include <thread>

#include "tests/descriptor_limit.h"
#include "tests/disk_world.h"

using namespace kvw;
using namespace kvw::nvme;

namespace {

std::vector<std::string>& synced() {
  static std::vector<std::string> paths;
  return paths;
}

}  // namespace

// In the place of the C library's; the disk thread's go another way.
extern "C" int fsync(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  synced().push_back(std::filesystem::read_symlink(link).string());
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace {

size_t count_of(const std::vector<IoKind>& order, IoKind kind, size_t from, size_t to) {
  return static_cast<size_t>(std::count(order.begin() + static_cast<std::ptrdiff_t>(from),
                                        order.begin() + static_cast<std::ptrdiff_t>(to), kind));
}

void check_fair(DiskJob::Kind crowd, DiskJob::Kind few, IoKind few_kind) {
  DiskWorld bench;
  bench.post(crowd, 100);
  const auto first = bench.engine->order_when(6);
  CHECK_EQ(first.size(), 6);  // two of eight places stay free for the other kind
  bench.post(few, 10);
  auto order = bench.engine->order_when(8);
  CHECK_EQ(count_of(order, few_kind, 6, 8), 2);
  bench.engine->allow(16);
  order = bench.engine->order_when(24);
  CHECK(count_of(order, few_kind, 6, 24) >= 8);
  bench.engine->allow(1000);
  while (bench.ended[crowd] < 100 || bench.ended[few] < 10) {
    pollfd ready{bench.disk->event_fd(), POLLIN, 0};
    CHECK_EQ(::poll(&ready, 1, 60000), 1);
    bench.disk->deliver();
  }
}

}  // namespace

// Stopped while the first of three was being registered, the other two were never heard of again.
TEST(memory_that_waits_to_be_registered_is_cancelled_when_the_disk_stops) {
  DiskWorld bench;
  std::promise<void> posted;
  std::thread stopper;
  unsigned calls = 0;
  bench.engine->on_register = [&] {
    if (++calls == 1) posted.get_future().wait();  // so that all others wait in one line
    if (calls == 2)
      bench.engine->until_woken_by([&] { stopper = std::thread([&] { bench.disk->stop(); }); });
  };
  unsigned done = 0, cancelled = 0;
  for (int i = 0; i < 4; ++i) {
    auto job = std::make_unique<DiskJob>();
    job->kind = DiskJob::Kind::register_memory;
    job->buffer = AlignedBuffer(kBlockBytes);
    job->add_piece(job->buffer.data(), kBlockBytes);
    job->done = [&](int error) { ++(error == 0 ? done : cancelled); };
    bench.disk->post(std::move(job));
  }
  posted.set_value();
  while (done + cancelled < 4) {
    pollfd ready{bench.disk->event_fd(), POLLIN, 0};
    CHECK_EQ(::poll(&ready, 1, 60000), 1);
    bench.disk->deliver();
  }
  stopper.join();
  CHECK_EQ(done, 2);
  CHECK_EQ(cancelled, 2);
}

TEST(memory_is_registered_beside_a_device_that_stands_and_each_hears_its_own_answer) {
  DiskWorld bench;
  bench.post(DiskJob::Kind::read, 8);
  bench.engine->order_when(6);
  std::vector<int> answers;
  for (const uint64_t blocks : {1, 2, 1}) {
    auto job = std::make_unique<DiskJob>();
    job->kind = DiskJob::Kind::register_memory;
    job->buffer = AlignedBuffer(blocks * kBlockBytes);
    job->add_piece(job->buffer.data(), blocks * kBlockBytes);
    job->done = [&](int error) { answers.push_back(error); };
    bench.disk->post(std::move(job));
  }
  while (answers.size() < 3) {
    pollfd ready{bench.disk->event_fd(), POLLIN, 0};
    CHECK_EQ(::poll(&ready, 1, 60000), 1);
    bench.disk->deliver();
  }
  CHECK_EQ(answers[0], 0);
  CHECK_EQ(answers[1], ENOMEM);
  CHECK_EQ(answers[2], 0);
}

TEST(reads_do_not_starve_behind_a_line_of_writes) {
  check_fair(DiskJob::Kind::write, DiskJob::Kind::read, IoKind::read);
}

TEST(writes_do_not_starve_behind_a_line_of_reads) {
  check_fair(DiskJob::Kind::read, DiskJob::Kind::write, IoKind::write);
}

TEST(jobs_that_wait_are_cancelled_and_submitted_ones_completed_when_the_disk_stops) {
  DiskWorld bench;
  unsigned done = 0, cancelled = 0;
  for (int i = 0; i < 20; ++i) {
    auto job = std::make_unique<DiskJob>();
    job->kind = DiskJob::Kind::write;
    job->buffer = AlignedBuffer(kBlockBytes);
    job->add_piece(job->buffer.data(), kBlockBytes);
    job->done = [&](int error) { ++(error == 0 ? done : cancelled); };
    bench.disk->post(std::move(job));
  }
  bench.engine->order_when(6);
  bench.engine->allow(6);
  bench.engine->allow(1000);
  bench.disk->stop();
  bench.disk->deliver();
  CHECK_EQ(done + cancelled, 20);
  CHECK(done >= 6);
}

// The device's queue must not run dry because the processor digests what came before.
TEST(what_completes_during_a_check_is_replaced_before_the_next_check) {
  DiskWorld bench;
  unsigned checked = 0, done = 0;
  for (int i = 0; i < 12; ++i) {
    auto job = std::make_unique<DiskJob>();
    job->kind = DiskJob::Kind::read;
    job->buffer = AlignedBuffer(kBlockBytes);
    job->add_piece(job->buffer.data(), kBlockBytes);
    job->check = [&] {
      ++checked;
      if (checked == 1) bench.engine->allow(1);
      // Six were in flight, two completed, and then a third.
      if (checked == 2) CHECK_EQ(bench.engine->order_when(9).size(), 9);
    };
    job->done = [&](int error) {
      CHECK_EQ(error, 0);
      ++done;
    };
    bench.disk->post(std::move(job));
  }
  bench.engine->order_when(6);
  bench.engine->allow(2);
  bench.engine->order_when(9);
  bench.engine->allow(1000);
  while (done < 12) {
    pollfd ready{bench.disk->event_fd(), POLLIN, 0};
    CHECK_EQ(::poll(&ready, 1, 60000), 1);
    bench.disk->deliver();
  }
  CHECK_EQ(checked, 12);
}

// Those behind the first are told in groups; a device that gives no more must not keep them back.
TEST(reads_that_have_come_are_told_though_the_device_gives_no_more) {
  for (const bool grouped : {false, true}) {
    DiskWorld bench;
    bench.post(DiskJob::Kind::read, 6, kBlockBytes, grouped);
    bench.engine->order_when(6);
    for (const unsigned come : {1, 2, 3, 5}) {
      bench.engine->allow(come - bench.ended[DiskJob::Kind::read]);
      bench.deliver_until(DiskJob::Kind::read, come);
    }
  }
}

// Eight large pages that share the disk end together, and the first is usable no sooner than all.
TEST(few_large_pages_are_under_way_at_once_and_one_of_any_size_is) {
  DiskWorld bench;
  bench.post(DiskJob::Kind::read, 6, 10 << 20);
  for (unsigned come = 1; come <= 6; ++come) {
    bench.engine->order_when(std::min(6u, come + 3));
    bench.engine->allow(1);
    bench.deliver_until(DiskJob::Kind::read, come);
  }
  CHECK_EQ(bench.engine->most_held(), 4);  // 40 MiB: below 32 another one begins
  bench.post(DiskJob::Kind::read, 1, 48 << 20);
  bench.engine->allow(1);
  bench.deliver_until(DiskJob::Kind::read, 7);
}

// A flush or a write that waited for reads would hold up whoever waits for it.
TEST(write_that_has_come_is_told_beside_reads_that_have_not) {
  DiskWorld bench;
  bench.post(DiskJob::Kind::write, 1);
  bench.engine->order_when(1);
  bench.post(DiskJob::Kind::read, 6);
  bench.engine->order_when(7);
  bench.engine->allow(1);
  bench.deliver_until(DiskJob::Kind::write, 1);
  CHECK_EQ(bench.ended[DiskJob::Kind::read], 0);
}

// Measured: a new segment file waited 225 ms for the journal, and no read was begun meanwhile.
TEST(reads_and_writes_go_on_while_a_file_is_being_made) {
  std::mutex mutex;
  std::condition_variable changed;
  bool slow = false, reached = false, let = false;
  DiskWorld bench([&](int fd, uint64_t bytes) {
    std::unique_lock lock(mutex);
    if (slow) {
      reached = true;
      changed.notify_all();
      CHECK(changed.wait_for(lock, std::chrono::seconds(60), [&] { return let; }));
    }
    return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  });
  slow = true;
  bool made = false;
  auto job = std::make_unique<DiskJob>();
  job->kind = DiskJob::Kind::prepare;
  job->segment = 1;
  job->bytes = 1 << 20;
  job->done = [&](int error) {
    CHECK_EQ(error, 0);
    made = true;
  };
  bench.disk->post(std::move(job));
  {
    std::unique_lock lock(mutex);
    CHECK(changed.wait_for(lock, std::chrono::seconds(60), [&] { return reached; }));
  }
  bench.post(DiskJob::Kind::read, 10);
  bench.post(DiskJob::Kind::write, 10);
  bench.engine->allow(1000);
  const auto deliver_until = [&](const std::function<bool()>& over) {
    while (!over()) {
      pollfd ready{bench.disk->event_fd(), POLLIN, 0};
      CHECK_EQ(::poll(&ready, 1, 60000), 1);
      bench.disk->deliver();
    }
  };
  deliver_until([&] {
    return bench.ended[DiskJob::Kind::read] == 10 && bench.ended[DiskJob::Kind::write] == 10;
  });
  CHECK(!made);
  {
    const std::lock_guard lock(mutex);
    let = true;
  }
  changed.notify_all();
  deliver_until([&] { return made; });
}

TEST(what_finds_no_descriptor_waits_for_one) {
  DiskWorld bench;
  {
    const DescriptorLimit none(DescriptorLimit::at_present(0));
    bench.post(DiskJob::Kind::write, 2);
    bench.post(DiskJob::Kind::read, 2);
    while (bench.files.shortages() == 0) std::this_thread::yield();
  }
  bench.engine->allow(1000);
  bench.deliver_until(DiskJob::Kind::write, 2);
  bench.deliver_until(DiskJob::Kind::read, 2);
}

TEST(what_waits_for_a_descriptor_is_cancelled_when_the_disk_stops) {
  DiskWorld bench;
  const DescriptorLimit none(DescriptorLimit::at_present(0));
  std::vector<int> errors;
  for (const DiskJob::Kind kind : {DiskJob::Kind::sync, DiskJob::Kind::prepare}) {
    auto job = std::make_unique<DiskJob>();
    job->kind = kind;
    job->bytes = kBlockBytes;
    job->done = [&](int error) { errors.push_back(error); };
    bench.disk->post(std::move(job));
  }
  while (bench.files.shortages() < 2) std::this_thread::yield();
  bench.disk->stop();
  bench.disk->deliver();
  CHECK(errors == std::vector({ECANCELED, ECANCELED}));
}

TEST(descriptors_that_are_kept_for_later_are_given_up_for_a_new_file) {
  DiskWorld bench;
  bench.engine->allow(1000);
  bench.post(DiskJob::Kind::write, 1);
  bench.deliver_until(DiskJob::Kind::write, 1);
  const DescriptorLimit none(DescriptorLimit::at_present(0));
  auto job = std::make_unique<DiskJob>();
  job->kind = DiskJob::Kind::prepare;
  job->segment = 1;
  job->bytes = 1 << 20;
  job->done = [&](int error) {
    CHECK_EQ(error, 0);
    ++bench.ended[DiskJob::Kind::prepare];
  };
  bench.disk->post(std::move(job));
  bench.deliver_until(DiskJob::Kind::prepare, 1);
}

TEST(descriptors_that_are_kept_for_later_are_a_quarter_of_the_limit) {
  const TempDir dir;
  SegmentFiles files(dir.path(), nullptr);
  for (uint32_t segment = 0; segment < 60; ++segment)
    CHECK_EQ(files.prepare(segment, kBlockBytes), 0);
  const DescriptorLimit few(200);
  for (uint32_t segment = 0; segment < 60; ++segment) {
    CHECK(files.acquire(segment) >= 0);
    files.release(segment);
  }
  unsigned kept = 0;
  while (files.close_idle()) ++kept;
  CHECK_EQ(kept, 50);
}

// Killed between making a file and syncing its directory.
TEST(files_that_are_found_are_there_for_good_before_they_are_used) {
  const TempDir dir;
  std::filesystem::create_directory(dir.path() + "/segments");
  std::ofstream(dir.path() + "/segments/probe") << "x";
  std::ofstream(dir.path() + "/segments/00000001.seg") << "x";
  synced().clear();
  const SegmentFiles files(dir.path(), nullptr);
  CHECK_EQ(files.write_error(), 0);
  CHECK(std::ranges::count(synced(), dir.path() + "/segments") > 0);
  CHECK(std::ranges::count(synced(), dir.path()) > 0);
}
