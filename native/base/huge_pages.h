// Huge pages of shared memory, with nothing for the operator to set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace kvw {

// A reservation at an address that suits huge pages of a file, which the caller maps over or
// unmaps, reserved_bytes() of it: as much as the kernel maps for so many bytes, so that nothing
// stays behind the mapping. Null: the kernel has no such room.
void* reserve_for_huge_pages(size_t bytes);
size_t reserved_bytes(size_t bytes);

// Memory of a file on tmpfs that nobody uses yet, in huge pages where the kernel has some; those
// that are whole in it. Best effort: memory of small pages is as good, and slower. Blocks for two
// seconds at most where the kernel does not come to it (huge_page_process.h), and then not again
// until it has. Thread-safe; starts that process. One that was killed is not replaced.
void take_huge_pages(int file, uint64_t offset, uint64_t bytes);
// Ends it until it is needed again. False: it hangs in the kernel; call this again later.
bool end_huge_page_process();

}  // namespace kvw
