// Copies of pages between a client's memory and the arena, fused with the page digest: every byte
// is read once, hashed in the registers or while its 4 KiB leaf is in the first-level cache, and
// written with streaming stores that do not evict the engine's working set.
// Stateless; thread-safe. Each call ends in a store fence (streaming stores are weakly ordered).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.h"

namespace kvw {

// A run of bytes of a page in the client's memory. A page of an engine's paged cache is many of
// them, in page order; their sizes add up to the page's bytes of one shard.
struct Piece {
  std::byte* data;
  size_t bytes;
};

enum class CopyPath { portable, avx2, avx512, neon };

// The path chosen at first use: the best that the processor has, or KVW_COPY_PATH's choice, for
// measuring and for finding faults. Throws Error (usage) if that names no path of this machine:
// call it once at start, so that no copy throws later.
CopyPath copy_path();
const char* copy_path_name();

// Plain streaming copy of contiguous bytes: the machine's limit that the benchmarks compare with.
void copy_streaming(std::byte* to, const std::byte* from, size_t bytes);

// arena -> client. Returns the digest of what was read (and copied). `from` is 4 KiB aligned.
uint64_t scatter_digest(std::span<const Piece> to, const std::byte* from, const Key& key,
                        uint32_t shard);
// arena -> client without a digest.
void scatter(std::span<const Piece> to, const std::byte* from);
// client -> arena. Returns the digest of what was written. `to` is 4 KiB aligned.
uint64_t gather_digest(std::byte* to, std::span<const Piece> from, const Key& key, uint32_t shard);
// client -> a row of the client's, which is read again soon: by ordinary stores, into the caches.
void gather(std::byte* to, std::span<const Piece> from);

}  // namespace kvw
