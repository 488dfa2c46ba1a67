// The copy loops that all paths share; a path adds only its streaming store of one cache line.
// Included once by each path's file, with that file's compiler flags (and XXH_VECTOR).
//
// Everything here has internal linkage and calls no inline function of the standard library: a
// function that the linker shares between files could be the AVX-512 build of it, and run on a
// processor that has none.
//
// Where a path has the hash's sums in registers (Line::Sums; AVX2 and AVX-512 do), whole leaves are
// hashed stripe by stripe as they are stored (streamed_leaf.h): on EPYC guests loads at 0.84 to 1.0
// and stores at 0.86 to 1.1 of a plain streaming copy, where hashing a leaf and then storing it had
// 0.58 to 0.73. Sums in registers of AVX-512 had 0.75 to 1.0 of what those of AVX2 do there.
//
// Elsewhere, and in pieces that are small or odd, a leaf is hashed first, which brings it to the
// first-level cache, then stored from there; each store asks for a line of the next leaf, a quarter
// of a leaf ahead of its own place in it. On a Sapphire Rapids guest with AVX-512, medians of 60
// rounds in turns: loads 0.84 and stores 0.85 of the streaming copy; asking for the same place in
// the next leaf 0.76 and 0.78.
//
// # What is asked for ahead
//
// The processor's own prefetching ends with each 4 KiB, and finding the way to memory (in a virtual
// machine a walk through two sets of page tables) stops a copy that meets it unprepared. So copies
// ask for lines ahead, and for the first line of each piece further ahead. All figures are ratios
// to the plain streaming copy of the same run, on an EPYC guest with AVX-512 that streams 17 to 20
// GB/s, medians of 11 rounds in turns; pages of 256 KiB, 1 and 2 MiB in 64 pieces at random places.
//
// - A copy that hashes asks for its lines into the second-level cache. Into the first level they
//   wait in line with the reads themselves: gathers 0.50, 0.61, 0.73 so, and 0.62, 0.79, 0.92 into
//   the second; scatters 0.67, 0.75, 0.82 and 0.76, 0.81, 0.90.
// - A gather asks a leaf and three quarters ahead: 0.65, 0.90, 0.95. A quarter more or less, or two
//   leaves more, costs 3 to 8 hundredths.
// - A scatter that hashes, whose reads are in a row, asks a leaf and a quarter ahead; whole leaves
//   (one, two or four) are the worst, 0.58 and less.
// - The first line of a piece is asked for four leaves ahead: gathers of pages of 64 KiB, pieces of
//   1 KiB, 0.43 and 0.55 (two and four leaves), scatters 0.59 and 0.68; larger pieces alike.
// - A scatter without a hash asks into the first level, for pieces of more than a leaf: rows 1.1
//   so, 0.8 into the second level; asking for what pieces of 4 KiB read cost what it gained
//   elsewhere. Two leaves and three quarters ahead: pages of 1, 2 and 8 MiB in pieces 0.92, 0.95
//   and 1.0, a leaf and a quarter 0.83, 0.90 and 0.94, without 0.89, 0.92 and 0.92; rows alike.
//   With registers of AVX2 there it gains less: 0.85, 0.92 and 0.96, and 0.86, 0.90 and 0.90.
//
// A digest alone asks for the first half of the next leaf before it hashes one, where a path says
// so, into the second-level cache. On a Xeon guest with AVX-512, cold pages of 256 KiB, into the
// first level: 11.7 GB/s (an eighth of a leaf more or less: 10.6 and 11.4; all of it: 9.3), and 8.5
// without. On an EPYC guest with AVX-512: into the second level as fast as without, 32 GB/s, and 30
// into the first (hashed with registers of AVX-512 27, 27 and 20). On an EPYC guest with AVX2: 8.3
// to 8.8 into the first and 12.4 to 14.5 without, so the path for AVX2 asks for nothing.
//
// Where a piece begins 16 bytes behind a line (an array of numpy's), stripes are stored shifted, by
// whole registers: scatters without a digest, before and after, on an EPYC guest: rows of 2 MiB
// 0.90 and 1.0, 64 pieces of 4 KiB 0.57 to 0.67 and 0.76 to 0.91, of 32 KiB 0.84 and 0.95.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

#include "copy/copy_routines.h"
#include "copy/streamed_leaf.h"

