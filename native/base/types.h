// The words that every part of the core shares: keys, page ids, limits.
// Plain values; thread-safe by being immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace kvw {

// A 128-bit digest: the key of a page, or the id of a namespace or warehouse.
struct Key {
  uint64_t lo = 0;
  uint64_t hi = 0;

  friend bool operator==(const Key&, const Key&) = default;
  bool is_zero() const { return lo == 0 && hi == 0; }
};

// Keys are digests already, so their low word is hash enough.
struct KeyHash {
  size_t operator()(const Key& key) const { return static_cast<size_t>(key.lo); }
};

// Position of a page's entry in the index table: its handle for as long as it is in any tier,
// because entries never move.
using PageId = uint32_t;
inline constexpr PageId kNoPage = UINT32_MAX;

// Number of a slot in the whole arena: slab * slots_per_slab_max + place in the slab.
using SlotId = uint32_t;
inline constexpr SlotId kNoSlot = UINT32_MAX;

// O_DIRECT, the digest's leaves and the arena's slots share one unit.
inline constexpr size_t kBlockBytes = 4096;

// Of x86-64, and of 64-bit ARM with pages of 4 KiB.
inline constexpr size_t kHugePageBytes = 2 << 20;

inline constexpr uint32_t kMaxShards = 64;        // one bit each in a 64-bit mask
inline constexpr uint32_t kMaxPageTokens = 4096;  // keeps a page's metadata under 20 KiB
inline constexpr uint64_t kMaxShardBytes = 1ull << 30;
inline constexpr uint32_t kMaxNamespaces =
    4096;  // ordinals fit 16 bits; the control table is fixed
inline constexpr size_t kMaxEngineKeyBytes = 64;  // an engine's own block hash (sha256 is 32)
inline constexpr size_t kSecretBytes = 192;       // XXH3 wants at least 136; its own default is 192

constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// What a page's witness is made of: the facts a load is confirmed against, beyond any digest.
enum class WitnessKind : uint32_t { tokens = 1, engine_key = 2 };

// What the core must know of a namespace; everything else that makes its id is the client's affair.
struct NamespaceShape {
  Key id;
  uint32_t page_tokens = 0;
  uint32_t shards = 0;
  uint64_t shard_bytes = 0;

  uint64_t shard_stride() const { return round_up(shard_bytes, kBlockBytes); }
  uint64_t slot_bytes() const { return shard_stride() * shards; }
  // Room for the token ids (4 bytes each) or an engine's full hash.
  uint32_t witness_capacity() const {
    const uint32_t tokens = page_tokens * 4;
    return tokens > kMaxEngineKeyBytes ? tokens : static_cast<uint32_t>(kMaxEngineKeyBytes);
  }
  friend bool operator==(const NamespaceShape&, const NamespaceShape&) = default;
};

// The bytes as they lie in memory, as the commands print ids and keys.
std::string to_hex(const Key& key);

}  // namespace kvw
