// The NVMe tier: a log of self-describing records in recycled fixed-size segment files.
//
// Threading: every method of Log and every call to its LogHost happens on the core thread. A disk
// thread inside (nvme/disk.h) does the I/O, the digests and the flushes; the core thread hears of
// finished work through event_fd() and poll(), and never waits for a device.
//
// Invariants:
//  - A record is believed only if its header's checksum holds and its life is its segment's life.
//  - A segment's header with its new life is written and flushed before the first new record.
//  - An extent is reported by on_written() after its write completed; durable after the next flush.
//  - A segment is reused only when no extent of it is named by the index, no read is in flight on
//    it, and the pin scan after the fence found nothing.
//  - Bytes on disk never exceed the capacity; queued bytes never exceed queue_bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "io/io_engine.h"
#include "nvme/record.h"

namespace kvw::nvme {

struct LogOptions {
  std::string directory;        // holds segments/NNNNNNNN.seg
  Key warehouse_id;             // a segment of another warehouse is refused, never overwritten
  uint64_t capacity_bytes = 0;  // hard bound on all segment files together
  uint64_t segment_bytes = 256ull << 20;
  uint64_t queue_bytes = 256ull << 20;  // write-behind queue; beyond it append() refuses
  uint64_t flush_interval_ns = kSecondNs;
  uint64_t retry_interval_ns = 30 * kSecondNs;  // a read-only tier is probed again after this
  uint64_t answer_ns = UINT64_MAX;              // of recover(), for each answer of the device
  unsigned depth = 8;
  std::string io_engine = "auto";
  // Nothing is written, removed or reclaimed: for a look at a directory. Appends are refused.
  bool inspect = false;
  uint64_t epoch_now = 0;               // the warehouse's clear epoch, stamped into segment headers
  uint32_t life_floor = 0;              // new lives are above it: the ledger's highest tombstone
  uint32_t life_ahead = 0;              // of all that another run may have written; 0: not known
  uint64_t moving_bytes = 16ull << 20;  // that reclaim has in memory before it waits for the device
  // Seams for tests; unset means the real thing.
  std::function<std::unique_ptr<IoEngine>()> make_engine;
  std::function<int(int fd, uint64_t bytes)> allocate;  // as fallocate(): 0 or errno
};

// Numbers of segments are below this, so that tables of segment words have a fixed size. A number
// can exceed capacity / segment_bytes where files of another warehouse occupy numbers.
inline constexpr uint32_t kMaxSegments = 1u << 16;
// A tier needs an open segment, two free ones and one with pages.
inline constexpr uint64_t kMinSegments = 4;

inline constexpr uint64_t kMaxReads = 256;  // beyond it read() asks to come again

enum class ReadResult {
  ok,
  io_error,
  mismatch
};  // mismatch: header, life, key or digest is not what it should be

// How a read or a check of a record ended. `reason`, unless ok: "io_error" or "stopped"; of a
// mismatch "header" (no header, or a damaged one), "place" (a good record of another place, life or
// warehouse), "key", "digest", or "unknown" (the log has no such record).
struct RecordEnd {
  ReadResult result;
  const char* reason;
  PageFacts facts;  // filled when ok
};
using ReadEnd = std::function<void(RecordEnd&&)>;

// How reclaim weighs a record.
enum class RecordUse {
  dead,  // the index no longer names this extent, or the page's ancestors are gone from every tier
  cold,  // droppable
  hot,   // recently used and with live ancestors: worth relocating, within a share of each segment
  kept,  // relocated whatever is left of that share, as long as there is room
};

// What the log asks of and tells its owner.
class LogHost {
 public:
  virtual ~LogHost() = default;
  // The record of append(ticket) is written: put the extent into the index.
  virtual void on_written(uint64_t ticket, const Extent& extent) = 0;
  // It is not, and never will be. reason: "io_error", "no_space", "read_only", "stopped".
  virtual void on_write_failed(uint64_t ticket, std::string_view reason) = 0;
  // read(ticket) ended. facts is filled when ok; the payload is then in the buffer and verified.
  virtual void on_read(uint64_t ticket, ReadResult result, PageFacts&& facts) = 0;
  virtual RecordUse use_of(const Key& key, const Extent& extent) = 0;
  // The record is going away: if the index names exactly this extent, take it out. `lost` says that
  // the bytes are not trusted any more (failed flush), rather than reclaimed.
  virtual void forget(const Key& key, const Extent& extent, bool lost) = 0;
  // A relocated record: if the index names `from`, name `to` instead. `to` lies before `from` where
  // a copy failed to become durable and the original is named again: a start may find the copy.
  virtual void moved(const Key& key, const Extent& from, const Extent& to) = 0;
  // A copy of the record is on its way there; moved() says when it is no more.
  virtual void moving(const Key& key, const Extent& to) = 0;
  // Publish the segment's word (life, closing) for clients that pin extents.
  virtual void set_segment_word(uint32_t segment, uint32_t life, bool closing) = 0;
  // After the fence: reads all sessions' pins, for segment_pinned() to answer by.
  virtual void read_pins() = 0;
  virtual bool segment_pinned(uint32_t segment) = 0;  // any session pins an extent of it
  // A thing worth a log line: name and a short text of fields. Rare by construction.
  virtual void on_event(std::string_view name, std::string_view detail) = 0;
};

struct RecoveredRecord {
  Extent extent;
  PageFacts facts;  // witness and digests are empty where they came from a table of contents
};

struct RecoveryReport {
  uint64_t segments = 0;
  uint64_t records = 0;
  uint64_t scanned_segments = 0;  // had no valid table of contents
  uint64_t refused_records = 0;   // bad checksum, digest or life
  uint64_t foreign_segments = 0;
  uint64_t bad_headers = 0;          // of ours, without a header that can be believed: lost
  uint64_t unreadable_segments = 0;  // the device gave an error: left alone until the next start
  uint64_t epoch_seen = 0;           // the highest clear epoch in any segment header
};

enum class LogHealth { ok, read_only };

struct LogStats {
  LogHealth health = LogHealth::ok;
  std::string health_reason;
  uint64_t capacity_bytes = 0, used_bytes = 0;                    // used: closed and open segments
  uint64_t segments = 0, free_segments = 0, closed_segments = 0;  // those to come: free ones too
  uint64_t live_records = 0;
  uint64_t queued_bytes = 0, queued_records = 0, reads_in_flight = 0;
  uint64_t written_records = 0, written_bytes = 0;  // by append, record bytes
  uint64_t relocated_records = 0, relocated_bytes = 0;
  uint64_t read_records = 0, read_bytes = 0;
  // Processor time of digesting what was read of records, by one read timed for each MiB at least.
  uint64_t read_digest_ns = 0;
  uint64_t reclaimed_segments = 0, dropped_records = 0;
  uint64_t write_errors = 0, read_errors = 0, mismatches = 0, flush_errors = 0, flushes = 0;
  uint64_t read_bytes_per_s = 0,
           write_bytes_per_s = 0;  // while busy, smoothed; 0: not measured yet
  std::string io_engine;
  // Of all that the next start may find, free segments too; 0: there is none, or nobody knows.
  uint32_t oldest_life = 0;
  uint64_t registered_bytes = 0;  // of memory that the engine need not find anew each time
  bool direct_io = false;  // false: the filesystem refuses O_DIRECT and the page cache is used
};

class Log {
 public:
  virtual ~Log() = default;

