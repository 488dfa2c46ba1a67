// Pages between a paged cache and one run of bytes, digested on the way: kvw_gather and kvw_scatter.
//
// A page is a list of pieces in device memory. A warp moves and digests four of its 4 KiB leaves.
// Those that are whole, and of two aligned parts at most on either side, it takes one after another,
// all lanes a leaf, 16 bytes a lane; of the others, eight lanes one: XXH3-64 keeps eight 64-bit sums
// over 64 bytes at a time, so a lane has one word and one sum. The digest of a leaf is that of
// docs/format.md, bit for bit; the host makes the page's digest of them.
// Source: xxHash's specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), XXH3, with the
// default secret and no seed.
//
// The same text is compiled for the host, by the tests and by their contract model of CUDA's driver:
// there a warp's lanes take turns (KVW_EACH_LANE), and KVW_AT says where an address of the device
// can be read. native/gpu/batch.h has the same structures and fills them.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Where a whole leaf lies: its byte i at first + i, and from the border on at second + i. A first of
// 0: nowhere.
struct Parts {
  u64 first, second;
  u32 border;
};

#if defined(__CUDACC__)
#define KVW_CODE static __device__ __forceinline__
#define KVW_CONSTANT static __device__ __constant__
#define KVW_KERNEL extern "C" __global__
#define KVW_AT(address) (address)
#define KVW_UNROLLED _Pragma("unroll")
#define KVW_LANES_HERE 1
#define KVW_EACH_LANE(lane) for (u32 lane = threadIdx.x % 32, done = 0; done < 1; ++done)
KVW_CODE u32 mine(u32) { return 0; }
// What one lane has, for all. Every lane of the warp takes part, in this and in the next two.
KVW_CODE Parts of_lane(const Parts* values, u32 lane) {
  return {__shfl_sync(~0u, values->first, lane), __shfl_sync(~0u, values->second, lane),
          __shfl_sync(~0u, values->border, lane)};
}
// The value of the lane whose number differs in the bits of `distance`.
KVW_CODE u64 other(const u64* values, u32, u32 distance) {
  return __shfl_xor_sync(~0u, values[0], distance);
}
// A bit for each lane.
KVW_CODE u32 votes(const bool* values) { return __ballot_sync(~0u, values[0]); }
KVW_CODE u64 high_product(u64 a, u64 b) { return __umul64hi(a, b); }
typedef ulonglong2 Pair;
// Streamed: what else is in the caches stays there.
KVW_CODE Pair load_pair(u64 address) { return __ldcs((const Pair*)address); }
KVW_CODE void store_pair(u64 address, Pair pair) { __stcs((Pair*)address, pair); }
#else
#define KVW_CODE static inline
#define KVW_CONSTANT static const
#define KVW_KERNEL static
#ifndef KVW_AT
#define KVW_AT(address) (address)
#endif
#define KVW_UNROLLED
#define KVW_LANES_HERE 32
#define KVW_EACH_LANE(lane) for (u32 lane = 0; lane < 32; ++lane)
struct Dimension {
  u32 x;
};
static thread_local Dimension threadIdx, blockIdx, blockDim;
KVW_CODE u32 mine(u32 lane) { return lane; }
KVW_CODE Parts of_lane(const Parts* values, u32 lane) { return values[lane]; }
KVW_CODE u64 other(const u64* values, u32 lane, u32 distance) { return values[lane ^ distance]; }
KVW_CODE u32 votes(const bool* values) {
  u32 all = 0;
  for (u32 lane = 0; lane < 32; ++lane) all |= (u32)values[lane] << lane;
  return all;
}
KVW_CODE u64 high_product(u64 a, u64 b) {
  __extension__ typedef unsigned __int128 u128;
  return (u64)((u128)a * b >> 64);
}
struct alignas(16) Pair {
  u64 x, y;
};
KVW_CODE Pair load_pair(u64 address) { return *(const Pair*)KVW_AT(address); }
KVW_CODE void store_pair(u64 address, Pair pair) { *(Pair*)KVW_AT(address) = pair; }
#endif

#define KVW_LEAF_BYTES 4096u
#define KVW_STRIPE_BYTES 64u
#define KVW_SHORT_BYTES 240u
#define KVW_LAST_SECRET (192u - KVW_STRIPE_BYTES - 7u)  // of the last 64 bytes

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