namespace kvw {
namespace {

constexpr size_t kLineBytes = 64;

// Pieces of client memory from here on are streamed, smaller ones stored plainly. Measured with
// cold pieces scattered at random, streaming against plain stores: 1.02 to 1.2 at 512 bytes, 0.8 to
// 0.9 at 256 bytes when the pieces are not line-aligned (their partial lines cost both ways).
constexpr size_t kStreamPieceBytes = 512;

constexpr size_t kHashedAlignment = 16;

constexpr size_t kAheadBytes = kBlockBytes + kBlockBytes / 4;
constexpr size_t kGatherAheadBytes = kBlockBytes + kBlockBytes / 4 * 3;
constexpr size_t kPlainAheadBytes = 2 * kBlockBytes + kBlockBytes / 4 * 3;
constexpr size_t kPiecesAheadBytes = 4 * kBlockBytes;
constexpr size_t kHalfLeafBytes = kBlockBytes / 2;

size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// Asks for a line, into the first-level cache or the second. Any address.
void ask_first_level(const std::byte* line) { __builtin_prefetch(line, 0, 3); }
void ask_second_level(const std::byte* line) { __builtin_prefetch(line, 0, 2); }

size_t total_bytes(const Piece* pieces, size_t count) {
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += pieces[i].bytes;
  return bytes;
}

// The root of the tree digest, fed leaf by leaf, so that a page has no upper bound here.
class Root {
 public:
  explicit Root(uint64_t seed) {
    XXH3_INITSTATE(&state_);  // the reset reads the old seed, and believes a match
    XXH3_64bits_reset_withSeed(&state_, seed);
  }
  void add(uint64_t leaf) {
    leaves_[count_++] = leaf;
    if (count_ == kBatch) flush();
  }
  uint64_t value() {
    flush();
    return XXH3_64bits_digest(&state_);
  }

 private:
  static constexpr size_t kBatch = 32;  // the hash's own buffer: 256 bytes

  void flush() {
    XXH3_64bits_update(&state_, leaves_, count_ * sizeof leaves_[0]);
    count_ = 0;
  }

  XXH3_state_t state_;
  uint64_t leaves_[kBatch];
  size_t count_ = 0;
};

// A place in the pieces of a page.
struct Cursor {
  const Piece* piece;
  size_t pieces;
  size_t offset = 0;

  // Passes pieces that are used up, or empty. False at the end of the page.
  bool settle() {
    while (pieces > 0 && offset == piece->bytes) {
      ++piece;
      --pieces;
      offset = 0;
    }
    return pieces > 0;
  }
  // The next `most` bytes, as many of them as lie together; settle() said that there are some.
  size_t part(size_t most) const { return smaller(most, piece->bytes - offset); }
  std::byte* data() const { return piece->data + offset; }
  // Goes on by so many bytes, or to the end.
  void pass(size_t bytes) {
    while (bytes > 0 && settle()) {
      const size_t some = part(bytes);
      offset += some;
      bytes -= some;
    }
  }
};

// gcc 12 makes a string instruction of a memcpy() that it knows to be a leaf at most, and that is
// slow where pieces are not aligned. So it is not told, and calls the library's.
[[gnu::noinline]] void copy_plainly(std::byte* to, const std::byte* from, size_t bytes) {
  asm("" : "+r"(bytes));
  memcpy(to, from, bytes);
}

// Up to one leaf, out of as many pieces as it takes. Returns its bytes.
size_t collect(std::byte* to, Cursor& from) {
  size_t bytes = 0;
  while (bytes < kBlockBytes && from.settle()) {
    const size_t part = from.part(kBlockBytes - bytes);
    copy_plainly(to + bytes, from.data(), part);
    from.offset += part;
    bytes += part;
  }
  return bytes;
}

// The lines that a gather reads kGatherAheadBytes later, in whatever pieces they lie.
class LinesAhead {
 public:
  explicit LinesAhead(Cursor from) : next_(from) {
    next_.pass(kGatherAheadBytes);
    find();
  }
  // For each line that is stored, one that will be read.
  void ask() {
    if (line_ >= end_ && !find()) return;
    ask_second_level(line_);
    line_ += kLineBytes;
  }

 private:
  bool find() {
    if (!next_.settle()) return false;
    line_ = next_.data();
    end_ = next_.piece->data + next_.piece->bytes;
    next_.offset = next_.piece->bytes;
    return true;
  }

  Cursor next_;
  const std::byte* line_ = nullptr;
  const std::byte* end_ = nullptr;
};

// The first line of each piece whose turn comes kPiecesAheadBytes later: the way to its memory is
// found meanwhile.
class PiecesAhead {
 public:
  explicit PiecesAhead(Cursor from) : next_(from) { ask(kPiecesAheadBytes); }
  void ask(size_t bytes) {
    while (bytes > 0 && next_.settle()) {
      if (next_.offset == 0) ask_first_level(next_.data());
      const size_t part = next_.part(bytes);
      next_.offset += part;
      bytes -= part;
    }
  }

