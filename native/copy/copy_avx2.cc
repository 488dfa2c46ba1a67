// The AVX2 path. Built with -mavx2; run only where the processor has it.
#define XXH_VECTOR XXH_AVX2
#include "copy/copy_kernel.h"

#include <immintrin.h>

namespace kvw {
namespace {

struct Avx2Line {
  static void stream(std::byte* to, const std::byte* from) {
    const __m256i* source = reinterpret_cast<const __m256i*>(from);
    __m256i* target = reinterpret_cast<__m256i*>(to);
    const __m256i low = _mm256_loadu_si256(source);
    const __m256i high = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(target, low);
    _mm256_stream_si256(target + 1, high);
  }
};

}  // namespace

constinit const CopyRoutines kAvx2Copy = Kernel<Avx2Line>::routines(CopyPath::avx2, "avx2");

}  // namespace kvw
