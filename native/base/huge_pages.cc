#include "base/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

namespace kvw {

size_t reserved_bytes(size_t bytes) {
  static const auto kernel_page_bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return round_up(bytes, kernel_page_bytes);
}

void* reserve_for_huge_pages(size_t bytes) {
  const size_t needed = reserved_bytes(bytes);
  void* reserved =
      ::mmap(nullptr, needed + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(reserved);
  const size_t before = -reinterpret_cast<uintptr_t>(begin) % kHugePageBytes;
  if (before > 0) ::munmap(begin, before);
  ::munmap(begin + before + needed, kHugePageBytes - before);
  return begin + before;
}

// A page of each is touched, and the collapse fills the rest on that page's node. It is another
// page in each, because tmpfs interleaves nodes by the page's number. Where there are no huge
// pages, and on a kernel before 6.1, this takes those few pages and no more. Unlike memory that is
// asked for otherwise, it works where shmem_enabled says never
// (Documentation/admin-guide/mm/transhuge.rst), as /dev/shm usually is.
void take_huge_pages(std::byte* begin, uint64_t bytes) {
#ifndef MADV_COLLAPSE
  constexpr int MADV_COLLAPSE = 25;  // of linux/mman.h; C libraries before 2.37 do not name it
#endif
  const uint64_t pages = bytes / kHugePageBytes;
  for (uint64_t page = 0; page < pages; ++page) {
    const uint64_t block = page % (kHugePageBytes / kBlockBytes);
    if (::madvise(begin + page * kHugePageBytes + block * kBlockBytes, kBlockBytes,
                  MADV_POPULATE_READ) != 0)
      return;
  }
  if (pages > 0) ::madvise(begin, pages * kHugePageBytes, MADV_COLLAPSE);
}

}  // namespace kvw
