// The index: a shared table from key to slot and extent. One writer (the daemon's core thread),
// lock-free sequence-validated readers in other processes, no call and no registration.
//
// Power-of-two table of one-cache-line entries, at most half full; a key lives in the window of 16
// entries from its home, or, if that was full when it came, in the one from its second home. Insert
// takes the first empty entry, delete empties it, nothing ever moves: an entry's position is the
// page's id. docs/protocol.md has the order of every store.
//
// Why two: of a half full table's windows one in a thousand is full, and a page that has no place
// is the end of its prompt. That both are full is as rare as that twice.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "base/atomics.h"
#include "base/clock.h"
#include "base/fd.h"
#include "base/types.h"
#include "nvme/record.h"

namespace kvw {

inline constexpr uint64_t kIndexMagic = 0x3158444e49564bull;  // "KVINDX1"
inline constexpr uint32_t kIndexVersion = 1;
inline constexpr uint32_t kIndexWindow = 16;
inline constexpr uint32_t kIndexPlaces = 2 * kIndexWindow;  // of a key
// A writer is in an entry for nanoseconds, but it can lose its processor there. One that died
// leaves one entry odd: a reader that meets it waits so long.
inline constexpr uint64_t kWriterPatienceNs = 20 * kMillisecondNs;

enum EntryFlag : uint16_t {
  kEntryUsed = 1,
  kEntryDram = 2,        // slot and generation are valid
  kEntryNvme = 4,        // the extent is valid
  kEntryUnverified = 8,  // an earlier daemon's: each load checks its digest
};

struct alignas(64) IndexEntry {
  std::atomic<uint32_t> sequence;     // odd while the writer is in it
  std::atomic<uint32_t> flags_space;  // flags, namespace ordinal << 16
  std::atomic<uint64_t> key_lo, key_hi;
  std::atomic<uint32_t> slot, generation;  // generation: low 32 bits
  std::atomic<uint32_t> segment, offset_blocks, blocks, life;
  std::atomic<uint64_t> clear_epoch;
  uint64_t spare;
};
static_assert(sizeof(IndexEntry) == 64);

struct IndexHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t spare;
  Key warehouse_id;
  uint64_t incarnation;
  uint64_t entries;
};

// A private, consistent copy of an entry.
struct EntryView {
  PageId page = kNoPage;
  uint16_t flags = 0;
  uint16_t space = 0;  // namespace ordinal
  Key key;
  SlotId slot = kNoSlot;
  uint32_t generation = 0;
  nvme::Extent extent;
  uint64_t clear_epoch = 0;

  bool in_dram() const { return (flags & kEntryDram) != 0; }
  bool in_nvme() const { return (flags & kEntryNvme) != 0; }
};

// What of an entry tells whether its page counts, and in which tiers it is.
struct EntrySummary {
  uint16_t flags = 0;  // 0: there is no such page
  uint16_t space = 0;
  SlotId slot = kNoSlot;  // these two where it is in DRAM
  uint32_t generation = 0;
  uint64_t clear_epoch = 0;

  bool found() const { return flags != 0; }
  bool in_dram() const { return (flags & kEntryDram) != 0; }
};

// The position of one of a key's places, in the order in which they are looked at and taken.
// `mask`: positions - 1. Places of one key can be at one position, where its windows overlap.
constexpr PageId index_place(const Key& key, uint32_t place, uint64_t mask) {
  const uint64_t home = place < kIndexWindow ? key.lo : key.hi;
  return static_cast<PageId>((home + place % kIndexWindow) & mask);
}

constexpr uint64_t index_bytes(uint64_t entries) {
  return kBlockBytes + entries * sizeof(IndexEntry);
}

// A view of a mapped index file; copyable, does not own the mapping. find(), peek() and
// prefetch() are safe in any process at any time; the other methods are the writer's.
class Index {
 public:
  Index() = default;
  explicit Index(const Mapping& mapping);

  uint64_t entries() const { return mask_ + 1; }
  PageId home(const Key& key) const { return static_cast<PageId>(key.lo & mask_); }

  void prefetch(const Key& key) const {
    __builtin_prefetch(&table_[home(key)]);
    __builtin_prefetch(&table_[(home(key) + 1) & mask_]);
  }
  // For the writer; any position.
  void prefetch_write(PageId page) const { __builtin_prefetch(&table_[page & mask_], 1); }
  // Looks at all places. Nothing if absent, or if an entry stays odd for 20 ms (its writer died in
  // it).
  std::optional<EntryView> find(const Key& key) const;
  // Of the entry that find() would find, in half the time: a lookup asks for thousands.
  EntrySummary peek(const Key& key) const;
  // The entry at a position, as a reader sees it. Nothing if empty or odd.
  std::optional<EntryView> at(PageId page) const;

  // The first of the key's places that is empty, or kNoPage.
  PageId empty_place(const Key& key) const;
  // Writes a whole entry under its sequence. No other store of the writer but erase().
  void write(const EntryView& view);
  void erase(PageId page);

 private:
  EntrySummary peek_second(const Key& key) const;
  // In one of the key's windows.
  bool find_from(uint64_t home, const Key& key, EntryView& view) const;
  template <class Take>
  static bool taken_whole(const IndexEntry& entry, Take take);
  bool read(PageId page, EntryView& view) const;

  IndexEntry* table_ = nullptr;
  uint64_t mask_ = 0;
};

}  // namespace kvw
