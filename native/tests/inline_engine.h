// An engine of the tests' own that does what it is told at once, in the caller's thread: for tests
// that open a log thousands of times, where handing each read to another thread and back would be
// most of the time. With a seed it tells of what is done in random order and pieces, so that many
// operations are in flight at a time without a device that takes its time.
// One thread, but for wake().
#pragma once

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "io/io_engine.h"
#include "io/transfer.h"

namespace kvw {

class InlineEngine final : public IoEngine {
 public:
  explicit InlineEngine(unsigned depth = 8, std::optional<uint64_t> seed = std::nullopt)
      : depth_(depth) {
    if (seed) random_.emplace(*seed);
  }

  const char* name() const override { return "inline"; }
  unsigned depth() const override { return depth_; }
  unsigned in_flight() const override { return static_cast<unsigned>(ready_.size()); }

  void submit(IoOp op) override {
    const uint64_t user = op.user;
    Transfer transfer(std::move(op));
    while (!transfer.advance(moved(transfer))) {
    }
    ready_.push_back({user, transfer.result()});
  }

  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    if (ready_.empty() && timeout_ms > 0) {
      std::unique_lock lock(mutex_);
      woken_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return wake_; });
      wake_ = false;
    }
    if (!random_) {
      done.insert(done.end(), ready_.begin(), ready_.end());
      ready_.clear();
      return;
    }
    // Some of it, so that the rest stays in flight; something, so that it goes on.
    for (size_t told = 0; !ready_.empty() && (told == 0 || (*random_)() % 2 == 0); ++told) {
      std::swap(ready_[(*random_)() % ready_.size()], ready_.back());
      done.push_back(ready_.back());
      ready_.pop_back();
    }
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      wake_ = true;
    }
    woken_.notify_one();
  }

 private:
  static int64_t moved(const Transfer& transfer) {
    const IoOp& op = transfer.op();
    const auto offset = static_cast<off_t>(transfer.offset());
    const auto count = static_cast<int>(transfer.piece_count());
    ssize_t got = 0;  // a sync in memory has nothing to do
    if (op.kind == IoKind::read) got = ::preadv(op.fd, transfer.pieces(), count, offset);
    if (op.kind == IoKind::write) got = ::pwritev(op.fd, transfer.pieces(), count, offset);
    return got < 0 ? -errno : got;
  }

  const unsigned depth_;
  std::optional<std::mt19937_64> random_;
  std::vector<IoDone> ready_;
  std::mutex mutex_;
  std::condition_variable woken_;
  bool wake_ = false;
};

}  // namespace kvw
