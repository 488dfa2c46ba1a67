// Files of a domain's directory: opened without following links, made whole or not at all. All of
// them throw Error (storage) that names the file. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/fd.h"

namespace kvw {

Fd open_file(const std::string& path, int flags);
uint64_t size_of(int fd, const std::string& path);
void resize(int fd, uint64_t bytes, const std::string& path);
// Takes the memory or the disk's blocks of a stretch now. 0 or an errno.
int allocate(int fd, uint64_t offset, uint64_t bytes);
void allocate_or_throw(int fd, uint64_t bytes, const std::string& path);

// New files are made beside and renamed in, with mode 0600: a crash never leaves a half-made one
// under the name, and a failure leaves none. In place of one that is there: whoever has that open
// keeps it.
void create_file(const std::string& path, const std::function<void(int fd)>& fill);

}  // namespace kvw
