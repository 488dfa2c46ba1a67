// The AVX-512 path: one 64-byte store a line, where lines can be aligned. Built with -mavx512f
// -mavx512bw -mavx512vl -mavx512dq; run only where the processor has all four.
//
// The hash takes registers of AVX2 here too. Digests alone of cold pages of 2 MiB, on an EPYC
// guest: 27 GB/s with those of AVX-512 and 32 with those of AVX2.
//
// gcc 12 defines its intrinsics' "undefined" registers in terms of themselves and warns of them.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define XXH_VECTOR XXH_AVX2
#include "copy/copy_kernel.h"
#include "copy/stripes_avx2.h"

namespace kvw {
namespace {

// Stores to a place that is line-aligned.
class LineStores {
 public:
  explicit LineStores(std::byte* to) : to_(reinterpret_cast<__m512i*>(to)) {}
  Stripe move(const std::byte* from) {
    const __m512i line = _mm512_loadu_si512(from);
    _mm512_stream_si512(to_++, line);
    return {_mm512_castsi512_si256(line), _mm512_extracti64x4_epi64(line, 1)};
  }
  void end() {}

 private:
  __m512i* to_;
};

struct Avx512Line {
  using Sums = Avx2Sums;
  static constexpr bool kAsksForNextLeaf = true;
  static void stream(std::byte* to, const std::byte* from) { LineStores(to).move(from); }
  template <class Use>
  static void with_stores(std::byte* to, Use use) {
    const auto place = reinterpret_cast<uintptr_t>(to);
    if (place % sizeof(__m512i) == 0)
      use(LineStores(to));
    else if (place % sizeof(__m256i) == 0)
      use(StraightStores(to));
    else
      use(ShiftedStores(to));
  }
};

}  // namespace

constinit const CopyRoutines kAvx512Copy = Kernel<Avx512Line>::routines(CopyPath::avx512, "avx512");

}  // namespace kvw
