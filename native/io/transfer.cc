#include "io/transfer.h"

#include <algorithm>
#include <cerrno>

#include "base/types.h"

namespace kvw {

namespace {
constexpr size_t kPiecesPerCall = 1024;  // IOV_MAX of Linux
constexpr unsigned kRetries = 128;       // EAGAIN for ever must not become a spin for ever
}  // namespace

unsigned Transfer::piece_count() const {
  return static_cast<unsigned>(std::min(op_.pieces.size() - first_, kPiecesPerCall));
}

bool Transfer::finish(int64_t result) {
  result_ = result;
  return true;
}

void Transfer::skip(uint64_t bytes) {
  moved_ += bytes;
  while (first_ < op_.pieces.size() && bytes >= op_.pieces[first_].iov_len)
    bytes -= op_.pieces[first_++].iov_len;
  if (bytes == 0) return;
  iovec& piece = op_.pieces[first_];
  piece.iov_base = static_cast<std::byte*>(piece.iov_base) + bytes;
  piece.iov_len -= bytes;
}

bool Transfer::advance(int64_t answer) {
  if ((answer == -EINTR || answer == -EAGAIN) && ++retries_ <= kRetries) return false;
  // A direct read that met the end of a file inside a block cannot go on from there.
  if (answer == -EINVAL && moved_ % kBlockBytes != 0) return finish(static_cast<int64_t>(moved_));
  if (answer < 0) return finish(answer);
  if (op_.kind == IoKind::sync) return finish(0);
  if (answer > 0) skip(static_cast<uint64_t>(answer));
  if (answer > 0 && first_ < op_.pieces.size()) return false;
  return finish(static_cast<int64_t>(moved_));
}

}  // namespace kvw
