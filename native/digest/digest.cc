#include "digest/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "copy/copy_routines.h"

namespace kvw {

static_assert(std::endian::native == std::endian::little, "digests are defined little-endian");

uint64_t digest_seed(const Key& key, uint32_t shard, uint64_t bytes) {
  std::byte packed[28];
  std::memcpy(packed, &key.lo, 8);
  std::memcpy(packed + 8, &key.hi, 8);
  std::memcpy(packed + 16, &shard, 4);
  std::memcpy(packed + 20, &bytes, 8);
  return XXH3_64bits(packed, sizeof packed);
}

uint64_t digest_root(std::span<const uint64_t> leaves, uint64_t seed) {
  return XXH3_64bits_withSeed(leaves.data(), leaves.size_bytes(), seed);
}

void add_leaves(const std::byte* data, uint64_t bytes, std::vector<uint64_t>& leaves) {
  for (uint64_t at = 0; at < bytes; at += kBlockBytes)
    leaves.push_back(XXH3_64bits(data + at, std::min<uint64_t>(bytes - at, kBlockBytes)));
}

uint64_t page_digest(const std::byte* data, uint64_t bytes, const Key& key, uint32_t shard) {
  return chosen_copy_routines().digest(data, bytes, digest_seed(key, shard, bytes));
}

}  // namespace kvw
