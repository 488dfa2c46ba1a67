// A whole segment of good records with an input's patches in it, through the scan that recovery
// makes: what is found lies inside, does not overlap, and has the payload that its digests say.
#include <algorithm>

#include "digest/digest.h"
#include "fuzz/target.h"
#include "nvme/aligned_buffer.h"
#include "nvme/format.h"
#include "nvme/segment_scan.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvw::fuzz {
namespace {

using nvme::AlignedBuffer;

constexpr Key kOwner{11, 13};
constexpr uint64_t kBytes = 32 * kBlockBytes;
constexpr uint32_t kLife = 5, kNumber = 3;

PageFacts facts_of(uint32_t number, const std::byte* payload) {
  PageFacts facts;
  facts.key = {number * 77, number};
  facts.namespace_id = {7, 9};
  facts.position = number;
  facts.shards = 1 + number % 2;
  facts.page_tokens = 4;
  facts.shard_bytes = 3000 + number * 500;
  facts.witness.assign(16, static_cast<std::byte>(number));
  const uint64_t stride = round_up(facts.shard_bytes, kBlockBytes);
  for (uint32_t shard = 0; shard < facts.shards; ++shard)
    facts.digests.push_back(
        page_digest(payload + shard * stride, facts.shard_bytes, facts.key, shard));
  return facts;
}

AlignedBuffer make_segment() {
  AlignedBuffer segment(kBytes);
  for (size_t i = 0; i < kBytes; ++i) segment.data()[i] = static_cast<std::byte>(i * 31 >> 3);
  uint32_t block = 1;
  for (uint32_t number = 0; number < 6; ++number) {
    std::byte* at = segment.data() + block * kBlockBytes;
    const PageFacts facts = facts_of(number, at + kBlockBytes);
    std::memset(at, 0, kBlockBytes);
    const nvme::Extent extent{kNumber, block, nvme::record_blocks(facts), kLife};
    nvme::encode_record_header(kOwner, extent, facts, {at, kBlockBytes});
    block += extent.blocks;
  }
  return segment;
}

// Each patch: where, how many bytes (up to 16), which. Headers that were hit may get a checksum
// that holds, so that the numbers behind it are what is tried.
void patch(AlignedBuffer& segment, Input input) {
  const bool whole = input.number<uint8_t>() % 2 == 0;
  while (!input.empty()) {
    const auto at = input.number<uint32_t>() % kBytes;
    const auto bytes = input.take(std::min<uint64_t>(input.number<uint8_t>() % 16, kBytes - at));
    if (!bytes.empty()) std::memcpy(segment.data() + at, bytes.data(), bytes.size());
    const auto block = segment.part(at / kBlockBytes * kBlockBytes, kBlockBytes);
    const auto size = nvme::record_header_bytes(block);
    if (!whole || !size || *size != kBlockBytes) continue;
    const uint64_t checksum = XXH3_64bits(block.data() + 8, kBlockBytes - 8);
    std::memcpy(block.data(), &checksum, sizeof checksum);
  }
}

}  // namespace
}  // namespace kvw::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvw;
  static const nvme::AlignedBuffer good = fuzz::make_segment();
  static nvme::AlignedBuffer bytes(fuzz::kBytes);
  std::memcpy(bytes.data(), good.data(), fuzz::kBytes);
  fuzz::patch(bytes, fuzz::Input(data, size));
  nvme::Segment segment;
  segment.number = fuzz::kNumber;
  segment.life = fuzz::kLife;
  segment.bytes = fuzz::kBytes;
  nvme::SegmentScan scan(fuzz::kOwner, segment, [](uint64_t offset, std::span<std::byte> to) {
    fuzz::require(offset + to.size() <= fuzz::kBytes, "reads stay inside the segment");
    std::memcpy(to.data(), bytes.data() + offset, to.size());
    return 0;
  });
  uint64_t next = 1;
  const nvme::ScanResult result = scan.run([&](nvme::RecordHeader&& header) {
    const uint64_t at = header.extent.offset_blocks;
    fuzz::require(at >= next, "records do not overlap");
    next = at + header.extent.blocks;
    fuzz::require(next * kBlockBytes <= fuzz::kBytes, "records lie inside");
    const std::byte* payload = bytes.data() + (at + header.header_blocks) * kBlockBytes;
    fuzz::require(nvme::payload_matches(header.facts, payload), "their payloads are theirs");
  });
  fuzz::require(result.next_block * kBlockBytes <= fuzz::kBytes, "the scan ends inside");
  return 0;
}
