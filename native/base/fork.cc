#include "base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_set>

namespace kvw {

namespace {

std::atomic<uint64_t> g_forks{0};
std::mutex g_mutex;  // held across fork(), so that the child finds the set whole
std::unordered_set<int>& descriptors() {
  static auto* set = new std::unordered_set<int>();  // outlives static destruction
  return *set;
}

void before_fork() { g_mutex.lock(); }
void after_fork_in_parent() { g_mutex.unlock(); }
void after_fork_in_child() {
  g_forks.fetch_add(1, std::memory_order_relaxed);
  for (const int fd : descriptors()) ::close(fd);
  descriptors().clear();
  g_mutex.unlock();
}

void watch_forks() {
  static const int watched =
      ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  (void)watched;
}

}  // namespace

uint64_t fork_count() {
  watch_forks();
  return g_forks.load(std::memory_order_relaxed);
}

ParentFd::ParentFd(int fd) : fd_(fd), forks_(fork_count()) {
  if (fd < 0) return;
  const std::lock_guard lock(g_mutex);
  descriptors().insert(fd);
}

void ParentFd::reset() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || forks_ != fork_count()) return;  // a child's copy is closed already
  const std::lock_guard lock(g_mutex);
  descriptors().erase(fd);
  ::close(fd);
}

ssize_t ParentFd::receive(int socket, msghdr& header, std::vector<ParentFd>& received) {
  std::vector<int> numbers;
  ssize_t got;
  {
    watch_forks();
    const std::lock_guard lock(g_mutex);
    got = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0) return got;
    for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr;
         part = CMSG_NXTHDR(&header, part)) {
      if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
      numbers.resize((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
      std::memcpy(numbers.data(), CMSG_DATA(part), numbers.size() * sizeof(int));
    }
    descriptors().insert(numbers.begin(), numbers.end());
  }
  for (const int fd : numbers) received.emplace_back(fd);
  return got;
}

}  // namespace kvw
