// Both engines keep the same promises; the double fails as it is told.
#include <fcntl.h>
#include <unistd.h>

#include <set>
#include <thread>

#include "base/fd.h"
#include "io/engines.h"
#include "io/faulty_engine.h"
#include "io/transfer.h"
#include "nvme/aligned_buffer.h"
#include "tests/check.h"
#include "tests/io_calls.h"

using namespace kvw;
using kvw::nvme::AlignedBuffer;

namespace {

std::vector<std::string> engines() {
  std::vector<std::string> names{"pread"};
  if (probe_io_engine() == std::string_view("io_uring")) names.push_back("io_uring");
  return names;
}

AlignedBuffer filled(size_t bytes, uint64_t seed) {
  AlignedBuffer buffer(bytes);
  std::mt19937_64 random(seed);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t word = random();
    std::memcpy(buffer.data() + i, &word, 8);
  }
  return buffer;
}

}  // namespace

TEST(engine_reads_back_what_it_wrote_in_pieces) {
  for (const auto& name : engines()) {
    const auto engine = make_io_engine(name, 4);
    CHECK_EQ(std::string(engine->name()), name);
    const Fd file = temporary_file();
    const auto data = filled(64 << 10, 1);
    std::vector<iovec> pieces;
    for (size_t at = 0; at < data.bytes(); at += 8192) pieces.push_back({data.data() + at, 8192});
    CHECK_EQ(run_one(*engine, {IoKind::write, file.get(), 4096, pieces, 1}), data.bytes());
    CHECK_EQ(run_one(*engine, {IoKind::sync, file.get(), 0, {}, 2}), 0);
    AlignedBuffer back(data.bytes());
    CHECK_EQ(run_one(*engine, {IoKind::read, file.get(), 4096, {{back.data(), back.bytes()}}, 3}),
             back.bytes());
    CHECK(std::memcmp(back.data(), data.data(), data.bytes()) == 0);
  }
}

TEST(engine_completes_every_operation_once_when_its_depth_is_full) {
  for (const auto& name : engines()) {
    const auto engine = make_io_engine(name, 8);
    const Fd file = temporary_file();
    const auto data = filled(4096 * 64, 2);
    std::set<uint64_t> seen;
    std::vector<IoDone> done;
    uint64_t next = 0;
    while (seen.size() < 64) {
      while (next < 64 && engine->in_flight() < engine->depth()) {
        engine->submit(
            {IoKind::write, file.get(), next * 4096, {{data.data() + next * 4096, 4096}}, next});
        ++next;
      }
      done.clear();
      engine->wait(done, 1000);
      for (const auto& each : done) {
        CHECK_EQ(each.result, 4096);
        CHECK(seen.insert(each.user).second);
      }
    }
    CHECK_EQ(engine->in_flight(), 0u);
  }
}

TEST(engine_reports_a_short_read_only_at_the_end_of_the_file) {
  for (const auto& name : engines()) {
    const auto engine = make_io_engine(name, 2);
    const Fd file = temporary_file();
    CHECK_EQ(::ftruncate(file.get(), 10000), 0);
    AlignedBuffer back(16 << 10);
    CHECK_EQ(run_one(*engine, {IoKind::read, file.get(), 0, {{back.data(), back.bytes()}}, 1}),
             10000);
    CHECK_EQ(run_one(*engine, {IoKind::read, file.get(), 20000, {{back.data(), 4096}}, 1}), 0);
  }
}

