#include "base/fd.h"

#include <cerrno>
#include <string>

#include "base/error.h"
#include "base/fork.h"
#include "base/types.h"

namespace kvw {

namespace {

constexpr size_t kLargestKernelPageBytes = 64 << 10;  // of 64-bit ARM

// An address that huge pages of the file can be mapped at, and room behind it: a reservation, which
// the caller's mapping replaces. Null: wherever the kernel likes.
void* reserve_for_huge_pages(size_t bytes) {
  const size_t needed = round_up(bytes, kLargestKernelPageBytes);
  if (bytes < kHugePageBytes) return nullptr;
  void* reserved =
      ::mmap(nullptr, needed + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(reserved);
  const size_t before = -reinterpret_cast<uintptr_t>(begin) % kHugePageBytes;
  if (before > 0) ::munmap(begin, before);
  ::munmap(begin + before + needed, kHugePageBytes - before);
  return begin + before;
}

void* map_shared(int fd, size_t bytes, int protection) {
  void* wanted = reserve_for_huge_pages(bytes);
  if (wanted != nullptr) {
    void* mapped = ::mmap(wanted, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped != MAP_FAILED) return mapped;
    ::munmap(wanted, round_up(bytes, kLargestKernelPageBytes));
  }
  return ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
}

}  // namespace

Mapping::Mapping(int fd, size_t bytes, bool writable) : bytes_(bytes), forks_(fork_count()) {
  void* mapped = map_shared(fd, bytes, PROT_READ | (writable ? PROT_WRITE : 0));
  if (mapped == MAP_FAILED)
    throw storage_error("cannot map " + std::to_string(bytes) + " bytes", errno);
  data_ = static_cast<std::byte*>(mapped);
  ::madvise(mapped, bytes, MADV_DONTFORK);
}

void Mapping::reset() {
  if (data_ != nullptr && forks_ == fork_count()) ::munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
}

}  // namespace kvw
