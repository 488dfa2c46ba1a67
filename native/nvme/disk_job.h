// One thing to do with a segment file. Made by the core thread, run by the disk thread or the file
// thread, ended on the core thread again.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "nvme/aligned_buffer.h"

namespace kvw::nvme {

struct DiskJob {
  // prepare: make the file with `bytes` allocated. remove: unlink it. register_memory: tell the
  // engine of the one piece; no file.
  enum class Kind { read, write, sync, prepare, remove, register_memory };

  Kind kind = Kind::sync;
  uint32_t segment = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;                   // of a read or write: the sum of its pieces
  std::vector<iovec> pieces;            // stay valid until done()
  AlignedBuffer buffer;                 // for pieces that belong to the job
  bool timed = true;                    // part of its lane's rate
  bool grouped = false;                 // done() may wait a little for others, see disk.cc
  bool alone = false;                   // not one operation with others, which failed once
  std::function<void()> check;          // after a read that succeeded: verify, decode
  std::function<void(int error)> done;  // 0, an errno; EIO for a short transfer

  void add_piece(std::byte* data, uint64_t size) {
    pieces.push_back({data, size});
    bytes += size;
  }
};

using JobPtr = std::unique_ptr<DiskJob>;

}  // namespace kvw::nvme
