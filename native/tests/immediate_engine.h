// An engine that does what it is told at once: for tests that open a log thousands of times, where
// handing each read to another thread and back would be most of the time.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "io/io_engine.h"
#include "io/transfer.h"

namespace kvw {

class ImmediateEngine final : public IoEngine {
 public:
  const char* name() const override { return "immediate"; }
  unsigned depth() const override { return 8; }
  unsigned in_flight() const override { return static_cast<unsigned>(done_.size()); }
  void submit(IoOp op) override {
    const uint64_t user = op.user;
    Transfer transfer(std::move(op));
    while (!transfer.advance(moved(transfer))) {
    }
    done_.push_back({user, transfer.result()});
  }
  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    if (done_.empty() && timeout_ms > 0) {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return woken_; });
      woken_ = false;
    }
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
  }
  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    wake_.notify_one();
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

  std::vector<IoDone> done_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool woken_ = false;
};

}  // namespace kvw
