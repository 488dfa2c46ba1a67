#include "nvme/write_behind.h"

#include <cerrno>
#include <utility>

#include "base/error.h"

namespace kvw::nvme {
namespace {

constexpr uint64_t kBatchBytes = 1ull << 20;  // worth sending while others are in flight
// So that a read never waits behind more; and the headers of what fits.
constexpr uint64_t kMaxBatchBytes = (4ull << 20) + 8 * kBlockBytes;
constexpr size_t kMaxBatchRecords = 256;  // two pieces each: below IOV_MAX

bool is_aligned(const std::byte* data) {
  return reinterpret_cast<uintptr_t>(data) % kBlockBytes == 0;
}

}  // namespace

bool WriteBehind::append(uint64_t ticket, const PageFacts& facts, const std::byte* payload) {
  if (!facts_are_sound(facts) || !is_aligned(payload))
    throw Error(ErrorKind::internal, "unsound_page",
                "page " + to_hex(facts.key) + " does not fit its own description; not written");
  if (!context_.health.writable() || rotation_.has_no_room_ever()) return false;
  QueuedRecord record;
  record.header_blocks = header_blocks(facts);
  record.blocks = record_blocks(facts);
  const bool oversize = !fits_segment(record.blocks, context_.options.segment_bytes) ||
                        record.bytes() > context_.options.queue_bytes;
  if (oversize && !std::exchange(oversize_reported_, true))
    context_.host.on_event("nvme_page_too_large", "bytes=" + std::to_string(record.bytes()));
  if (oversize || queued_bytes_ + record.bytes() > context_.options.queue_bytes) return false;
  record.ticket = ticket;
  record.sequence = ++appended_;
  record.facts = facts;
  record.payload = payload;
  queued_bytes_ += record.bytes();
  waiting_bytes_ += record.bytes();
  ++queued_records_;
  appends_.push_back(std::move(record));
  return true;
}

uint64_t WriteBehind::written() const {
  for (const auto& batch : in_flight_)
    if (batch->first_sequence != 0) return batch->first_sequence - 1;
  return appends_.empty() ? appended_ : appends_.front().sequence - 1;
}

const QueuedRecord& WriteBehind::front() const {
  return relocations_.empty() ? appends_.front() : relocations_.front();
}

QueuedRecord WriteBehind::take_front() {
  auto& queue = relocations_.empty() ? appends_ : relocations_;
  QueuedRecord record = std::move(queue.front());
  queue.pop_front();
  if (!record.is_relocation()) waiting_bytes_ -= record.bytes();
  return record;
}

void WriteBehind::keep_room(uint64_t bytes) {
  const bool was_kept = kept_blocks_ > 0;
  kept_blocks_ = bytes / kBlockBytes;
  if (was_kept && kept_blocks_ == 0) context_.disk.signal();  // what waited for it goes on
}

// The room that is kept is for records of two blocks at least.
bool WriteBehind::may_place(const Segment& segment) const {
  return front().is_relocation() || kept_blocks_ == 0 || rotation_.spare() > 0 ||
         segment.has_room(front().blocks + kept_blocks_, 1 + kept_blocks_ / 2);
}

// While something is in flight, small pages gather to a batch.
bool WriteBehind::worth_sending() const {
  return in_flight_.empty() || !relocations_.empty() || waiting_bytes_ >= kBatchBytes;
}

void WriteBehind::step() {
  while (context_.health.writable() && in_flight_.size() < context_.options.depth) {
    drop_dead_relocations();
    if (!waiting()) return;
    Segment* segment = rotation_.current();
    if (segment == nullptr) {
      // A reclaim that waits for relocations which wait for its segment would never end.
      if (rotation_.exhausted()) drop_relocations();
      // Nothing would ever end the wait, and a page that waits cannot leave DRAM.
      if (rotation_.has_no_room_ever()) fail_waiting("no_space");
      return;
    }
    if (!worth_sending() || !may_place(*segment)) return;
    if (segment->broken || !segment->has_room(front().blocks)) {
      rotation_.retire_current();
      continue;
    }
    send(*segment);
  }
}

void WriteBehind::send(Segment& segment) {
  auto batch = std::make_shared<Batch>();
  batch->segment = &segment;
  fill(*batch);
  uint64_t header_bytes = 0;
  for (const QueuedRecord& record : batch->records) header_bytes += record.header_blocks;
  auto job = std::make_unique<DiskJob>();
  job->kind = DiskJob::Kind::write;
  job->segment = segment.number;
  job->offset = uint64_t{batch->extents.front().offset_blocks} * kBlockBytes;
  job->buffer = AlignedBuffer(header_bytes * kBlockBytes);
  size_t at = 0;
  for (size_t i = 0; i < batch->records.size(); ++i) {
    const QueuedRecord& record = batch->records[i];
    const auto header = job->buffer.part(at, record.header_blocks * kBlockBytes);
    at += header.size();
    encode_record_header(context_.options.warehouse_id, batch->extents[i], record.facts, header);
    job->add_piece(header.data(), header.size());
    // Only read from: the engine's pieces serve both directions.
    job->add_piece(const_cast<std::byte*>(record.payload), record.facts.payload_bytes());
  }
  ++segment.writes_in_flight;
  in_flight_.push_back(batch);
  job->done = [this, batch = batch.get()](int error) {
    batch->done = true;
    batch->error = error;
    deliver();
  };
  context_.disk.post(std::move(job));
}

void WriteBehind::fill(Batch& batch) {
  Segment& segment = *batch.segment;
  uint64_t bytes = 0;
  while (waiting() && batch.records.size() < kMaxBatchRecords) {
    const QueuedRecord& next = front();
    if (!segment.has_room(next.blocks) || !may_place(segment)) break;
    if (bytes > 0 && bytes + next.bytes() > kMaxBatchBytes) break;
    bytes += next.bytes();
    batch.extents.push_back({segment.number, segment.next_block, next.blocks, segment.life});
    context_.last_position = batch.extents.back().position();
    segment.next_block += next.blocks;
    ++segment.placed;
    if (batch.first_sequence == 0) batch.first_sequence = next.sequence;
    if (next.is_relocation()) context_.host.moving(next.facts.key, batch.extents.back());
    batch.records.push_back(take_front());
    drop_dead_relocations();
  }
}

void WriteBehind::deliver() {
  while (!in_flight_.empty() && in_flight_.front()->done) {
    const auto batch = std::move(in_flight_.front());
    in_flight_.pop_front();
    deliver(*batch);
  }
}

void WriteBehind::deliver(Batch& batch) {
  Segment& segment = *batch.segment;
  --segment.writes_in_flight;
  const bool stopped = batch.error == ECANCELED;
  if (batch.error != 0 && !stopped) {
    segment.broken = true;
    ++context_.stats.write_errors;
    context_.host.on_event("nvme_write_failed", event_detail(segment.number, batch.error));
    context_.health.write_failed(batch.error);
  }
  // A segment that refused a write is not relied on any more, so what lies behind it fails as well
  // (the scan of a recovery may find it all the same, with the right bytes).
  const bool good = batch.error == 0 && !segment.broken;
  if (good) {
    ++segment.writes_done;
    context_.health.write_succeeded();
    for (size_t i = 0; i < batch.records.size(); ++i)
      segment.add(batch.records[i].facts, batch.extents[i]);
  }
  const std::string_view reason = reason_of(batch.error);
  for (size_t i = 0; i < batch.records.size(); ++i)
    report(batch.records[i], batch.extents[i], good, reason);
}

void WriteBehind::report(QueuedRecord& record, const Extent& to, bool written,
                         std::string_view reason) {
  if (record.is_relocation()) return relocated_(record, &to, written);
  if (!written) return fail(record, reason);
  queued_bytes_ -= record.bytes();
  --queued_records_;
  ++context_.stats.written_records;
  context_.stats.written_bytes += record.bytes();
  context_.host.on_written(record.ticket, to);
}

void WriteBehind::fail(const QueuedRecord& record, std::string_view reason) {
  queued_bytes_ -= record.bytes();
  --queued_records_;
  context_.host.on_write_failed(record.ticket, reason);
}

void WriteBehind::drop_dead_relocations() {
  while (!relocations_.empty()) {
    const QueuedRecord& next = relocations_.front();
    if (context_.host.use_of(next.facts.key, next.from) != RecordUse::dead) return;
    const QueuedRecord dropped = std::move(relocations_.front());
    relocations_.pop_front();
    relocated_(dropped, nullptr, false);
  }
}

void WriteBehind::drop_relocations() {
  std::deque<QueuedRecord> dropped;
  dropped.swap(relocations_);
  for (const QueuedRecord& record : dropped) relocated_(record, nullptr, false);
}

void WriteBehind::fail_waiting(std::string_view reason) {
  drop_relocations();
  std::deque<QueuedRecord> failed;
  failed.swap(appends_);
  waiting_bytes_ = 0;
  for (const QueuedRecord& record : failed) fail(record, reason);
}

}  // namespace kvw::nvme
