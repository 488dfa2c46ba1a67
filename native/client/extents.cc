#include "client/extents.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdio>

#include "base/error.h"
#include "client/daemon_link.h"
#include "copy/copy.h"

namespace kvw {

namespace {

constexpr uint64_t kReadBytes = 4 << 20;

// O_DIRECT where the filesystem has it, for a header is read once and the page cache is others'.
Fd open_segment(int directory, uint32_t segment, bool& direct) {
  char name[16];
  std::snprintf(name, sizeof name, "%08u.seg", segment);
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW;
  Fd fd(::openat(directory, name, kFlags | O_DIRECT));
  direct = fd.valid();
  if (!fd.valid() && errno == EINVAL) fd = Fd(::openat(directory, name, kFlags));
  return fd;
}

}  // namespace

const SegmentFolder::Opened* SegmentFolder::open(DaemonLink& link, uint64_t deadline_ns) {
  if (!handed_out_) return nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (opened_) return &*opened_;
  }
  Writer message(MessageType::locate);
  Connection::Reply reply = link.ask(message, MessageType::located, deadline_ns);
  Reader body = reply.body();
  const auto* located = body.take<Located>();
  if (located == nullptr || reply.descriptors.size() != 1)
    throw Error(ErrorKind::transport, "daemon_gone", "the daemon's answer is malformed");
  const std::lock_guard lock(mutex_);
  if (!opened_) opened_ = Opened{std::move(reply.descriptors.front()), located->segments_held};
  return &*opened_;
}

void Extents::release() {
  if (session_ != nullptr && forks_ == fork_count()) {
    for (const File& file : files_) session_->drop_pin(file.pin);
    session_->segments_held().give_back(files_.size());
  }
  files_.clear();
  pages_.clear();
  session_.reset();
}

std::optional<uint32_t> Extents::pin_segment(const nvme::Extent& extent,
                                             const SegmentFolder::Opened& folder) {
  const auto refuse = [this](Reason why) {
    ended_ = why;
    return std::nullopt;
  };
  for (uint32_t at = 0; at < files_.size(); ++at) {
    if (files_[at].segment != extent.segment) continue;
    if (files_[at].life != extent.life) return refuse(Reason::stale);
    return at;
  }
  if (!session_->segments_held().take(1, folder.segments_held)) return refuse(Reason::later);
  const int pin = session_->take_pin();
  bool direct = false;
  Fd fd = pin < 0 ? Fd() : open_segment(folder.directory.get(), extent.segment, direct);
  if (!fd.valid()) {
    if (pin >= 0) session_->drop_pin(pin);
    session_->segments_held().give_back(1);
    return refuse(pin < 0 ? Reason::later : Reason::io_error);
  }
  session_->store_pin(pin, segment_pin(extent.segment, extent.life));
  files_.push_back({extent.segment, extent.life, ParentFd(fd.release()), direct, pin});
  return static_cast<uint32_t>(files_.size() - 1);
}

void Extents::end(Reason why, uint64_t pages) {
  ended_ = why;
  pages_.erase(pages_.begin() + static_cast<ptrdiff_t>(pages), pages_.end());
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
