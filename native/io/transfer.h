// One operation on its way: how much has moved and what is still to move. Shared by the engines so
// that short transfers, EINTR and EAGAIN are treated in one place. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/io_engine.h"

namespace kvw {

class Transfer {
 public:
  Transfer() = default;
  explicit Transfer(IoOp op) : op_(std::move(op)) {}

  const IoOp& op() const { return op_; }
  uint64_t offset() const { return op_.offset + moved_; }
  const iovec* pieces() const { return op_.pieces.data() + first_; }
  unsigned piece_count() const;  // at most what one call takes

  // Takes what the kernel answered (bytes or -errno). True: finished, result() is final.
  bool advance(int64_t answer);
  int64_t result() const { return result_; }

 private:
  bool finish(int64_t result);
  void skip(uint64_t bytes);

  IoOp op_;
  size_t first_ = 0;  // first piece with bytes left
  uint64_t moved_ = 0;
  unsigned retries_ = 0;
  int64_t result_ = 0;
};

}  // namespace kvw
