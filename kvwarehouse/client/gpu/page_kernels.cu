// Pages between a paged cache and one run of bytes, digested on the way: kvw_gather and kvw_scatter.
//
// A page is a list of pieces in device memory. Eight lanes move and digest one 4 KiB leaf of it:
// XXH3-64 keeps eight 64-bit sums over 64 bytes at a time, so a lane has one word and one sum. The
// digest of a leaf is that of docs/format.md, bit for bit; the host makes the page's digest of them.
// Source: xxHash's specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), XXH3, with the
// default secret and no seed.
//
// The same text is compiled for the host, by the tests and by their contract model of CUDA's driver:
// there a group's lanes take turns (KVW_EACH_LANE), and KVW_AT says where an address of the device
// can be read. native/gpu/batch.h has the same structures and fills them.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#if defined(__CUDACC__)
#define KVW_CODE static __device__ __forceinline__
#define KVW_CONSTANT static __device__ __constant__
#define KVW_KERNEL extern "C" __global__
#define KVW_AT(address) (address)
#define KVW_LANES_HERE 1
#define KVW_EACH_LANE(lane) for (u32 lane = threadIdx.x % 8, done = 0; done < 1; ++done)
KVW_CODE u32 mine(u32) { return 0; }
// The value of the lane whose number differs in the bits of `distance`.
KVW_CODE u64 other(const u64* values, u32, u32 distance) {
  return __shfl_xor_sync(0xffu << (threadIdx.x & 24), values[0], distance, 8);
}
KVW_CODE u64 high_product(u64 a, u64 b) { return __umul64hi(a, b); }
#else
#define KVW_CODE static inline
#define KVW_CONSTANT static const
#define KVW_KERNEL static
#ifndef KVW_AT
#define KVW_AT(address) (address)
#endif
#define KVW_LANES_HERE 8
#define KVW_EACH_LANE(lane) for (u32 lane = 0; lane < 8; ++lane)
struct Dimension {
  u32 x;
};
static thread_local Dimension threadIdx, blockIdx, blockDim;
KVW_CODE u32 mine(u32 lane) { return lane; }
KVW_CODE u64 other(const u64* values, u32 lane, u32 distance) { return values[lane ^ distance]; }
KVW_CODE u64 high_product(u64 a, u64 b) {
  __extension__ typedef unsigned __int128 u128;
  return (u64)((u128)a * b >> 64);
}
#endif

#define KVW_LEAF_BYTES 4096u
#define KVW_STRIPE_BYTES 64u
#define KVW_SHORT_BYTES 240u

// --- what the host hands over, in device memory ---------------------------------------------------

struct PagePiece {
  u64 address;  // of its first byte
  u64 offset;   // of that byte in the page; pieces of a page ascend by it, and none is empty
};

struct PageWork {
  u64 staged;  // address of the page's bytes in one run; 0: pieces are digested where they are
  u64 first_piece;
  u64 pieces;
};

template <class T>
KVW_CODE T* at(u64 address) {
  return (T*)KVW_AT(address);
}

// --- XXH3-64 --------------------------------------------------------------------------------------

KVW_CONSTANT u64 kSecret[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};

#define KVW_PRIME32_1 0x9e3779b1ull
#define KVW_PRIME32_2 0x85ebca77ull
#define KVW_PRIME32_3 0xc2b2ae3dull
#define KVW_PRIME64_1 0x9e3779b185ebca87ull
#define KVW_PRIME64_2 0xc2b2ae3d27d4eb4full
#define KVW_PRIME64_3 0x165667b19e3779f9ull
#define KVW_PRIME64_4 0x85ebca77c2b2ae63ull
#define KVW_PRIME64_5 0x27d4eb2f165667c5ull

// The eight bytes of the secret from any of its bytes on.
KVW_CODE u64 secret_at(u32 byte) {
  const u32 shift = byte % 8 * 8;
  const u64 low = kSecret[byte / 8] >> shift;
  return shift == 0 ? low : low | kSecret[byte / 8 + 1] << (64 - shift);
}

