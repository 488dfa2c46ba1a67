#include "base/huge_page_process.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/fd.h"
#include "base/huge_pages.h"
#include "base/types.h"
#include "tests/check.h"
#include "tests/huge_memory.h"
#include "tests/warehouse_world.h"

namespace kvw {
namespace {

constexpr uint64_t kBytes = 4 * kHugePageBytes;
constexpr uint64_t kLongNs = 60 * kSecondNs;  // no test waits so long

Fd memory_file() {
  Fd fd(::memfd_create("test", MFD_CLOEXEC));
  CHECK_EQ(::ftruncate(fd.get(), static_cast<off_t>(kBytes)), 0);
  return fd;
}

// By a process that may not have begun yet on a busy machine.
bool taken(HugePageProcess& process, const Fd& file, uint64_t offset, uint64_t bytes) {
  const uint64_t until_ns = system_clock().boot_ns() + kPatienceMs * kMillisecondNs;
  while (!process.take(file.get(), offset, bytes, kLongNs))
    if (system_clock().boot_ns() > until_ns) return false;
  return true;
}

void end(HugePageProcess& process) {
  while (!process.end()) {
  }
}

// One that does nothing by itself.
struct Double {
  Double() {
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    socket = Fd(ends[0]);
    process.emplace(Fd(ends[1]));
  }
  bool asked() const {
    char request[64];
    return ::recv(socket.get(), request, sizeof request, MSG_DONTWAIT) > 0;
  }
  void answer() const { CHECK_EQ(::send(socket.get(), "1", 1, 0), 1); }

  Fd socket;
  std::optional<HugePageProcess> process;
};

TEST(huge_pages_are_not_waited_for_again_while_an_answer_is_owed) {
  Double other;
  const Fd file = memory_file();
  CHECK(!other.process->take(file.get(), 0, kBytes, kMillisecondNs));
  CHECK(other.asked());
  CHECK(!other.process->take(file.get(), 0, kBytes, kLongNs));
  CHECK(!other.asked());
  other.answer();
  CHECK(!other.process->take(file.get(), 0, kBytes, kMillisecondNs));
  CHECK(other.asked());
}

TEST(huge_pages_are_late_when_their_process_has_ended) {
  Double other;
  const Fd file = memory_file();
  CHECK(!other.process->take(file.get(), 0, kBytes, kMillisecondNs));
  other.socket.reset();
  CHECK(!other.process->take(file.get(), 0, kBytes, kLongNs));
  CHECK(!other.process->take(file.get(), 0, kBytes, kLongNs));
}

TEST(process_of_huge_pages_has_only_its_socket_open_and_ends_with_its_owner) {
  HugePageProcess process;
  const pid_t pid = process.pid();
  CHECK(pid > 0);
  const Fd file = memory_file();
  CHECK(taken(process, file, 0, kBytes));
  CHECK(taken(process, file, kBlockBytes, kBlockBytes));  // no huge page in it
  const std::string folder = "/proc/" + std::to_string(pid);
  size_t open = 0;
  for ([[maybe_unused]] const auto& each : std::filesystem::directory_iterator(folder + "/fd"))
    ++open;
  CHECK_EQ(open, 1);
  end(process);
  CHECK_EQ(process.pid(), -1);
  CHECK(!std::filesystem::exists(folder));
  CHECK(!process.take(file.get(), 0, kBytes, kLongNs));
}

TEST(process_of_huge_pages_that_does_not_end_is_not_waited_for) {
  HugePageProcess process;
  const pid_t pid = process.pid();
  CHECK_EQ(::kill(pid, SIGSTOP), 0);
  CHECK(!process.end());
  CHECK_EQ(process.pid(), pid);
  CHECK_EQ(::kill(pid, SIGCONT), 0);
  end(process);
}

TEST(huge_pages_are_those_that_are_whole_in_what_was_asked_for) {
  if (!kernel_gives_huge_pages(TempDir().path())) {
    std::printf("(skipped: this kernel gives no huge pages to files on tmpfs) ");
    return;
  }
  HugePageProcess process;
  for (const uint64_t left_out : {uint64_t{0}, kBlockBytes, kHugePageBytes}) {
    const Fd file = memory_file();
    CHECK(taken(process, file, left_out, kBytes - left_out));
    const Mapping mapping(file.get(), kBytes, true);
    for (uint64_t at = 0; at < kBytes; at += kBlockBytes) mapping.data()[at] = std::byte{1};
    CHECK_EQ(mapped_huge_bytes("/memfd:test (deleted)"),
             left_out == 0 ? kBytes : kBytes - kHugePageBytes);
  }
  end(process);
}

// What was written stays, and nobody who waits for children of his own hears of the process.
TEST(huge_pages_are_taken_of_memory_with_bytes_in_it) {
  const Fd file = memory_file();
  const Mapping mapping(file.get(), kBytes, true);
  for (uint64_t at = 0; at < kBytes; at += kBlockBytes) mapping.data()[at] = std::byte{7};
  take_huge_pages(file.get(), 0, kBytes);
  for (uint64_t at = 0; at < kBytes; at += kBlockBytes)
    CHECK(mapping.data()[at] == std::byte{7} && mapping.data()[at + 1] == std::byte{0});
  CHECK_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  CHECK_EQ(errno, ECHILD);
  while (!end_huge_page_process()) {
  }
}

TEST(forked_child_leaves_the_process_of_its_parent_alone) {
  const Fd file = memory_file();
  HugePageProcess process;
  const pid_t child = ::fork();
  if (child == 0) {
    const bool ended = process.forked() && process.end();
    take_huge_pages(file.get(), 0, kBytes);
    ::_exit(ended ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(taken(process, file, 0, kBytes));
  end(process);
}

}  // namespace
}  // namespace kvw
