// Memory that holds KV, token ids or the domain's secret is not in core dumps.
#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace kvw {

// `begin` is a memory page's, of a mapping that nothing else shares: what else lay there would be
// missing too. A kernel that refuses leaves a larger dump.
inline void leave_out_of_dumps(void* begin, size_t bytes) {
  ::madvise(begin, bytes, MADV_DONTDUMP);
}

}  // namespace kvw
