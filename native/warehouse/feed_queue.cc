#include "warehouse/feed_queue.h"

#include <utility>

namespace kvw {

void FeedQueue::push(const FeedItem& item, std::span<const std::byte> witness) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    if (lost_ || batch_.closed) return;
    first = batch_.items.empty();
    bytes_ += sizeof item + witness.size();
    if (bytes_ > bound_bytes_) {
      lost_ = true;
      batch_.items = {};
      batch_.witnesses = {};
      bytes_ = 0;
      first = true;
    } else {
      batch_.items.push_back(item);
      batch_.witnesses.insert(batch_.witnesses.end(), witness.begin(), witness.end());
    }
  }
  if (first) filled_.notify_one();
}

void FeedQueue::restart() {
  {
    const std::lock_guard lock(mutex_);
    batch_.items.clear();
    batch_.witnesses.clear();
    bytes_ = 0;
    lost_ = false;
  }
  push({});
  want_advance();
}

void FeedQueue::want_advance() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(batch_.more, true)) return;
  }
  filled_.notify_one();
}

bool FeedQueue::closed() const {
  const std::lock_guard lock(mutex_);
  return batch_.closed;
}

bool FeedQueue::half_full() const {
  const std::lock_guard lock(mutex_);
  return lost_ || bytes_ > bound_bytes_ / 2;
}

FeedBatch FeedQueue::take(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  filled_.wait_for(lock, timeout, [this] {
    return lost_ || batch_.more || batch_.closed || !batch_.items.empty();
  });
  FeedBatch taken;
  std::swap(taken.items, batch_.items);
  std::swap(taken.witnesses, batch_.witnesses);
  taken.more = std::exchange(batch_.more, false);
  taken.lost = lost_;
  taken.closed = batch_.closed;
  bytes_ = 0;
  return taken;
}

void FeedQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    batch_.closed = true;
  }
  filled_.notify_all();
}

}  // namespace kvw
