// Memory that io_uring holds for as long as the ring lives, so that an operation on it need not
// find and hold its pages anew: for the pages of the arena, two thirds of what the kernel does for
// a read. Best effort: where it is refused (RLIMIT_MEMLOCK, a kernel before 6.15), or an operation
// does not fit, operations go as they would have gone without it.
//
// One operation may touch one region only, and a record has a header of its own in other memory. So
// each region is registered with a bounce area behind it, the same memory for all regions; what of
// an operation lies outside of the region and is small goes through it.
//
// The kernel keeps a region by its huge pages where all of it is in huge pages, so the bounce area
// is too: with one piece for each 4 KiB a read of 2 MiB went to the disk as three, and took twice
// the processor's time.
//
// Used by the thread that uses the ring. The memory must stay mapped, and keep its very pages (no
// holes punched), until the ring is gone.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/fd.h"

struct io_uring;

namespace kvw {

// IORING_OP_READV_FIXED and IORING_OP_WRITEV_FIXED of Linux 6.15, younger than liburing's headers.
inline constexpr uint8_t kReadvFixed = 60, kWritevFixed = 61;

class RegisteredMemory {
 public:
  // Bounce memory of one operation: the headers of a batch of pages of 256 KiB, with room to spare.
  static constexpr uint64_t kBounceBytes = 64ull << 10;
  // Of a region; the kernel takes a GiB at most.
  static constexpr uint64_t kMaxRegionBytes = 256ull << 20;

  // The kernel compares the huge pages of a region with every piece that it holds. Of regions in
  // huge pages these are few. But where some are in small pages, because the host had too few huge
  // ones, each takes longer than the one before, minutes in the end: once one has taken so much of
  // the processor, no more are registered.
  static constexpr uint64_t kMostNs = 100'000'000;

  // operations: in flight at most, numbered from 0.
  explicit RegisteredMemory(unsigned operations, uint64_t most_ns = kMostNs);

  // Registers memory that begins and ends at multiples of 4 KiB, mapped shared; in regions, each of
  // which is usable at once. 0, or the errno of the first that was refused; ETIME after one that
  // took too long. Blocks while the kernel takes hold of it: tens of milliseconds a GiB.
  int add(io_uring& ring, std::span<std::byte> memory);
  uint64_t bytes() const { return bytes_; }

  // The same transfer in registered memory, and which buffer that is. Nothing if it does not fit.
  // The pieces stay valid until the next call for the same operation. Bounced pieces of a write are
  // copied now, those of a read by read_back().
  struct Fixed {
    unsigned buffer;
    std::span<const iovec> pieces;
  };
  std::optional<Fixed> place(unsigned operation, std::span<const iovec> pieces, bool is_write);
  // The first `bytes` of a read have arrived: copies what was bounced to `pieces`, which are those
  // that place() was called with. Nothing if the operation was not placed.
  void read_back(unsigned operation, std::span<const iovec> pieces, uint64_t bytes) const;

 private:
  struct Region {
    std::byte* begin;
    uint64_t bytes;
    std::byte* placed;  // where the kernel knows it, with the bounce area behind: only an address
    unsigned buffer;

    bool holds(const iovec& piece) const;
  };
  struct Placed {
    std::vector<iovec> pieces;    // empty: the operation was not placed
    std::byte* bounce = nullptr;  // where its region's bounce area begins
  };

  int open(io_uring& ring);
  int add_region(io_uring& ring, std::span<std::byte> memory);
  const Region* region_of(std::span<const iovec> pieces) const;

  const uint64_t most_ns_;
  bool slow_ = false;
  int refused_ = 0;  // why nothing is registered at all
  Mapping bounce_;   // kBounceBytes for each operation
  Fd bounce_fd_;
  std::vector<Region> regions_;  // by begin
  std::vector<Placed> placed_;   // by operation
  uint64_t bytes_ = 0;
};

}  // namespace kvw
