// The segment files of a directory: names, creation, and a cache of open descriptors, bounded by a
// quarter of the process's limit.
// O_DIRECT is used unless the filesystem refuses it; that is decided here and nowhere else.
// Used by one thread at a time: the core thread during recovery, the disk thread afterwards. Only
// prepare(), remove(), direct() and shortages() may be called beside it: they touch no descriptor
// of the cache.
// All calls may block for the device's metadata.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fd.h"

namespace kvw::nvme {

// The number of the file that a read-only tier writes to find out whether it has healed.
inline constexpr uint32_t kProbeFile = UINT32_MAX;

// The process or the system has no descriptor left, which says nothing about the disk.
inline bool is_shortage(int error) { return error == EMFILE || error == ENFILE; }
inline constexpr std::chrono::milliseconds kShortageWait{100};  // then it is asked for again

class SegmentFiles {
 public:
  struct Listed {
    uint32_t number;
    uint64_t bytes;
  };
  // 0 or an errno; EOPNOTSUPP: zeros are written instead.
  using Allocate = std::function<int(int fd, uint64_t bytes)>;

  // Creates directory/segments. Throws Error (storage) when that fails.
  SegmentFiles(const std::string& directory, Allocate allocate);

  // Regular files with names of ours and numbers below kMaxSegments, by number.
  std::vector<Listed> list() const;
  // 0, or the errno of the attempt to write a file when this object was made.
  int write_error() const { return write_error_; }
  bool direct() const { return direct_.load(std::memory_order_relaxed); }

  // How often a descriptor was wanted and there was none.
  uint64_t shortages() const { return shortages_.load(std::memory_order_relaxed); }

  // A descriptor, valid until release(); or -errno. Nested use is counted. Where descriptors are
  // short, those that are kept for later are given up for it.
  int acquire(uint32_t segment);
  void release(uint32_t segment);
  // Closes an idle descriptor, before the file is made anew or goes: one that was opened while the
  // filesystem was read-only must not survive its healing.
  void forget(uint32_t segment);
  // Closes the idle descriptor that was used the longest ago; false if there is none.
  bool close_idle();
  // Makes a file of at least `bytes`, all of them allocated; one that does not get them is removed:
  // made here for nothing, or found too short. 0 or an errno. Not while the file has users.
  int prepare(uint32_t segment, uint64_t bytes);
  // Lets go what lies behind `bytes`; not durable before the next flush. 0 or an errno.
  int cut(uint32_t segment, uint64_t bytes);
  int remove(uint32_t segment);

  std::string path(uint32_t segment) const;

 private:
  struct Open {
    Fd fd;
    unsigned users = 0;
    std::list<uint32_t>::iterator age;
  };

  int open_file(uint32_t segment, int extra_flags);
  int probe_writing();
  int write_probe();
  int grow(int fd, uint64_t bytes) const;
  int sync_directory(const std::string& directory);

  std::string directory_;
  Allocate allocate_;
  std::unordered_map<uint32_t, Open> open_;
  std::list<uint32_t> ages_;  // least recently used first
  std::atomic<bool> direct_{true};
  std::atomic<uint64_t> shortages_{0};
  int write_error_ = 0;
};

}  // namespace kvw::nvme
