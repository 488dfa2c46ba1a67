// The log as one: wires its parts together and steps them whenever something happened.
#include "nvme/log.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "nvme/context.h"
#include "nvme/flusher.h"
#include "nvme/reclaimer.h"
#include "nvme/record_read.h"
#include "nvme/recovery.h"
#include "nvme/rotation.h"
#include "nvme/write_behind.h"

namespace kvw::nvme {
namespace {

// Of memory at once: the disk thread is away for so long, some 30 ms on a slow machine.
constexpr size_t kRegisterBytes = 64ull << 20;

class SegmentLog final : public Log {
 public:
  SegmentLog(const LogOptions& options, LogHost& host, const Clock& clock)
      : context_(options, host, clock),
        flusher_(context_),
        rotation_(context_, flusher_),
        writes_(context_, rotation_),
        reclaimer_(context_, rotation_, flusher_, writes_) {}

  // Before the parts go: the engine may still write from their buffers.
  ~SegmentLog() override { context_.disk.stop(); }

  RecoveryReport recover(const std::function<void(RecoveredRecord&&)>& found) override {
    const RecoveryReport report = Recovery(context_, rotation_).run(found);
    context_.last_position = uint64_t{context_.table.last_life()} << 32 | UINT32_MAX;
    const int error = context_.files.write_error();
    const bool serves = reason_of(error) == "no_space" && rotation_.serves_without_new_files();
    if (error != 0 && !serves) context_.health.become_read_only(error);
    context_.disk.start();
    context_.disk.signal();
    return report;
  }

  bool append(uint64_t ticket, const PageFacts& facts, const std::byte* payload) override {
    if (stopped_ || context_.options.inspect || !writes_.append(ticket, facts, payload))
      return false;
    // Sent in the next poll(), so that what is appended in one go travels as one batch.
    if (!std::exchange(signalled_, true)) context_.disk.signal();
    return true;
  }

  bool read(uint64_t ticket, const Extent& extent, const Key& key, std::byte* payload) override {
    if (reads_ >= kMaxReads || stopped_) return false;
    post_read(extent, key, {RecordPart::whole, payload, true}, [this, ticket](RecordEnd&& end) {
      context_.host.on_read(ticket, end.result, std::move(end.facts));
    });
    return true;
  }
  bool check(const Extent& extent, const Key& key, ReadEnd end) override {
    if (reads_ >= kMaxReads || stopped_) return false;
    post_read(extent, key, {}, std::move(end));
    return true;
  }
  bool read_header(const Extent& extent, const Key& key, ReadEnd end) override {
    if (reads_ >= kMaxReads || stopped_) return false;
    post_read(extent, key, {RecordPart::header}, std::move(end));
    return true;
  }

  uint64_t request_flush() override {
    flusher_.want(writes_.appended());
    context_.disk.signal();
    return writes_.appended();
  }
  uint64_t durable_through() const override { return flusher_.durable(); }

  void register_memory(std::span<std::byte> memory) override {
    if (stopped_ || context_.options.inspect || memory_refused_) return;
    while (!memory.empty()) {
      const auto part = memory.first(std::min(memory.size(), kRegisterBytes));
      memory = memory.subspan(part.size());
      auto job = std::make_unique<DiskJob>();
      job->kind = DiskJob::Kind::register_memory;
      job->add_piece(part.data(), part.size());
      job->done = [this, bytes = part.size()](int error) { memory_registered(bytes, error); };
      context_.disk.post(std::move(job));
    }
  }

  void set_epoch(uint64_t epoch) override { context_.epoch = epoch; }
  int event_fd() const override { return context_.disk.event_fd(); }

  void poll() override {
    signalled_ = false;
    context_.disk.deliver();
    tell_mismatches();
    advance();
  }
  void tick() override {
    tell_shortage();
    advance();
  }

  LogStats stats() const override;
  LogHealth health() const override { return context_.health.state(); }
  uint64_t last_position() const override { return context_.last_position; }
  uint64_t queued_bytes() const override { return writes_.queued_bytes(); }
  uint64_t written_bytes() const override {
    return context_.stats.written_bytes + context_.stats.relocated_bytes;
  }
  bool has_room() const override {
    return rotation_.has_room(writes_.queued_bytes() + context_.options.segment_bytes);
  }
  bool has_room_soon() const override {
    const uint64_t bytes = writes_.queued_bytes() + context_.options.segment_bytes;
    return rotation_.has_room(bytes + reclaimer_.bytes_to_move(), reclaimer_.spare_when_idle());
  }

  void stop() override {
    if (std::exchange(stopped_, true)) return;
    reclaimer_.abandon();
    context_.disk.stop();
    context_.disk.deliver();
    tell_mismatches();
    writes_.fail_waiting("stopped");
    context_.disk.deliver();
  }

 private:
  void post_read(const Extent& extent, const Key& key, ReadTarget target, ReadEnd end) {
    ++reads_;
    Segment* segment = context_.table.find(extent.segment);
    const RecordRef* ref = segment == nullptr ? nullptr : segment->find(extent, key);
    if (ref == nullptr) {
      // Told in the next poll(): a caller is never called back from inside its call.
      mismatches_.push_back(std::move(end));
      context_.disk.signal();
      return;
    }
    post_record_read(context_, *segment, *ref, target,
                     [this, end = std::move(end)](RecordEnd&& read) {
                       --reads_;
                       end(std::move(read));
                     });
  }