KVW_CODE u64 first_sum(u32 lane) {
  switch (lane) {
    case 0: return KVW_PRIME32_3;
    case 1: return KVW_PRIME64_1;
    case 2: return KVW_PRIME64_2;
    case 3: return KVW_PRIME64_3;
    case 4: return KVW_PRIME64_4;
    case 5: return KVW_PRIME32_2;
    case 6: return KVW_PRIME64_5;
    default: return KVW_PRIME32_1;
  }
}

KVW_CODE u64 folded_product(u64 a, u64 b) { return a * b ^ high_product(a, b); }

KVW_CODE u64 avalanche(u64 hash) {
  hash ^= hash >> 37;
  hash *= 0x165667919e3779f9ull;
  return hash ^ hash >> 32;
}

KVW_CODE u64 read_bytes(const u8* from, u32 bytes) {
  u64 value = 0;
  for (u32 i = 0; i < bytes; ++i) value |= (u64)from[i] << 8 * i;
  return value;
}

KVW_CODE u64 mix16(const u8* from, u32 secret) {
  return folded_product(read_bytes(from, 8) ^ secret_at(secret),
                        read_bytes(from + 8, 8) ^ secret_at(secret + 8));
}

KVW_CODE u64 digest_to_3(const u8* data, u32 bytes) {
  const u64 combined = (u64)data[0] << 16 | (u64)data[bytes / 2] << 24 | data[bytes - 1] |
                       (u64)bytes << 8;
  u64 hash = combined ^ (u32)(kSecret[0] ^ kSecret[0] >> 32);
  hash ^= hash >> 33;
  hash *= KVW_PRIME64_2;
  hash ^= hash >> 29;
  hash *= KVW_PRIME64_3;
  return hash ^ hash >> 32;
}

KVW_CODE u64 rotated(u64 value, u32 bits) { return value << bits | value >> (64 - bits); }

KVW_CODE u64 digest_to_8(const u8* data, u32 bytes) {
  const u64 joined = read_bytes(data + bytes - 4, 4) + (read_bytes(data, 4) << 32);
  u64 hash = joined ^ (secret_at(8) ^ secret_at(16));
  hash ^= rotated(hash, 49) ^ rotated(hash, 24);
  hash *= 0x9fb21c651e98df25ull;
  hash ^= (hash >> 35) + bytes;
  hash *= 0x9fb21c651e98df25ull;
  return hash ^ hash >> 28;
}

KVW_CODE u64 digest_to_16(const u8* data, u32 bytes) {
  const u64 low = read_bytes(data, 8) ^ secret_at(24) ^ secret_at(32);
  const u64 high = read_bytes(data + bytes - 8, 8) ^ secret_at(40) ^ secret_at(48);
  u64 swapped = 0;
  for (u32 i = 0; i < 8; ++i) swapped |= (low >> 8 * i & 0xff) << (56 - 8 * i);
  return avalanche(bytes + swapped + high + folded_product(low, high));
}

KVW_CODE u64 digest_to_128(const u8* data, u32 bytes) {
  u64 hash = bytes * KVW_PRIME64_1;
  for (u32 i = 0; i <= (bytes - 1) / 32; ++i)
    hash += mix16(data + 16 * i, 32 * i) + mix16(data + bytes - 16 * (i + 1), 32 * i + 16);
  return avalanche(hash);
}

KVW_CODE u64 digest_to_240(const u8* data, u32 bytes) {
  u64 hash = bytes * KVW_PRIME64_1;
  for (u32 i = 0; i < 8; ++i) hash += mix16(data + 16 * i, 16 * i);
  hash = avalanche(hash);
  for (u32 i = 8; i < bytes / 16; ++i) hash += mix16(data + 16 * i, 16 * (i - 8) + 3);
  return avalanche(hash + mix16(data + bytes - 16, 136 - 17));
}

KVW_CODE u64 short_digest(const u8* data, u32 bytes) {
  if (bytes <= 3) return digest_to_3(data, bytes);
  if (bytes <= 8) return digest_to_8(data, bytes);
  if (bytes <= 16) return digest_to_16(data, bytes);
  return bytes <= 128 ? digest_to_128(data, bytes) : digest_to_240(data, bytes);
}

// --- a page's bytes, in one run or in pieces ------------------------------------------------------

struct Place {
  u64 run;  // address of the page's first byte; 0: in pieces
  const PagePiece* pieces;
  u64 count;
  u64 page_bytes;
};

