// The page digest: XXH3-64, seeded with the page's key and shard, over the XXH3-64 of each 4 KiB
// leaf. A tree, so that a copy can compute it leaf by leaf while the leaf is in the first-level
// cache, and a GPU can compute leaves in parallel. docs/format.md has the definition.
// Stateless; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"

namespace kvw {

// XXH3-64 of the 28 bytes (key.lo 8, key.hi 8, shard 4, bytes 8), little-endian and packed: what
// makes two pages that swapped their payloads fail.
uint64_t digest_seed(const Key& key, uint32_t shard, uint64_t bytes);

// The root: XXH3-64, seeded, over the leaves' digests as 64-bit little-endian. A leaf's digest is
// XXH3-64 of its bytes; only the last leaf may be shorter than 4 KiB, and no bytes have no leaf.
uint64_t digest_root(std::span<const uint64_t> leaves, uint64_t seed);

// Appends the leaves' digests of a stretch of a page, which begins at a leaf and ends at one or at
// the page's end.
void add_leaves(const std::byte* data, uint64_t bytes, std::vector<uint64_t>& leaves);

// The whole digest of contiguous bytes, with the instructions of copy_path().
uint64_t page_digest(const std::byte* data, uint64_t bytes, const Key& key, uint32_t shard);

}  // namespace kvw
