// An IoEngine of the test's own that does everything at once and tells of it in random order and
// pieces, so that many operations are in flight at a time without a device that takes its time.
// One thread, but for wake().
#pragma once

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>

#include "io/io_engine.h"

namespace kvw {

class InlineEngine final : public IoEngine {
 public:
  InlineEngine(unsigned depth, uint64_t seed) : depth_(depth), random_(seed) {}

  const char* name() const override { return "inline"; }
  unsigned depth() const override { return depth_; }
  unsigned in_flight() const override { return static_cast<unsigned>(ready_.size()); }

  void submit(IoOp op) override {
    int64_t moved = 0;
    for (const iovec& piece : op.pieces) {
      const auto at = static_cast<off_t>(op.offset) + moved;
      const ssize_t bytes = op.kind == IoKind::write
                                ? ::pwrite(op.fd, piece.iov_base, piece.iov_len, at)
                                : ::pread(op.fd, piece.iov_base, piece.iov_len, at);
      if (bytes < 0) {
        ready_.push_back({op.user, -errno});
        return;
      }
      moved += bytes;
    }
    ready_.push_back({op.user, moved});
  }

  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    if (ready_.empty()) {
      std::unique_lock lock(mutex_);
      woken_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return wake_; });
    }
    {
      const std::lock_guard lock(mutex_);
      wake_ = false;
    }
    // Some of it, so that the rest stays in flight; something, so that it goes on.
    for (size_t told = 0; !ready_.empty() && (told == 0 || random_() % 2 == 0); ++told) {
      std::swap(ready_[random_() % ready_.size()], ready_.back());
      done.push_back(ready_.back());
      ready_.pop_back();
    }
  }

  void wake() override {
    const std::lock_guard lock(mutex_);
    wake_ = true;
    woken_.notify_one();
  }

 private:
  unsigned depth_;
  std::mt19937_64 random_;
  std::vector<IoDone> ready_;
  std::mutex mutex_;
  std::condition_variable woken_;
  bool wake_ = false;
};

}  // namespace kvw
