// Owners of what the kernel lends: file descriptors and mappings. Not thread-safe; movable.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/lost_pages.h"

namespace kvw {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// A shared mapping of a whole file; at an address that suits huge pages, if it is large enough for
// one (the kernel aligns files on tmpfs only where it may choose huge pages itself). Children of a
// fork do not inherit it: a forked engine must not touch the warehouse through its parent's
// session, and its destructors must not unmap what the child has put at the same address since.
// Pages that the file has lost read as zeros (lost_pages.h).
class Mapping {
 public:
  Mapping() = default;
  // Throws Error (storage) when the kernel refuses.
  Mapping(int fd, size_t bytes, bool writable);
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        forks_(other.forks_),
        guard_(std::exchange(other.guard_, nullptr)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    if (this != &other) {
      reset();
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
      forks_ = other.forks_;
      guard_ = std::exchange(other.guard_, nullptr);
    }
    return *this;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { reset(); }

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }
  // Whether something was read or written here that the file does not have. Asked after the
  // access that matters. One relaxed load.
  bool lost() const {
    return guard_ != nullptr && guard_->lost.load(std::memory_order_relaxed) > 0;
  }
  void reset();

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  uint64_t forks_ = 0;
  GuardedRange* guard_ = nullptr;
};

}  // namespace kvw
