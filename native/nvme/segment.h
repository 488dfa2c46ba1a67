// The segments of the log and what lies in them. Core thread only.
//
// Invariants: a segment's records are in rising order of offset; its toc runs parallel to them
// while it is open or closing, and is empty otherwise; life numbers are handed out once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "base/types.h"
#include "nvme/format.h"
#include "nvme/record.h"

namespace kvw::nvme {

enum class SegmentState : uint8_t {
  free,     // may begin a new life
  opening,  // its file, header and flush are under way
  standby,  // has a flushed header and no record: the next to be open
  open,     // takes records
  closing,  // takes no more; its table of contents is under way
  closed,
  reclaiming,  // still read from, no longer pinned
  foreign,     // of another warehouse: never touched
  bad,         // could not be read at start: left alone until the next
};

// What is kept of a record once its segment is closed: 24 bytes.
struct RecordRef {
  Key key;
  uint32_t offset_blocks = 0;
  uint32_t blocks : 24;
  uint32_t header_blocks : 8;
};
static_assert(sizeof(RecordRef) == 24);
inline constexpr uint32_t kMaxRecordBlocks = (1u << 24) - 1;

enum class CloseStep : uint8_t { records, writing_toc, flushing_toc };

struct Segment {
  uint32_t number = 0;
  uint32_t life = 0;
  uint32_t file_life = 0;  // whose records a start would find in its file; 0: none, or not known
  SegmentState state = SegmentState::free;
  uint64_t bytes = 0;

  std::vector<RecordRef> records;
  std::vector<TocEntry> toc;

  uint32_t next_block = 1;  // where the next record goes
  uint64_t placed = 0;      // records that have a place: written and in flight
  unsigned writes_in_flight = 0, reads_in_flight = 0;
  uint64_t writes_done = 0, writes_flushed = 0;
  size_t flushed_records = 0;  // a prefix of records
  bool flushing = false;
  bool has_file = false;
  bool broken = false;  // a write or flush failed: takes no more records
  bool unread = false;  // a start could not read all of it: not reclaimed, for the next may
  CloseStep close_step = CloseStep::records;

  uint64_t hot_bytes = 0, live_bytes = 0;  // estimates, if scored; live: all that is not dead
  bool scored = false;

  // For `count` records of that many blocks together.
  bool has_room(uint64_t blocks, uint64_t count = 1) const;
  bool unflushed() const { return writes_flushed < writes_done; }
  bool readable() const;
  Extent extent_of(const RecordRef& ref) const {
    return {number, ref.offset_blocks, ref.blocks, life};
  }
  // Null unless this very record is here and may be read.
  const RecordRef* find(const Extent& extent, const Key& key) const;
  void add(const PageFacts& facts, const Extent& extent);
  void begin_life(uint32_t new_life);
};

// Whether a record of that many blocks fits into an empty segment of that size.
bool fits_segment(uint64_t blocks, uint64_t segment_bytes);

class SegmentTable {
 public:
  using Map = std::map<uint32_t, Segment>;  // addresses stay

  Segment& add(uint32_t number, uint64_t bytes, SegmentState state);
  void erase(uint32_t number);
  // Its file has another length from now on.
  void resize(Segment& segment, uint64_t bytes);
  Segment* find(uint32_t number);
  Map& all() { return segments_; }
  const Map& all() const { return segments_; }

  // The lowest number without a segment; kMaxSegments if there is none.
  uint32_t unused_number() const;
  uint64_t bytes() const { return bytes_; }
  size_t count(SegmentState state) const;

  // First in, first out: wear spreads, and a file that fails goes to the back.
  std::deque<uint32_t>& free() { return free_; }
  const std::deque<uint32_t>& free() const { return free_; }

  uint32_t take_life() { return next_life_++; }
  uint32_t last_life() const { return next_life_ - 1; }
  void saw_life(uint32_t life) {
    if (life >= next_life_) next_life_ = life + 1;
  }

 private:
  Map segments_;
  std::deque<uint32_t> free_;
  uint64_t bytes_ = 0;
  uint32_t next_life_ = 1;
};

}  // namespace kvw::nvme
