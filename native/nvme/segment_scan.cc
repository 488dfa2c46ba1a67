#include "nvme/segment_scan.h"

#include <algorithm>

namespace kvw::nvme {

namespace {
constexpr uint64_t kWindowBytes = 8ull << 20;
// Of a segment. A device may take seconds for each, and a start waits for all of them.
constexpr uint64_t kMostErrors = 64;
}  // namespace

SegmentScan::SegmentScan(const Key& warehouse, const Segment& segment, ReadSegment read)
    : warehouse_(warehouse), segment_(segment), read_(std::move(read)) {}

std::span<const std::byte> SegmentScan::view(uint64_t offset, uint64_t bytes) {
  if (offset + bytes > segment_.bytes || given_up()) return {};
  const bool inside = offset >= window_offset_ && offset + bytes <= window_offset_ + window_bytes_;
  if (!inside && !fill_window(offset, bytes)) return {};
  return window_.part(offset - window_offset_, bytes);
}

// Of a window that cannot be read as a whole, each part is read alone: a bad sector costs what lies
// on it, and nothing beside it.
bool SegmentScan::fill_window(uint64_t offset, uint64_t bytes) {
  const uint64_t wanted = std::min(std::max(bytes, kWindowBytes), segment_.bytes - offset);
  if (offset >= exact_until_) {
    if (read_window(offset, wanted)) return true;
    exact_until_ = offset + wanted;
  }
  if (read_window(offset, bytes)) return true;
  ++errors_;
  return false;
}

bool SegmentScan::read_window(uint64_t offset, uint64_t bytes) {
  if (window_.bytes() < bytes) window_ = AlignedBuffer(bytes);
  const int error = read_(offset, window_.part(0, bytes));
  window_offset_ = offset;
  window_bytes_ = error == 0 ? bytes : 0;
  if (error != 0) error_ = error;
  return error == 0;
}

bool SegmentScan::given_up() const { return errors_ >= kMostErrors; }

std::optional<RecordHeader> SegmentScan::header_at(uint32_t block) {
  const uint64_t offset = uint64_t{block} * kBlockBytes;
  const auto first = view(offset, kBlockBytes);
  if (first.empty()) return std::nullopt;
  const auto bytes = record_header_bytes(first);
  if (!bytes) return std::nullopt;
  const auto whole = view(offset, *bytes);
  if (whole.empty()) return std::nullopt;
  auto header = decode_record_header(whole);
  if (!header || header->warehouse != warehouse_) return std::nullopt;
  const Extent& extent = header->extent;
  if (extent.segment != segment_.number || extent.life != segment_.life) return std::nullopt;
  return extent.offset_blocks == block ? std::move(header) : std::nullopt;
}

std::optional<RecordHeader> SegmentScan::next_header(uint32_t block) {
  std::optional<RecordHeader> header;
  const uint64_t blocks = segment_.bytes / kBlockBytes;
  for (uint64_t at = block; at < blocks && !header && !given_up(); ++at)
    header = header_at(static_cast<uint32_t>(at));
  return header;
}

ScanResult SegmentScan::run(const std::function<void(RecordHeader&&)>& found) {
  ScanResult result;
  while (auto header = next_header(result.next_block)) {
    if (header->extent.offset_blocks != result.next_block) ++result.refused;
    const uint64_t offset = uint64_t{header->extent.offset_blocks} * kBlockBytes;
    const uint64_t bytes = uint64_t{header->extent.blocks} * kBlockBytes;
    if (offset + bytes > segment_.bytes) break;
    result.next_block = header->extent.offset_blocks + header->extent.blocks;
    const auto record = view(offset, bytes);
    const uint64_t header_bytes = header->header_blocks * kBlockBytes;
    if (!record.empty() && payload_matches(header->facts, record.data() + header_bytes))
      found(std::move(*header));
    else
      ++result.refused;
  }
  result.error = error_;
  return result;
}

}  // namespace kvw::nvme