KVW_CONSTANT u64 kFirstSums[8] = {KVW_PRIME32_3, KVW_PRIME64_1, KVW_PRIME64_2, KVW_PRIME64_3,
                                  KVW_PRIME64_4, KVW_PRIME32_2, KVW_PRIME64_5, KVW_PRIME32_1};

// The eight bytes of the secret from any of its bytes on.
KVW_CODE u64 secret_at(u32 byte) {
  const u32 shift = byte % 8 * 8;
  const u64 low = kSecret[byte / 8] >> shift;
  return shift == 0 ? low : low | kSecret[byte / 8 + 1] << (64 - shift);
}

// What one of a stripe's words adds to its sum, beside its neighbour.
KVW_CODE u64 squared(u64 word, u64 secret) {
  const u64 keyed = word ^ secret;
  return (keyed & 0xffffffffull) * (keyed >> 32);
}

KVW_CODE u64 scrambled(u64 sum, u64 secret) { return (sum ^ sum >> 47 ^ secret) * KVW_PRIME32_1; }

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

// Those that lie in a row where one of them was asked for, and how to find what follows.
struct Run {
  u64 base;  // a byte's address, less its offset in the page
  u64 end;   // the offset of the first byte behind the run; 0: there are no bytes
  const PagePiece* piece;
  u64 rest;  // pieces behind that
};

KVW_CODE Run run_of(const PagePiece* piece, u64 rest, u64 page_bytes) {
  return {piece->address - piece->offset, rest != 0 ? piece[1].offset : page_bytes, piece, rest};
}

// Around a byte of a page in pieces.
KVW_CODE Run found_run(const PagePiece* pieces, u64 count, u64 page_bytes, u64 offset) {
  u64 low = 0, high = count;
  while (high - low > 1) {
    const u64 middle = (low + high) / 2;
    if (pieces[middle].offset <= offset)
      low = middle;
    else
      high = middle;
  }
  return run_of(pieces + low, count - low - 1, page_bytes);
}

KVW_CODE void move_on(Run& run, u64 offset, u64 page_bytes) {
  while (run.end <= offset) run = run_of(run.piece + 1, run.rest - 1, page_bytes);
}

// --- a leaf, of eight lanes -----------------------------------------------------------------------

struct Leaf {
  u64 offset;
  u32 bytes;     // 0: none
  Run from, to;  // around its first byte
};

KVW_CODE bool has_word(const Run& run, u64 offset) {
  return run.end - offset >= 8 && (run.base + offset) % 8 == 0;
}

// `run`: around a byte before, or this one; moved on. `bytes`: up to 8.
KVW_CODE u64 load_word(Run& run, u64 offset, u32 bytes, u64 page_bytes) {
  move_on(run, offset, page_bytes);
  if (bytes == 8 && has_word(run, offset)) return *at<u64>(run.base + offset);
  u64 value = 0;
  for (u32 i = 0; i < bytes; ++i) {
    move_on(run, offset + i, page_bytes);
    value |= (u64)*at<u8>(run.base + offset + i) << 8 * i;
  }
  return value;
}

KVW_CODE void store_word(Run& run, u64 offset, u32 bytes, u64 value, u64 page_bytes) {
  move_on(run, offset, page_bytes);
  if (bytes == 8 && has_word(run, offset)) {
    *at<u64>(run.base + offset) = value;
    return;
  }
  for (u32 i = 0; i < bytes; ++i) {
    move_on(run, offset + i, page_bytes);
    *at<u8>(run.base + offset + i) = (u8)(value >> 8 * i);
  }
}

KVW_CODE void add_lanes(u64* values, u32 distance) {
  u64 both[KVW_LANES_HERE];
  KVW_EACH_LANE(lane) both[mine(lane)] = values[mine(lane)] + other(values, lane, distance);
  KVW_EACH_LANE(lane) values[mine(lane)] = both[mine(lane)];
}

