// Operations on memory that io_uring was told of: the same bytes as without, and as without where
// it is refused.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/fd.h"
#include "base/huge_pages.h"
#include "io/engines.h"
#include "io/registered_memory.h"
#include "nvme/aligned_buffer.h"
#include "tests/check.h"
#include "tests/io_calls.h"

#if defined(KVW_HAVE_LIBURING)
#include <liburing.h>
#endif

using namespace kvw;
using kvw::nvme::AlignedBuffer;

namespace {

constexpr uint64_t kRegion = 1ull << 20;

// Shared memory, as an arena is, seen twice.
struct Memory {
  explicit Memory(uint64_t bytes) : fd(::memfd_create("test", MFD_CLOEXEC)) {
    CHECK_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
    mapped = Mapping(fd.get(), bytes, true);
    seen = Mapping(fd.get(), bytes, true);
  }
  std::span<std::byte> part(uint64_t offset, uint64_t bytes) const {
    return {mapped.data() + offset, bytes};
  }

  Fd fd;
  Mapping mapped, seen;
};

void fill(std::span<std::byte> bytes, std::mt19937_64& random) {
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {  // a number has eight bytes
    const uint64_t number = random();
    std::memcpy(bytes.data() + at, &number, std::min(sizeof number, bytes.size() - at));
  }
}

// Null, and a line that says why, where this system registers nothing.
std::unique_ptr<IoEngine> registering(std::span<std::byte> memory, unsigned depth = 4) {
  std::string why;
  auto engine = make_uring_engine(depth, why);
  if (engine != nullptr) {
    const int error = engine->register_memory(memory);
    if (error == 0) return engine;
    // Anything else is a bug and no property of the system.
    CHECK(error == EOPNOTSUPP || error == ENOMEM || error == EPERM);
    why = std::strerror(error);
  }
  std::printf("SKIPPED, not a pass: memory cannot be registered here: %s\n", why.c_str());
  return nullptr;
}

iovec piece(std::span<std::byte> bytes) { return {bytes.data(), bytes.size()}; }

// Two regions of these bytes: headers beside a region and in it, pieces of both, and more beside it
// than fits. Pieces in it have up to 8 times `piece_bytes`.
void check_moved_right(const Memory& memory, uint64_t region, uint64_t piece_bytes) {
  const auto engine = registering(memory.part(0, region));
  if (engine == nullptr) return;
  CHECK_EQ(engine->register_memory(memory.part(region, region)), 0);
  const AlignedBuffer beside(4 * RegisteredMemory::kBounceBytes);
  const Fd file = temporary_file();
  auto random = check::random("beside");
  const auto all_of = [&](bool in_memory) {
    return in_memory ? memory.part(0, 2 * region) : beside.span();
  };
  for (int round = 0; round < 300; ++round) {
    std::vector<iovec> pieces;
    std::vector<std::byte> expected;
    const uint64_t home = random() % 2 * region;  // most rounds stay in one region
    const bool strays = random() % 8 == 0;
    uint64_t at = 0, beside_at = 0;
    for (uint64_t left = 1 + random() % 12; left > 0; --left) {
      const bool in_memory = random() % 2 == 0;
      const uint64_t bytes = (1 + random() % 8) * (in_memory ? piece_bytes : kBlockBytes);
      uint64_t& next = in_memory ? at : beside_at;
      const uint64_t from = in_memory ? (strays ? random() % 2 * region : home) + at : beside_at;
      if (from + bytes > all_of(in_memory).size()) break;
      pieces.push_back(piece(all_of(in_memory).subspan(from, bytes)));
      next += bytes;
    }
    if (pieces.empty()) continue;
    for (const iovec& each : pieces)
      fill({static_cast<std::byte*>(each.iov_base), each.iov_len}, random);
    for (const iovec& each : pieces) {
      const auto* begin = static_cast<const std::byte*>(each.iov_base);
      expected.insert(expected.end(), begin, begin + each.iov_len);
    }
    CHECK_EQ(run_one(*engine, {IoKind::write, file.get(), 8192, pieces, 1}), expected.size());
    std::vector<std::byte> there(expected.size());
    CHECK_EQ(::pread(file.get(), there.data(), there.size(), 8192), there.size());
    CHECK(there == expected);
    for (const iovec& each : pieces) std::memset(each.iov_base, 0, each.iov_len);
    CHECK_EQ(run_one(*engine, {IoKind::read, file.get(), 8192, pieces, 2}), expected.size());
    std::vector<std::byte> back;
    for (const iovec& each : pieces) {
      const auto* begin = static_cast<const std::byte*>(each.iov_base);
      back.insert(back.end(), begin, begin + each.iov_len);
    }
    CHECK(back == expected);
  }
}

}  // namespace

