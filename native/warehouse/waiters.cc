#include "warehouse/waiters.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace kvw {

// Clients wait on the low half in shared memory; a read-only mapping is enough for that.
void Waiters::wake_all() const {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_.value), FUTEX_WAKE, INT_MAX, nullptr,
            nullptr, 0);
}

}  // namespace kvw
