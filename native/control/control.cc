#include "control/control.h"

namespace kvw {

int find_namespace(const ControlPage& page, const Key& id, uint32_t first) {
  for (uint32_t step = 0; step < kMaxNamespaces; ++step) {
    const uint32_t ordinal = (first + step) % kMaxNamespaces;
    const NamespaceWord& row = page.namespaces[ordinal];
    if (row.ready.load(std::memory_order_acquire) == 0) continue;
    if (row.id_lo.load(std::memory_order_relaxed) == id.lo &&
        row.id_hi.load(std::memory_order_relaxed) == id.hi)
      return static_cast<int>(ordinal);
  }
  return -1;
}

}  // namespace kvw
