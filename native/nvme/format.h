// The bytes of the NVMe tier. Pure functions over spans; thread-safe. Decoding believes nothing: a
// checksum first, then every number against its bound, and only then its use.
//
// All integers are little-endian; all structures start at multiples of 4 KiB (a block) of a segment
// file. Checksums are XXH3-64, unseeded, over everything after themselves. Version 1.
//
// Segment file `segments/NNNNNNNN.seg` (its number in eight decimal digits):
//   block 0            segment header
//   block 1 ...        records, back to back
//   ...                whatever earlier lives left behind; never believed
//   end                at close: table of contents, its footer in the last block
//
// Segment header, 4096 bytes:
//     0  u64  checksum of bytes 8 to 4095
//     8  u64  magic "KVWSEGM1"
//    16  u32  version
//    20  u32  segment number
//    24  u128 warehouse id (lo, hi)
//    40  u32  life
//    44  u32  zero
//    48  u64  clear epoch of the warehouse when this life began
//    56  u64  bytes of the segment file
//    64       zeros
//
// Record: a header of whole blocks, then the payload: every shard padded to whole blocks.
//     0  u64  checksum of bytes 8 to header_bytes - 1
//     8  u64  magic "KVWRECD1"
//    16  u32  version
//    20  u32  header_bytes, a multiple of 4096
//    24  u128 warehouse id
//    40  u32  segment
//    44  u32  life of the segment
//    48  u32  offset of this header in the segment, in blocks
//    52  u32  blocks of the record, header and payload
//    56  u128 key
//    72  u128 key of the parent; the namespace's root key for the first page of a chain
//    88  u128 namespace id
//   104  u32  position of the page in its chain
//   108  u32  shards
//   112  u32  tokens of the page
//   116  u32  witness kind (1 token ids, 2 the engine's hash)
//   120  u32  witness bytes
//   124  u32  zero
//   128  u64  bytes of one shard
//   136  u64  clear epoch when the page was reserved
//   144  u64  stored at, wall clock, nanoseconds
//   152  u64  zero
//   160  u64  page digest of each shard (docs/format.md), then the witness, then zeros
//
// Table of contents: entries, padded with zeros to whole blocks, then the footer in the last block
// of the segment. Entries are in rising order of offset. Entry, 96 bytes:
//     0  u128 key            16  u128 parent         32  u128 namespace id
//    48  u64  shard bytes    56  u64  clear epoch    64  u64  stored at
//    72  u32  position       76  u32  shards         80  u32  tokens
//    84  u32  witness kind   88  u32  offset, blocks 92  u32  blocks
// Footer, 4096 bytes:
//     0  u64  checksum of bytes 8 to 4095
//     8  u64  magic "KVWTOCF1"
//    16  u32  version
//    20  u32  segment
//    24  u128 warehouse id
//    40  u32  life
//    44  u32  entries
//    48  u64  checksum of the entries with their padding
//    56  u64  bytes of the segment file
//    64       zeros
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/types.h"
#include "nvme/record.h"

namespace kvw::nvme {

inline constexpr uint32_t kFormatVersion = 1;

// The widest header: 64 digests and the token ids of 4096 tokens.
inline constexpr size_t kMaxWitnessBytes = kMaxPageTokens * 4;
inline constexpr size_t kRecordFixedBytes = 160;
inline constexpr size_t kMaxHeaderBytes =
    round_up(kRecordFixedBytes + kMaxShards * 8 + kMaxWitnessBytes, kBlockBytes);

struct SegmentHeader {
  Key warehouse;
  uint32_t segment = 0;
  uint32_t life = 0;
  uint64_t clear_epoch = 0;
  uint64_t segment_bytes = 0;
};

// `block` has 4096 bytes.
void encode_segment_header(const SegmentHeader& header, std::span<std::byte> block);
std::optional<SegmentHeader> decode_segment_header(std::span<const std::byte> block);
// The version of a segment header that a newer program wrote. Its checksum must hold: where magic,
// version and checksum of this block stand is the same in all versions, whatever else changes.
std::optional<uint32_t> newer_segment_version(std::span<const std::byte> block);

struct RecordHeader {
  Key warehouse;
  Extent extent;
  uint32_t header_blocks = 0;
  PageFacts facts;
};

// What a record of these facts needs, in blocks. Preconditions: facts_are_sound().
uint32_t header_blocks(const PageFacts& facts);
uint32_t record_blocks(const PageFacts& facts);
uint32_t record_blocks(uint32_t shards, uint64_t shard_bytes, uint64_t witness_bytes);
// Every field within its bound and the vectors as long as the fields say.
bool facts_are_sound(const PageFacts& facts);

// `header` has header_blocks(facts) blocks of zeros.
void encode_record_header(const Key& warehouse, const Extent& extent, const PageFacts& facts,
                          std::span<std::byte> header);
// `bytes` may be longer than the header. Nothing: not a header, or one that is damaged.
std::optional<RecordHeader> decode_record_header(std::span<const std::byte> bytes);
// How many bytes decode_record_header() needs, read from the unverified first block; nothing when
// that cannot be the start of a record.
std::optional<size_t> record_header_bytes(std::span<const std::byte> first_block);
// The payload's digests are those of the facts. Costs a pass over the payload.
bool payload_matches(const PageFacts& facts, const std::byte* payload);

// Exactly its bytes on disk.
struct TocEntry {
  Key key, parent, namespace_id;
  uint64_t shard_bytes = 0, clear_epoch = 0, stored_at_ns = 0;
  uint32_t position = 0, shards = 0, page_tokens = 0, witness_kind = 0;
  uint32_t offset_blocks = 0, blocks = 0;

  PageFacts facts() const;  // without witness and digests
  uint32_t header_blocks() const;
};

TocEntry toc_entry(const PageFacts& facts, const Extent& extent);

struct TocFooter {
  Key warehouse;
  uint32_t segment = 0;
  uint32_t life = 0;
  uint32_t entries = 0;
  uint64_t entries_checksum = 0;
  uint64_t segment_bytes = 0;
};

// Bytes of the entries with their padding, without the footer.
uint64_t toc_entry_bytes(uint64_t entries);
// Entries and footer: what a segment must keep free at its end.
uint64_t toc_bytes(uint64_t entries);
// `to` has toc_bytes(entries.size()) bytes of zeros; footer's entries and checksum are filled in.
void encode_toc(std::span<const TocEntry> entries, TocFooter footer, std::span<std::byte> to);
// Nothing unless the entries fit into the segment of that size.
std::optional<TocFooter> decode_toc_footer(std::span<const std::byte> block);
// The entries in `padded` (toc_entry_bytes(footer.entries) bytes, 8-byte aligned), all of them
// checked. Nothing if one is impossible. The view lives as long as `padded`.
std::optional<std::span<const TocEntry>> decode_toc_entries(const TocFooter& footer,
                                                            std::span<const std::byte> padded);

}  // namespace kvw::nvme
