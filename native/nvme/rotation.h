// The life of segments: which one is open, which stands by, how they open and close, and what a
// read-only tier is probed with. Core thread only.
//
// Opening: the file is made or found, its header with a new life written, and flushed; only then
// may a record follow. Closing: records are flushed, then the table of contents is written, then
// flushed, so that a table never names a record that is not there.
#pragma once

#include <cstdint>
#include <vector>

#include "nvme/context.h"
#include "nvme/flusher.h"

namespace kvw::nvme {

// Segments; with fewer, reclaim makes room.
inline constexpr uint64_t kSpareWanted = 2;

class Rotation {
 public:
  Rotation(LogContext& context, Flusher& flusher) : context_(context), flusher_(flusher) {}

  // The segment that takes records; null while there is none. Asking is wanting: one is opened.
  Segment* current();
  // It is full or broken: close it, and let the next one follow.
  void retire_current();
  // Closes a segment that recovery found open.
  void close(Segment& segment);
  // A segment that nothing names, reads or pins: it becomes free, or goes if it does not fit the
  // options any more.
  void give_back(Segment& segment);

  // Segments that could begin a life without reclaiming another, once so many bytes have left.
  uint64_t spare(uint64_t leaving_bytes = 0) const;
  // Of files on their way out, which the capacity counts until they are gone.
  uint64_t removing_bytes() const { return removing_bytes_; }
  // None open, and none that could be.
  bool exhausted() const;
  uint64_t allocatable(uint64_t leaving_bytes = 0) const;
  // Pages can be written with the files that there are, now or once reclaim has made room.
  bool serves_without_new_files() const;
  // No page can be written before the next start: what cannot be reclaimed fills the capacity.
  bool has_no_room_ever() const { return exhausted() && !serves_without_new_files(); }
  // Takes so many bytes more without reclaiming anything. False on a disk that was full when it was
  // last asked, which it is once an interval, whether anybody writes or not.
  bool has_room(uint64_t bytes) const { return has_room(bytes, spare()); }
  bool has_room(uint64_t bytes, uint64_t spare) const;

  void step();

 private:
  void promote();
  bool next_is_due() const;
  Segment* choose_free();
  bool open_next(bool probing);
  void prepared(uint32_t number, int error);
  void write_header(Segment& segment);
  void header_written(uint32_t number, int error);
  void header_flushed(uint32_t number, int error);
  void opening_failed(Segment& segment, int error);
  void allocation_failed(Segment& segment, int error);
  void opening_ended(int error);

  bool advance_close(Segment& segment);
  void write_toc(Segment& segment);
  void toc_written(uint32_t number, int error);

  void probe();
  void probe_file(DiskJob::Kind kind);

  LogContext& context_;
  Flusher& flusher_;
  Segment* current_ = nullptr;
  Segment* next_ = nullptr;  // standing by
  bool wanted_ = false, opening_ = false, probing_ = false;
  bool no_space_ = false;  // for another file, when it was last tried
  uint64_t allocation_blocked_until_ns_ = 0;
  uint64_t removing_bytes_ = 0;
  std::vector<Segment*> closing_;
};

}  // namespace kvw::nvme
