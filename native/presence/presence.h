// The presence filter: which objects of a store are probably there, and of which day each is. A
// table in shared memory with 16 bits for each object, so that a lookup never asks the store.
//
// One writer, and readers without a lock in other processes. A reader may be told of an object that
// is not there (2 * 8 * load / 8192 of those that are not), and may miss one that is; both cost no
// more than a miss, because whoever reads the object judges what it gets. So every store is of one
// word, and nothing orders two of them.
//
// All integers are little-endian. Version 1:
//   block 0      header: PresenceHeader, then zeros
//   block 1 ...  buckets of 16 bytes, each of 8 cells: fingerprint << 3 | day mod 8; 0: empty
//
// A key, which is a digest already, has two buckets and a fingerprint. The epoch of its namespace
// is mixed into them, so that a clear leaves nothing that matches. Days are those since 1970.
//
// Invariants:
//  - All cells are of days in the window: the writer narrows it, then takes the cells of a day
//    out, then gives the day's three bits to another.
//  - An object that is put again gets its newest day in the cell that it has.
//  - Geometry is taken from the header once, when it was checked: nothing that is read later leads
//    outside the mapping.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "base/fd.h"
#include "base/types.h"

namespace kvw {

inline constexpr uint64_t kPresenceMagic = 0x315345525057564bull;  // "KVWPRES1"
inline constexpr uint32_t kPresenceVersion = 1;
inline constexpr uint32_t kPresenceDays = 8;   // that the bits of a cell tell apart
inline constexpr uint32_t kPresenceCells = 8;  // of a bucket
inline constexpr uint64_t kPresenceBucketBytes = 16;

struct PresenceHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t days;  // that an object counts for, 1 to kPresenceDays
  Key fleet;      // whose objects they are
  uint64_t buckets;
  uint64_t bytes;                             // of the file
  uint64_t checksum;                          // XXH3-64 of all before
  alignas(128) std::atomic<uint64_t> window;  // newest day << 8 | how many days count
  std::atomic<uint32_t> ahead;                // days that the newest is after today
};
static_assert(sizeof(PresenceHeader) == 256 && sizeof(PresenceHeader) <= kBlockBytes);

// For that many objects: 100 of 124 cells, which is 20 bits an object.
constexpr uint64_t presence_buckets(uint64_t objects) {
  return objects * 31 / (25 * kPresenceCells) + 1;
}
constexpr uint64_t presence_bytes(uint64_t buckets) {
  return kBlockBytes + round_up(buckets * kPresenceBucketBytes, kBlockBytes);
}

// Where a key's cell may be.
struct PresencePlace {
  uint64_t first, second;  // buckets
  uint16_t fingerprint;    // 13 bits, not 0
};

// A view of a mapped table; copyable, does not own the mapping, which may be read-only.
class Presence {
 public:
  // What one lookup goes by: window and epoch, read once.
  class Look {
   public:
    void prefetch(const Key& key) const;
    // The day of the newest object that matches; nothing where none does.
    std::optional<uint32_t> day_of(const Key& key) const;
    // The writer's, which may be before the newest day that is told of.
    uint32_t today() const;

   private:
    friend class Presence;
    Look(const Presence& table, uint64_t epoch);

    const std::atomic<uint64_t>* words_;
    uint64_t buckets_;
    Key salt_;
    uint64_t window_;
    uint32_t ahead_;
  };

  // Writes a header for that many buckets into a mapping of presence_bytes(buckets) zeros. `days`
  // is 1 to kPresenceDays.
  static void format(const Mapping& mapping, const Key& fleet, uint64_t buckets, uint32_t days);
  // Nothing: not a table of this fleet and version, or damaged, or cut.
  static std::optional<Presence> attach(const Mapping& mapping, const Key& fleet);

  // Of a namespace whose objects are of this epoch.
  Look look(uint64_t epoch) const { return {*this, epoch}; }
  uint64_t cells() const { return buckets_ * kPresenceCells; }
  uint32_t days() const { return days_; }

 private:
  friend class PresenceWriter;
  Presence() = default;

  PresenceHeader* header_ = nullptr;
  std::atomic<uint64_t>* words_ = nullptr;  // two a bucket
  uint64_t buckets_ = 0;
  uint32_t days_ = 0;
};

// The table's one writer. Not thread-safe.
class PresenceWriter {
 public:
  enum class Put {
    added,
    renewed,   // it was there, of an earlier day
    already,   // of this day or a later one
    replaced,  // added in place of the oldest that was in its buckets
    no_room,   // its buckets are full of this day and later ones
    outside,   // of a day that is not in the window
  };

  // The table is writable. Looks at all cells, and ends what a writer that died has begun.
  explicit PresenceWriter(const Presence& table);

  // A later day than the newest: objects that are too old for it are dropped. Looks at all cells,
  // 10 ms for 10M objects. An earlier newest day is ignored. Today may be before the newest: the
  // next day is told of by hosts whose clocks are ahead.
  void advance(uint32_t newest, uint32_t today);
  void advance(uint32_t today) { advance(today, today); }
  Put put(const Key& key, uint64_t epoch, uint32_t day);
  // The object of that day is not there. False: no cell said so.
  bool remove(const Key& key, uint64_t epoch, uint32_t day);

  // Of the window, which is under no checksum: one far from today's is damage, and the table is to
  // be made anew.
  uint32_t newest() const;
  uint64_t objects() const;              // cells in use
  uint64_t objects(uint32_t day) const;  // of them, of one day

 private:
  void drop_older_than(uint32_t age);
  void set_window(uint32_t newest, uint32_t days);

  Presence table_;
  std::array<uint64_t, kPresenceDays> counts_{};  // by day mod 8
};

}  // namespace kvw
