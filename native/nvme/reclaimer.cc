#include "nvme/reclaimer.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/atomics.h"
#include "nvme/record_read.h"

namespace kvw::nvme {
namespace {

constexpr int kSeizeTries = 16;          // segments that were pinned while they were closed
constexpr size_t kSampledRecords = 64;   // of a segment, for its score
constexpr size_t kScoredSegments = 32;   // a choice; the others keep their old scores
constexpr size_t kSortedRecords = 1024;  // a step
constexpr uint64_t kPinnedRetryNs = 100 * kMillisecondNs;

// Parts of a segment, so that of those with about as much the oldest goes.
uint64_t eighths(uint64_t bytes, const Segment& segment) { return bytes * 8 / segment.bytes; }

// A start closes what was open, which is often nearly empty: it is worth waiting for.
bool is_candidate(const Segment& segment) {
  if (segment.unread) return false;
  if (segment.state == SegmentState::closed) return true;
  return segment.state == SegmentState::closing &&
         eighths(uint64_t{segment.next_block} * kBlockBytes, segment) == 0;
}

// Of a segment, by a record: of large ones a part of the end stays empty.
int64_t room_of(uint64_t bytes, uint64_t segment_bytes) {
  const uint64_t fit = std::max<uint64_t>(1, (segment_bytes - kBlockBytes) / bytes);
  return static_cast<int64_t>(segment_bytes / fit);
}

// The least goes first.
auto rank(const Segment& segment) {
  return std::tuple(eighths(segment.hot_bytes, segment), eighths(segment.live_bytes, segment),
                    segment.life);
}

}  // namespace

Reclaimer::Reclaimer(LogContext& context, Rotation& rotation, Flusher& flusher, WriteBehind& writes)
    : context_(context), rotation_(rotation), flusher_(flusher), writes_(writes) {
  writes_.on_relocated([this](const QueuedRecord& record, const Extent* to, bool written) {
    moved(record, to, written);
  });
  flusher_.on_lost([this](const Extent& extent) { copy_lost(extent); });
}

void Reclaimer::score(Segment& segment) {
  const size_t count = segment.records.size();
  const size_t stride = std::max<size_t>(1, count / kSampledRecords);
  uint64_t hot = 0, live = 0, sampled = 0;
  for (size_t i = 0; i < count; i += stride, ++sampled) {
    const RecordRef& ref = segment.records[i];
    const RecordUse use = context_.host.use_of(ref.key, segment.extent_of(ref));
    const uint64_t bytes = uint64_t{ref.blocks} * kBlockBytes;
    if (use == RecordUse::hot || use == RecordUse::kept) hot += bytes;
    if (use != RecordUse::dead) live += bytes;
  }
  segment.hot_bytes = sampled == 0 ? 0 : hot * count / sampled;
  segment.live_bytes = sampled == 0 ? 0 : live * count / sampled;
  segment.scored = true;
}

void Reclaimer::refresh_scores() {
  auto& all = context_.table.all();
  auto at = all.lower_bound(score_cursor_);
  size_t scored = 0;
  for (size_t seen = 0; seen < all.size() && scored < kScoredSegments; ++seen, ++at) {
    if (at == all.end()) at = all.begin();
    if (!is_candidate(at->second)) continue;
    score(at->second);
    ++scored;
  }
  score_cursor_ = at == all.end() ? 0 : at->first;
}

Segment* Reclaimer::choose() {
  Segment* best = nullptr;
  for (auto& [number, segment] : context_.table.all()) {
    if (!is_candidate(segment) || !segment.scored || context_.host.segment_pinned(number)) continue;
    if (best == nullptr || rank(segment) < rank(*best)) best = &segment;
  }
  return best;
}

// Chosen by the pins as they are, and looked at once more behind the fence: one that was pinned
// meanwhile is passed over by the next choice.
Segment* Reclaimer::seize() {
  refresh_scores();
  context_.host.read_pins();
  for (int tries = 0; tries < kSeizeTries; ++tries) {
    Segment* segment = choose();
    if (segment == nullptr || segment->state == SegmentState::closing) return nullptr;
    context_.host.set_segment_word(segment->number, segment->life, true);
    full_fence();
    context_.host.read_pins();
    if (!context_.host.segment_pinned(segment->number)) {
      segment->state = SegmentState::reclaiming;
      return segment;
    }
    context_.host.set_segment_word(segment->number, segment->life, false);
  }
  return nullptr;
}

uint64_t Reclaimer::spare_after(std::span<Segment* const> leaving) const {
  uint64_t kept = 0, leaving_bytes = rotation_.removing_bytes();
  for (const Segment* each : leaving) {
    const bool stays = each->bytes == context_.options.segment_bytes;
    (stays ? kept : leaving_bytes) += stays ? 1 : each->bytes;
  }
  return kept + rotation_.spare(leaving_bytes);
}

uint64_t Reclaimer::spare_when_idle() const {
  std::vector<Segment*> leaving = draining_;
  if (victim_ != nullptr) leaving.push_back(victim_);
  return spare_after(leaving);
}

void Reclaimer::begin() {
  if (spare_after(draining_) >= kSpareWanted) return tell_shrunk();
  if (!context_.health.writable() || context_.clock.boot_ns() < retry_at_ns_) return;
  victim_ = seize();
  if (victim_ == nullptr) {
    retry_at_ns_ = context_.clock.boot_ns() + kPinnedRetryNs;
    return;
  }
  ++round_;
  next_record_ = 0;
  share_bytes_ = std::min(share_bytes_, int64_t{0}) + static_cast<int64_t>(victim_->bytes / 4);
  largest_bytes_ = 0;
  for (const RecordRef& ref : victim_->records)
    largest_bytes_ = std::max(largest_bytes_, uint64_t{ref.blocks} * kBlockBytes);
  moving_bytes_ = 0;
  moving_ = 0;
  lost_copy_ = false;
  stage_ = Stage::sorting;
}

// What it dropped since the start was for a capacity that became smaller.
void Reclaimer::tell_shrunk() {
  if (!std::exchange(context_.shrinking, false) || context_.stats.dropped_records == 0) return;
  context_.host.on_event("nvme_shrunk",
                         "pages=" + std::to_string(context_.stats.dropped_records) +
                             " capacity=" + std::to_string(context_.options.capacity_bytes));
}

bool Reclaimer::worth_moving(RecordUse use, const RecordRef& ref) const {
  const bool may = use == RecordUse::kept || (use == RecordUse::hot && share_bytes_ > 0);
  return may && !rotation_.exhausted() && fits_segment(ref.blocks, context_.options.segment_bytes);
}

void Reclaimer::drop(const RecordRef& ref) {
  ++context_.stats.dropped_records;
  context_.host.forget(ref.key, victim_->extent_of(ref), false);
}

void Reclaimer::sort_some() {
  for (size_t i = 0; i < kSortedRecords && next_record_ < victim_->records.size(); ++i) {
    const RecordRef& ref = victim_->records[next_record_];
    const Extent extent = victim_->extent_of(ref);
    const RecordUse use = context_.host.use_of(ref.key, extent);
    if (worth_moving(use, ref)) {
      // What has been moved comes back here and goes on with the next record.
      if (moving_ > 0 && moving_bytes_ >= context_.options.moving_bytes) return;
      move(ref);
    } else if (use == RecordUse::dead) {
      context_.host.forget(ref.key, extent, false);
    } else {
      drop(ref);
    }
    ++next_record_;
  }
  if (next_record_ < victim_->records.size()) return context_.disk.signal();
  stage_ = Stage::moving;
}

void Reclaimer::move(const RecordRef& ref) {
  const uint64_t bytes = uint64_t{ref.blocks} * kBlockBytes;
  share_bytes_ -= room_of(bytes, context_.options.segment_bytes);
  moving_bytes_ += bytes;
  ++moving_;
  AlignedBuffer payload(bytes - ref.header_blocks * kBlockBytes);
  std::byte* into = payload.data();
  // std::function wants copyable captures.
  auto owned = std::make_shared<AlignedBuffer>(std::move(payload));
  post_record_read(context_, *victim_, ref, {RecordPart::whole, into},
                   [this, round = round_, ref, owned](RecordEnd&& end) {
                     read_for_move(round, ref, std::move(*owned), end.result, std::move(end.facts));
                   });
}

void Reclaimer::read_for_move(uint64_t round, const RecordRef& ref, AlignedBuffer payload,
                              ReadResult result, PageFacts&& facts) {
  if (round != round_ || stage_ == Stage::idle) return;
  const Extent from = victim_->extent_of(ref);
  if (result == ReadResult::ok) {
    QueuedRecord record;
    record.ticket = round;
    record.facts = std::move(facts);
    record.payload = payload.data();
    record.header_blocks = ref.header_blocks;
    record.blocks = ref.blocks;
    record.owned = std::move(payload);
    record.from = from;
    return writes_.relocate(std::move(record));
  }
  --moving_;
  moving_bytes_ -= uint64_t{ref.blocks} * kBlockBytes;
  context_.host.forget(ref.key, from, true);
}

void Reclaimer::moved(const QueuedRecord& record, const Extent* to, bool written) {
  const Key& key = record.facts.key;
  if (to != nullptr) {
    context_.host.moved(key, record.from, *to);
    copies_[to->position()] = {key, record.from, *to, flusher_.next_cycle()};
    if (!written) {
      copy_lost(*to);
      context_.host.forget(key, *to, true);
    }
  }
  if (written) {
    ++context_.stats.relocated_records;
    context_.stats.relocated_bytes += record.bytes();
  }
  if (record.ticket != round_ || stage_ == Stage::idle) return;
  --moving_;
  moving_bytes_ -= record.bytes();
  if (to != nullptr) return;
  ++context_.stats.dropped_records;
  context_.host.forget(key, record.from, false);
}

// The victim stands until its copies are durable, so the record in it is named again.
void Reclaimer::copy_lost(const Extent& to) {
  const auto node = copies_.extract(to.position());
  if (node.empty()) return;
  const Copy& copy = node.mapped();
  if (victim_ != nullptr && victim_->number == copy.from.segment) lost_copy_ = true;
  if (context_.host.use_of(copy.key, to) != RecordUse::dead)
    context_.host.moved(copy.key, to, copy.from);
}

void Reclaimer::forget_durable_copies() {
  while (!copies_.empty() && flusher_.ended(copies_.begin()->second.cycle))
    copies_.erase(copies_.begin());
}

uint64_t Reclaimer::bytes_to_move() const {
  // The last one that is moved may begin at the end of its share; what is kept asks for none.
  if (stage_ == Stage::sorting)
    return static_cast<uint64_t>(std::max<int64_t>(share_bytes_, 0)) + largest_bytes_ +
           moving_bytes_;
  return stage_ == Stage::moving ? moving_bytes_ : 0;
}

void Reclaimer::release_drained() {
  std::erase_if(draining_, [this](Segment* segment) {
    if (segment->reads_in_flight > 0) return false;
    ++context_.stats.reclaimed_segments;
    rotation_.give_back(*segment);
    return true;
  });
}

void Reclaimer::step() {
  forget_durable_copies();
  if (stage_ == Stage::idle) begin();
  if (stage_ == Stage::sorting) sort_some();
  if (stage_ == Stage::moving && moving_ == 0) {
    if (!copies_.empty()) flusher_.want_cycle();
    stage_ = Stage::flushing;
  }
  if (stage_ == Stage::flushing && copies_.empty()) {
    if (!lost_copy_) draining_.push_back(std::exchange(victim_, nullptr));
    abandon();
    stage_ = Stage::idle;
  }
  writes_.keep_room(bytes_to_move());
  release_drained();
}

void Reclaimer::abandon() {
  if (victim_ == nullptr) return;
  victim_->state = SegmentState::closed;
  context_.host.set_segment_word(victim_->number, victim_->life, false);
  victim_ = nullptr;
  stage_ = Stage::idle;
}

}  // namespace kvw::nvme
