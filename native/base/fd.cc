#include "base/fd.h"

#include <cerrno>
#include <string>

#include "base/error.h"
#include "base/fork.h"

namespace kvw {

Mapping::Mapping(int fd, size_t bytes, bool writable) : bytes_(bytes), forks_(fork_count()) {
  const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
  void* mapped = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
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
