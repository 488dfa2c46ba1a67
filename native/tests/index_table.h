// An index file without a directory around it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"
#include "base/fd.h"
#include "index/index.h"

namespace kvw {

struct IndexTable {
  explicit IndexTable(uint64_t entries) : fd(::memfd_create("kvw-index", MFD_CLOEXEC)) {
    if (::ftruncate(fd.get(), static_cast<off_t>(index_bytes(entries))) != 0)
      throw storage_error("cannot size the table", errno);
    const IndexHeader header{kIndexMagic, kIndexVersion, 0, Key{0x77, 0x99}, 1, entries};
    if (::pwrite(fd.get(), &header, sizeof header, 0) != sizeof header)
      throw storage_error("cannot write the header", errno);
    mapping = Mapping(fd.get(), index_bytes(entries), true);
    index = Index(mapping);
  }

  Fd fd;
  Mapping mapping;
  Index index;
};

}  // namespace kvw
