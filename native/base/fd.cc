#include "base/fd.h"

#include <cerrno>
#include <string>

#include "base/dumps.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/huge_pages.h"

namespace kvw {

namespace {

void* map_shared(int fd, size_t bytes, int protection) {
  void* wanted = bytes < kHugePageBytes ? nullptr : reserve_for_huge_pages(bytes);
  if (wanted != nullptr) {
    void* mapped = ::mmap(wanted, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped != MAP_FAILED) return mapped;
    ::munmap(wanted, reserved_bytes(bytes));
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
  leave_out_of_dumps(mapped, bytes);
  guard_ = guard(data_, bytes, writable);
}

void Mapping::reset() {
  if (guard_ != nullptr) unguard(std::exchange(guard_, nullptr));
  if (data_ != nullptr && forks_ == fork_count()) ::munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
}

}  // namespace kvw
