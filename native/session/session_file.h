// The session file: what one client tells the daemon without a call. Created by the daemon, locked
// (flock) by whoever holds the descriptor that hello passed, written by the client alone. The
// daemon reads it with pread only: a client can truncate what it can write, and a short read harms
// nobody where a mapping would raise SIGBUS.
//
// Pins: the client stores the pin, one sequentially consistent fence per batch, then checks that
// the slot's word is (generation, LIVE). The reclaimer stores CLOSING, the same fence, then reads
// the pins of all sessions and matches by slot alone. One of the two sees the other.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/types.h"

namespace kvw {

inline constexpr uint64_t kSessionMagic = 0x314e4f4953564bull;  // "KVSION1"
inline constexpr uint32_t kSessionVersion = 2;    // 1: every session may use all its words
inline constexpr uint32_t kPinCapacity = 32768;   // words that a session file has room for
inline constexpr uint32_t kTouchCapacity = 8192;  // a power of two; older touches are overwritten

// In the page id of a touch: not used, but released (eviction/policy.h). Ids are below it, so a
// daemon that does not know it finds no such page.
inline constexpr PageId kReleasedPage = 1u << 31;

// A pin word: 0 is none; the top bit tells a segment from a slot.
constexpr uint64_t slot_pin(SlotId slot, uint32_t generation) {
  return (uint64_t{slot} + 1) << 32 | generation;
}
constexpr uint64_t segment_pin(uint32_t segment, uint32_t life) {
  return 1ull << 63 | (uint64_t{segment} + 1) << 32 | life;
}
constexpr bool is_segment_pin(uint64_t pin) { return pin >> 63 != 0; }
constexpr uint32_t pinned_number(uint64_t pin) {
  return static_cast<uint32_t>(pin >> 32 & 0x7fffffff) - 1;
}

// Outcomes a client counts. Pages asked are the sum of the hits of each tier and those missed, by
// construction.
enum class Counter : uint32_t {
  lookup_hit_dram,
  lookup_hit_nvme,
  lookup_missed,
  lookups,
  loads,
  pages_loaded,
  bytes_loaded,
  load_stale,     // the page was evicted or reused while it was being read
  load_mismatch,  // digest, tokens or identity differed: never handed out
  load_timeout,   // promotion did not arrive in time
  stores,
  pages_stored,  // shards of pages, as all that clients count of loads and stores
  bytes_stored,
  pages_already,
  dropped_other,
  pins_taken,
  pins_refused,
  pages_loaded_hbm,   // of pages_loaded: from the copies in HBM
  load_mismatch_hbm,  // such a copy was not what was sealed; the page was read from DRAM then
  lookup_hit_hbm,
  // Pages that stores dropped, by reason (exchange/drop_counters.h).
  dropped_draining,
  dropped_parent_missing,
  dropped_reserve_limit,
  dropped_no_room,
  dropped_later,
  dropped_index_full,
  dropped_refused_tail,
  dropped_stale,
  dropped_cleared,
  dropped_timeout,
  dropped_busy,
  dropped_unreachable,
  // The first 32 have a place of their own; these came later (SessionFile::later_counters).
  lookup_hit_remote,    // pages that the remote tier probably has, behind those stored here
  pages_loaded_remote,  // of pages_loaded: fetched for this load
  count
};
inline constexpr uint32_t kCounters = static_cast<uint32_t>(Counter::count);
inline constexpr uint32_t kFirstCounters = 32, kLaterCounters = 15;
const char* counter_name(Counter counter);

struct SessionFile {
  uint64_t magic;
  uint32_t version;
  uint32_t pin_capacity;  // words that this session may use; others pin nothing
  Key warehouse_id;
  uint64_t session_id;
  uint64_t owner_pid;  // as the daemon sees it, 0: it does not; liveness is the lock

  alignas(128) std::atomic<uint64_t> pins_high;          // pins[0, pins_high) may be in use
  alignas(128) std::atomic<uint64_t> touch_head;         // touches ever written
  std::atomic<uint64_t> later_counters[kLaterCounters];  // 0 in files of older daemons
  alignas(128) std::atomic<uint64_t> counters[kFirstCounters];
  // A touch: page id in the low half, perhaps with kReleasedPage; low half of its key's low word in
  // the high half.
  alignas(128) std::atomic<uint64_t> touches[kTouchCapacity];
  alignas(128) std::atomic<uint64_t> pins[kPinCapacity];
};
static_assert(kCounters <= kFirstCounters + kLaterCounters);

inline std::atomic<uint64_t>& counter_of(SessionFile& file, Counter counter) {
  const auto number = static_cast<uint32_t>(counter);
  return number < kFirstCounters ? file.counters[number]
                                 : file.later_counters[number - kFirstCounters];
}

}  // namespace kvw
