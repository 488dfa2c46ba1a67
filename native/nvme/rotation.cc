#include "nvme/rotation.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace kvw::nvme {

Segment* Rotation::current() {
  if (current_ == nullptr) {
    wanted_ = true;
    promote();
  }
  return current_;
}

void Rotation::promote() {
  if (current_ != nullptr || next_ == nullptr || !context_.health.writable()) return;
  current_ = std::exchange(next_, nullptr);
  current_->state = SegmentState::open;
}

void Rotation::retire_current() {
  if (current_ == nullptr) return;
  Segment& segment = *std::exchange(current_, nullptr);
  close(segment);
}

void Rotation::close(Segment& segment) {
  segment.state = SegmentState::closing;
  segment.close_step = CloseStep::records;
  closing_.push_back(&segment);
}

uint64_t Rotation::allocatable(uint64_t leaving_bytes) const {
  if (context_.clock.boot_ns() < allocation_blocked_until_ns_) return 0;
  const uint64_t used = context_.table.bytes() - leaving_bytes;
  const uint64_t capacity = context_.options.capacity_bytes;
  return used >= capacity ? 0 : (capacity - used) / context_.options.segment_bytes;
}

uint64_t Rotation::spare(uint64_t leaving_bytes) const {
  return context_.table.free().size() + allocatable(leaving_bytes) + (next_ != nullptr ? 1 : 0) +
         (opening_ ? 1 : 0);
}

bool Rotation::has_room(uint64_t bytes, uint64_t spare) const {
  return !no_space_ && spare * context_.options.segment_bytes >=
                           kSpareWanted * context_.options.segment_bytes + bytes;
}

bool Rotation::exhausted() const { return current_ == nullptr && spare() == 0; }

bool Rotation::serves_without_new_files() const {
  if (current_ != nullptr || next_ != nullptr || !context_.table.free().empty()) return true;
  return removing_bytes_ > 0 || std::ranges::any_of(context_.table.all(), [](const auto& each) {
           const Segment& segment = each.second;
           return segment.readable() && !segment.unread;
         });
}

void Rotation::give_back(Segment& segment) {
  const auto& options = context_.options;
  context_.host.set_segment_word(segment.number, segment.life, true);
  segment.begin_life(segment.life);
  segment.state = SegmentState::free;
  if (segment.bytes == options.segment_bytes) {
    context_.table.free().push_back(segment.number);
    return;
  }
  auto job = std::make_unique<DiskJob>();
  job->kind = DiskJob::Kind::remove;
  job->segment = segment.number;
  // Counted until it is gone: the capacity is a bound on files, not on hopes.
  removing_bytes_ += segment.bytes;
  job->done = [this, number = segment.number, bytes = segment.bytes](int error) {
    removing_bytes_ -= bytes;
    if (error == 0) return context_.table.erase(number);
    context_.table.find(number)->state = SegmentState::bad;
    context_.host.on_event("nvme_remove_failed", event_detail(number, error));
  };
  context_.disk.post(std::move(job));
}

void Rotation::step() {
  if (current_ != nullptr && current_->broken) retire_current();
  std::erase_if(closing_, [this](Segment* each) { return advance_close(*each); });
  if (context_.health.probe_due()) probe();
  if (!context_.health.writable()) return;
  if (wanted_) promote();
  if (next_is_due()) open_next(false);
}

bool Rotation::next_is_due() const {
  if (opening_ || probing_) return false;
  if (no_space_ && allocatable() > 0) return true;
  if (next_ != nullptr) return false;
  if (current_ == nullptr) return wanted_;
  // Early: a new file takes two commits, of the filesystem and of the device, and under a full load
  // of writes each may take as long as filling much of a segment.
  return uint64_t{current_->next_block} * kBlockBytes * 4 > current_->bytes;
}

Segment* Rotation::choose_free() {
  auto& table = context_.table;
  // New files first: what is spare would else be the same one for ever, and its blocks others'.
  const uint32_t unused = table.unused_number();
  if (allocatable() > 0 && unused < kMaxSegments)
    return &table.add(unused, context_.options.segment_bytes, SegmentState::free);
  if (table.free().empty()) return nullptr;
  const uint32_t number = table.free().front();
  table.free().pop_front();
  return table.find(number);
}

bool Rotation::open_next(bool probing) {
  Segment* segment = choose_free();
  if (segment == nullptr) return false;
  segment->state = SegmentState::opening;
  opening_ = true;
  probing_ = probing;
  auto job = std::make_unique<DiskJob>();
  job->kind = DiskJob::Kind::prepare;
  job->segment = segment->number;
  job->bytes = segment->bytes;
  job->done = [this, number = segment->number](int error) { prepared(number, error); };
  context_.disk.post(std::move(job));
  return true;
}

void Rotation::prepared(uint32_t number, int error) {
  Segment& segment = *context_.table.find(number);
  // A file that was found may be too short, and is gone then.
  const bool no_file = !segment.has_file || reason_of(error) == "no_space";
  if (error != 0 && no_file) return allocation_failed(segment, error);
  if (error != 0) return opening_failed(segment, error);
  if (!segment.has_file || next_ != nullptr) no_space_ = false;
  segment.has_file = true;
  if (next_ != nullptr) {  // it was made only to see whether there is room for it
    segment.state = SegmentState::free;
    context_.table.free().push_back(number);
    return opening_ended(0);
  }
  write_header(segment);
}

void Rotation::write_header(Segment& segment) {
  segment.begin_life(context_.table.take_life());
  auto job = std::make_unique<DiskJob>();
  job->kind = DiskJob::Kind::write;
  job->segment = segment.number;
  job->buffer = AlignedBuffer(kBlockBytes);
  encode_segment_header(
      {context_.options.warehouse_id, segment.number, segment.life, context_.epoch, segment.bytes},
      job->buffer.span());
  job->add_piece(job->buffer.data(), kBlockBytes);
  job->done = [this, number = segment.number](int error) { header_written(number, error); };
  context_.disk.post(std::move(job));
}

