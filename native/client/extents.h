// Pages on NVMe that a client reads by itself, past the daemon: where their bytes are and what they
// must be. While it lives, their segments are neither reclaimed nor reused; the hold stands in the
// session's file, so it survives the daemon and ends with the client's death, as pins do.
//
// What is believed of a page, its digest among it, comes from its record's header, which was read
// and compared with the prompt (key, parent, position, tokens, life) when it was held. The bytes
// are whoever reads them's to verify: deliver() does it for host memory, DeviceStage for a
// device's. The hold keeps good bytes readable; it is the digest that makes a wrong byte a miss.
//
// Not thread-safe, but for release(). The reader must have ended before it: a device may still be
// writing what a transfer reads.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "client/regions.h"
#include "client/session.h"
#include "client/view.h"
#include "exchange/messages.h"

namespace kvw {

class DaemonLink;

// The directory of the segments, as a daemon hands it out to those who ask. Thread-safe.
class SegmentFolder {
 public:
  struct Opened {
    ParentFd directory;
    uint64_t segments_held;  // that all sessions of a process may hold at a time
  };

  explicit SegmentFolder(bool handed_out) : handed_out_(handed_out) {}
  // Null: the daemon hands out none. The first call is a round trip. Throws Error transport.
  const Opened* open(DaemonLink& link, uint64_t deadline_ns);

 private:
  const bool handed_out_;
  std::mutex mutex_;
  std::optional<Opened> opened_;  // stays as it is once it is there
};

class Extents {
 public:
  // One shard of a page.
  struct Page {
    EntryView entry;
    uint64_t offset_bytes;  // in its file, a multiple of 4 KiB
    uint64_t digest;
    uint32_t file;           // in files()
    uint64_t staged_at = 0;  // where the last plan puts it in its stage
  };
  struct File {
    uint32_t segment, life;
    ParentFd descriptor;
    bool direct;  // opened with O_DIRECT
    int pin;      // its word in the session file
    // Opens the same file again, under whatever flags, wherever this process is.
    std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor.get()); }
  };
  // One transfer: `bytes` from `offset_bytes` of a file to `stage_at` of the stage of its round.
  // All multiples of 4 KiB.
  struct Read {
    uint32_t round, file;
    uint64_t offset_bytes, bytes, stage_at;
    uint64_t first, pages;
  };

  Extents(std::shared_ptr<const View> view, std::shared_ptr<ClientSession> session,
          const View::SpaceRow& row, uint32_t shard)
      : view_(std::move(view)), session_(std::move(session)), row_(row), shard_(shard) {}
  ~Extents() { release(); }
  Extents(const Extents&) = delete;
  Extents& operator=(const Extents&) = delete;
  void release();

  const std::vector<Page>& pages() const { return pages_; }
  const std::vector<File>& files() const { return files_; }
  uint32_t shard() const { return shard_; }
  uint64_t page_bytes() const { return row_.shape.shard_bytes; }
  // Why the hold ended before the last page that was asked for.
  Reason ended() const { return ended_; }

  // For the call that makes the hold. Stores a pin for the segment of an extent, where there is
  // none yet, and returns its number in files(). Nothing: it cannot be had, and ended() says why.
  std::optional<uint32_t> pin_segment(const nvme::Extent& extent,
                                      const SegmentFolder::Opened& folder);
  void add(const Page& page) { pages_.push_back(page); }
  void set_digest(uint64_t page, uint64_t digest) { pages_[page].digest = digest; }
  // No more than so many pages are held.
  void end(Reason why, uint64_t pages);

  // How to read all pages through stages of that many bytes: neighbours with at most `gap_bytes`
  // between them in one transfer, gap included, up to 4 MiB: more makes no disk faster, and a
  // transfer's pages can be used when all of it has come. Throws Error usage "stage_too_small" when
  // a page does not fit.
  std::vector<Read> plan(uint64_t stage_bytes, uint64_t gap_bytes);
  // Verifies pages [first, first + count) in a stage of the last plan and copies them to the same
  // pages of `to`, in one pass, in order, to the first that is not what its record says or was
  // cleared meanwhile; that page of `to` then holds nothing of meaning. Returns how many are there.
  // `to` is in host memory: for a device's, client/device_stage.h.
  uint64_t deliver(const std::byte* stage, uint64_t first, uint64_t count, const Regions& to);
  // What deliver() counts and touches, for pages that somebody else verified; `mismatch`: the next
  // one was not what its record says.
  void count_delivered(uint64_t first, uint64_t count, bool mismatch);
  // Whether the page may still be handed out: its namespace was not cleared since it was stored.
  bool current(uint64_t page) const;

 private:
  std::shared_ptr<const View> view_;
  std::shared_ptr<ClientSession> session_;
  View::SpaceRow row_;
  uint32_t shard_;
  uint64_t forks_ = fork_count();
  std::vector<File> files_;
  std::vector<Page> pages_;
  Reason ended_ = Reason::none;
};

}  // namespace kvw
