#include "base/lost_pages.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/dumps.h"
#include "base/fork.h"

namespace kvw {

namespace {

// What lies behind a page that is gone is mostly gone too; and the kernel bounds the pieces that a
// process may have mapped.
constexpr uint64_t kPieceBytes = 2ull << 20;
constexpr uint64_t kPiecesPerRange = 4096;

std::atomic<GuardedRange*> g_ranges{nullptr};
struct sigaction g_before;
uintptr_t g_page_bytes;

GuardedRange* range_of(const std::byte* address) {
  for (GuardedRange* range = g_ranges.load(std::memory_order_acquire); range != nullptr;
       range = range->next)
    if (address < range->end.load(std::memory_order_acquire) && address >= range->begin.load() &&
        range->forks.load() == fork_count())
      return range;
  return nullptr;
}

bool replace(GuardedRange& range, const siginfo_t& info) {
  auto* const begin = range.begin.load();
  auto* const end = range.end.load();
  const auto at = static_cast<uint64_t>(static_cast<std::byte*>(info.si_addr) - begin);
  uint64_t first = at / g_page_bytes * g_page_bytes, last = first + g_page_bytes;
  if (info.si_code == BUS_ADRERR) {
    const uint64_t piece = std::max<uint64_t>(
        kPieceBytes, (end - begin) / kPiecesPerRange / kPieceBytes * kPieceBytes);
    last = (at / piece + 1) * piece;
  } else if (info.si_addr_lsb > 0 && info.si_addr_lsb < 40) {  // broken memory, so large
    const uint64_t broken = std::max<uint64_t>(g_page_bytes, 1ull << info.si_addr_lsb);
    const auto address = reinterpret_cast<uintptr_t>(info.si_addr) / broken * broken;
    const auto base = reinterpret_cast<uintptr_t>(begin);
    first = std::max<uint64_t>(address, base) - base;
    last = address + broken - base;
  }
  last = std::min<uint64_t>(last, (end - begin + g_page_bytes - 1) / g_page_bytes * g_page_bytes);
  const int protection = PROT_READ | (range.writable.load() ? PROT_WRITE : 0);
  // The caller looks after it has touched the page: said first.
  range.lost.fetch_add(1);
  void* const made = ::mmap(begin + first, last - first, protection,
                            MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return false;
  ::madvise(made, last - first, MADV_DONTFORK);
  leave_out_of_dumps(made, last - first);
  return true;
}

void pass_on(int number, siginfo_t* info, void* context) {
  if ((g_before.sa_flags & SA_SIGINFO) != 0) {
    g_before.sa_sigaction(number, info, context);
  } else if (g_before.sa_handler == SIG_DFL) {
    ::sigaction(number, &g_before, nullptr);
    ::raise(number);  // comes when this handler returns
  } else if (g_before.sa_handler != SIG_IGN) {
    g_before.sa_handler(number);
  }
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int before = errno;
  const bool fault = info->si_code > 0;  // else somebody sent it
  GuardedRange* const range = fault ? range_of(static_cast<std::byte*>(info->si_addr)) : nullptr;
  if (range == nullptr || !replace(*range, *info)) pass_on(number, info, context);
  errno = before;
}

bool install() {
  fork_count();  // what it does at first is nothing for a handler
  g_page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  ::sigaction(SIGBUS, nullptr, &g_before);
  return ::sigaction(SIGBUS, &action, nullptr) == 0;
}

}  // namespace

GuardedRange* guard(std::byte* begin, size_t bytes, bool writable) {
  static const bool installed = install();
  (void)installed;
  GuardedRange* range = g_ranges.load(std::memory_order_acquire);
  while (range != nullptr && range->used.exchange(true)) range = range->next;
  if (range == nullptr) {
    range = new GuardedRange;
    range->next = g_ranges.load();
    while (!g_ranges.compare_exchange_weak(range->next, range)) {
    }
  }
  range->writable = writable;
  range->forks = fork_count();
  range->lost = 0;
  range->begin = begin;
  range->end.store(begin + bytes, std::memory_order_release);
  return range;
}

void unguard(GuardedRange* range) {
  range->end = nullptr;
  range->begin = nullptr;
  range->used.store(false, std::memory_order_release);
}

}  // namespace kvw
