// What one copy path provides, and which of them this processor can run. Internal to copy/ and
// digest/ (and their tests, which compare the paths with each other).
// Plain function pointers: thread-safe. None of them fences; copy.cc does.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy/copy.h"

namespace kvw {

struct CopyRoutines {
  CopyPath path;
  const char* name;
  void (*copy)(std::byte* to, const std::byte* from, size_t bytes);
  void (*scatter)(const Piece* to, size_t pieces, const std::byte* from);
  // Both return the page's digest under `seed`.
  uint64_t (*scatter_digest)(const Piece* to, size_t pieces, const std::byte* from, uint64_t seed);
  uint64_t (*gather_digest)(std::byte* to, const Piece* from, size_t pieces, uint64_t seed);
  uint64_t (*digest)(const std::byte* data, uint64_t bytes, uint64_t seed);
};

// nullptr when the path is not built for this architecture or the processor lacks its
// instructions.
const CopyRoutines* copy_routines(CopyPath path);

// Those of `wanted`, a path's name; of the processor's best path if it is null or empty. Throws
// Error (usage) that lists the names that this machine has.
const CopyRoutines& choose_copy_routines(const char* wanted);

// Those of copy_path().
const CopyRoutines& chosen_copy_routines();

// Defined by each path's file; callers go through copy_routines(), which asks the processor first.
extern const CopyRoutines kPortableCopy;
extern const CopyRoutines kAvx2Copy;
extern const CopyRoutines kAvx512Copy;
extern const CopyRoutines kNeonCopy;

}  // namespace kvw
