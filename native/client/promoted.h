// The control page's `promoted` word: it rises, and its futex wakes, when pages came into DRAM, and
// when a fetch from the remote store ended. Who waits for a page reads the word, looks for the
// page, and sleeps while the word is the same.
#pragma once

#include <cstdint>

#include "client/view.h"

namespace kvw {

inline uint64_t promoted(const View& view) {
  return view.control().promoted.value.load(std::memory_order_acquire);
}
// Sleeps until the word is not `tick` any more, or until then (boot clock). A daemon that died
// wakes nobody: bound it.
void wait_promoted(const View& view, uint64_t tick, uint64_t until_ns);

}  // namespace kvw
