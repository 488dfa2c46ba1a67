#include "nvme/segment.h"

#include <algorithm>

#include "nvme/log.h"

namespace kvw::nvme {

bool Segment::has_room(uint64_t blocks, uint64_t count) const {
  return (next_block + blocks) * kBlockBytes + toc_bytes(placed + count) <= bytes;
}

bool fits_segment(uint64_t blocks, uint64_t segment_bytes) {
  return blocks <= kMaxRecordBlocks && (1 + blocks) * kBlockBytes + toc_bytes(1) <= segment_bytes;
}

bool Segment::readable() const {
  return state == SegmentState::open || state == SegmentState::closing ||
         state == SegmentState::closed || state == SegmentState::reclaiming;
}

const RecordRef* Segment::find(const Extent& extent, const Key& key) const {
  if (!readable() || extent.life != life) return nullptr;
  const auto found =
      std::ranges::lower_bound(records, extent.offset_blocks, {}, &RecordRef::offset_blocks);
  if (found == records.end() || found->offset_blocks != extent.offset_blocks) return nullptr;
  return found->key == key && found->blocks == extent.blocks ? &*found : nullptr;
}

void Segment::add(const PageFacts& facts, const Extent& extent) {
  RecordRef ref{facts.key, extent.offset_blocks, 0, 0};
  ref.blocks = extent.blocks & kMaxRecordBlocks;
  ref.header_blocks = nvme::header_blocks(facts) & 0xff;
  records.push_back(ref);
  toc.push_back(toc_entry(facts, extent));
}

void Segment::begin_life(uint32_t new_life) {
  life = new_life;
  std::vector<RecordRef>().swap(records);
  std::vector<TocEntry>().swap(toc);
  next_block = 1;
  placed = 0;
  writes_done = writes_flushed = 0;
  flushed_records = 0;
  broken = unread = false;
  close_step = CloseStep::records;
  scored = false;
}

Segment& SegmentTable::add(uint32_t number, uint64_t bytes, SegmentState state) {
  Segment& segment = segments_[number];
  segment.number = number;
  segment.bytes = bytes;
  segment.state = state;
  bytes_ += bytes;
  return segment;
}

void SegmentTable::erase(uint32_t number) {
  const auto found = segments_.find(number);
  bytes_ -= found->second.bytes;
  segments_.erase(found);
}

void SegmentTable::resize(Segment& segment, uint64_t bytes) {
  bytes_ += bytes - segment.bytes;
  segment.bytes = bytes;
}

Segment* SegmentTable::find(uint32_t number) {
  const auto found = segments_.find(number);
  return found == segments_.end() ? nullptr : &found->second;
}

uint32_t SegmentTable::unused_number() const {
  uint32_t number = 0;
  for (const auto& [taken, segment] : segments_) {
    if (taken != number) break;
    ++number;
  }
  return std::min(number, kMaxSegments);
}

size_t SegmentTable::count(SegmentState state) const {
  return static_cast<size_t>(std::ranges::count_if(
      segments_, [state](const auto& each) { return each.second.state == state; }));
}

}  // namespace kvw::nvme
