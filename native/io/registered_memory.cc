#include "io/registered_memory.h"

#if defined(KVW_HAVE_LIBURING)

#include <liburing.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "base/huge_pages.h"

namespace kvw {
namespace {

constexpr unsigned kMaxRegions = 1u << 14;  // of the kernel: IORING_MAX_REG_BUFFERS

std::byte* address_of(const iovec& piece) { return static_cast<std::byte*>(piece.iov_base); }

// Addresses for a while: what is mapped there is held by the ring, not by the mapping. They suit
// huge pages, which Linux 6.15 takes the places in for those of the addresses.
class Window {
 public:
  explicit Window(uint64_t bytes)
      : data_(static_cast<std::byte*>(reserve_for_huge_pages(bytes))), bytes_(bytes) {}
  ~Window() {
    if (data_ != nullptr) ::munmap(data_, reserved_bytes(bytes_));
  }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  std::byte* data() const { return data_; }

  // Shows shared memory a second time; an old size of 0 says so. 0 or an errno.
  int show(uint64_t offset, std::byte* memory, uint64_t bytes) {
    void* shown = ::mremap(memory, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, data_ + offset);
    return shown == MAP_FAILED ? errno : 0;
  }

 private:
  std::byte* data_;
  uint64_t bytes_;
};

}  // namespace

RegisteredMemory::RegisteredMemory(unsigned operations, uint64_t most_ns)
    : most_ns_(most_ns), placed_(operations) {}

bool RegisteredMemory::Region::holds(const iovec& piece) const {
  const std::byte* at = address_of(piece);
  return at >= begin && at < begin + bytes &&
         piece.iov_len <= static_cast<uint64_t>(begin + bytes - at);
}

int RegisteredMemory::open(io_uring& ring) {
  bounce_fd_.reset(::memfd_create("kvw-bounce", MFD_CLOEXEC));
  const uint64_t bytes = round_up(placed_.size() * kBounceBytes, kHugePageBytes);
  if (!bounce_fd_.valid() || ::ftruncate(bounce_fd_.get(), static_cast<off_t>(bytes)) != 0)
    return errno;
  try {
    bounce_ = Mapping(bounce_fd_.get(), bytes, true);
    take_huge_pages(bounce_fd_.get(), 0, bytes);
  } catch (const Error&) {
    return ENOMEM;
  }
  return -io_uring_register_buffers_sparse(&ring, kMaxRegions);
}

int RegisteredMemory::add(io_uring& ring, std::span<std::byte> memory) {
  if (refused_ != 0) return refused_;
  if (bounce_.data() == nullptr) {
    refused_ = open(ring);
    if (refused_ != 0) {
      bounce_.reset();
      return refused_;
    }
  }
  while (!memory.empty()) {
    const auto region = memory.first(std::min<uint64_t>(memory.size(), kMaxRegionBytes));
    if (const int error = add_region(ring, region); error != 0) return error;
    memory = memory.subspan(region.size());
  }
  return 0;
}

int RegisteredMemory::add_region(io_uring& ring, std::span<std::byte> memory) {
  if (slow_) return ETIME;
  if (regions_.size() >= kMaxRegions) return ENOSPC;
  Window window(memory.size() + bounce_.bytes());
  if (window.data() == nullptr) return errno;
  if (const int error = window.show(0, memory.data(), memory.size()); error != 0) return error;
  if (const int error = window.show(memory.size(), bounce_.data(), bounce_.bytes()); error != 0)
    return error;
  const auto buffer = static_cast<unsigned>(regions_.size());
  const iovec whole{window.data(), memory.size() + bounce_.bytes()};
  const uint64_t began_ns = thread_cpu_ns();
  const int done = io_uring_register_buffers_update_tag(&ring, buffer, &whole, nullptr, 1);
  if (done != 1) return done < 0 ? -done : EINVAL;
  slow_ = thread_cpu_ns() - began_ns > most_ns_;
  const Region region{memory.data(), memory.size(), window.data(), buffer};
  regions_.insert(std::ranges::upper_bound(regions_, region.begin, {}, &Region::begin), region);
  bytes_ += memory.size();
  return 0;
}

// Of the first piece that is in registered memory.
const RegisteredMemory::Region* RegisteredMemory::region_of(std::span<const iovec> pieces) const {
  for (const iovec& piece : pieces) {
    const auto behind = std::ranges::upper_bound(regions_, address_of(piece), {}, &Region::begin);
    if (behind != regions_.begin() && std::prev(behind)->holds(piece)) return &*std::prev(behind);
  }
  return nullptr;
}

std::optional<RegisteredMemory::Fixed> RegisteredMemory::place(unsigned operation,
                                                               std::span<const iovec> pieces,
                                                               bool is_write) {
  Placed& placed = placed_[operation];
  placed.pieces.clear();
  const Region* region = region_of(pieces);
  if (region == nullptr) return std::nullopt;
  placed.bounce = region->placed + region->bytes;
  uint64_t bounced = 0;
  for (const iovec& piece : pieces) {
    if (region->holds(piece)) {
      placed.pieces.push_back(
          {region->placed + (address_of(piece) - region->begin), piece.iov_len});
      continue;
    }
    if (bounced + piece.iov_len > kBounceBytes) {
      placed.pieces.clear();
      return std::nullopt;
    }
    const uint64_t at = operation * kBounceBytes + bounced;
    if (is_write) std::memcpy(bounce_.data() + at, piece.iov_base, piece.iov_len);
    placed.pieces.push_back({placed.bounce + at, piece.iov_len});
    bounced += round_up(piece.iov_len, kBlockBytes);
  }
  return Fixed{region->buffer, placed.pieces};
}

void RegisteredMemory::read_back(unsigned operation, std::span<const iovec> pieces,
                                 uint64_t bytes) const {
  const Placed& placed = placed_[operation];
  for (size_t i = 0; i < placed.pieces.size() && bytes > 0; ++i) {
    const uint64_t came = std::min<uint64_t>(bytes, pieces[i].iov_len);
    bytes -= came;
    const std::byte* at = address_of(placed.pieces[i]);
    if (at < placed.bounce) continue;
    std::memcpy(pieces[i].iov_base, bounce_.data() + (at - placed.bounce), came);
  }
}

}  // namespace kvw

#endif