void Rotation::header_written(uint32_t number, int error) {
  Segment& segment = *context_.table.find(number);
  if (error != 0) return opening_failed(segment, error);
  auto job = std::make_unique<DiskJob>();
  job->kind = DiskJob::Kind::sync;
  job->segment = number;
  job->done = [this, number](int flush_error) { header_flushed(number, flush_error); };
  context_.disk.post(std::move(job));
}

void Rotation::header_flushed(uint32_t number, int error) {
  Segment& segment = *context_.table.find(number);
  if (error != 0) return opening_failed(segment, error);
  segment.state = SegmentState::standby;
  segment.file_life = segment.life;
  next_ = &segment;
  context_.host.set_segment_word(number, segment.life, false);
  opening_ended(0);
}

void Rotation::allocation_failed(Segment& segment, int error) {
  const uint32_t number = segment.number;
  context_.table.erase(number);
  if (error == ECANCELED) return opening_ended(error);
  const bool full = reason_of(error) == "no_space";
  if (full) {
    // The tier serves with the files that it has, and asks again later.
    no_space_ = true;
    allocation_blocked_until_ns_ = context_.clock.boot_ns() + context_.options.retry_interval_ns;
    context_.host.on_event("nvme_no_space", event_detail(number, error));
  } else {
    context_.host.on_event("nvme_open_failed", event_detail(number, error));
  }
  ++context_.stats.write_errors;
  const bool serves = serves_without_new_files();
  if (full && serves && std::exchange(probing_, false)) {
    // A full disk is no sick one: what is there already says more.
    opening_ = false;
    return probe();
  }
  opening_ended(error);
  if (full && !serves) context_.health.become_read_only(error);
  if (!full) context_.health.write_failed(error);
}

void Rotation::opening_failed(Segment& segment, int error) {
  segment.state = SegmentState::free;
  context_.table.free().push_back(segment.number);
  opening_ended(error);
  if (error == ECANCELED) return;
  ++context_.stats.write_errors;
  context_.host.on_event("nvme_open_failed", event_detail(segment.number, error));
  context_.health.write_failed(error);
}

void Rotation::opening_ended(int error) {
  // No write_succeeded(): a device that takes headers and no pages is not healthy.
  opening_ = false;
  if (std::exchange(probing_, false)) context_.health.probe_ended(error);
}

// True when the segment needs no more closing.
bool Rotation::advance_close(Segment& segment) {
  if (segment.writes_in_flight > 0 || segment.flushing) return false;
  if (segment.close_step == CloseStep::writing_toc) return false;
  if (segment.unflushed()) {
    flusher_.flush(segment);
    return false;
  }
  if (segment.records.empty()) {
    give_back(segment);
    return true;
  }
  if (segment.close_step == CloseStep::records) {
    write_toc(segment);
    return false;
  }
  segment.state = SegmentState::closed;
  std::vector<TocEntry>().swap(segment.toc);
  segment.records.shrink_to_fit();
  return true;
}

void Rotation::write_toc(Segment& segment) {
  segment.close_step = CloseStep::writing_toc;
  auto job = std::make_unique<DiskJob>();
  const uint64_t bytes = toc_bytes(segment.toc.size());
  job->kind = DiskJob::Kind::write;
  job->segment = segment.number;
  job->offset = segment.bytes - bytes;
  job->buffer = AlignedBuffer(bytes);
  encode_toc(segment.toc,
             {context_.options.warehouse_id, segment.number, segment.life, 0, 0, segment.bytes},
             job->buffer.span());
  job->add_piece(job->buffer.data(), bytes);
  job->done = [this, number = segment.number](int error) { toc_written(number, error); };
  context_.disk.post(std::move(job));
}

void Rotation::toc_written(uint32_t number, int error) {
  Segment& segment = *context_.table.find(number);
  segment.close_step = CloseStep::flushing_toc;
  if (error == 0) ++segment.writes_done;
  if (error == 0 || error == ECANCELED) return;
  // Without a table it is scanned at the next start, which is slower and as good.
  ++context_.stats.write_errors;
  context_.host.on_event("nvme_toc_failed", event_detail(number, error));
  context_.health.write_failed(error);
}

// The best probe is to open a segment; where that is not possible, a file of its own.
void Rotation::probe() {
  if (opening_ || probing_) return;
  if (next_ == nullptr && open_next(true)) return;
  probing_ = true;
  probe_file(DiskJob::Kind::prepare);
}

void Rotation::probe_file(DiskJob::Kind kind) {
  auto job = std::make_unique<DiskJob>();
  job->kind = kind;
  job->segment = kProbeFile;
  if (kind == DiskJob::Kind::prepare) job->bytes = kBlockBytes;
  if (kind == DiskJob::Kind::write) {
    job->buffer = AlignedBuffer(kBlockBytes);
    job->add_piece(job->buffer.data(), kBlockBytes);
  }
  job->done = [this, kind](int error) {
    if (error == 0 && kind == DiskJob::Kind::prepare) return probe_file(DiskJob::Kind::write);
    if (error == 0 && kind == DiskJob::Kind::write) return probe_file(DiskJob::Kind::sync);
    if (kind == DiskJob::Kind::remove) return;
    probing_ = false;
    const bool full = kind == DiskJob::Kind::prepare && reason_of(error) == "no_space";
    context_.health.probe_ended(full && serves_without_new_files() ? 0 : error);
    probe_file(DiskJob::Kind::remove);
  };
  context_.disk.post(std::move(job));
}

}  // namespace kvw::nvme