 private:
  Cursor next_;
};

// Each of them is aligned as allocators align, and all but the last are of whole blocks of the
// hash. On an EPYC guest with AVX2, ratios to the streaming copy: pieces of 1 KiB 0.70 where leaf
// by leaf had 0.54, of 512 bytes 0.48 and 0.55; a row that is aligned to 16 bytes 0.80 and 0.65.
bool are_hashed_as_stored(const Piece* pieces, size_t count) {
  for (const Piece* piece = pieces; piece < pieces + count; ++piece)
    if (reinterpret_cast<uintptr_t>(piece->data) % kHashedAlignment != 0 ||
        (piece + 1 < pieces + count && piece->bytes % kHashBlockBytes != 0))
      return false;
  return true;
}

// What is read is line-aligned and what is stored lies 16 bytes behind that, or 48, as allocators
// align: lines that are aligned where they are stored would not be where they are read.
bool are_shifted(const std::byte* to, const std::byte* from) {
  return reinterpret_cast<uintptr_t>(from) % kLineBytes == 0 &&
         reinterpret_cast<uintptr_t>(to) % (2 * kHashedAlignment) == kHashedAlignment;
}

template <class Line>
concept HashesAsItStores = requires { typename Line::Sums; };

// Line::stream(to, from) stores the line at `from` (of any alignment) to `to` (line-aligned).
// Line::with_stores(to, use) calls `use` with stores of stripes to `to`, kHashedAlignment-aligned.
// Line::kAsksForNextLeaf: see above, of digests alone. Line::Sums: see streamed_leaf.h.
template <class Line>
struct Kernel {
  // Whole lines are streamed, what is left before and after them is stored plainly. `ahead` is
  // called with the place of each line.
  template <class Ahead>
  static void stream(std::byte* to, const std::byte* from, size_t bytes, Ahead ahead) {
    if constexpr (HashesAsItStores<Line>)
      if (are_shifted(to, from)) return stream_shifted(to, from, bytes, ahead);
    const size_t head = smaller(-reinterpret_cast<uintptr_t>(to) % kLineBytes, bytes);
    memcpy(to, from, head);
    const size_t body = (bytes - head) / kLineBytes * kLineBytes;
    for (size_t at = head; at < head + body; at += kLineBytes) {
      ahead(from + at);
      Line::stream(to + at, from + at);
    }
    memcpy(to + head + body, from + head + body, bytes - head - body);
  }

  template <class Ahead>
  static void stream_shifted(std::byte* to, const std::byte* from, size_t bytes, Ahead ahead) {
    const size_t body = bytes / kStripeBytes * kStripeBytes;
    Line::with_stores(to, [&](auto stores) {
      for (size_t at = 0; at < body; at += kStripeBytes) {
        ahead(from + at);
        stores.move(from + at);
      }
      stores.end();
    });
    memcpy(to + body, from + body, bytes - body);
  }

  static void copy(std::byte* to, const std::byte* from, size_t bytes) {
    stream(to, from, bytes, [](const std::byte*) {});
  }

  // The next `bytes` of a page, into the pieces where they belong. Where they end within a piece,
  // the line there is left to the next call, whole: returns how many were stored.
  template <class Ahead>
  static size_t spread(Cursor& to, const std::byte* from, size_t bytes, Ahead ahead) {
    size_t stored = 0;
    while (stored < bytes && to.settle()) {
      size_t part = to.part(bytes - stored);
      if (to.offset + part < to.piece->bytes) {
        const size_t begun = reinterpret_cast<uintptr_t>(to.data() + part) % kLineBytes;
        if (begun >= part) break;
        part -= begun;
      }
      if (to.piece->bytes >= kStreamPieceBytes) {
        stream(to.data(), from + stored, part, ahead);
      } else {
        memcpy(to.data(), from + stored, part);
      }
      to.offset += part;
      stored += part;
    }
    return stored;
  }

  // Asks for the lines of a slot that a scatter reads `bytes` later.
  static auto lines_ahead(const std::byte* end, size_t bytes) {
    return [end, bytes](const std::byte* line) {
      if (static_cast<size_t>(end - line) > bytes) ask_first_level(line + bytes);
    };
  }

  static void scatter(const Piece* to, size_t pieces, const std::byte* from) {
    Cursor cursor{to, pieces};
    PiecesAhead pieces_ahead(cursor);
    const auto ahead = lines_ahead(from + total_bytes(to, pieces), kPlainAheadBytes);
    while (cursor.settle()) {
      const size_t bytes = cursor.piece->bytes;
      pieces_ahead.ask(bytes);
      from += bytes > kBlockBytes ? spread(cursor, from, bytes, ahead)
                                  : spread(cursor, from, bytes, [](const std::byte*) {});
    }
  }

