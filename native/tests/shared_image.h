// The files of a warehouse that say what its slots are, saved and put back: what a daemon that
// ended at some step would have left for the next one. Payloads and sessions are not among them:
// they are their clients'. Not thread-safe.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fd.h"

namespace kvw {

class SharedImage {
 public:
  // What the file holds now.
  explicit SharedImage(std::string path) : path_(std::move(path)) {
    const Fd fd = open();
    for_each_page(fd.get(), [&](off_t at) {
      std::vector<std::byte>& page = pages_[static_cast<uint64_t>(at)];
      page.resize(kPage);
      if (::pread(fd.get(), page.data(), kPage, at) != static_cast<ssize_t>(kPage))
        throw storage_error("cannot read " + path_, errno);
    });
  }

  void set(uint64_t offset, uint64_t word) {
    std::vector<std::byte>& page = pages_[offset / kPage * kPage];
    page.resize(kPage);
    std::memcpy(page.data() + offset % kPage, &word, 8);
  }

  // The file holds exactly this again.
  void put_back() const {
    const Fd fd = open();
    for_each_page(fd.get(), [&](off_t at) {
      if (!pages_.contains(static_cast<uint64_t>(at)))
        ::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, kPage);
    });
    for (const auto& [at, page] : pages_)
      if (::pwrite(fd.get(), page.data(), kPage, static_cast<off_t>(at)) !=
          static_cast<ssize_t>(kPage))
        throw storage_error("cannot write " + path_, errno);
  }

 private:
  static constexpr size_t kPage = 4096;

  Fd open() const {
    Fd fd(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
    if (!fd.valid()) throw storage_error("cannot open " + path_, errno);
    return fd;
  }

  template <class Each>
  static void for_each_page(int fd, Each&& each) {
    off_t at = ::lseek(fd, 0, SEEK_DATA);
    while (at >= 0) {
      const off_t end = ::lseek(fd, at, SEEK_HOLE);
      for (; at < end; at += static_cast<off_t>(kPage)) each(at);
      at = ::lseek(fd, end, SEEK_DATA);
    }
  }

  std::string path_;
  std::map<uint64_t, std::vector<std::byte>> pages_;  // by offset
};

}  // namespace kvw
