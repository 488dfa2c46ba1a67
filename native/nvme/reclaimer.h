// Makes room: picks the closed segment with the fewest hot, then live bytes, in eighths, then the
// oldest; moves what is hot, drops the rest and gives the segment back. Core thread only; every
// step is bounded.
//
// Order, which is the safety of it:
//   1. the segment's word says closing; full fence; pin scan. Pinned: the word is taken back and
//      another segment is chosen. From here on nobody can pin an extent of it.
//   2. every record is forgotten, or, if hot, read (digest verified) and queued for writing; the
//      index names the old place until the new one is written, so a hot page never misses.
//   3. a flush cycle: the copies are durable before the originals can be overwritten.
//   4. no read is in flight on it. Only now may it begin a new life.
// At most a quarter of a segment is moved, so that of four bytes written three are new; by how much
// the last record goes beyond it, the next segments move less. New pages leave it that room,
// however late the device gives what is to be moved. A record that cannot be moved, for want of
// room all the same or because its write failed, is dropped: reclaim never waits for room that only
// reclaim can make.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "nvme/context.h"
#include "nvme/flusher.h"
#include "nvme/rotation.h"
#include "nvme/write_behind.h"

namespace kvw::nvme {

class Reclaimer {
 public:
  Reclaimer(LogContext& context, Rotation& rotation, Flusher& flusher, WriteBehind& writes);

  void step();
  // The tier does not take writes: what is left of the victim stays.
  void abandon();

  // What may still have to be written elsewhere of the victim.
  uint64_t bytes_to_move() const;
  // Segments that could begin a life once the victim has gone, too.
  uint64_t spare_when_idle() const;

 private:
  enum class Stage { idle, sorting, moving, flushing };
  struct Copy {
    Key key;
    Extent from, to;
    uint64_t cycle;  // of flushes, after which it is durable or lost
  };

  Segment* choose();
  void refresh_scores();
  void score(Segment& segment);
  // A closed segment that nobody pins and, from now on, nobody can; null if there is none yet.
  Segment* seize();
  void begin();
  void tell_shrunk();
  void sort_some();
  bool worth_moving(RecordUse use, const RecordRef& ref) const;
  void drop(const RecordRef& ref);
  void move(const RecordRef& ref);
  void read_for_move(uint64_t round, const RecordRef& ref, AlignedBuffer payload, ReadResult result,
                     PageFacts&& facts);
  void moved(const QueuedRecord& record, const Extent* to, bool written);
  void copy_lost(const Extent& to);
  void forget_durable_copies();
  // Segments that could begin a life once these, which reclaim took, have gone.
  uint64_t spare_after(std::span<Segment* const> leaving) const;
  void release_drained();

  LogContext& context_;
  Rotation& rotation_;
  Flusher& flusher_;
  WriteBehind& writes_;

  Stage stage_ = Stage::idle;
  Segment* victim_ = nullptr;
  uint64_t round_ = 0;  // tells late completions of an abandoned victim apart
  size_t next_record_ = 0;
  int64_t share_bytes_ = 0;     // may still be moved; below 0: on account of victims to come
  uint64_t largest_bytes_ = 0;  // record of the victim
  uint64_t moving_bytes_ = 0;   // in memory now
  unsigned moving_ = 0;
  std::map<uint64_t, Copy> copies_;  // by position, of all victims: not known to be durable
  bool lost_copy_ = false;           // of this victim, whose record is named again
  uint64_t retry_at_ns_ = 0;         // after all candidates were pinned
  uint32_t score_cursor_ = 0;
  std::vector<Segment*> draining_;  // wait for reads in flight only
};

}  // namespace kvw::nvme
