#include "base/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <mutex>

#include "base/clock.h"
#include "base/huge_page_process.h"

namespace kvw {

namespace {

// How long memory waits for it; small pages do as well then. 256 MiB took 0.1 s on a quiet machine.
constexpr uint64_t kWithinNs = 2 * kSecondNs;

std::mutex g_process_mutex;
std::unique_ptr<HugePageProcess> g_process;

}  // namespace

size_t reserved_bytes(size_t bytes) {
  static const auto kernel_page_bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return round_up(bytes, kernel_page_bytes);
}

void* reserve_for_huge_pages(size_t bytes) {
  const size_t needed = reserved_bytes(bytes);
  void* reserved =
      ::mmap(nullptr, needed + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(reserved);
  const size_t before = -reinterpret_cast<uintptr_t>(begin) % kHugePageBytes;
  if (before > 0) ::munmap(begin, before);
  ::munmap(begin + before + needed, kHugePageBytes - before);
  return begin + before;
}

void take_huge_pages(int file, uint64_t offset, uint64_t bytes) {
  const std::lock_guard lock(g_process_mutex);
  if (g_process == nullptr || g_process->forked()) g_process = std::make_unique<HugePageProcess>();
  g_process->take(file, offset, bytes, kWithinNs);
}

bool end_huge_page_process() {
  const std::lock_guard lock(g_process_mutex);
  if (g_process != nullptr && !g_process->end()) return false;
  g_process.reset();
  return true;
}

}  // namespace kvw