// The piece that has a byte.
KVW_CODE u64 piece_of(const Place& place, u64 offset) {
  u64 low = 0, high = place.count;
  while (high - low > 1) {
    const u64 middle = (low + high) / 2;
    if (place.pieces[middle].offset <= offset)
      low = middle;
    else
      high = middle;
  }
  return low;
}

KVW_CODE u64 end_of(const Place& place, u64 piece) {
  return piece + 1 < place.count ? place.pieces[piece + 1].offset : place.page_bytes;
}

// Where up to 8 bytes are: their address, and how many of them lie there in a row.
struct Here {
  u64 address;
  u64 bytes;
};

// `piece`: the one that had the last byte asked for, at or before this one; moved on.
KVW_CODE Here here(const Place& place, u64 offset, u64& piece) {
  if (place.run != 0) return {place.run + offset, place.page_bytes - offset};
  while (end_of(place, piece) <= offset) ++piece;
  const PagePiece& found = place.pieces[piece];
  return {found.address + (offset - found.offset), end_of(place, piece) - offset};
}

KVW_CODE u64 load_word(const Place& place, u64 offset, u32 bytes, u64& piece) {
  const Here first = here(place, offset, piece);
  if (bytes == 8 && first.bytes >= 8 && first.address % 8 == 0) return *at<u64>(first.address);
  u64 value = 0;
  for (u32 i = 0; i < bytes; ++i)
    value |= (u64)*at<u8>(here(place, offset + i, piece).address) << 8 * i;
  return value;
}

KVW_CODE void store_word(const Place& place, u64 offset, u32 bytes, u64 value, u64& piece) {
  const Here first = here(place, offset, piece);
  if (bytes == 8 && first.bytes >= 8 && first.address % 8 == 0) {
    *at<u64>(first.address) = value;
    return;
  }
  for (u32 i = 0; i < bytes; ++i)
    *at<u8>(here(place, offset + i, piece).address) = (u8)(value >> 8 * i);
}

// --- a leaf ---------------------------------------------------------------------------------------

struct Leaf {
  u64 offset;
  u32 bytes;
};

// One stripe into the sums. `secret`: where the stripe's part of it begins.
KVW_CODE void accumulate(u64* sums, const u64* words, u32 secret) {
  KVW_EACH_LANE(lane) {
    const u64 keyed = words[mine(lane)] ^ secret_at(secret + 8 * lane);
    sums[mine(lane)] += other(words, lane, 1) + (keyed & 0xffffffffull) * (keyed >> 32);
  }
}

KVW_CODE void scramble(u64* sums) {
  KVW_EACH_LANE(lane) {
    u64& sum = sums[mine(lane)];
    sum ^= sum >> 47;
    sum ^= kSecret[16 + lane];
    sum *= KVW_PRIME32_1;
  }
}

KVW_CODE void add_lanes(u64* to, const u64* values, u32 distance) {
  KVW_EACH_LANE(lane) to[mine(lane)] = values[mine(lane)] + other(values, lane, distance);
}

// The digest of a leaf of more than 240 bytes; every lane has it.
KVW_CODE u64 merged(const u64* sums, u32 bytes) {
  u64 keyed[KVW_LANES_HERE], parts[KVW_LANES_HERE], halves[KVW_LANES_HERE], all[KVW_LANES_HERE];
  KVW_EACH_LANE(lane) keyed[mine(lane)] = sums[mine(lane)] ^ secret_at(11 + 8 * lane);
  KVW_EACH_LANE(lane) {
    const u64 partner = other(keyed, lane, 1);  // by all lanes: who shuffles must not be alone
    parts[mine(lane)] = folded_product(keyed[mine(lane)], partner);
  }
  add_lanes(halves, parts, 2);
  add_lanes(all, halves, 4);
  return avalanche(bytes * KVW_PRIME64_1 + all[0]);
}

KVW_CODE void digest_short(const Leaf& leaf, const Place& from, u64* digest) {
  KVW_EACH_LANE(lane) {
    if (lane != 0) continue;
    u8 bytes[KVW_SHORT_BYTES];
    u64 piece = from.run != 0 ? 0 : piece_of(from, leaf.offset);
    for (u32 i = 0; i < leaf.bytes; ++i) bytes[i] = (u8)load_word(from, leaf.offset + i, 1, piece);
    *digest = short_digest(bytes, leaf.bytes);
  }
}

