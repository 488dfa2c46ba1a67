// The slots file: the source of truth about the DRAM tier. One atomic word per slot at a place that
// never moves, and one metadata record per slot, beside the arena's raw bytes.
//
// Written by the daemon's core thread only, so transitions are plain stores with the order that
// docs/protocol.md gives. Readers in other processes trust nothing that the word's generation does
// not frame: read the word, read metadata and payload, acquire fence, read the word again.
//
// Invariants:
//  - A word's generation only rises, for as long as the file lives, whatever its slab is cut into.
//  - The metadata's checksum covers everything that does not change after LIVE, and the generation.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "base/atomics.h"
#include "base/fd.h"
#include "base/types.h"
#include "nvme/record.h"

namespace kvw {

inline constexpr uint64_t kSlotsMagic = 0x3153544f4c53564bull;  // "KVSLOTS1"
inline constexpr uint32_t kSlotsVersion = 1;

enum class SlotState : uint16_t {
  free = 0,      // readable as its last generation until reused
  reserved = 1,  // clients are writing
  filling = 2,   // the daemon is reading it from NVMe
  live = 3,
  closing = 4,  // being evicted: readable, not pinnable
  limbo = 5,    // never to be published; freed when nobody can still write
};

struct SlotWord {
  uint64_t generation;
  SlotState state;

  static SlotWord unpack(uint64_t raw) { return {raw >> 16, static_cast<SlotState>(raw & 0xffff)}; }
  uint64_t pack() const { return generation << 16 | static_cast<uint64_t>(state); }
  // While its bytes are what was sealed for the generation.
  bool readable() const {
    return state == SlotState::live || state == SlotState::closing || state == SlotState::free;
  }
};

// How a slab is cut: one atomic word, so that nobody ever sees half of it. 0 blocks: not cut yet.
struct SlabLayout {
  uint32_t slot_blocks = 0;  // of 4 KiB
  uint16_t meta_units = 0;   // of 64 bytes
  uint16_t populated = 0;    // its arena bytes are allocated

  static SlabLayout unpack(uint64_t raw) {
    return {static_cast<uint32_t>(raw), static_cast<uint16_t>(raw >> 32),
            static_cast<uint16_t>(raw >> 48)};
  }
  uint64_t pack() const {
    return uint64_t{slot_blocks} | uint64_t{meta_units} << 32 | uint64_t{populated} << 48;
  }
  uint64_t slot_bytes() const { return uint64_t{slot_blocks} * kBlockBytes; }
  uint64_t meta_bytes() const { return uint64_t{meta_units} * 64; }
};

struct alignas(64) SlotMeta {
  uint64_t checksum;
  Key namespace_id;
  Key key;
  Key parent;
  uint64_t clear_epoch;
  uint64_t stored_at_ns;
  uint64_t shard_bytes;
  uint32_t position;
  uint32_t shards;
  uint32_t page_tokens;
  uint32_t witness_kind;
  uint32_t witness_bytes;
  uint32_t spare;
  // Change after LIVE or before it: not under the checksum.
  // Masks of shards; settled: sealed or aborted.
  std::atomic<uint64_t> granted, unused, settled;
  // uint64_t digests[shards]; uint64_t owners[shards]; std::byte witness[]; follow
};
static_assert(sizeof(SlotMeta) == 128);

inline uint64_t meta_bytes_of(const NamespaceShape& shape) {
  return round_up(sizeof(SlotMeta) + 16ull * shape.shards + shape.witness_capacity(), 64);
}

inline uint64_t* digests_of(SlotMeta* meta) { return reinterpret_cast<uint64_t*>(meta + 1); }
inline const uint64_t* digests_of(const SlotMeta* meta) {
  return reinterpret_cast<const uint64_t*>(meta + 1);
}
inline uint64_t* owners_of(SlotMeta* meta) { return digests_of(meta) + meta->shards; }
inline const uint64_t* owners_of(const SlotMeta* meta) { return digests_of(meta) + meta->shards; }
inline std::byte* witness_of(SlotMeta* meta) {
  return reinterpret_cast<std::byte*>(digests_of(meta) + 2 * meta->shards);
}
inline const std::byte* witness_of(const SlotMeta* meta) {
  return reinterpret_cast<const std::byte*>(digests_of(meta) + 2 * meta->shards);
}

// XXH3-64 over the generation and everything of the record that is fixed at LIVE.
// Precondition: the record's counts fit its slab's layout (see fits()).
uint64_t meta_checksum(const SlotMeta& meta, uint64_t generation);
// Do the counts inside the record stay inside meta_bytes? Asked before anything in it is followed.
bool meta_fits(const SlotMeta& meta, uint64_t meta_bytes, uint64_t slot_bytes);
PageFacts facts_of(const SlotMeta& meta);

struct SlotsHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t slab_max;
  Key warehouse_id;
  uint64_t slab_bytes;
  uint64_t slots_per_slab;  // room for words: slab_bytes / 4 KiB
  uint64_t meta_region_bytes;
  uint64_t words_offset, metas_offset, bytes;
  uint64_t checksum;  // XXH3-64 of the fields above
};

// The geometry that follows from a slab size.
SlotsHeader slots_layout(const Key& warehouse_id, uint64_t slab_bytes, uint32_t slab_max);
// Throws Error (storage) that says what is wrong: magic, version, checksum, another warehouse.
void check_slots_header(const SlotsHeader& header, const Key& warehouse_id);
// Written whole by a newer program, whose header has its checksum where ours has.
bool slots_header_is_newer(const SlotsHeader& header);

// Places inside a mapped slots file. Copyable; does not own the mapping.
class Slots {
 public:
  Slots() = default;
  explicit Slots(const Mapping& mapping);

  const SlotsHeader& header() const { return header_; }
  uint32_t slab_of(SlotId slot) const { return slot / per_slab_; }
  uint32_t place_of(SlotId slot) const { return slot % per_slab_; }
  SlotId slot_id(uint32_t slab, uint32_t place) const { return slab * per_slab_ + place; }
  bool in_range(SlotId slot) const { return slab_of(slot) < header_.slab_max; }

  std::atomic<uint64_t>& layout_word(uint32_t slab) const { return layouts_[slab]; }
  SlabLayout layout(uint32_t slab) const {
    return SlabLayout::unpack(layouts_[slab].load(std::memory_order_acquire));
  }
  uint32_t slots_in(const SlabLayout& layout) const;

  std::atomic<uint64_t>& word(SlotId slot) const { return words_[slot]; }
  SlotWord load(SlotId slot) const {
    return SlotWord::unpack(words_[slot].load(std::memory_order_acquire));
  }
  uint64_t meta_offset(SlotId slot, const SlabLayout& layout) const {
    return header_.metas_offset + slab_of(slot) * header_.meta_region_bytes +
           place_of(slot) * layout.meta_bytes();
  }
  SlotMeta* meta(SlotId slot, const SlabLayout& layout) const {
    return reinterpret_cast<SlotMeta*>(base_ + meta_offset(slot, layout));
  }
  uint64_t arena_offset(SlotId slot, const SlabLayout& layout) const {
    return slab_of(slot) * header_.slab_bytes + place_of(slot) * layout.slot_bytes();
  }

 private:
  std::byte* base_ = nullptr;
  SlotsHeader header_{};  // a copy: what it says was checked, and must not change under a reader
  std::atomic<uint64_t>* layouts_ = nullptr;
  std::atomic<uint64_t>* words_ = nullptr;
  uint32_t per_slab_ = 1;
};

}  // namespace kvw
