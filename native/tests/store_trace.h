// Every store of this thread to chosen memory, one machine instruction after the other: what a
// SIGKILL between any two of them would leave.
//
// The memory is made read-only; each store then faults, is let through alone (its page opened, the
// processor's trap flag set), and what it changed is noted. x86-64 only. One trace at a time in a
// process; no system call may write to the memory meanwhile; nothing else may use SIGSEGV, SIGTRAP.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace kvw {

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
inline constexpr bool kStoresCanBeTraced = true;
#else
inline constexpr bool kStoresCanBeTraced = false;
#endif

class StoreTrace {
 public:
  struct Region {
    std::byte* at;
    size_t bytes;  // whole pages
  };
  // Eight bytes of a region have this value after step `step`.
  struct Change {
    uint32_t step;
    uint32_t region;
    uint64_t offset;
    uint64_t word;
  };

  // From here until end(), stores to the regions are noted.
  static void begin(std::vector<Region> regions) {
    State& now = state();
    now.regions = std::move(regions);
    now.changes.clear();
    now.changes.reserve(kMostChanges);  // a handler must not allocate
    now.steps = 0;
    now.open_pages = 0;
    struct sigaction action{};
    action.sa_flags = SA_SIGINFO;
    action.sa_sigaction = on_fault;
    ::sigaction(SIGSEGV, &action, &now.old_fault);
    action.sa_sigaction = on_trap;
    ::sigaction(SIGTRAP, &action, &now.old_trap);
    protect(PROT_READ);
  }

  static void end() {
    protect(PROT_READ | PROT_WRITE);
    ::sigaction(SIGSEGV, &state().old_fault, nullptr);
    ::sigaction(SIGTRAP, &state().old_trap, nullptr);
  }

  static const std::vector<Change>& changes() { return state().changes; }
  // Instructions that changed something.
  static uint32_t steps() { return state().steps; }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kMostChanges = 1 << 18;
  static constexpr greg_t kTrapFlag = 0x100;

  struct Open {
    uint32_t region;
    std::byte* page;
    std::array<std::byte, kPage> before;
  };
  struct State {
    std::vector<Region> regions;
    std::vector<Change> changes;
    uint32_t steps = 0;
    std::array<Open, 2> open;  // a store can cross from one page to the next
    int open_pages = 0;
    struct sigaction old_fault, old_trap;
  };

  static State& state() {
    static State only;
    return only;
  }

  static void protect(int access) {
    for (const Region& region : state().regions)
      if (::mprotect(region.at, region.bytes, access) != 0)
        throw storage_error("cannot protect memory to trace stores to it", errno);
  }

  static void on_fault(int, siginfo_t* info, void* context) {
    State& now = state();
    auto* at = static_cast<std::byte*>(info->si_addr);
    for (uint32_t region = 0; region < now.regions.size(); ++region) {
      const Region& each = now.regions[region];
      if (at < each.at || at >= each.at + each.bytes || now.open_pages == 2) continue;
      Open& open = now.open[static_cast<size_t>(now.open_pages++)];
      open.region = region;
      open.page = each.at + (at - each.at) / static_cast<ptrdiff_t>(kPage) * kPage;
      std::memcpy(open.before.data(), open.page, kPage);
      ::mprotect(open.page, kPage, PROT_READ | PROT_WRITE);
      static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] |= kTrapFlag;
      return;
    }
    ::signal(SIGSEGV, SIG_DFL);  // somebody else's: let it happen
  }

  static void on_trap(int, siginfo_t*, void* context) {
    State& now = state();
    const size_t before = now.changes.size();
    for (int i = 0; i < now.open_pages; ++i) note(now, now.open[static_cast<size_t>(i)]);
    now.open_pages = 0;
    if (now.changes.size() != before) ++now.steps;
    static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] &= ~kTrapFlag;
  }

  static void note(State& now, const Open& open) {
    for (size_t at = 0; at < kPage; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, open.page + at, 8);
      if (std::memcmp(&word, open.before.data() + at, 8) == 0) continue;
      if (now.changes.size() == kMostChanges) ::abort();
      const auto offset = static_cast<uint64_t>(open.page - now.regions[open.region].at) + at;
      now.changes.push_back({now.steps, open.region, offset, word});
    }
    ::mprotect(open.page, kPage, PROT_READ);
  }

  static_assert(kPage % 8 == 0);
};

}  // namespace kvw
