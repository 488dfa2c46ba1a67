// A disk thread over a device that does only what a test tells it to.
#pragma once

#include <fcntl.h>
#include <poll.h>

#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "nvme/disk.h"
#include "tests/nvme_world.h"

namespace kvw::nvme {

// Keeps what is submitted until told to complete one, and remembers the order.
class StubbornEngine final : public IoEngine {
 public:
  explicit StubbornEngine(unsigned depth) : depth_(depth) {}
  const char* name() const override { return "stubborn"; }
  unsigned depth() const override { return depth_; }
  unsigned in_flight() const override {
    std::lock_guard lock(mutex_);
    return static_cast<unsigned>(held_.size());
  }
  void submit(IoOp op) override {
    std::lock_guard lock(mutex_);
    order_.push_back(op.kind);
    bytes_.push_back(bytes_of(op));
    held_.push_back(std::move(op));
    most_held_ = std::max(most_held_, held_.size());
    changed_.notify_all();
  }
  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                      [this] { return woken_ || (allowed_ > 0 && !held_.empty()); });
    woken_ = false;
    while (allowed_ > 0 && !held_.empty()) {
      --allowed_;
      done.push_back({held_.front().user,
                      error_ != 0 ? -error_ : static_cast<int64_t>(bytes_of(held_.front()))});
      held_.erase(held_.begin());
    }
  }
  int register_memory(std::span<std::byte> memory) override {
    if (on_register) on_register();
    return memory.size() == kBlockBytes ? 0 : ENOMEM;
  }
  // Runs `call` and returns when it has woken the engine.
  void until_woken_by(const std::function<void()>& call) {
    {
      std::lock_guard lock(mutex_);
      woken_ = false;
    }
    call();
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(60), [this] { return woken_; }));
  }
  std::function<void()> on_register;  // on the disk thread
  void wake() override {
    std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_all();
  }
  void allow(unsigned completions) {
    std::lock_guard lock(mutex_);
    allowed_ += completions;
    changed_.notify_all();
  }
  // What completes from now on fails so; 0: no more.
  void fail(int error) {
    std::lock_guard lock(mutex_);
    error_ = error;
  }
  // Of each operation, in the order of their submission, once there are so many.
  std::vector<uint64_t> bytes_when(size_t submitted) {
    order_when(submitted);
    std::lock_guard lock(mutex_);
    return bytes_;
  }
  size_t most_held() const {
    std::lock_guard lock(mutex_);
    return most_held_;
  }
  std::vector<IoKind> order_when(size_t submitted) {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(60),
                            [&] { return order_.size() >= submitted; }));
    return order_;
  }

 private:
  static uint64_t bytes_of(const IoOp& op) {
    uint64_t bytes = 0;
    for (const iovec& piece : op.pieces) bytes += piece.iov_len;
    return bytes;
  }

  const unsigned depth_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<IoOp> held_;
  std::vector<IoKind> order_;
  std::vector<uint64_t> bytes_;
  int error_ = 0;
  size_t most_held_ = 0;
  unsigned allowed_ = 0;
  bool woken_ = false;
};

struct DiskWorld {
  explicit DiskWorld(SegmentFiles::Allocate allocate = nullptr) : files(dir.path(), allocate) {
    CHECK_EQ(files.prepare(0, 1 << 20), 0);
    auto made = std::make_unique<StubbornEngine>(8);
    engine = made.get();
    disk = std::make_unique<Disk>(std::move(made), files, clock);
    disk->start();
  }
  ~DiskWorld() {
    engine->allow(1000);
    disk.reset();
  }
  void post(DiskJob::Kind kind, unsigned count, uint64_t bytes = kBlockBytes,
            bool grouped = false) {
    for (unsigned i = 0; i < count; ++i) {
      auto job = std::make_unique<DiskJob>();
      job->kind = kind;
      job->grouped = grouped;
      job->buffer = AlignedBuffer(bytes);
      job->add_piece(job->buffer.data(), bytes);
      job->done = [this, kind](int error) {
        CHECK_EQ(error, 0);
        ++ended[kind];
      };
      disk->post(std::move(job));
    }
  }
  void deliver_until(DiskJob::Kind kind, unsigned count) {
    while (ended[kind] < count) {
      pollfd ready{disk->event_fd(), POLLIN, 0};
      CHECK_EQ(::poll(&ready, 1, 60000), 1);
      disk->deliver();
    }
  }
  // What `call` posts, the disk thread finds all at once.
  void post_together(const std::function<void()>& call) {
    std::promise<void> begun, posted;
    engine->on_register = [&] {
      begun.set_value();
      posted.get_future().wait();
    };
    post(DiskJob::Kind::register_memory, 1);
    begun.get_future().wait();
    call();
    posted.set_value();
    deliver_until(DiskJob::Kind::register_memory, ++registered_);
    engine->on_register = nullptr;
  }
  TempDir dir;
  FakeClock clock;
  SegmentFiles files;
  std::map<DiskJob::Kind, unsigned> ended;
  StubbornEngine* engine;
  std::unique_ptr<Disk> disk;

 private:
  unsigned registered_ = 0;
};

}  // namespace kvw::nvme