  static uint64_t scatter_digest(const Piece* to, size_t pieces, const std::byte* from,
                                 uint64_t seed) {
    Cursor cursor{to, pieces};
    Root root(seed);
    const std::byte* const end = from + total_bytes(to, pieces);
    const auto ahead = lines_ahead(end, kAheadBytes);
    if constexpr (HashesAsItStores<Line>)
      if (are_hashed_as_stored(to, pieces)) from = scatter_leaves(cursor, from, end, root);
    for (const std::byte* hashed = from; hashed < end;) {
      const size_t leaf = smaller(static_cast<size_t>(end - hashed), kBlockBytes);
      root.add(XXH3_64bits(hashed, leaf));
      hashed += leaf;
      from += spread(cursor, from, static_cast<size_t>(hashed - from), ahead);
    }
    return root.value();
  }

  // Whole leaves, as many as there are. Returns where they end.
  static const std::byte* scatter_leaves(Cursor& to, const std::byte* from, const std::byte* end,
                                         Root& root) {
    const std::byte* const leaves_end =
        from + static_cast<size_t>(end - from) / kBlockBytes * kBlockBytes;
    StreamedLeaf<typename Line::Sums> leaf;
    PiecesAhead pieces_ahead(to);
    while (from < leaves_end && to.settle()) {
      const std::byte* const part_end = from + to.part(static_cast<size_t>(leaves_end - from));
      Line::with_stores(to.data(), [&](auto stores) {
        while (from < part_end) {
          const size_t bytes = smaller(static_cast<size_t>(part_end - from), leaf.left_bytes());
          const size_t ahead =
              static_cast<size_t>(end - from) > kBlockBytes + kAheadBytes ? kAheadBytes : 0;
          leaf.stream(stores, from, bytes,
                      [ahead](const std::byte* line) { ask_second_level(line + ahead); });
          from += bytes;
          to.offset += bytes;
          if (leaf.left_bytes() > 0) continue;
          root.add(leaf.digest());
          leaf = {};
          pieces_ahead.ask(kBlockBytes);
        }
        stores.end();
      });
    }
    return from;
  }

  static uint64_t gather_digest(std::byte* to, const Piece* from, size_t pieces, uint64_t seed) {
    Cursor cursor{from, pieces};
    LinesAhead lines_ahead(cursor);
    PiecesAhead pieces_ahead(cursor);
    const auto ahead = [&lines_ahead](const std::byte*) { lines_ahead.ask(); };
    Root root(seed);
    alignas(kLineBytes) std::byte scratch[kBlockBytes];  // a leaf that crosses pieces
    while (cursor.settle()) {
      const std::byte* leaf = cursor.data();
      size_t bytes = kBlockBytes;
      if (cursor.part(kBlockBytes) == kBlockBytes) {
        cursor.offset += kBlockBytes;
      } else {
        bytes = collect(scratch, cursor);
        leaf = scratch;
      }
      pieces_ahead.ask(bytes);
      root.add(stream_leaf(to, leaf, bytes, ahead));
      to += bytes;
    }
    return root.value();
  }

  // A leaf, or the page's last part of one, to a place that is line-aligned. Returns its digest.
  template <class Ahead>
  static uint64_t stream_leaf(std::byte* to, const std::byte* from, size_t bytes, Ahead ahead) {
    if constexpr (HashesAsItStores<Line>)
      if (bytes == kBlockBytes) {
        StreamedLeaf<typename Line::Sums> leaf;
        Line::with_stores(to, [&](auto stores) { leaf.stream(stores, from, bytes, ahead); });
        return leaf.digest();
      }
    const uint64_t digest = XXH3_64bits(from, bytes);
    stream(to, from, bytes, ahead);
    return digest;
  }

  static uint64_t digest(const std::byte* data, uint64_t bytes, uint64_t seed) {
    Root root(seed);
    for (uint64_t at = 0; at < bytes; at += kBlockBytes) {
      if (Line::kAsksForNextLeaf && bytes - at > kBlockBytes)
        for (size_t line = 0; line < kHalfLeafBytes; line += kLineBytes)
          ask_second_level(data + at + kBlockBytes + line);
      root.add(XXH3_64bits(data + at, smaller(bytes - at, kBlockBytes)));
    }
    return root.value();
  }

  static constexpr CopyRoutines routines(CopyPath path, const char* name) {
    return {path, name, copy, scatter, scatter_digest, gather_digest, digest};
  }
};

}  // namespace
}  // namespace kvw
