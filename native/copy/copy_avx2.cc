// The AVX2 path. Built with -mavx2; run only where the processor has it.
#define XXH_VECTOR XXH_AVX2
#include "copy/copy_kernel.h"
#include "copy/stripes_avx2.h"

namespace kvw {
namespace {

struct Avx2Line {
  using Sums = Avx2Sums;
  static constexpr bool kAsksForNextLeaf = false;
  static void stream(std::byte* to, const std::byte* from) { StraightStores(to).move(from); }
  template <class Use>
  static void with_stores(std::byte* to, Use use) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(__m256i) == 0)
      use(StraightStores(to));
    else
      use(ShiftedStores(to));
  }
};

}  // namespace

constinit const CopyRoutines kAvx2Copy = Kernel<Avx2Line>::routines(CopyPath::avx2, "avx2");

}  // namespace kvw
