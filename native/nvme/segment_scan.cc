#include "nvme/segment_scan.h"

#include <algorithm>

namespace kvw::nvme {

namespace {
constexpr uint64_t kWindowBytes = 8ull << 20;
}

SegmentScan::SegmentScan(const Key& warehouse, const Segment& segment, ReadSegment read)
    : warehouse_(warehouse), segment_(segment), read_(std::move(read)) {}

std::span<const std::byte> SegmentScan::view(uint64_t offset, uint64_t bytes) {
  if (offset + bytes > segment_.bytes || error_ != 0) return {};
  const bool inside = offset >= window_offset_ && offset + bytes <= window_offset_ + window_bytes_;
  if (!inside) {
    const uint64_t wanted = std::min(std::max(bytes, kWindowBytes), segment_.bytes - offset);
    if (window_.bytes() < wanted) window_ = AlignedBuffer(wanted);
    window_offset_ = offset;
    window_bytes_ = wanted;
    error_ = read_(offset, window_.part(0, wanted));
    if (error_ != 0) return {};
  }
  return window_.part(offset - window_offset_, bytes);
}

std::optional<RecordHeader> SegmentScan::header_at(uint32_t block) {
  const uint64_t offset = uint64_t{block} * kBlockBytes;
  const auto first = view(offset, kBlockBytes);
  if (first.empty()) return std::nullopt;
  const auto bytes = record_header_bytes(first);
  if (!bytes) return std::nullopt;
  auto header = decode_record_header(view(offset, *bytes));
  if (!header || header->warehouse != warehouse_) return std::nullopt;
  const Extent& extent = header->extent;
  if (extent.segment != segment_.number || extent.life != segment_.life) return std::nullopt;
  return extent.offset_blocks == block ? std::move(header) : std::nullopt;
}

std::optional<RecordHeader> SegmentScan::next_header(uint32_t block) {
  std::optional<RecordHeader> header;
  const uint64_t blocks = segment_.bytes / kBlockBytes;
  for (uint64_t at = block; at < blocks && !header && error_ == 0; ++at)
    header = header_at(static_cast<uint32_t>(at));
  return header;
}

ScanResult SegmentScan::run(const std::function<void(RecordHeader&&)>& found) {
  ScanResult result;
  while (auto header = next_header(result.next_block)) {
    if (header->extent.offset_blocks != result.next_block) ++result.refused;
    const uint64_t offset = uint64_t{header->extent.offset_blocks} * kBlockBytes;
    const auto record = view(offset, uint64_t{header->extent.blocks} * kBlockBytes);
    if (record.empty()) break;
    result.next_block = header->extent.offset_blocks + header->extent.blocks;
    const std::byte* payload = record.data() + header->header_blocks * kBlockBytes;
    if (payload_matches(header->facts, payload))
      found(std::move(*header));
    else
      ++result.refused;
  }
  result.error = error_;
  return result;
}

}  // namespace kvw::nvme
