// What may never be freed, because a device may still read or write it, or it is another process's.
#pragma once

#include <atomic>
#include <memory>
#include <new>

namespace kvw {

struct Kept {
  const void* object;
  const Kept* next;
};

// Those of this process. Reachable from here, so that a checker of leaks tells them from what was
// forgotten.
inline std::atomic<const Kept*> kept_forever{nullptr};

// `object` stays until the process ends. Takes no lock: it is also called in a forked child, where
// a lock may have been left taken. Thread-safe, does not block or throw.
template <class T>
void keep_forever(std::unique_ptr<T> object) noexcept {
  const T* kept = object.release();
  auto* entry = new (std::nothrow) Kept{kept, kept_forever.load()};
  if (entry == nullptr) return;
  while (!kept_forever.compare_exchange_weak(entry->next, entry)) {
  }
}

}  // namespace kvw