// The digests of leaves of more than 240 bytes; every lane has that of its own.
KVW_CODE void merge(const u64* sums, const Leaf* leaves, u64* digests) {
  u64 keyed[KVW_LANES_HERE], parts[KVW_LANES_HERE];
  KVW_EACH_LANE(lane) keyed[mine(lane)] = sums[mine(lane)] ^ secret_at(11 + 8 * (lane % 8));
  KVW_EACH_LANE(lane) parts[mine(lane)] = folded_product(keyed[mine(lane)], other(keyed, lane, 1));
  add_lanes(parts, 2);
  add_lanes(parts, 4);
  KVW_EACH_LANE(lane) {
    const u32 bytes = leaves[mine(lane)].bytes;
    digests[mine(lane)] = avalanche(bytes * KVW_PRIME64_1 + parts[mine(lane)]);
  }
}

KVW_CODE u64 digest_short(const Leaf& leaf, u64 page_bytes) {
  u8 bytes[KVW_SHORT_BYTES];
  Run run = leaf.from;
  for (u32 i = 0; i < leaf.bytes; ++i)
    bytes[i] = (u8)load_word(run, leaf.offset + i, 1, page_bytes);
  return short_digest(bytes, leaf.bytes);
}

// Copies each group's leaf, unless it has none or that goes nowhere, and says its digest. A lane
// that has no more to do goes on with the others: who shuffles must not be alone.
KVW_CODE void move_leaves(const Leaf* leaves, u64 page_bytes, u64* digests) {
  u64 sums[KVW_LANES_HERE], words[KVW_LANES_HERE];
  Run from[KVW_LANES_HERE], to[KVW_LANES_HERE];
  bool more[KVW_LANES_HERE];
  KVW_EACH_LANE(lane) {
    sums[mine(lane)] = kFirstSums[lane % 8];
    from[mine(lane)] = leaves[mine(lane)].from;
    to[mine(lane)] = leaves[mine(lane)].to;
    more[mine(lane)] = leaves[mine(lane)].bytes != 0;
  }
  for (u32 stripe = 0; votes(more) != 0; ++stripe) {
    KVW_EACH_LANE(lane) {
      const Leaf& leaf = leaves[mine(lane)];
      const u32 begin = stripe * KVW_STRIPE_BYTES + 8 * (lane % 8);
      const u32 bytes = begin >= leaf.bytes ? 0 : leaf.bytes - begin < 8 ? leaf.bytes - begin : 8;
      u64& word = words[mine(lane)];
      word = 0;
      if (bytes == 0) continue;
      word = load_word(from[mine(lane)], leaf.offset + begin, bytes, page_bytes);
      if (leaf.to.end != 0)
        store_word(to[mine(lane)], leaf.offset + begin, bytes, word, page_bytes);
    }
    KVW_EACH_LANE(lane) {
      const u64 partner = other(words, lane, 1);
      u64& sum = sums[mine(lane)];
      // Not the last stripe, even if it is a whole one.
      more[mine(lane)] = (stripe + 1) * KVW_STRIPE_BYTES < leaves[mine(lane)].bytes;
      if (!more[mine(lane)]) continue;
      sum += partner + squared(words[mine(lane)], kSecret[stripe % 16 + lane % 8]);
      if (stripe % 16 == 15) sum = scrambled(sum, kSecret[16 + lane % 8]);
    }
  }
  // The last 64 bytes once more, whatever stripe they are in.
  KVW_EACH_LANE(lane) {
    const Leaf& leaf = leaves[mine(lane)];
    Run run = leaf.from;
    const u64 begin = leaf.offset + leaf.bytes - KVW_STRIPE_BYTES + 8 * (lane % 8);
    words[mine(lane)] = leaf.bytes > KVW_SHORT_BYTES ? load_word(run, begin, 8, page_bytes) : 0;
  }
  KVW_EACH_LANE(lane) {
    const u64 secret = secret_at(KVW_LAST_SECRET + 8 * (lane % 8));
    sums[mine(lane)] += other(words, lane, 1) + squared(words[mine(lane)], secret);
  }
  merge(sums, leaves, digests);
  KVW_EACH_LANE(lane) {
    const Leaf& leaf = leaves[mine(lane)];
    if (lane % 8 == 0 && leaf.bytes != 0 && leaf.bytes <= KVW_SHORT_BYTES)
      digests[mine(lane)] = digest_short(leaf, page_bytes);
  }
}

