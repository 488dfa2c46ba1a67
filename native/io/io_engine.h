// Asynchronous file I/O as a seam: io_uring where the kernel permits it, a pread/pwrite pool where
// it does not, and a recording or failing double in tests. One thread at a time submits and waits;
// engines may use threads of their own inside. Bounded: never more than depth() operations in
// flight. Destruction waits for what is in flight, so that no buffer is written to afterwards.
#pragma once

#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvw {

enum class IoKind { read, write, sync };

struct IoOp {
  IoKind kind;
  int fd;
  uint64_t offset = 0;
  std::vector<iovec> pieces;  // 4 KiB aligned in memory and length for O_DIRECT files
  uint64_t user = 0;          // comes back with the completion
};

struct IoDone {
  uint64_t user;
  // Bytes moved or -errno. A short transfer has already been continued; short here means end of
  // file.
  int64_t result;
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual const char* name() const = 0;  // "io_uring" or "pread"
  virtual unsigned depth() const = 0;
  virtual unsigned in_flight() const = 0;
  // Precondition: in_flight() < depth(). Never blocks for the device. sync is fdatasync.
  virtual void submit(IoOp op) = 0;
  // Appends finished operations. Waits up to timeout_ms (0: poll) for the first; may return early
  // with none.
  virtual void wait(std::vector<IoDone>& done, int timeout_ms) = 0;
  // Says of shared memory that operations will often move it, which then cost less where the system
  // permits it to be held: 0, or why it is not, an errno. It begins and ends at multiples of 4 KiB,
  // stays mapped, and keeps its very pages, until the engine is gone. May block for tens of
  // milliseconds a GiB. By the thread that submits; operations go on being possible on any memory.
  // Nothing at all: what is kept beside such memory is made, by whoever will submit later.
  virtual int register_memory(std::span<std::byte> memory) {
    (void)memory;
    return EOPNOTSUPP;
  }
  // Ends the wait() in progress, or the next one, early. The one method for any thread.
  virtual void wake() = 0;
};

// What "auto" picks on this machine: "io_uring" or "pread". Probed once.
const char* probe_io_engine();

// "auto" probes io_uring (it can be compiled in and still be refused by seccomp) and falls back.
// Throws Error (usage) on an unknown name, Error (storage) if "io_uring" was asked for and is
// refused.
std::unique_ptr<IoEngine> make_io_engine(std::string_view name, unsigned depth);

}  // namespace kvw
