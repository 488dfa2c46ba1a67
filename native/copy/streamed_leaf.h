// XXH3-64 of a whole leaf (4 KiB, default secret, no seed), a stripe of 64 bytes at a time, so that
// a loop hashes what it has in its registers anyway, to store it. What is hashed is then what was
// stored, and hashing waits for no memory: the library hashes a buffer in one call.
//
// The algorithm: the xxHash specification, "XXH3 algorithm", inputs of more than 240 bytes. A leaf
// is four blocks of 16 stripes; the sums are scrambled after each block but the last, and the very
// last stripe has a key of its own. The secret is the library's.
//
// Included by copy_kernel.h, whose rules about linkage hold here too.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

#include "base/types.h"

namespace kvw {
namespace {

constexpr size_t kStripeBytes = 64, kStripesOfBlock = 16, kSums = 8;
// What is hashed as it is stored lies in whole blocks.
constexpr size_t kHashBlockBytes = kStripesOfBlock * kStripeBytes;
// Where in the secret the keys begin: of a scramble, of the last stripe, of the end.
constexpr size_t kScrambleKey = kSecretBytes - kStripeBytes, kLastKey = kScrambleKey - 7;
constexpr size_t kEndKey = 11;
static_assert(sizeof XXH3_kSecret == kSecretBytes);

constexpr uint64_t kPrime32_1 = 0x9e3779b1, kPrime32_2 = 0x85ebca77, kPrime32_3 = 0xc2b2ae3d;
constexpr uint64_t kPrime64_1 = 0x9e3779b185ebca87, kPrime64_2 = 0xc2b2ae3d27d4eb4f;
constexpr uint64_t kPrime64_3 = 0x165667b19e3779f9, kPrime64_4 = 0x85ebca77c2b2ae63;
constexpr uint64_t kPrime64_5 = 0x27d4eb2f165667c5, kAvalanchePrime = 0x165667919e3779f9;

alignas(kStripeBytes) constexpr uint64_t kFirstSums[kSums] = {
    kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

const uint8_t* key_at(size_t secret_byte) { return XXH3_kSecret + secret_byte; }

uint64_t end_key(size_t sum) {
  uint64_t key;
  memcpy(&key, key_at(kEndKey + sum * sizeof key), sizeof key);
  return key;
}

uint64_t folded_product(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// `Stores` moves stripes one by one to a place that it knows, and returns each in registers:
// move(from). `Sums` are the eight sums, in registers too: Sums(from), save(to), scramble(key),
// add(stripe, key).
template <class Sums>
class StreamedLeaf {
 public:
  // The next whole blocks of the leaf. `ahead` is called with the place of each stripe.
  template <class Stores, class Ahead>
  [[gnu::always_inline]] void stream(Stores& stores, const std::byte* from, size_t bytes,
                                     Ahead ahead) {
    for (const std::byte* const end = from + bytes; from < end;) {
      left_bytes_ -= kHashBlockBytes;
#pragma GCC unroll 15
      for (size_t stripe = 0; stripe < kStripesOfBlock - 1; ++stripe)
        move(stores, from, stripe * sizeof(uint64_t), ahead);
      if (left_bytes_ == 0) return move(stores, from, kLastKey, ahead);
      move(stores, from, (kStripesOfBlock - 1) * sizeof(uint64_t), ahead);
      sums_.scramble(key_at(kScrambleKey));
    }
  }
  size_t left_bytes() const { return left_bytes_; }
  // When nothing is left.
  uint64_t digest() const {
    alignas(kStripeBytes) uint64_t sums[kSums];
    sums_.save(sums);
    uint64_t hash = kBlockBytes * kPrime64_1;
    for (size_t at = 0; at < kSums; at += 2)
      hash += folded_product(sums[at] ^ end_key(at), sums[at + 1] ^ end_key(at + 1));
    hash ^= hash >> 37;
    hash *= kAvalanchePrime;
    return hash ^ hash >> 32;
  }

 private:
  template <class Stores, class Ahead>
  [[gnu::always_inline]] void move(Stores& stores, const std::byte*& from, size_t key,
                                   Ahead ahead) {
    ahead(from);
    sums_.add(stores.move(from), key_at(key));
    from += kStripeBytes;
  }

  Sums sums_{kFirstSums};
  size_t left_bytes_ = kBlockBytes;
};

}  // namespace
}  // namespace kvw