// --- a whole leaf, of a warp ----------------------------------------------------------------------

// A lane has a pair of a stripe's words: four lanes have a stripe, and a warp has eight at a time.
constexpr u64 kWarpBytes = 8 * KVW_STRIPE_BYTES;
constexpr u32 kPairs = KVW_LEAF_BYTES / kWarpBytes;

// Those of a whole leaf, if there are no more than two and a pair lies in one of them, aligned.
KVW_CODE bool found_parts(const Run& run, u64 offset, u64 page_bytes, Parts& parts) {
  const bool one = run.end - offset >= KVW_LEAF_BYTES;
  parts = {run.base + offset, 0, one ? KVW_LEAF_BYTES : (u32)(run.end - offset)};
  if (one) return parts.first % 16 == 0;
  const Run next = run_of(run.piece + 1, run.rest - 1, page_bytes);
  parts.second = next.base + offset;
  return next.end - offset >= KVW_LEAF_BYTES &&
         (parts.first | parts.second | parts.border) % 16 == 0;
}

KVW_CODE u64 pair_at(const Parts& parts, u32 pair, u32 lane) {
  const u64 first = parts.first + 16 * lane, second = parts.second + 16 * lane;
  const int left = (int)parts.border - 16 * (int)lane;
  return (left > (int)(kWarpBytes * pair) ? first : second) + kWarpBytes * pair;
}

KVW_CODE void add_pair(const Pair& pair, u64 low_secret, u64 high_secret, u64& low, u64& high) {
  low += pair.y + squared(pair.x, low_secret);
  high += pair.x + squared(pair.y, high_secret);
}

// Copies a leaf, unless that goes nowhere; every lane has its digest. Between two scramblings, which
// are 16 stripes apart, sums only grow: each lane adds up what it has for them.
KVW_CODE u64 move_whole_leaf(const Parts& from, const Parts& to) {
  Pair pairs[KVW_LANES_HERE][kPairs];
  u64 low[KVW_LANES_HERE], high[KVW_LANES_HERE];  // two sums, the same in each stripe's lanes
  KVW_EACH_LANE(lane) {
    KVW_UNROLLED
    for (u32 i = 0; i < kPairs; ++i)
      pairs[mine(lane)][i] = load_pair(pair_at(from, i, lane));
    KVW_UNROLLED
    for (u32 i = 0; to.first != 0 && i < kPairs; ++i)
      store_pair(pair_at(to, i, lane), pairs[mine(lane)][i]);
    low[mine(lane)] = kFirstSums[lane % 4 * 2];
    high[mine(lane)] = kFirstSums[lane % 4 * 2 + 1];
  }
  KVW_UNROLLED
  for (u32 i = 0; i < kPairs; i += 2) {
    const bool last = i == kPairs - 2;
    u64 low_more[KVW_LANES_HERE], high_more[KVW_LANES_HERE];
    KVW_EACH_LANE(lane) {
      u64 &low_sum = low_more[mine(lane)] = 0, &high_sum = high_more[mine(lane)] = 0;
      const Pair* two = pairs[mine(lane)] + i;
      const u32 stripe = lane / 4, pair = lane % 4, secret = stripe + 2 * pair;
      add_pair(two[0], kSecret[secret], kSecret[secret + 1], low_sum, high_sum);
      const u32 end = KVW_LAST_SECRET + 16 * pair;
      add_pair(two[1], last && stripe == 7 ? secret_at(end) : kSecret[secret + 8],
               last && stripe == 7 ? secret_at(end + 8) : kSecret[secret + 9], low_sum, high_sum);
    }
    KVW_UNROLLED
    for (u32 distance = 4; distance < 32; distance *= 2) {
      add_lanes(low_more, distance);
      add_lanes(high_more, distance);
    }
    KVW_EACH_LANE(lane) {
      u64 &low_sum = low[mine(lane)], &high_sum = high[mine(lane)];
      low_sum += low_more[mine(lane)];
      high_sum += high_more[mine(lane)];
      if (last) continue;
      low_sum = scrambled(low_sum, kSecret[16 + lane % 4 * 2]);
      high_sum = scrambled(high_sum, kSecret[17 + lane % 4 * 2]);
    }
  }
  u64 parts[KVW_LANES_HERE];
  KVW_EACH_LANE(lane) {
    const u32 secret = 11 + 16 * (lane % 4);
    parts[mine(lane)] = folded_product(low[mine(lane)] ^ secret_at(secret),
                                       high[mine(lane)] ^ secret_at(secret + 8));
  }
  add_lanes(parts, 1);
  add_lanes(parts, 2);
  return avalanche(KVW_LEAF_BYTES * KVW_PRIME64_1 + parts[0]);
}

