// The path of 64-bit ARM, whose baseline has NEON. Its streaming store is a hint (STNP: no need to
// keep the line); the fence after it is copy.cc's. Run under an emulator only: that shows the bytes
// and digests right, its speed and the stores' order on a real weak machine are argued, not run.
#define XXH_VECTOR XXH_NEON
#include "copy/copy_kernel.h"

#include <arm_neon.h>

namespace kvw {
namespace {

struct NeonLine {
  static constexpr bool kAsksForNextLeaf = true;
  static void stream(std::byte* to, const std::byte* from) {
    const uint8_t* source = reinterpret_cast<const uint8_t*>(from);
    const uint8x16_t a = vld1q_u8(source);
    const uint8x16_t b = vld1q_u8(source + 16);
    const uint8x16_t c = vld1q_u8(source + 32);
    const uint8x16_t d = vld1q_u8(source + 48);
    auto& line = *reinterpret_cast<std::byte(*)[kLineBytes]>(to);
    asm("stnp %q1, %q2, [%5]\n\tstnp %q3, %q4, [%5, #32]"
        : "=m"(line)
        : "w"(a), "w"(b), "w"(c), "w"(d), "r"(to));
  }
};

}  // namespace

constinit const CopyRoutines kNeonCopy = Kernel<NeonLine>::routines(CopyPath::neon, "neon");

}  // namespace kvw
