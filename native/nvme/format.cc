#include "nvme/format.h"

#include <bit>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "digest/digest.h"

namespace kvw::nvme {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire structures are used in place");

constexpr uint64_t magic(const char (&text)[9]) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(text[i]);
  return value;
}
constexpr uint64_t kSegmentMagic = magic("KVWSEGM1");
constexpr uint64_t kRecordMagic = magic("KVWRECD1");
constexpr uint64_t kFooterMagic = magic("KVWTOCF1");

struct SegmentWire {
  uint64_t checksum, magic;
  uint32_t version, segment;
  Key warehouse;
  uint32_t life, zero;
  uint64_t clear_epoch, segment_bytes;
};
static_assert(sizeof(SegmentWire) == 64 && offsetof(SegmentWire, warehouse) == 24 &&
              offsetof(SegmentWire, life) == 40 && offsetof(SegmentWire, segment_bytes) == 56);

struct RecordWire {
  uint64_t checksum, magic;
  uint32_t version, header_bytes;
  Key warehouse;
  uint32_t segment, life, offset_blocks, blocks;
  Key key, parent, namespace_id;
  uint32_t position, shards, page_tokens, witness_kind, witness_bytes, zero;
  uint64_t shard_bytes, clear_epoch, stored_at_ns, zero_too;
};
static_assert(sizeof(RecordWire) == kRecordFixedBytes && offsetof(RecordWire, warehouse) == 24 &&
              offsetof(RecordWire, key) == 56 && offsetof(RecordWire, position) == 104 &&
              offsetof(RecordWire, shard_bytes) == 128 &&
              offsetof(RecordWire, stored_at_ns) == 144);

static_assert(sizeof(TocEntry) == 96 && offsetof(TocEntry, shard_bytes) == 48 &&
              offsetof(TocEntry, position) == 72 && offsetof(TocEntry, blocks) == 92);

struct FooterWire {
  uint64_t checksum, magic;
  uint32_t version, segment;
  Key warehouse;
  uint32_t life, entries;
  uint64_t entries_checksum, segment_bytes;
};
static_assert(sizeof(FooterWire) == 64 && offsetof(FooterWire, entries) == 44 &&
              offsetof(FooterWire, segment_bytes) == 56);

uint64_t checksum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

// Everything after the checksum, which stands first.
uint64_t self_checksum(std::span<const std::byte> bytes) { return checksum_of(bytes.subspan(8)); }

void seal(std::span<std::byte> bytes) {
  const uint64_t checksum = self_checksum(bytes);
  std::memcpy(bytes.data(), &checksum, sizeof checksum);
}

template <class Wire>
std::optional<Wire> open_block(std::span<const std::byte> block, uint64_t expected_magic) {
  if (block.size() != kBlockBytes) return std::nullopt;
  Wire wire;
  std::memcpy(&wire, block.data(), sizeof wire);
  if (wire.magic != expected_magic || wire.version != kFormatVersion) return std::nullopt;
  if (wire.checksum != self_checksum(block)) return std::nullopt;
  return wire;
}

bool segment_size_is_sound(uint64_t bytes) {
  return bytes % kBlockBytes == 0 && bytes >= 4 * kBlockBytes && bytes / kBlockBytes <= UINT32_MAX;
}

bool shape_is_sound(uint32_t shards, uint32_t tokens, uint64_t shard_bytes, uint32_t witness_kind) {
  constexpr uint64_t kMaxShardBytes = 1ull << 40;  // keeps every product below 2^64
  return shards >= 1 && shards <= kMaxShards && tokens <= kMaxPageTokens && shard_bytes >= 1 &&
         shard_bytes <= kMaxShardBytes &&
         (witness_kind == static_cast<uint32_t>(WitnessKind::tokens) ||
          witness_kind == static_cast<uint32_t>(WitnessKind::engine_key));
}

uint64_t payload_blocks(uint32_t shards, uint64_t shard_bytes) {
  return round_up(shard_bytes, kBlockBytes) / kBlockBytes * shards;
}

uint64_t header_bytes_of(uint32_t shards, uint64_t witness_bytes) {
  return round_up(kRecordFixedBytes + shards * 8ull + witness_bytes, kBlockBytes);
}

PageFacts facts_of(const RecordWire& wire, const std::byte* tail) {
  PageFacts facts;
  facts.key = wire.key;
  facts.parent = wire.parent;
  facts.namespace_id = wire.namespace_id;
  facts.position = wire.position;
  facts.shards = wire.shards;
  facts.page_tokens = wire.page_tokens;
  facts.shard_bytes = wire.shard_bytes;
  facts.clear_epoch = wire.clear_epoch;
  facts.stored_at_ns = wire.stored_at_ns;
  facts.witness_kind = static_cast<WitnessKind>(wire.witness_kind);
  facts.digests.resize(wire.shards);
  std::memcpy(facts.digests.data(), tail, wire.shards * 8ull);
  const std::byte* witness = tail + wire.shards * 8ull;
  facts.witness.assign(witness, witness + wire.witness_bytes);
  return facts;
}