// --- the kernels: eight threads a leaf, blocks of any multiple of 32 threads ----------------------

// Page p's leaves are leaves[p * n] to leaves[p * n + n - 1], n of them a page. All addresses are
// the device's.
struct Launch {
  u64 pages, pieces, leaves, page_bytes, count;
  bool to_pieces;
};

KVW_CODE Leaf leaf_of(const Launch& launch, u64 number) {
  const u64 page_bytes = launch.page_bytes;
  const u64 each = (page_bytes + KVW_LEAF_BYTES - 1) / KVW_LEAF_BYTES;
  Leaf leaf = {0, 0, {0, 0, nullptr, 0}, {0, 0, nullptr, 0}};
  if (number >= each * launch.count) return leaf;
  const PageWork work = at<PageWork>(launch.pages)[number / each];
  leaf.offset = number % each * KVW_LEAF_BYTES;
  leaf.bytes =
      page_bytes - leaf.offset < KVW_LEAF_BYTES ? (u32)(page_bytes - leaf.offset) : KVW_LEAF_BYTES;
  leaf.from = found_run(at<PagePiece>(launch.pieces) + work.first_piece, work.pieces, page_bytes,
                        leaf.offset);
  if (work.staged == 0) return leaf;
  leaf.to = {work.staged, page_bytes, nullptr, 0};
  if (launch.to_pieces) {
    const Run pieces = leaf.from;
    leaf.from = leaf.to;
    leaf.to = pieces;
  }
  return leaf;
}

KVW_CODE void move_pages(const Launch& launch) {
  const u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32 * 4;
  u64* digests = at<u64>(launch.leaves) + first;
  Leaf leaves[KVW_LANES_HERE];
  Parts from[KVW_LANES_HERE], to[KVW_LANES_HERE];
  bool whole[KVW_LANES_HERE], left[KVW_LANES_HERE];
  KVW_EACH_LANE(lane) {
    Leaf& leaf = leaves[mine(lane)] = leaf_of(launch, first + lane / 8);
    to[mine(lane)] = {0, 0, 0};
    whole[mine(lane)] =
        leaf.bytes == KVW_LEAF_BYTES &&
        found_parts(leaf.from, leaf.offset, launch.page_bytes, from[mine(lane)]) &&
        (leaf.to.end == 0 ||
         found_parts(leaf.to, leaf.offset, launch.page_bytes, to[mine(lane)]));
    if (whole[mine(lane)]) leaf.bytes = 0;
    left[mine(lane)] = leaf.bytes != 0;
  }
  if (votes(left) != 0) {
    u64 own[KVW_LANES_HERE];
    move_leaves(leaves, launch.page_bytes, own);
    KVW_EACH_LANE(lane) {
      if (lane % 8 == 0 && left[mine(lane)]) digests[lane / 8] = own[mine(lane)];
    }
  }
  const u32 all_whole = votes(whole);
  for (u32 group = 0; group < 4; ++group) {
    if ((all_whole >> 8 * group & 1) == 0) continue;
    const u64 digest = move_whole_leaf(of_lane(from, 8 * group), of_lane(to, 8 * group));
    KVW_EACH_LANE(lane) {
      if (lane == 0) digests[group] = digest;
    }
  }
}

// Pieces to one run.
KVW_KERNEL void kvw_gather(u64 pages, u64 pieces, u64 leaves, u64 page_bytes, u64 count) {
  move_pages({pages, pieces, leaves, page_bytes, count, false});
}

// One run to pieces.
KVW_KERNEL void kvw_scatter(u64 pages, u64 pieces, u64 leaves, u64 page_bytes, u64 count) {
  move_pages({pages, pieces, leaves, page_bytes, count, true});
}
