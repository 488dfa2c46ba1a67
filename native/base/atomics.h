// Fences and per-word access for memory shared between processes.
// gcc's ThreadSanitizer does not model fences: its build uses acquire loads and release stores per
// word instead, which order at least as much.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvw {

#if defined(__SANITIZE_THREAD__)
inline constexpr std::memory_order kWordLoad = std::memory_order_acquire;
inline constexpr std::memory_order kWordStore = std::memory_order_release;
inline void acquire_fence() {}
inline void release_fence() {}
inline void full_fence() { __sync_synchronize(); }
#else
inline constexpr std::memory_order kWordLoad = std::memory_order_relaxed;
inline constexpr std::memory_order kWordStore = std::memory_order_relaxed;
inline void acquire_fence() { std::atomic_thread_fence(std::memory_order_acquire); }
inline void release_fence() { std::atomic_thread_fence(std::memory_order_release); }
inline void full_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
#endif

// Orders streaming stores before everything that follows: they bypass the store buffer's order.
inline void streaming_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  full_fence();
#endif
}

// Spelled once: all shared words are lock-free or the protocol is void.
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace kvw
