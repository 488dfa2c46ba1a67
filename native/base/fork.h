// What belongs to one process and not to its forked children: descriptors that carry locks, and
// mappings that the child does not have (MADV_DONTFORK).
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace kvw {

// Forks that this process is a child of, since the first call in an ancestor. One relaxed load.
uint64_t fork_count();

// A descriptor that a forked child closes before it runs any other code: a copy of a session's lock
// must die with the session's owner. Movable, not thread-safe.
class ParentFd {
 public:
  ParentFd() = default;
  explicit ParentFd(int fd);  // takes ownership
  ParentFd(ParentFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), forks_(other.forks_) {}
  ParentFd& operator=(ParentFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      forks_ = other.forks_;
    }
    return *this;
  }
  ParentFd(const ParentFd&) = delete;
  ParentFd& operator=(const ParentFd&) = delete;
  ~ParentFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

  // recvmsg without waiting; the descriptors that come along are enlisted before any fork can copy
  // them. Returns what recvmsg returns.
  static ssize_t receive(int socket, msghdr& header, std::vector<ParentFd>& received);

 private:
  int fd_ = -1;
  uint64_t forks_ = 0;
};

}  // namespace kvw
