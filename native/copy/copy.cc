#include "copy/copy.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "base/atomics.h"
#include "base/error.h"
#include "copy/copy_routines.h"
#include "digest/digest.h"

namespace kvw {
namespace {

constexpr CopyPath kBestFirst[] = {CopyPath::avx512, CopyPath::avx2, CopyPath::neon,
                                   CopyPath::portable};

std::string names_here() {
  std::string names;
  for (const CopyPath path : kBestFirst) {
    const CopyRoutines* routines = copy_routines(path);
    if (routines != nullptr) names += (names.empty() ? "" : ", ") + std::string(routines->name);
  }
  return names;
}

uint64_t seed_of(std::span<const Piece> pieces, const Key& key, uint32_t shard) {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return digest_seed(key, shard, bytes);
}

}  // namespace

const CopyRoutines* copy_routines(CopyPath path) {
  switch (path) {
    case CopyPath::portable:
      return &kPortableCopy;
#if defined(__x86_64__)
    case CopyPath::avx2:
      return __builtin_cpu_supports("avx2") ? &kAvx2Copy : nullptr;
    case CopyPath::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
                 ? &kAvx512Copy
                 : nullptr;
#elif defined(__aarch64__)
    case CopyPath::neon:
      return &kNeonCopy;
#endif
    default:
      return nullptr;
  }
}

const CopyRoutines& choose_copy_routines(const char* wanted) {
  const std::string_view name = wanted == nullptr ? "" : wanted;
  for (const CopyPath path : kBestFirst) {
    const CopyRoutines* routines = copy_routines(path);
    if (routines != nullptr && (name.empty() || name == routines->name)) return *routines;
  }
  throw Error(ErrorKind::usage, "copy_path",
              "KVW_COPY_PATH is \"" + std::string(name) + "\"; this machine has " + names_here() +
                  " (unset it for the best)");
}

const CopyRoutines& chosen_copy_routines() {
  static const CopyRoutines& chosen = choose_copy_routines(std::getenv("KVW_COPY_PATH"));
  return chosen;
}

CopyPath copy_path() { return chosen_copy_routines().path; }

const char* copy_path_name() { return chosen_copy_routines().name; }

void copy_streaming(std::byte* to, const std::byte* from, size_t bytes) {
  chosen_copy_routines().copy(to, from, bytes);
  streaming_fence();
}

uint64_t scatter_digest(std::span<const Piece> to, const std::byte* from, const Key& key,
                        uint32_t shard) {
  const uint64_t digest =
      chosen_copy_routines().scatter_digest(to.data(), to.size(), from, seed_of(to, key, shard));
  streaming_fence();
  return digest;
}

void scatter(std::span<const Piece> to, const std::byte* from) {
  chosen_copy_routines().scatter(to.data(), to.size(), from);
  streaming_fence();
}

uint64_t gather_digest(std::byte* to, std::span<const Piece> from, const Key& key, uint32_t shard) {
  const uint64_t digest =
      chosen_copy_routines().gather_digest(to, from.data(), from.size(), seed_of(from, key, shard));
  streaming_fence();
  return digest;
}

void gather(std::byte* to, std::span<const Piece> from) {
  for (const Piece& piece : from) {
    std::memcpy(to, piece.data, piece.bytes);
    to += piece.bytes;
  }
}

}  // namespace kvw
