// What a feed has to say, on its way from the core thread to its one reader: in order, bounded, and
// never waited for by the core. What does not fit is lost, all of it at once: the reader sees that
// and has the feed restarted, which says everything again from the beginning.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/types.h"

namespace kvw {

enum class FeedKind : uint8_t {
  cleared,  // forget everything: what is stored follows
  stored,   // the page entered `tiers`
  removed,  // it left `tiers`
  synced,   // all that was stored when `cleared` was said has been said
};

inline constexpr uint8_t kFeedDram = 1, kFeedNvme = 2;

struct FeedItem {
  FeedKind kind = FeedKind::cleared;
  uint8_t tiers = 0;
  uint32_t position = 0;
  Key namespace_id;  // its ordinal may be another's when this is read
  Key key;
  Key parent;  // of what was stored above position 0; zero otherwise
  WitnessKind witness_kind = WitnessKind::tokens;
  uint32_t witness_bytes = 0;  // only of what was stored
};

struct FeedBatch {
  std::vector<FeedItem> items;
  std::vector<std::byte> witnesses;  // of the items, one after the other
  bool lost = false;                 // there was more than fits: nothing is said until a restart
  bool more = false;                 // Feeds::advance() has work
  bool closed = false;
};

class FeedQueue {
 public:
  explicit FeedQueue(uint64_t bound_bytes) : bound_bytes_(bound_bytes) {}

  // --- of the core thread
  void push(const FeedItem& item, std::span<const std::byte> witness = {});
  // Drops what was not taken, and begins anew with `cleared`.
  void restart();
  // The reader is to call Feeds::advance().
  void want_advance();
  // The feed has no reader any more, and is to be let go.
  bool closed() const;
  bool lost() const { return lost_.load(std::memory_order_relaxed); }
  bool half_full() const;

  // --- of the reader
  // All there is; waits for something, at most `timeout`. After a loss: `lost`, and nothing else.
  FeedBatch take(std::chrono::milliseconds timeout);
  // Ends a take() that waits. Nobody asks the core, which may be busy: it finds out by closed().
  void close();

 private:
  mutable std::mutex mutex_;
  std::condition_variable filled_;
  uint64_t bound_bytes_, bytes_ = 0;
  FeedBatch batch_;
  std::atomic<bool> lost_{false};
};

}  // namespace kvw
