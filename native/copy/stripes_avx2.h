// Stripes of a StreamedLeaf in registers of AVX2: how they are stored, and the sums of the hash.
// The path for AVX-512 has them too. Included by the paths' files alone, after copy_kernel.h, whose
// rules about linkage hold here too.
#pragma once

#include <immintrin.h>

#include "copy/streamed_leaf.h"

namespace kvw {
namespace {

struct Stripe {
  explicit Stripe(const std::byte* from)
      : low(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))),
        high(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1)) {}
  Stripe(__m256i lower, __m256i upper) : low(lower), high(upper) {}
  __m256i low, high;
};

// Stores to a place of 32-byte alignment.
class StraightStores {
 public:
  explicit StraightStores(std::byte* to) : to_(reinterpret_cast<__m256i*>(to)) {}
  [[gnu::always_inline]] Stripe move(const std::byte* from) {
    const Stripe stripe(from);
    _mm256_stream_si256(to_++, stripe.low);
    _mm256_stream_si256(to_++, stripe.high);
    return stripe;
  }
  void end() {}

 private:
  __m256i* to_;
};

// Stores to a place of 16-byte alignment (as large arrays of numpy's have it: a page and 16 bytes)
// that are aligned to 32 but at its two ends: a quarter of each stripe waits for the next.
class ShiftedStores {
 public:
  explicit ShiftedStores(std::byte* to) : to_(reinterpret_cast<__m256i*>(to + kQuarterBytes)) {}
  [[gnu::always_inline]] Stripe move(const std::byte* from) {
    const Stripe stripe(from);
    if (begun_) {
      _mm256_stream_si256(to_++, across(waiting_, stripe.low));
    } else {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to_) - 1, _mm256_castsi256_si128(stripe.low));
      begun_ = true;
    }
    _mm256_stream_si256(to_++, across(stripe.low, stripe.high));
    waiting_ = stripe.high;
    return stripe;
  }
  void end() {
    if (begun_)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to_), _mm256_extracti128_si256(waiting_, 1));
  }

 private:
  static constexpr size_t kQuarterBytes = 16;
  // The upper half of one and the lower half of the next.
  static __m256i across(__m256i one, __m256i next) {
    return _mm256_permute2x128_si256(one, next, 0x21);
  }

  __m256i* to_;
  __m256i waiting_{};
  bool begun_ = false;
};

class Avx2Sums {
 public:
  explicit Avx2Sums(const uint64_t* from) : low_(load(from)), high_(load(from + 4)) {}
  void save(uint64_t* to) const {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), low_);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + 4), high_);
  }
  [[gnu::always_inline]] void add(const Stripe& stripe, const uint8_t* key) {
    low_ = added(low_, stripe.low, load(key));
    high_ = added(high_, stripe.high, load(key + sizeof(__m256i)));
  }
  void scramble(const uint8_t* key) {
    low_ = scrambled(low_, load(key));
    high_ = scrambled(high_, load(key + sizeof(__m256i)));
  }

 private:
  static __m256i load(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
  static __m256i added(__m256i sums, __m256i data, __m256i key) {
    const __m256i keyed = _mm256_xor_si256(data, key);
    const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    const __m256i neighbours = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(sums, neighbours));
  }
  static __m256i scrambled(__m256i sums, __m256i key) {
    const __m256i mixed =
        _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), key);
    const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32_1));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
  }

  __m256i low_, high_;
};

}  // namespace
}  // namespace kvw
