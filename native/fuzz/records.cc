// Segment header, record header, table of contents and its footer: decoding believes nothing, and
// what it lets through is within every bound. Half of the inputs get a checksum that holds.
#include "fuzz/target.h"
#include "nvme/aligned_buffer.h"
#include "nvme/format.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvw::fuzz {
namespace {

using nvme::AlignedBuffer;

AlignedBuffer blocks_of(std::span<const uint8_t> raw, size_t most) {
  const size_t bytes = std::min<size_t>(round_up(raw.size() + 1, kBlockBytes), most);
  AlignedBuffer buffer(bytes);
  std::memset(buffer.data(), 0, bytes);
  if (!raw.empty()) std::memcpy(buffer.data(), raw.data(), std::min(raw.size(), bytes));
  return buffer;
}

void seal(std::span<std::byte> bytes) {
  const uint64_t checksum = XXH3_64bits(bytes.data() + 8, bytes.size() - 8);
  std::memcpy(bytes.data(), &checksum, sizeof checksum);
}

void segment_header(AlignedBuffer& block, bool whole) {
  if (whole) seal(block.part(0, kBlockBytes));
  if (const auto header = nvme::decode_segment_header(block.part(0, kBlockBytes)))
    require(header->segment_bytes % kBlockBytes == 0, "segments are whole blocks");
  nvme::newer_segment_version(block.part(0, kBlockBytes));
}

void record_header(AlignedBuffer& bytes, bool whole) {
  const auto size = nvme::record_header_bytes(bytes.span());
  if (size && whole && *size <= bytes.bytes()) seal(bytes.part(0, *size));
  const auto header = nvme::decode_record_header(bytes.span());
  if (!header) return;
  const PageFacts& facts = header->facts;
  require(facts.shards >= 1 && facts.shards <= kMaxShards, "shards");
  require(facts.digests.size() == facts.shards, "a digest a shard");
  require(facts.witness.size() <= nvme::kMaxWitnessBytes, "witness");
  require(header->header_blocks * kBlockBytes <= bytes.bytes(), "the header was all there");
  require(header->extent.blocks > header->header_blocks, "a payload");
}

void table(AlignedBuffer& bytes, bool whole) {
  const auto footer_block = bytes.part(bytes.bytes() - kBlockBytes, kBlockBytes);
  if (whole) seal(footer_block);
  auto footer = nvme::decode_toc_footer(footer_block);
  if (!footer) return;
  const uint64_t need = nvme::toc_entry_bytes(footer->entries);
  if (need + kBlockBytes > bytes.bytes()) return;
  const auto padded = bytes.part(bytes.bytes() - kBlockBytes - need, need);
  if (whole) footer->entries_checksum = XXH3_64bits(padded.data(), padded.size());
  const auto entries = nvme::decode_toc_entries(*footer, padded);
  if (!entries) return;
  uint64_t next = 1;
  for (const nvme::TocEntry& entry : *entries) {
    require(entry.offset_blocks >= next, "in rising order, apart from each other");
    next = uint64_t{entry.offset_blocks} + entry.blocks;
    require(next * kBlockBytes <= footer->segment_bytes, "inside the segment");
    require(entry.header_blocks() >= 1 && entry.facts().shards <= kMaxShards, "facts");
  }
}

}  // namespace
}  // namespace kvw::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvw;
  fuzz::Input input(data, size);
  const auto what = input.number<uint8_t>();
  auto bytes = fuzz::blocks_of(input.take(size), nvme::kMaxHeaderBytes);
  const bool whole = (what & 0x80) == 0;
  switch (what % 3) {
    case 0:
      fuzz::segment_header(bytes, whole);
      break;
    case 1:
      fuzz::record_header(bytes, whole);
      break;
    default:
      fuzz::table(bytes, whole);
  }
  return 0;
}