bool entry_is_sound(const TocEntry& entry, uint64_t first_block, uint64_t end_block) {
  if (!shape_is_sound(entry.shards, entry.page_tokens, entry.shard_bytes, entry.witness_kind))
    return false;
  const uint64_t payload = payload_blocks(entry.shards, entry.shard_bytes);
  if (entry.blocks <= payload || entry.blocks - payload > kMaxHeaderBytes / kBlockBytes)
    return false;
  return entry.offset_blocks >= first_block &&
         uint64_t{entry.offset_blocks} + entry.blocks <= end_block;
}

}  // namespace

void encode_segment_header(const SegmentHeader& header, std::span<std::byte> block) {
  const SegmentWire wire{
      0, kSegmentMagic,      kFormatVersion,      header.segment, header.warehouse, header.life,
      0, header.clear_epoch, header.segment_bytes};
  std::memset(block.data(), 0, block.size());
  std::memcpy(block.data(), &wire, sizeof wire);
  seal(block.first(kBlockBytes));
}

std::optional<SegmentHeader> decode_segment_header(std::span<const std::byte> block) {
  const auto wire = open_block<SegmentWire>(block, kSegmentMagic);
  if (!wire || !segment_size_is_sound(wire->segment_bytes)) return std::nullopt;
  return SegmentHeader{wire->warehouse, wire->segment, wire->life, wire->clear_epoch,
                       wire->segment_bytes};
}

std::optional<uint32_t> newer_segment_version(std::span<const std::byte> block) {
  if (block.size() != kBlockBytes) return std::nullopt;
  SegmentWire wire;
  std::memcpy(&wire, block.data(), sizeof wire);
  const bool newer = wire.magic == kSegmentMagic && wire.version > kFormatVersion;
  if (!newer || wire.checksum != self_checksum(block)) return std::nullopt;
  return wire.version;
}

uint32_t header_blocks(const PageFacts& facts) {
  return static_cast<uint32_t>(header_bytes_of(facts.shards, facts.witness.size()) / kBlockBytes);
}

uint32_t record_blocks(uint32_t shards, uint64_t shard_bytes, uint64_t witness_bytes) {
  return static_cast<uint32_t>(header_bytes_of(shards, witness_bytes) / kBlockBytes +
                               payload_blocks(shards, shard_bytes));
}

uint32_t record_blocks(const PageFacts& facts) {
  return record_blocks(facts.shards, facts.shard_bytes, facts.witness.size());
}

bool facts_are_sound(const PageFacts& facts) {
  return shape_is_sound(facts.shards, facts.page_tokens, facts.shard_bytes,
                        static_cast<uint32_t>(facts.witness_kind)) &&
         facts.digests.size() == facts.shards && facts.witness.size() <= kMaxWitnessBytes &&
         payload_blocks(facts.shards, facts.shard_bytes) < UINT32_MAX / 2;
}

void encode_record_header(const Key& warehouse, const Extent& extent, const PageFacts& facts,
                          std::span<std::byte> header) {
  RecordWire wire{};
  wire.magic = kRecordMagic;
  wire.version = kFormatVersion;
  wire.header_bytes = static_cast<uint32_t>(header.size());
  wire.warehouse = warehouse;
  wire.segment = extent.segment;
  wire.life = extent.life;
  wire.offset_blocks = extent.offset_blocks;
  wire.blocks = extent.blocks;
  wire.key = facts.key;
  wire.parent = facts.parent;
  wire.namespace_id = facts.namespace_id;
  wire.position = facts.position;
  wire.shards = facts.shards;
  wire.page_tokens = facts.page_tokens;
  wire.witness_kind = static_cast<uint32_t>(facts.witness_kind);
  wire.witness_bytes = static_cast<uint32_t>(facts.witness.size());
  wire.shard_bytes = facts.shard_bytes;
  wire.clear_epoch = facts.clear_epoch;
  wire.stored_at_ns = facts.stored_at_ns;
  std::memcpy(header.data(), &wire, sizeof wire);
  std::byte* tail = header.data() + sizeof wire;
  std::memcpy(tail, facts.digests.data(), facts.digests.size() * 8);
  if (!facts.witness.empty())
    std::memcpy(tail + facts.digests.size() * 8, facts.witness.data(), facts.witness.size());
  seal(header);
}

std::optional<size_t> record_header_bytes(std::span<const std::byte> first_block) {
  if (first_block.size() < kBlockBytes) return std::nullopt;
  RecordWire wire;
  std::memcpy(&wire, first_block.data(), sizeof wire);
  if (wire.magic != kRecordMagic || wire.version != kFormatVersion) return std::nullopt;
  if (wire.header_bytes == 0 || wire.header_bytes % kBlockBytes != 0) return std::nullopt;
  if (wire.header_bytes > kMaxHeaderBytes) return std::nullopt;
  return wire.header_bytes;
}

