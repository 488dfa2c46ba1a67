#include "client/extents.h"

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "copy/copy.h"

namespace kvw {

namespace {

constexpr uint64_t kReadBytes = 4 << 20;

}  // namespace

Extents::Extents(std::shared_ptr<const View> view, std::shared_ptr<ClientSession> session,
                 const View::SpaceRow& row, uint32_t shard,
                 std::shared_ptr<std::atomic<uint64_t>> segments_held)
    : view_(std::move(view)),
      session_(std::move(session)),
      row_(row),
      shard_(shard),
      segments_held_(std::move(segments_held)),
      forks_(fork_count()) {}

void Extents::release() {
  if (session_ != nullptr && forks_ == fork_count()) {
    for (const File& file : files_) session_->drop_pin(file.pin);
    *segments_held_ -= files_.size();
  }
  files_.clear();
  pages_.clear();
  session_.reset();
}

std::vector<Extents::Read> Extents::plan(uint64_t stage_bytes, uint64_t gap_bytes) {
  const uint64_t stride = row_.shape.shard_stride();
  if (stride > stage_bytes)
    throw Error(ErrorKind::usage, "stage_too_small",
                "a page needs " + std::to_string(stride) + " bytes of the stage, which has " +
                    std::to_string(stage_bytes));
  std::vector<Read> reads;
  uint64_t used = 0;
  uint32_t round = 0;
  for (uint64_t at = 0; at < pages_.size(); ++at) {
    Page& page = pages_[at];
    Read* last = reads.empty() ? nullptr : &reads.back();
    const uint64_t end = last == nullptr ? 0 : last->offset_bytes + last->bytes;
    const bool near = last != nullptr && last->file == page.file && page.offset_bytes >= end &&
                      page.offset_bytes - end <= gap_bytes;
    const uint64_t gap = near ? page.offset_bytes - end : 0;
    const bool joins = near && last->bytes + gap + stride <= kReadBytes;
    if (joins && used + gap + stride <= stage_bytes) {
      last->bytes += gap + stride;
      ++last->pages;
      used += gap;
    } else {
      if (used + stride > stage_bytes) {
        ++round;
        used = 0;
      }
      reads.push_back({round, page.file, page.offset_bytes, stride, used, at, 1});
    }
    page.staged_at = used;
    used += stride;
  }
  return reads;
}

bool Extents::current(uint64_t page) const {
  return pages_[page].entry.clear_epoch >= view_->clear_epoch(row_.ordinal);
}

uint64_t Extents::deliver(const std::byte* stage, uint64_t first, uint64_t count,
                          const Regions& to) {
  std::vector<Piece> pieces;
  bool good = true;
  uint64_t done = 0;
  for (; done < count; ++done) {
    const Page& page = pages_[first + done];
    to.pieces(first + done, pieces);
    const uint64_t digest = scatter_digest(pieces, stage + page.staged_at, page.entry.key, shard_);
    good = digest == page.digest;
    if (!good || !current(first + done)) break;
  }
  count_delivered(first, done, !good);
  return done;
}

void Extents::count_delivered(uint64_t first, uint64_t count, bool mismatch) {
  for (uint64_t at = first; at < first + count; ++at) session_->touch(pages_[at].entry);
  session_->count(Counter::pages_loaded, count);
  session_->count(Counter::bytes_loaded, count * row_.shape.shard_bytes);
  if (mismatch) session_->count(Counter::load_mismatch);
}

}  // namespace kvw
