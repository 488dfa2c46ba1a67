// The write-behind queue: pages wait here in chain order, are placed into the open segment batch by
// batch, and are reported in the order in which they came. Relocated records go first: a segment
// waits for them; while the last segment is filling, appends wait rather than take their room. Core
// thread only.
//
// Bound: queue_bytes for pages, the reclaimer's own bound for relocations, depth batches in flight.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "nvme/context.h"
#include "nvme/rotation.h"

namespace kvw::nvme {

struct QueuedRecord {
  uint64_t ticket = 0;
  uint64_t sequence = 0;  // of an append; 0: a relocation
  PageFacts facts;
  const std::byte* payload = nullptr;
  uint32_t header_blocks = 0, blocks = 0;
  AlignedBuffer owned;  // a relocation's payload
  Extent from;          // a relocation's old place

  bool is_relocation() const { return sequence == 0; }
  uint64_t bytes() const { return uint64_t{blocks} * kBlockBytes; }
};

class WriteBehind {
 public:
  // What became of a relocation: its place, null if it got none, and whether it was written there;
  // one that was not may be there all the same.
  using Relocated = std::function<void(const QueuedRecord&, const Extent* to, bool written)>;

  WriteBehind(LogContext& context, Rotation& rotation) : context_(context), rotation_(rotation) {}
  void on_relocated(Relocated relocated) { relocated_ = std::move(relocated); }

  // False: refused. See Log::append.
  bool append(uint64_t ticket, const PageFacts& facts, const std::byte* payload);
  void relocate(QueuedRecord record) { relocations_.push_back(std::move(record)); }
  // Of the last segment that there is, appends leave that much to relocations that will come.
  void keep_room(uint64_t bytes);
  void step();
  // Everything that has no place yet fails.
  void fail_waiting(std::string_view reason);

  uint64_t appended() const { return appended_; }
  // All appends up to this number are written or failed.
  uint64_t written() const;
  uint64_t queued_bytes() const { return queued_bytes_; }
  uint64_t queued_records() const { return queued_records_; }

 private:
  struct Batch {
    Segment* segment;
    std::vector<QueuedRecord> records;
    std::vector<Extent> extents;
    uint64_t first_sequence = 0;  // 0: relocations only
    bool done = false;
    int error = 0;
  };

  bool waiting() const { return !relocations_.empty() || !appends_.empty(); }
  const QueuedRecord& front() const;
  QueuedRecord take_front();
  bool may_place(const Segment& segment) const;
  bool worth_sending() const;
  void send(Segment& segment);
  void fill(Batch& batch);
  void deliver();
  void deliver(Batch& batch);
  void report(QueuedRecord& record, const Extent& to, bool written, std::string_view reason);
  void fail(const QueuedRecord& record, std::string_view reason);
  void drop_relocations();
  // Of pages that left while they were read: no copy is made of them.
  void drop_dead_relocations();

  LogContext& context_;
  Rotation& rotation_;
  Relocated relocated_;
  std::deque<QueuedRecord> appends_, relocations_;
  std::deque<std::shared_ptr<Batch>> in_flight_;  // in order of place
  uint64_t appended_ = 0;
  uint64_t queued_bytes_ = 0, queued_records_ = 0, waiting_bytes_ = 0;
  uint64_t kept_blocks_ = 0;
  bool oversize_reported_ = false;
};

}  // namespace kvw::nvme
