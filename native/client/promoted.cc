#include "client/promoted.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include "base/clock.h"

namespace kvw {

void wait_promoted(const View& view, uint64_t tick, uint64_t until_ns) {
  const uint64_t now = system_clock().boot_ns();
  const uint64_t left = until_ns > now ? until_ns - now : 0;
  timespec timeout{static_cast<time_t>(left / kSecondNs), static_cast<long>(left % kSecondNs)};
  ::syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&view.control().promoted.value),
            FUTEX_WAIT, static_cast<uint32_t>(tick), &timeout, nullptr, 0);
}

}  // namespace kvw
