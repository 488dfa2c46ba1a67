// The control page: what the daemon publishes to every client without a call. One file, written by
// the daemon's core thread and read-only to everybody else; its inode stays when a new daemon takes
// over, so that clients of the old one see the new incarnation. docs/format.md has the layout.
// Every word is read and written atomically; hot words sit on cache line pairs of their own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace kvw {

inline constexpr uint64_t kControlMagic = 0x4c52544e4f43564bull;  // "KVCONTRL"
inline constexpr uint32_t kControlVersion = 1;

struct alignas(128) HotWord {
  std::atomic<uint64_t> value{0};
};

// One row per namespace ordinal, which goes on to another namespace when its own is forgotten.
// `ready` is stored last (release), 0 while the row says nothing, and never twice the same for two
// namespaces: what was read is a row's where `ready` stood unchanged around it.
struct NamespaceWord {
  std::atomic<uint64_t> id_lo, id_hi;
  std::atomic<uint64_t> clear_epoch;  // pages reserved before this epoch are gone
  std::atomic<uint64_t> shard_bytes;
  std::atomic<uint32_t> page_tokens, shards;
  std::atomic<uint64_t> ready;
  uint64_t last_ready;  // the daemon's own
  // Of the namespace's objects in the remote store: their epoch + 1. 0: none are served, as from a
  // clear here until the store knows of it.
  std::atomic<uint64_t> remote_epoch;
};
static_assert(sizeof(NamespaceWord) == 64);

struct Word {
  std::atomic<uint64_t> value{0};
};

// Of the remote tier, by what its worker said last. Zeros: none is served.
struct RemoteWords {
  Word serving;           // 1: pages that its presence filter shows may be fetched
  Word read_bytes_per_s;  // smoothed, of one object at a time; 0: not measured yet
  Word first_byte_ns;     // likewise
  Word queued_bytes;      // of objects that are being fetched or wait for it
};

struct ControlPage {
  // Fixed while the arena lives.
  uint64_t magic;
  uint32_t version;
  uint32_t segment_words;  // rows after the namespaces
  uint64_t bytes;          // of the whole file
  Key warehouse_id;
  uint64_t slab_bytes;
  uint64_t slab_count;  // of the configured bound: arena bytes to map = slab_bytes * slab_count
  std::byte secret[kSecretBytes];

  HotWord incarnation;    // rises with every daemon; names the index file
  HotWord index_entries;  // of the current index: a power of two
  HotWord heartbeat_ns;   // boot clock, every 100 ms
  HotWord state;          // ControlState
  HotWord clear_epoch;    // the highest epoch given out
  HotWord promoted;       // rises when a page comes that is waited for; its low half is a futex
  HotWord durable;        // flush number known to be on stable media
  HotWord nvme_read_bytes_per_s;  // smoothed while busy; 0: not measured yet
  HotWord nvme_write_bytes_per_s;
  HotWord nvme_reads_queued;
  HotWord nvme_write_queue_bytes;
  HotWord pin_limit_bytes;  // of all sessions of a process, beside what others pin now
  alignas(128) Word reserve_limit_bytes;  // what a process alone may leave unfinished
  RemoteWords remote;                     // seldom written, as its neighbour

  alignas(128) NamespaceWord namespaces[kMaxNamespaces];
  // std::atomic<uint64_t> segment_words[] follow: life << 1 | closing, per segment.
};

static_assert(sizeof(HotWord) == 128 && offsetof(ControlPage, namespaces) % 128 == 0);

enum class ControlState : uint64_t { starting = 0, serving = 1, draining = 2, stopped = 3 };

constexpr uint64_t control_bytes(uint32_t segment_words) {
  return round_up(sizeof(ControlPage) + uint64_t{segment_words} * 8, kBlockBytes);
}

inline std::atomic<uint64_t>* segment_words(ControlPage* page) {
  return reinterpret_cast<std::atomic<uint64_t>*>(page + 1);
}
inline const std::atomic<uint64_t>* segment_words(const ControlPage* page) {
  return reinterpret_cast<const std::atomic<uint64_t>*>(page + 1);
}

constexpr uint64_t segment_word(uint32_t life, bool closing) {
  return uint64_t{life} << 1 | (closing ? 1 : 0);
}

// Row of a namespace, or -1. Looks at all rows, one after the other from `first` on: at one alone,
// where that is it.
int find_namespace(const ControlPage& page, const Key& id, uint32_t first);

}  // namespace kvw
