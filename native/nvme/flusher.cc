#include "nvme/flusher.h"

#include <algorithm>
#include <cerrno>

namespace kvw::nvme {

void Flusher::flush(Segment& segment) {
  if (segment.flushing) return;
  segment.flushing = true;
  const Snapshot before{segment.writes_done, segment.records.size(), cycle_};
  auto job = std::make_unique<DiskJob>();
  job->kind = DiskJob::Kind::sync;
  job->segment = segment.number;
  job->done = [this, number = segment.number, before](int error) {
    flushed(number, before, error);
  };
  context_.disk.post(std::move(job));
}

void Flusher::flushed(uint32_t number, const Snapshot& before, int error) {
  Segment& segment = *context_.table.find(number);
  segment.flushing = false;
  if (error == ECANCELED) return;  // stopping: nothing is claimed, nothing is forgotten
  if (error == 0) {
    ++context_.stats.flushes;
    context_.health.flush_succeeded();
    segment.writes_flushed = before.writes;
    segment.flushed_records = before.records;
  } else {
    ++context_.stats.flush_errors;
    context_.host.on_event("nvme_flush_failed", event_detail(number, error));
    lose_unflushed(segment);
    context_.health.flush_failed(error);
  }
  if (!pending_.contains(number)) return;
  if (before.cycle < cycle_ && segment.unflushed()) return flush(segment);
  pending_.erase(number);
}

void Flusher::lose_unflushed(Segment& segment) {
  segment.broken = true;
  segment.writes_flushed = segment.writes_done;
  for (size_t i = segment.flushed_records; i < segment.records.size(); ++i) {
    const RecordRef& ref = segment.records[i];
    const Extent extent = segment.extent_of(ref);
    lost_(extent);
    context_.host.forget(ref.key, extent, true);
  }
  segment.records.resize(segment.flushed_records);
  segment.toc.resize(segment.flushed_records);
}

bool Flusher::cycle_is_due(uint64_t written) const {
  if (wanted_cycle_ > cycle_) return true;
  if (wanted_ > durable_ && written >= wanted_) return true;
  return context_.clock.boot_ns() >= last_end_ns_ + context_.options.flush_interval_ns;
}

void Flusher::begin_cycle(uint64_t written) {
  ++cycle_;
  target_ = written;
  for (auto& [number, segment] : context_.table.all()) {
    if (!segment.flushing && !segment.unflushed()) continue;
    pending_.insert(number);
    flush(segment);
  }
}

void Flusher::end_cycle() {
  durable_ = target_;
  ended_cycle_ = cycle_;
  last_end_ns_ = context_.clock.boot_ns();
}

void Flusher::step(uint64_t written) {
  const bool under_way = ended_cycle_ < cycle_;
  if (!under_way && cycle_is_due(written)) begin_cycle(written);
  if (ended_cycle_ < cycle_ && pending_.empty()) end_cycle();
}

}  // namespace kvw::nvme
