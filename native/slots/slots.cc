#include "slots/slots.h"

#include <algorithm>
#include <cstddef>
#include <string>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"

namespace kvw {

namespace {

uint64_t header_checksum(const SlotsHeader& header) {
  return XXH3_64bits(&header, offsetof(SlotsHeader, checksum));
}

}  // namespace

uint64_t meta_checksum(const SlotMeta& meta, uint64_t generation) {
  // One pass over a short copy without the masks, then the digests and the witness.
  XXH3_state_t state;
  XXH3_INITSTATE(&state);  // reset compares with the old seed
  XXH3_64bits_reset_withSeed(&state, generation);
  const auto* bytes = reinterpret_cast<const std::byte*>(&meta);
  const size_t begin = offsetof(SlotMeta, namespace_id);
  XXH3_64bits_update(&state, bytes + begin, offsetof(SlotMeta, granted) - begin);
  XXH3_64bits_update(&state, digests_of(&meta), 8ull * meta.shards);
  XXH3_64bits_update(&state, witness_of(&meta), meta.witness_bytes);
  return XXH3_64bits_digest(&state);
}

bool meta_fits(const SlotMeta& meta, uint64_t meta_bytes, uint64_t slot_bytes) {
  if (meta.shards == 0 || meta.shards > kMaxShards) return false;
  if (meta.page_tokens == 0 || meta.page_tokens > kMaxPageTokens) return false;
  if (meta.witness_bytes > kMaxPageTokens * 4) return false;
  if (meta.witness_kind != static_cast<uint32_t>(WitnessKind::tokens) &&
      meta.witness_kind != static_cast<uint32_t>(WitnessKind::engine_key))
    return false;
  if (meta.shard_bytes == 0 || meta.shard_bytes > slot_bytes) return false;
  if (round_up(meta.shard_bytes, kBlockBytes) * meta.shards > slot_bytes) return false;
  return sizeof(SlotMeta) + 16ull * meta.shards + meta.witness_bytes <= meta_bytes;
}

PageFacts facts_of(const SlotMeta& meta) {
  PageFacts facts;
  facts.key = meta.key;
  facts.parent = meta.parent;
  facts.namespace_id = meta.namespace_id;
  facts.position = meta.position;
  facts.shards = meta.shards;
  facts.page_tokens = meta.page_tokens;
  facts.shard_bytes = meta.shard_bytes;
  facts.clear_epoch = meta.clear_epoch;
  facts.stored_at_ns = meta.stored_at_ns;
  facts.witness_kind = static_cast<WitnessKind>(meta.witness_kind);
  facts.witness.assign(witness_of(&meta), witness_of(&meta) + meta.witness_bytes);
  facts.digests.assign(digests_of(&meta), digests_of(&meta) + meta.shards);
  return facts;
}

SlotsHeader slots_layout(const Key& warehouse_id, uint64_t slab_bytes, uint32_t slab_max) {
  SlotsHeader header{};
  header.magic = kSlotsMagic;
  header.version = kSlotsVersion;
  header.slab_max = slab_max;
  header.warehouse_id = warehouse_id;
  header.slab_bytes = slab_bytes;
  header.slots_per_slab = slab_bytes / kBlockBytes;
  // A quarter of the payload is more metadata than any sensible page size needs; the file is
  // sparse.
  header.meta_region_bytes = round_up(slab_bytes / 4, kBlockBytes);
  header.words_offset = kBlockBytes + round_up(uint64_t{slab_max} * 8, kBlockBytes);
  header.metas_offset =
      header.words_offset + round_up(slab_max * header.slots_per_slab * 8, kBlockBytes);
  header.bytes = header.metas_offset + slab_max * header.meta_region_bytes;
  header.checksum = header_checksum(header);
  return header;
}

void check_slots_header(const SlotsHeader& header, const Key& warehouse_id) {
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorKind::storage, "arena_foreign",
                "the arena's slots file " + what +
                    "; move the arena directory away (its pages are then recomputed) or start the "
                    "daemon that it belongs to");
  };
  if (header.magic != kSlotsMagic) refuse("is not a kvwarehouse file");
  if (header.version != kSlotsVersion)
    refuse("has format version " + std::to_string(header.version) + ", this build reads " +
           std::to_string(kSlotsVersion));
  if (header.checksum != header_checksum(header)) refuse("has a damaged header");
  if (!(header.warehouse_id == warehouse_id))
    refuse("belongs to warehouse " + to_hex(header.warehouse_id) + ", not " + to_hex(warehouse_id));
}

bool slots_header_is_newer(const SlotsHeader& header) {
  return header.magic == kSlotsMagic && header.version > kSlotsVersion &&
         header.checksum == header_checksum(header);
}

Slots::Slots(const Mapping& mapping)
    : base_(mapping.data()), header_(*mapping.at<const SlotsHeader>(0)) {
  layouts_ = mapping.at<std::atomic<uint64_t>>(kBlockBytes);
  words_ = mapping.at<std::atomic<uint64_t>>(header_.words_offset);
  per_slab_ = static_cast<uint32_t>(header_.slots_per_slab);
}

uint32_t Slots::slots_in(const SlabLayout& layout) const {
  if (layout.slot_blocks == 0 || layout.meta_units == 0) return 0;
  const uint64_t by_payload = header_.slab_bytes / layout.slot_bytes();
  const uint64_t by_meta = header_.meta_region_bytes / layout.meta_bytes();
  return static_cast<uint32_t>(std::min(by_payload, by_meta));
}

}  // namespace kvw