// Copies a leaf to where `to` has it, unless that is nowhere, and writes its digest.
KVW_CODE void move_leaf(const Leaf& leaf, const Place& from, const Place* to, u64* digest) {
  u64 sums[KVW_LANES_HERE], words[KVW_LANES_HERE], read[KVW_LANES_HERE], written[KVW_LANES_HERE];
  KVW_EACH_LANE(lane) {
    sums[mine(lane)] = first_sum(lane);
    read[mine(lane)] = from.run != 0 ? 0 : piece_of(from, leaf.offset);
    written[mine(lane)] = to == nullptr || to->run != 0 ? 0 : piece_of(*to, leaf.offset);
  }
  const bool whole = leaf.bytes > KVW_SHORT_BYTES;
  for (u32 stripe = 0; stripe * KVW_STRIPE_BYTES < leaf.bytes; ++stripe) {
    KVW_EACH_LANE(lane) {
      const u32 begin = stripe * KVW_STRIPE_BYTES + 8 * lane;
      const u32 bytes = begin >= leaf.bytes ? 0 : leaf.bytes - begin < 8 ? leaf.bytes - begin : 8;
      u64& word = words[mine(lane)];
      word = bytes == 0 ? 0 : load_word(from, leaf.offset + begin, bytes, read[mine(lane)]);
      if (to != nullptr && bytes != 0)
        store_word(*to, leaf.offset + begin, bytes, word, written[mine(lane)]);
    }
    if (!whole || stripe >= (leaf.bytes - 1) / KVW_STRIPE_BYTES) continue;
    accumulate(sums, words, stripe % 16 * 8);
    if (stripe % 16 == 15) scramble(sums);
  }
  if (!whole) return digest_short(leaf, from, digest);
  // The last 64 bytes once more, whatever stripe they are in.
  KVW_EACH_LANE(lane) {
    const u64 begin = leaf.offset + leaf.bytes - KVW_STRIPE_BYTES + 8 * lane;
    u64 piece = from.run != 0 ? 0 : piece_of(from, begin);
    words[mine(lane)] = load_word(from, begin, 8, piece);
  }
  accumulate(sums, words, 192 - KVW_STRIPE_BYTES - 7);
  const u64 value = merged(sums, leaf.bytes);
  KVW_EACH_LANE(lane) {
    if (lane == 0) *digest = value;
  }
}

// --- the kernels: eight threads a leaf, blocks of any multiple of 32 threads ----------------------

// Page p's leaves are leaves[p * n] to leaves[p * n + n - 1], n of them a page. All addresses are
// the device's.
KVW_CODE void move_pages(u64 pages, u64 pieces, u64 leaves, u64 page_bytes, u64 count,
                         bool to_pieces) {
  const u64 each = (page_bytes + KVW_LEAF_BYTES - 1) / KVW_LEAF_BYTES;
  const u64 number = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 8;
  if (number >= each * count) return;
  const PageWork work = at<PageWork>(pages)[number / each];
  const Place paged = {0, at<PagePiece>(pieces) + work.first_piece, work.pieces, page_bytes};
  const Place staged = {work.staged, nullptr, 0, page_bytes};
  Leaf leaf;
  leaf.offset = number % each * KVW_LEAF_BYTES;
  leaf.bytes = page_bytes - leaf.offset < KVW_LEAF_BYTES ? (u32)(page_bytes - leaf.offset)
                                                         : KVW_LEAF_BYTES;
  u64* digest = at<u64>(leaves) + number;
  if (work.staged == 0)
    move_leaf(leaf, paged, nullptr, digest);
  else if (to_pieces)
    move_leaf(leaf, staged, &paged, digest);
  else
    move_leaf(leaf, paged, &staged, digest);
}

// Pieces to one run.
KVW_KERNEL void kvw_gather(u64 pages, u64 pieces, u64 leaves, u64 page_bytes, u64 count) {
  move_pages(pages, pieces, leaves, page_bytes, count, false);
}

// One run to pieces.
KVW_KERNEL void kvw_scatter(u64 pages, u64 pieces, u64 leaves, u64 page_bytes, u64 count) {
  move_pages(pages, pieces, leaves, page_bytes, count, true);
}