TEST(registered_memory_is_moved_by_the_pages_that_it_had) {
  Memory memory(kRegion);
  const auto engine = registering(memory.part(0, kRegion));
  if (engine == nullptr) return;
  // What is at the addresses now is something else, so only what the ring holds can be meant.
  void* other = ::mmap(memory.mapped.data(), kRegion, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  CHECK(other == memory.mapped.data());
  const Fd file = temporary_file();
  std::vector<std::byte> data(kRegion);
  auto random = check::random("registered");
  fill(data, random);
  CHECK_EQ(::pwrite(file.get(), data.data(), data.size(), 0), kRegion);
  CHECK_EQ(run_one(*engine, {IoKind::read, file.get(), 0, {piece(memory.part(0, kRegion))}, 1}),
           kRegion);
  CHECK(std::memcmp(memory.seen.data(), data.data(), kRegion) == 0);
  CHECK(memory.mapped.data()[0] == std::byte{} && memory.mapped.data()[kRegion - 1] == std::byte{});
}

TEST(registered_memory_is_moved_right_with_whatever_lies_beside_it) {
  check_moved_right(Memory(2 * kRegion), kRegion, kBlockBytes);
}

// The kernel keeps it by its huge pages then, and pieces end within and go across them.
TEST(registered_huge_pages_are_moved_right_with_whatever_lies_beside_them) {
  constexpr uint64_t kLarge = 2 * kHugePageBytes;
  const Memory memory(2 * kLarge);
  take_huge_pages(memory.fd.get(), 0, 2 * kLarge);
  check_moved_right(memory, kLarge, 37 * kBlockBytes);
}

// A region that begins and ends within a huge page.
TEST(registered_part_of_huge_pages_is_moved_right) {
  constexpr uint64_t kOdd = kHugePageBytes - 3 * kBlockBytes;
  const Memory memory(2 * kHugePageBytes);
  take_huge_pages(memory.fd.get(), 0, 2 * kHugePageBytes);
  check_moved_right(memory, kOdd, 11 * kBlockBytes);
}

// With one operation there is nothing behind its bounce memory: the kernel would refuse it.
TEST(operation_with_more_beside_the_region_than_its_bounce_memory_holds_goes_unregistered) {
  Memory memory(kRegion);
  const auto engine = registering(memory.part(0, kRegion), 1);
  if (engine == nullptr) return;
  const AlignedBuffer beside(RegisteredMemory::kBounceBytes + kBlockBytes);
  const Fd file = temporary_file();
  const uint64_t bytes = beside.bytes() + kBlockBytes;
  const std::vector<iovec> pieces{piece(beside.span()), piece(memory.part(0, kBlockBytes))};
  std::memset(beside.data(), 3, beside.bytes());
  std::memset(memory.mapped.data(), 4, kBlockBytes);
  CHECK_EQ(run_one(*engine, {IoKind::write, file.get(), 0, pieces, 1}), bytes);
  std::vector<std::byte> there(bytes);
  CHECK_EQ(::pread(file.get(), there.data(), bytes, 0), bytes);
  CHECK(there[beside.bytes() - 1] == std::byte{3} && there[beside.bytes()] == std::byte{4});
}

#if defined(KVW_HAVE_LIBURING)
// For a kernel that takes longer with each region.
TEST(nothing_more_is_registered_after_a_region_that_took_too_long) {
  const Memory memory(2 * kRegion);
  if (registering(memory.part(0, kRegion)) == nullptr) return;
  io_uring ring{};
  CHECK_EQ(io_uring_queue_init(4, &ring, 0), 0);
  RegisteredMemory registered(4, 0);
  CHECK_EQ(registered.add(ring, memory.part(0, kRegion)), 0);
  CHECK_EQ(registered.add(ring, memory.part(kRegion, kRegion)), ETIME);
  CHECK_EQ(registered.bytes(), kRegion);
  const iovec there = piece(memory.part(0, kRegion)), not_there = piece(memory.part(kRegion, 1));
  CHECK(registered.place(0, {&there, 1}, false).has_value());
  CHECK(!registered.place(1, {&not_there, 1}, false).has_value());
  io_uring_queue_exit(&ring);
}
#endif

TEST(piece_across_two_regions_goes_unregistered) {
  Memory memory(2 * kRegion);
  const auto engine = registering(memory.part(0, kRegion));
  if (engine == nullptr) return;
  CHECK_EQ(engine->register_memory(memory.part(kRegion, kRegion)), 0);
  const Fd file = temporary_file();
  const auto across = memory.part(kRegion - kBlockBytes, 2 * kBlockBytes);
  auto random = check::random("across");
  fill(across, random);
  CHECK_EQ(run_one(*engine, {IoKind::write, file.get(), 0, {piece(across)}, 1}), across.size());
  std::vector<std::byte> there(across.size());
  CHECK_EQ(::pread(file.get(), there.data(), there.size(), 0), there.size());
  CHECK(std::memcmp(there.data(), across.data(), there.size()) == 0);
}

TEST(bounced_reads_in_flight_at_once_do_not_mix) {
  Memory memory(kRegion);
  const auto engine = registering(memory.part(0, kRegion));
  if (engine == nullptr) return;
  const Fd file = temporary_file();
  std::vector<std::byte> data(4 * 2 * kBlockBytes);
  auto random = check::random("mix");
  fill(data, random);
  CHECK_EQ(::pwrite(file.get(), data.data(), data.size(), 0), data.size());
  const AlignedBuffer headers(4 * kBlockBytes);
  for (uint64_t i = 0; i < 4; ++i)
    engine->submit({IoKind::read,
                    file.get(),
                    i * 2 * kBlockBytes,
                    {piece(headers.part(i * kBlockBytes, kBlockBytes)),
                     piece(memory.part(i * kBlockBytes, kBlockBytes))},
                    i});
  finish_all(*engine);
  for (uint64_t i = 0; i < 4; ++i) {
    const std::byte* record = data.data() + i * 2 * kBlockBytes;
    CHECK(std::memcmp(headers.data() + i * kBlockBytes, record, kBlockBytes) == 0);
    CHECK(std::memcmp(memory.mapped.data() + i * kBlockBytes, record + kBlockBytes, kBlockBytes) ==
          0);
  }
}

TEST(registered_read_that_meets_the_end_of_the_file_brings_what_there_is) {
  Memory memory(kRegion);
  const auto engine = registering(memory.part(0, kRegion));
  if (engine == nullptr) return;
  const Fd file = temporary_file();
  std::vector<std::byte> data(kBlockBytes / 2);
  auto random = check::random("end");
  fill(data, random);
  CHECK_EQ(::pwrite(file.get(), data.data(), data.size(), 0), data.size());
  const AlignedBuffer header(kBlockBytes);
  std::memset(header.data(), 0x55, kBlockBytes);
  const std::vector<iovec> pieces{piece(header.span()), piece(memory.part(0, kBlockBytes))};
  CHECK_EQ(run_one(*engine, {IoKind::read, file.get(), 0, pieces, 1}), data.size());
  CHECK(std::memcmp(header.data(), data.data(), data.size()) == 0);
  CHECK(header.data()[data.size()] == std::byte{0x55});
}

TEST(engine_refuses_to_register_what_is_not_shared_memory_and_moves_it_all_the_same) {
  for (const char* name : {"pread", "auto"}) {
    const auto engine = make_io_engine(name, 2);
    const AlignedBuffer data(kBlockBytes);
    CHECK(engine->register_memory(data.span()) != 0);
    const Fd file = temporary_file();
    std::memset(data.data(), 7, kBlockBytes);
    CHECK_EQ(run_one(*engine, {IoKind::write, file.get(), 0, {piece(data.span())}, 1}),
             kBlockBytes);
    std::memset(data.data(), 0, kBlockBytes);
    CHECK_EQ(run_one(*engine, {IoKind::read, file.get(), 0, {piece(data.span())}, 2}), kBlockBytes);
    CHECK(data.data()[kBlockBytes - 1] == std::byte{7});
  }
}

// As in a container with the usual limit and without CAP_IPC_LOCK.
TEST(engine_goes_on_without_when_the_limit_of_locked_memory_is_too_low) {
  Memory memory(kRegion);
  const Fd file = temporary_file();
  const pid_t child = ::fork();
  if (child == 0) {
    // Enough for a ring, which counts since Linux 6.14, and too little for the memory.
    const rlimit little{kRegion / 2, kRegion / 2};
    // The child of a fork has no mappings of the warehouse's kind; it makes its own.
    void* own = ::mmap(nullptr, kRegion, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd.get(), 0);
    if (own == MAP_FAILED || ::setrlimit(RLIMIT_MEMLOCK, &little) != 0) ::_exit(2);
    if (::geteuid() == 0 && ::seteuid(65534) != 0) ::_exit(3);
    const auto engine = make_io_engine("auto", 2);
    if (engine->name() != std::string_view(probe_io_engine())) ::_exit(6);
    const std::span<std::byte> all(static_cast<std::byte*>(own), kRegion);
    if (engine->register_memory(all) == 0) ::_exit(4);
    std::memset(own, 9, kRegion);
    const bool good =
        run_one(*engine, {IoKind::write, file.get(), 0, {piece(all)}, 1}) == int64_t{kRegion};
    ::_exit(good ? 0 : 5);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  std::byte last{};
  CHECK_EQ(::pread(file.get(), &last, 1, kRegion - 1), 1);
  CHECK(last == std::byte{9});
}
