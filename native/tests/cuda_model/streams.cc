// The model's streams: each a queue and a thread that works it off when it likes.
#include <chrono>

#include "tests/cuda_model/model.h"

namespace kvw::cuda_model {

namespace {

constexpr std::chrono::microseconds kLook{50};  // how often what is held or waited for is looked at

void sleep_us(uint64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

}  // namespace

Stream::Stream(int device) : device_(device), thread_([this] { work(); }) { ++counts().streams; }

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  --counts().streams;
}

void Stream::queue(std::function<void()> operation) {
  {
    const std::lock_guard lock(mutex_);
    operations_.push_back(std::move(operation));
  }
  changed_.notify_all();
}

bool Stream::idle() {
  const std::lock_guard lock(mutex_);
  return operations_.empty() && !busy_;
}

void Stream::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return operations_.empty() && !busy_; });
}

void Stream::pause() {
  static std::atomic<uint64_t> numbers{0};
  thread_local std::mt19937_64 random(settings().seed + 0x9e3779b97f4a7c15ull * ++numbers);
  const uint64_t longest = settings().pause_us;
  // Mostly none: long pauses now and then bring streams out of step better than short ones always.
  if (longest != 0 && random() % 3 == 0) sleep_us(random() % longest);
}

void Stream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ending_ || !operations_.empty(); });
    if (operations_.empty()) return;
    const std::function<void()> operation = std::move(operations_.front());
    operations_.pop_front();
    busy_ = true;
    ++counts().busy_streams;
    lock.unlock();
    while (settings().hold != 0) std::this_thread::sleep_for(kLook);
    pause();
    operation();
    lock.lock();
    busy_ = false;
    --counts().busy_streams;
    changed_.notify_all();
  }
}

void wait_for(const Recording& recording) {
  while (!recording.done.load(std::memory_order_acquire)) std::this_thread::sleep_for(kLook);
}

}  // namespace kvw::cuda_model
