// What tests of huge pages look at: whether the kernel gives any to files on tmpfs, and where it
// did.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

#include "base/fd.h"
#include "base/types.h"
#include "tests/check.h"

namespace kvw {

// Of mappings in this process of a file whose name, as /proc/self/smaps has it, ends so.
inline uint64_t mapped_huge_bytes(const std::string& path) {
  std::ifstream maps("/proc/self/smaps");
  uint64_t kib = 0, sum = 0;
  bool counted = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('/') != std::string::npos) counted = line.ends_with(path);
    if (counted && std::sscanf(line.c_str(), "ShmemPmdMapped: %" SCNu64, &kib) == 1) sum += kib;
  }
  return sum * 1024;
}

// Asked of a file of the test's own: not of a kernel before 6.1, nor without memory for one page.
inline bool kernel_gives_huge_pages(const std::string& directory) {
  const Fd fd(::open((directory + "/probe").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  CHECK_EQ(::ftruncate(fd.get(), kHugePageBytes), 0);
  const Mapping mapping(fd.get(), kHugePageBytes, true);
  *mapping.data() = std::byte{1};
  constexpr int kCollapse = 25;  // MADV_COLLAPSE
  return ::madvise(mapping.data(), kHugePageBytes, kCollapse) == 0;
}

}  // namespace kvw