TEST(engine_reports_errno_when_the_kernel_refuses) {
  for (const auto& name : engines()) {
    const auto engine = make_io_engine(name, 2);
    AlignedBuffer data(4096);
    CHECK_EQ(run_one(*engine, {IoKind::write, -1, 0, {{data.data(), 4096}}, 1}), -EBADF);
    const Fd read_only(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
    CHECK_EQ(run_one(*engine, {IoKind::write, read_only.get(), 0, {{data.data(), 4096}}, 1}),
             -EBADF);
    CHECK_EQ(run_one(*engine, {IoKind::sync, -1, 0, {}, 1}), -EBADF);
  }
}

TEST(engine_moves_more_pieces_than_one_call_takes) {
  for (const auto& name : engines()) {
    const auto engine = make_io_engine(name, 2);
    const Fd file = temporary_file();
    const auto data = filled(3000 * 512, 3);
    std::vector<iovec> pieces;
    for (size_t i = 0; i < 3000; ++i) pieces.push_back({data.data() + i * 512, 512});
    CHECK_EQ(run_one(*engine, {IoKind::write, file.get(), 0, pieces, 1}), 3000 * 512);
    AlignedBuffer back(data.bytes());
    CHECK_EQ(::pread(file.get(), back.data(), 3000 * 512, 0), 3000 * 512);
    CHECK(std::memcmp(back.data(), data.data(), 3000 * 512) == 0);
  }
}

TEST(engine_wait_ends_when_another_thread_wakes_it) {
  for (const auto& name : engines()) {
    const auto engine = make_io_engine(name, 2);
    std::vector<IoDone> done;
    for (int round = 0; round < 50; ++round) {
      std::thread waker([&] { engine->wake(); });
      engine->wait(done, 60000);  // a lost wake-up shows as a test that takes a minute
      waker.join();
    }
    CHECK(done.empty());
  }
}

TEST(engine_waits_for_what_is_in_flight_when_it_is_destroyed) {
  for (const auto& name : engines()) {
    const Fd file = temporary_file();
    const auto data = filled(1 << 20, 4);
    {
      const auto engine = make_io_engine(name, 8);
      for (uint64_t i = 0; i < 8; ++i)
        engine->submit({IoKind::write, file.get(), i << 20, {{data.data(), data.bytes()}}, i});
    }
    AlignedBuffer back(1 << 20);
    CHECK_EQ(::pread(file.get(), back.data(), 1 << 20, 7 << 20), 1 << 20);
    CHECK(std::memcmp(back.data(), data.data(), data.bytes()) == 0);
  }
}

TEST(engine_name_is_refused_when_unknown) { CHECK_THROWS(make_io_engine("aio", 4), "io_engine"); }

TEST(transfer_continues_inside_a_piece_after_a_short_write) {
  AlignedBuffer data(8192);
  Transfer transfer({IoKind::write, 3, 100, {{data.data(), 4096}, {data.data() + 4096, 4096}}, 1});
  CHECK(!transfer.advance(5000));
  CHECK_EQ(transfer.offset(), 5100);
  CHECK_EQ(transfer.piece_count(), 1);
  CHECK(transfer.pieces()->iov_base == data.data() + 5000);
  CHECK_EQ(transfer.pieces()->iov_len, 3192);
  CHECK(!transfer.advance(-EINTR));
  CHECK(transfer.advance(3192));
  CHECK_EQ(transfer.result(), 8192);
}

TEST(transfer_gives_up_when_the_kernel_says_try_again_for_ever) {
  AlignedBuffer data(4096);
  Transfer transfer({IoKind::read, 3, 0, {{data.data(), 4096}}, 1});
  int rounds = 0;
  while (!transfer.advance(-EAGAIN)) CHECK(++rounds < 1000);
  CHECK_EQ(transfer.result(), -EAGAIN);
}

TEST(transfer_ends_short_when_a_direct_read_meets_the_end_inside_a_block) {
  AlignedBuffer data(8192);
  Transfer transfer({IoKind::read, 3, 0, {{data.data(), 8192}}, 1});
  CHECK(!transfer.advance(5000));
  CHECK(transfer.advance(-EINVAL));
  CHECK_EQ(transfer.result(), 5000);
}

TEST(faulty_engine_fails_the_operation_that_it_is_told_to) {
  const auto faults = std::make_shared<Faults>();
  const auto engine = make_faulty_engine(make_io_engine("pread", 4), faults);
  const Fd file = temporary_file();
  const auto data = filled(4096, 5);
  faults->add({IoKind::write, "kvw-io", 1, 1, ENOSPC, -1});
  const auto write = [&](uint64_t at) {
    return run_one(*engine, {IoKind::write, file.get(), at, {{data.data(), 4096}}, 1});
  };
  CHECK_EQ(write(0), 4096);
  CHECK_EQ(write(4096), -ENOSPC);
  CHECK_EQ(write(8192), 4096);
  CHECK_EQ(faults->struck(), 1);
}

TEST(faulty_engine_tears_a_write_and_reports_success) {
  const auto faults = std::make_shared<Faults>();
  const auto engine = make_faulty_engine(make_io_engine("pread", 4), faults);
  const Fd file = temporary_file();
  const auto data = filled(8192, 6);
  faults->add({IoKind::write, "", 0, 1, 0, 4096});
  CHECK_EQ(run_one(*engine, {IoKind::write, file.get(), 0, {{data.data(), 8192}}, 1}), 8192);
  AlignedBuffer back(8192);
  CHECK_EQ(::pread(file.get(), back.data(), 8192, 0), 4096);
}
