// preadv/pwritev on threads: for kernels and containers that refuse io_uring. One mutex guards all;
// an operation here moves a megabyte, so the lock is not what costs.
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/start_thread.h"
#include "io/engines.h"
#include "io/transfer.h"

namespace kvw {
namespace {

int64_t run_once(const Transfer& transfer) {
  const IoOp& op = transfer.op();
  const auto offset = static_cast<off_t>(transfer.offset());
  const int count = static_cast<int>(transfer.piece_count());
  int64_t answer = 0;
  switch (op.kind) {
    case IoKind::read:
      answer = ::preadv(op.fd, transfer.pieces(), count, offset);
      break;
    case IoKind::write:
      answer = ::pwritev(op.fd, transfer.pieces(), count, offset);
      break;
    case IoKind::sync:
      answer = ::fdatasync(op.fd);
      break;
  }
  return answer < 0 ? -errno : answer;
}

class PreadPool final : public IoEngine {
 public:
  explicit PreadPool(unsigned depth) : depth_(depth) {
    threads_.reserve(depth);
    for (unsigned i = 0; i < depth; ++i)
      threads_.push_back(start_thread("kvw-pread", [this] { serve(); }));
  }

  ~PreadPool() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  const char* name() const override { return "pread"; }
  unsigned depth() const override { return depth_; }
  unsigned in_flight() const override { return in_flight_; }

  void submit(IoOp op) override {
    ++in_flight_;
    {
      std::lock_guard lock(mutex_);
      queue_.emplace_back(std::move(op));
    }
    work_.notify_one();
  }

  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    std::unique_lock lock(mutex_);
    finished_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                       [this] { return woken_ || !results_.empty(); });
    woken_ = false;
    in_flight_ -= static_cast<unsigned>(results_.size());
    done.insert(done.end(), results_.begin(), results_.end());
    results_.clear();
  }

  void wake() override {
    // Notified under the lock: the engine may be destroyed as soon as the waiter sees the flag.
    std::lock_guard lock(mutex_);
    woken_ = true;
    finished_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Transfer transfer = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      while (!transfer.advance(run_once(transfer))) {
      }
      lock.lock();
      results_.push_back({transfer.op().user, transfer.result()});
      finished_.notify_one();
    }
  }

  const unsigned depth_;
  unsigned in_flight_ = 0;  // of the submitting thread
  std::mutex mutex_;
  std::condition_variable work_, finished_;
  std::deque<Transfer> queue_;
  std::vector<IoDone> results_;
  bool woken_ = false, stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> make_pread_pool(unsigned depth) {
  return std::make_unique<PreadPool>(depth);
}

}  // namespace kvw
