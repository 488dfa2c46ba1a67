#include "base/huge_page_process.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/clock.h"
#include "base/fork.h"
#include "base/types.h"

// The copy has one thread of many, and the locks of the others are as they were: it makes calls to
// the kernel and none to a library that could want one, nor does a sanitizer add such here.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVW_IN_THE_COPY __attribute__((no_sanitize("address", "thread")))
#else
#define KVW_IN_THE_COPY
#endif

namespace kvw {

namespace {

constexpr uint64_t kStartsWithinNs = kSecondNs;
constexpr int kEndsWithinMs = 100;

struct Request {
  uint64_t offset, bytes;
};

// A request, with room for one descriptor beside it.
struct Message {
  Request request{};
  iovec piece{&request, sizeof request};
  alignas(cmsghdr) std::byte control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{nullptr, 0, &piece, 1, control, sizeof control, 0};
};

KVW_IN_THE_COPY std::byte* mapped(void* at, uint64_t bytes, int protection, int flags, int file,
                                  uint64_t offset) {
  const long answer = ::syscall(SYS_mmap, at, bytes, protection, flags, file, offset);
  if (answer == -1) return nullptr;
  return reinterpret_cast<std::byte*>(answer);  // NOLINT(performance-no-int-to-ptr)
}

// A page of each is touched, and the collapse fills the rest on that page's node. It is another
// page in each, because tmpfs interleaves nodes by the page's number. Where there are no huge
// pages, and on a kernel before 6.1, this takes those few pages and no more. Unlike memory that is
// asked for otherwise, it works where shmem_enabled says never
// (Documentation/admin-guide/mm/transhuge.rst), as /dev/shm usually is.
KVW_IN_THE_COPY void collapse(std::byte* begin, uint64_t bytes) {
#ifndef MADV_COLLAPSE
  constexpr int MADV_COLLAPSE = 25;  // of linux/mman.h; C libraries before 2.37 do not name it
#endif
  for (uint64_t page = 0; page < bytes / kHugePageBytes; ++page) {
    const uint64_t block = page % (kHugePageBytes / kBlockBytes);
    std::byte* const touched = begin + page * kHugePageBytes + block * kBlockBytes;
    if (::syscall(SYS_madvise, touched, kBlockBytes, MADV_POPULATE_READ) != 0) return;
  }
  ::syscall(SYS_madvise, begin, bytes, MADV_COLLAPSE);
}

// At an address that suits huge pages, as base/fd.cc maps.
KVW_IN_THE_COPY void collapse_file(int file, Request request) {
  const uint64_t before = -request.offset % kHugePageBytes;
  if (request.bytes < before + kHugePageBytes) return;
  const uint64_t offset = request.offset + before;
  const uint64_t bytes = (request.bytes - before) / kHugePageBytes * kHugePageBytes;
  const uint64_t reserved_bytes = bytes + kHugePageBytes;
  std::byte* const reserved =
      mapped(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == nullptr) return;
  std::byte* const wanted = reserved + -reinterpret_cast<uintptr_t>(reserved) % kHugePageBytes;
  std::byte* const begin =
      mapped(wanted, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset);
  if (begin != nullptr) collapse(begin, bytes);
  ::syscall(SYS_munmap, reserved, reserved_bytes);
}

// That it is there, and then that a request is done.
KVW_IN_THE_COPY bool say() {
  const char done = 1;
  return ::syscall(SYS_sendto, STDIN_FILENO, &done, 1, MSG_NOSIGNAL, nullptr, 0) == 1;
}

// The process itself. It has no descriptor but its socket: a copy of a lock or of a listening
// socket would outlive the daemon. Signals are blocked since before it was made.
[[noreturn]] KVW_IN_THE_COPY void serve(int socket) {
  const bool first =
      socket == STDIN_FILENO || ::syscall(SYS_dup3, socket, STDIN_FILENO, 0) == STDIN_FILENO;
  bool goes_on = first && ::syscall(SYS_close_range, STDIN_FILENO + 1, UINT_MAX, 0) == 0;
  ::syscall(SYS_prctl, PR_SET_NAME, "kvw-huge-pages", 0, 0, 0);
  goes_on = goes_on && say();
  while (goes_on) {
    Message message;
    const long got = ::syscall(SYS_recvmsg, STDIN_FILENO, &message.header, 0);
    if (got == -1 && errno == EINTR) continue;
    const cmsghdr* const along = CMSG_FIRSTHDR(&message.header);
    if (got != sizeof(Request) || along == nullptr || along->cmsg_type != SCM_RIGHTS) break;
    int file = -1;
    __builtin_memcpy(&file, CMSG_DATA(along), sizeof file);
    collapse_file(file, message.request);
    ::syscall(SYS_close, file);
    goes_on = say();
  }
  for (;;) ::syscall(SYS_exit_group, 0);
}

// Not fork(): nothing that is to run in a child of this process is to run there. No signal tells of
// its end, so that nobody who waits for children of their own hears of it.
pid_t start_copy(int socket) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const long pid = ::syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr);
  if (pid == 0) serve(socket);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return static_cast<pid_t>(pid);
}

}  // namespace

