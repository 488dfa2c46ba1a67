// What a record of the NVMe log says about a page, apart from its payload. Plain values.
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"

namespace kvw {

struct PageFacts {
  Key key;
  Key parent;
  Key namespace_id;
  uint32_t position = 0;  // of the page in its prefix chain, from 0
  uint32_t shards = 0;
  uint32_t page_tokens = 0;
  uint64_t shard_bytes = 0;
  uint64_t clear_epoch = 0;   // the warehouse's epoch when the page was reserved
  uint64_t stored_at_ns = 0;  // wall clock, information only
  WitnessKind witness_kind = WitnessKind::tokens;
  std::vector<std::byte> witness;  // token ids as 32-bit little-endian, or the engine's full hash
  std::vector<uint64_t> digests;   // one a shard

  // Payload of a record and of a slot: all shards, each padded to 4 KiB.
  uint64_t payload_bytes() const { return round_up(shard_bytes, kBlockBytes) * shards; }
};

}  // namespace kvw

namespace kvw::nvme {

// Where a record lies. `life` is the global life number of its segment: it rises with every reuse
// of any segment, so that (life, offset) orders all records ever written.
struct Extent {
  uint32_t segment = UINT32_MAX;
  uint32_t offset_blocks = 0;  // of the record's header, in units of 4 KiB
  uint32_t blocks = 0;         // header and payload
  uint32_t life = 0;

  bool valid() const { return segment != UINT32_MAX; }
  // Orders all records ever written, in any segment.
  uint64_t position() const { return uint64_t{life} << 32 | offset_blocks; }
  friend bool operator==(const Extent&, const Extent&) = default;
};

}  // namespace kvw::nvme
