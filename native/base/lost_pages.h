// What becomes of a mapped file's pages that the file has no bytes for any more: somebody cut it,
// its filesystem is full, or the memory is broken. Reading or writing one raises SIGBUS, which
// would end the process, an engine's too. Here it ends nothing: the page is replaced in this
// process by one of zeros, and whoever trusts what it read or wrote asks afterwards.
//
// Thread-safe. Costs nothing where nothing is lost. A handler that was there before is called for
// all other addresses; one that the program installs later comes first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvw {

// A mapping whose lost pages are replaced. Never freed, used again: the handler walks over all.
struct GuardedRange {
  std::atomic<bool> used{true};
  std::atomic<std::byte*> begin{nullptr};
  std::atomic<std::byte*> end{nullptr};
  std::atomic<bool> writable{false};
  std::atomic<uint64_t> forks{0};  // a child of a fork does not have it
  std::atomic<uint64_t> lost{0};   // times that a stretch of it was replaced
  GuardedRange* next = nullptr;
};

// From here until unguard(), which comes before the range is unmapped.
GuardedRange* guard(std::byte* begin, size_t bytes, bool writable);
void unguard(GuardedRange* range);

}  // namespace kvw