HugePageProcess::HugePageProcess() : forks_(fork_count()) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return;
  Fd ours(ends[0]);
  const Fd theirs(ends[1]);
  pid_ = start_copy(theirs.get());
  if (pid_ <= 0) return;
  socket_ = std::move(ours);
  owed_ = 1;
  // Until then it has copies of all that this process has open, locks among them.
  answered(system_clock().boot_ns() + kStartsWithinNs);
}

HugePageProcess::HugePageProcess(Fd socket) : socket_(std::move(socket)), forks_(fork_count()) {}

HugePageProcess::~HugePageProcess() { end(); }

bool HugePageProcess::end() {
  socket_.reset();
  if (pid_ <= 0 || forked()) return true;
  for (int waited_ms = 0; waited_ms < kEndsWithinMs; ++waited_ms) {
    if (::waitpid(pid_, nullptr, WNOHANG | __WALL) != 0) {
      pid_ = -1;
      return true;
    }
    const timespec pause{0, static_cast<long>(kMillisecondNs)};
    ::nanosleep(&pause, nullptr);
  }
  return false;
}

bool HugePageProcess::forked() const { return forks_ != fork_count(); }

bool HugePageProcess::take(int file, uint64_t offset, uint64_t bytes, uint64_t within_ns) {
  while (owed_ > 0)
    if (!answered(0)) return false;
  Message message;
  message.request = {offset, bytes};
  cmsghdr* const along = CMSG_FIRSTHDR(&message.header);
  along->cmsg_level = SOL_SOCKET;
  along->cmsg_type = SCM_RIGHTS;
  along->cmsg_len = CMSG_LEN(sizeof file);
  std::memcpy(CMSG_DATA(along), &file, sizeof file);
  if (!socket_.valid() ||
      ::sendmsg(socket_.get(), &message.header, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof(Request))
    return false;
  ++owed_;
  return answered(system_clock().boot_ns() + within_ns);
}

bool HugePageProcess::answered(uint64_t until_ns) {
  for (;;) {
    const uint64_t now = system_clock().boot_ns();
    const uint64_t left_ms = until_ns > now ? (until_ns - now) / kMillisecondNs + 1 : 0;
    pollfd watch{socket_.get(), POLLIN, 0};
    const int ready = ::poll(&watch, 1, static_cast<int>(std::min<uint64_t>(left_ms, INT_MAX)));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    char done = 0;
    if (::recv(socket_.get(), &done, 1, MSG_DONTWAIT) == 1) {
      --owed_;
      return true;
    }
    socket_.reset();  // it has ended
    owed_ = 0;
    return false;
  }
}

}  // namespace kvw