  // Reads all segments; calls back for every believed record (any order; the owner lets the higher
  // (life, offset) of a duplicate win and applies tombstones). Call once, before anything else.
  virtual RecoveryReport recover(const std::function<void(RecoveredRecord&&)>& found) = 0;

  // Queues a page for writing. `payload` (facts.payload_bytes(), 4 KiB aligned) must stay unchanged
  // until on_written or on_write_failed. False: the queue is full, the tier is read-only, the
  // page is larger than a segment or the whole queue, or segments that are left alone fill the
  // capacity.
  virtual bool append(uint64_t ticket, const PageFacts& facts, const std::byte* payload) = 0;
  // Reads and verifies a record into `payload`. False: too many reads queued; ask again later.
  virtual bool read(uint64_t ticket, const Extent& extent, const Key& key, std::byte* payload) = 0;

  // Reads and verifies a record into a buffer of its own, which is gone by the time `end` is called
  // (in poll(), or in stop()). False as above.
  virtual bool check(const Extent& extent, const Key& key, ReadEnd end) = 0;

  // As check(), of the record's header alone: what page it is, with its tokens; its payload is
  // neither read nor judged. Not counted in the tier's read rate, which is for payloads.
  virtual bool read_header(const Extent& extent, const Key& key, ReadEnd end) = 0;

  // Everything appended before this call: returns a number that durable_through() reaches when it
  // is on stable media (or is known to have failed).
  virtual uint64_t request_flush() = 0;
  virtual uint64_t durable_through() const = 0;

  // Memory that payloads are in, as IoEngine::register_memory() wants it; it must outlive the log.
  // Best effort: if it is refused, the host hears of it once, and all goes on as without.
  virtual void register_memory(std::span<std::byte> memory) = 0;

  virtual void set_epoch(uint64_t epoch) = 0;
  virtual int event_fd() const = 0;
  virtual void poll() = 0;  // handle finished work
  virtual void tick() = 0;  // flush interval, reclaim, probing of a read-only tier
  // Looks at every segment. The two below do not.
  virtual LogStats stats() const = 0;
  virtual LogHealth health() const = 0;
  // No record of now, written or on its way, lies above this position: not in a segment that was
  // reclaimed or could not be read either. All that come lie above it.
  virtual uint64_t last_position() const = 0;
  virtual uint64_t queued_bytes() const = 0;
  // Records of now and before, those that reclaim moved among them.
  virtual uint64_t written_bytes() const = 0;
  // What is queued and a page more fit without making room by what is there.
  virtual bool has_room() const = 0;
  // The same, once what is being reclaimed now is free.
  virtual bool has_room_soon() const = 0;
  // Ends the disk thread once what it has submitted is done; unwritten appends fail with "stopped",
  // unread reads with io_error. Flush first to keep them. Destruction without stop() calls nobody.
  virtual void stop() = 0;
};

// Throws Error usage ("nvme_capacity", "segment_bytes") for sizes that no tier can have.
void check_sizes(uint64_t capacity_bytes, uint64_t segment_bytes);

// Creates the directories. Throws Error: usage for impossible sizes, storage when the directory
// cannot be created. One that cannot be written to starts as a read-only tier.
std::unique_ptr<Log> open_log(const LogOptions& options, LogHost& host, const Clock& clock);

}  // namespace kvw::nvme
