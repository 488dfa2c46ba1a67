// The AVX-512 path: one 64-byte store a line. Built with -mavx512f -mavx512bw -mavx512vl
// -mavx512dq; run only where the processor has all four.
//
// gcc 12 defines its intrinsics' "undefined" registers in terms of themselves and warns of them.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define XXH_VECTOR XXH_AVX512
#include "copy/copy_kernel.h"

#include <immintrin.h>

namespace kvw {
namespace {

struct Avx512Line {
  static void stream(std::byte* to, const std::byte* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
};

}  // namespace

constinit const CopyRoutines kAvx512Copy = Kernel<Avx512Line>::routines(CopyPath::avx512, "avx512");

}  // namespace kvw