  void memory_registered(uint64_t bytes, int error) {
    if (error == 0) context_.stats.registered_bytes += bytes;
    if (error == 0 || error == ECANCELED || std::exchange(memory_refused_, true)) return;
    context_.host.on_event("nvme_memory_not_registered",
                           "error=" + std::string(std::strerror(error)) + " bytes=" +
                               std::to_string(bytes) + " effect=more_processor_time_a_page");
  }

  void tell_shortage() {
    const uint64_t shortages = context_.files.shortages();
    if (shortages == shortages_ || context_.clock.boot_ns() < shortage_quiet_until_ns_) return;
    shortages_ = shortages;
    shortage_quiet_until_ns_ = context_.clock.boot_ns() + context_.options.retry_interval_ns;
    context_.host.on_event("nvme_no_descriptors", "effect=reads_and_writes_wait");
  }

  void tell_mismatches() {
    for (const ReadEnd& end : std::exchange(mismatches_, {})) {
      --reads_;
      ++context_.stats.mismatches;
      end({ReadResult::mismatch, "unknown", {}});
    }
  }

  // Twice: what one part frees, another takes at once.
  void advance() {
    if (stopped_ || context_.options.inspect) return;
    for (int pass = 0; pass < 2; ++pass) {
      if (!context_.health.writable()) {
        reclaimer_.abandon();
        writes_.fail_waiting("read_only");
      }
      rotation_.step();
      writes_.step();
      reclaimer_.step();
      flusher_.step(writes_.written());
    }
  }

  LogContext context_;
  Flusher flusher_;
  Rotation rotation_;
  WriteBehind writes_;
  Reclaimer reclaimer_;
  std::vector<ReadEnd> mismatches_;  // reads that need no device
  uint64_t reads_ = 0;
  uint64_t shortages_ = 0, shortage_quiet_until_ns_ = 0;
  bool signalled_ = false, stopped_ = false, memory_refused_ = false;
};

void count_segment(const Segment& segment, LogStats& stats) {
  if (segment.state == SegmentState::foreign || segment.state == SegmentState::bad) return;
  ++stats.segments;
  stats.capacity_bytes += segment.bytes;
  if (!segment.readable()) return;
  if (segment.state == SegmentState::closed) ++stats.closed_segments;
  stats.used_bytes += segment.bytes;
  stats.live_records += segment.records.size();
}

uint32_t oldest_life(const SegmentTable& table) {
  uint32_t oldest = 0;
  for (const auto& [number, segment] : table.all()) {
    const bool known = segment.file_life != 0;
    if (!known && segment.state == SegmentState::bad) return 0;
    if (known && (oldest == 0 || segment.file_life < oldest)) oldest = segment.file_life;
  }
  return oldest;
}

LogStats SegmentLog::stats() const {
  LogStats stats = context_.stats;
  stats.capacity_bytes = 0;
  for (const auto& [number, segment] : context_.table.all()) count_segment(segment, stats);
  stats.oldest_life = oldest_life(context_.table);
  stats.health = context_.health.state();
  stats.health_reason = context_.health.reason();
  // Without room for more files the capacity is what exists.
  const uint64_t to_come = rotation_.allocatable();
  stats.segments += to_come;
  stats.capacity_bytes += to_come * context_.options.segment_bytes;
  stats.free_segments = rotation_.spare();
  stats.queued_bytes = writes_.queued_bytes();
  stats.queued_records = writes_.queued_records();
  stats.reads_in_flight = reads_;
  stats.read_bytes_per_s = context_.disk.read_rate();
  stats.write_bytes_per_s = context_.disk.write_rate();
  stats.io_engine = context_.disk.engine_name();
  stats.direct_io = context_.files.direct();
  return stats;
}

}  // namespace

void check_sizes(uint64_t capacity_bytes, uint64_t segment_bytes) {
  const auto refuse = [](const char* code, const std::string& message) {
    throw Error(ErrorKind::usage, code, message);
  };
  if (segment_bytes % kBlockBytes != 0 || segment_bytes < 16 * kBlockBytes)
    refuse("segment_bytes", "--nvme-segment " + std::to_string(segment_bytes) +
                                ": give a multiple of 4096, at least 65536");
  const uint64_t segments = capacity_bytes / segment_bytes;
  if (segments < kMinSegments)
    refuse("nvme_capacity", "--nvme-capacity of " + std::to_string(capacity_bytes) +
                                " bytes holds " + std::to_string(segments) + " segments of " +
                                std::to_string(segment_bytes) +
                                "; give room for at least 4, or a smaller --nvme-segment");
  if (segments > kMaxSegments)
    refuse("segment_bytes", "--nvme-capacity of " + std::to_string(capacity_bytes) +
                                " bytes needs " + std::to_string(segments) + " segments of " +
                                std::to_string(segment_bytes) + ", more than " +
                                std::to_string(kMaxSegments) + "; give a larger --nvme-segment");
}

std::unique_ptr<Log> open_log(const LogOptions& options, LogHost& host, const Clock& clock) {
  check_sizes(options.capacity_bytes, options.segment_bytes);
  return std::make_unique<SegmentLog>(options, host, clock);
}

}  // namespace kvw::nvme