std::optional<RecordHeader> decode_record_header(std::span<const std::byte> bytes) {
  const auto size = record_header_bytes(bytes);
  if (!size || bytes.size() < *size) return std::nullopt;
  RecordWire wire;
  std::memcpy(&wire, bytes.data(), sizeof wire);
  if (wire.checksum != self_checksum(bytes.first(*size))) return std::nullopt;
  if (!shape_is_sound(wire.shards, wire.page_tokens, wire.shard_bytes, wire.witness_kind))
    return std::nullopt;
  if (wire.witness_bytes > kMaxWitnessBytes) return std::nullopt;
  if (header_bytes_of(wire.shards, wire.witness_bytes) != *size) return std::nullopt;
  const uint64_t blocks = *size / kBlockBytes + payload_blocks(wire.shards, wire.shard_bytes);
  if (wire.blocks != blocks) return std::nullopt;
  const Extent extent{wire.segment, wire.offset_blocks, wire.blocks, wire.life};
  return RecordHeader{wire.warehouse, extent, static_cast<uint32_t>(*size / kBlockBytes),
                      facts_of(wire, bytes.data() + sizeof wire)};
}

bool payload_matches(const PageFacts& facts, const std::byte* payload) {
  const uint64_t stride = round_up(facts.shard_bytes, kBlockBytes);
  for (uint32_t shard = 0; shard < facts.shards; ++shard) {
    const std::byte* data = payload + shard * stride;
    if (page_digest(data, facts.shard_bytes, facts.key, shard) != facts.digests[shard])
      return false;
  }
  return true;
}

PageFacts TocEntry::facts() const {
  PageFacts facts;
  facts.key = key;
  facts.parent = parent;
  facts.namespace_id = namespace_id;
  facts.position = position;
  facts.shards = shards;
  facts.page_tokens = page_tokens;
  facts.shard_bytes = shard_bytes;
  facts.clear_epoch = clear_epoch;
  facts.stored_at_ns = stored_at_ns;
  facts.witness_kind = static_cast<WitnessKind>(witness_kind);
  return facts;
}

uint32_t TocEntry::header_blocks() const {
  return blocks - static_cast<uint32_t>(payload_blocks(shards, shard_bytes));
}

TocEntry toc_entry(const PageFacts& facts, const Extent& extent) {
  return {facts.key,
          facts.parent,
          facts.namespace_id,
          facts.shard_bytes,
          facts.clear_epoch,
          facts.stored_at_ns,
          facts.position,
          facts.shards,
          facts.page_tokens,
          static_cast<uint32_t>(facts.witness_kind),
          extent.offset_blocks,
          extent.blocks};
}

uint64_t toc_entry_bytes(uint64_t entries) {
  return round_up(entries * sizeof(TocEntry), kBlockBytes);
}

uint64_t toc_bytes(uint64_t entries) { return toc_entry_bytes(entries) + kBlockBytes; }

void encode_toc(std::span<const TocEntry> entries, TocFooter footer, std::span<std::byte> to) {
  const auto padded = to.first(to.size() - kBlockBytes);
  if (!entries.empty()) std::memcpy(padded.data(), entries.data(), entries.size_bytes());
  const FooterWire wire{0,
                        kFooterMagic,
                        kFormatVersion,
                        footer.segment,
                        footer.warehouse,
                        footer.life,
                        static_cast<uint32_t>(entries.size()),
                        checksum_of(padded),
                        footer.segment_bytes};
  const auto block = to.last(kBlockBytes);
  std::memcpy(block.data(), &wire, sizeof wire);
  seal(block);
}

std::optional<TocFooter> decode_toc_footer(std::span<const std::byte> block) {
  const auto wire = open_block<FooterWire>(block, kFooterMagic);
  if (!wire || !segment_size_is_sound(wire->segment_bytes)) return std::nullopt;
  if (toc_bytes(wire->entries) + kBlockBytes > wire->segment_bytes) return std::nullopt;
  return TocFooter{wire->warehouse, wire->segment,          wire->life,
                   wire->entries,   wire->entries_checksum, wire->segment_bytes};
}

std::optional<std::span<const TocEntry>> decode_toc_entries(const TocFooter& footer,
                                                            std::span<const std::byte> padded) {
  if (padded.size() != toc_entry_bytes(footer.entries)) return std::nullopt;
  if (reinterpret_cast<uintptr_t>(padded.data()) % alignof(TocEntry) != 0) return std::nullopt;
  if (checksum_of(padded) != footer.entries_checksum) return std::nullopt;
  const std::span entries(reinterpret_cast<const TocEntry*>(padded.data()), footer.entries);
  const uint64_t end = (footer.segment_bytes - toc_bytes(footer.entries)) / kBlockBytes;
  uint64_t next = 1;
  for (const TocEntry& entry : entries) {
    if (!entry_is_sound(entry, next, end)) return std::nullopt;
    next = uint64_t{entry.offset_blocks} + entry.blocks;
  }
  return entries;
}

}  // namespace kvw::nvme
