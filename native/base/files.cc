#include "base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/error.h"

namespace kvw {

Fd open_file(const std::string& path, int flags) {
  Fd fd(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) throw storage_error("cannot open " + path, errno);
  return fd;
}

uint64_t size_of(int fd, const std::string& path) {
  struct stat info{};
  if (::fstat(fd, &info) != 0) throw storage_error("cannot stat " + path, errno);
  return static_cast<uint64_t>(info.st_size);
}

void resize(int fd, uint64_t bytes, const std::string& path) {
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0)
    throw storage_error("cannot size " + path + " to " + std::to_string(bytes) + " bytes", errno);
}

int allocate(int fd, uint64_t offset, uint64_t bytes) {
  int result;
  do {
    result = ::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

void allocate_or_throw(int fd, uint64_t bytes, const std::string& path) {
  if (const int err = allocate(fd, 0, bytes); err != 0)
    throw storage_error("cannot allocate " + std::to_string(bytes) + " bytes for " + path +
                            "; free room on that filesystem or choose another --arena-dir",
                        err);
}

void create_file(const std::string& path, const std::function<void(int fd)>& fill) {
  const std::string fresh = path + ".new";
  ::unlink(fresh.c_str());
  const Fd fd = open_file(fresh, O_RDWR | O_CREAT | O_EXCL);
  try {
    fill(fd.get());
    if (::rename(fresh.c_str(), path.c_str()) != 0)
      throw storage_error("cannot rename " + fresh, errno);
  } catch (...) {
    ::unlink(fresh.c_str());
    throw;
  }
}

}  // namespace kvw
