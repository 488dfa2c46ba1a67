// The path of every processor: what its architecture guarantees, no more. On x86-64 that is SSE2,
// which has streaming stores; elsewhere the stores are plain.
#include "copy/copy_kernel.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvw {
namespace {

struct PortableLine {
  static constexpr bool kAsksForNextLeaf = true;
  static void stream(std::byte* to, const std::byte* from) {
#if defined(__SSE2__)
    const __m128i* source = reinterpret_cast<const __m128i*>(from);
    __m128i* target = reinterpret_cast<__m128i*>(to);
    const __m128i line[4] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1),
                             _mm_loadu_si128(source + 2), _mm_loadu_si128(source + 3)};
    for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, line[i]);
#else
    memcpy(to, from, kLineBytes);
#endif
  }
};

}  // namespace

constinit const CopyRoutines kPortableCopy =
    Kernel<PortableLine>::routines(CopyPath::portable, "portable");

}  // namespace kvw
