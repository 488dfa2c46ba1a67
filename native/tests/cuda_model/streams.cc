// The model's streams, each a queue and a thread that works it off when it likes, and the driver's
// calls of streams and events.
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>

#include "tests/cuda_model/calls.h"

namespace kvw::cuda_model {

namespace {

constexpr std::chrono::microseconds kLook{50};  // how often what is held or waited for is looked at
constexpr int kAnyDevice = -1;

const CUstream kLegacyStream = reinterpret_cast<CUstream>(1);   // CU_STREAM_LEGACY
const CUstream kThreadsStream = reinterpret_cast<CUstream>(2);  // CU_STREAM_PER_THREAD

void sleep_us(uint64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

Event& event_of(CUevent event) { return *reinterpret_cast<Event*>(event); }

bool is_legacy(CUstream stream) { return stream == nullptr || stream == kLegacyStream; }

// Of the default stream: whether it cannot be used.
bool is_captured(CUstream stream) {
  const CUstream named = is_legacy(stream) ? kLegacyStream : stream;
  return settings().capture != 0 && settings().captured == reinterpret_cast<uint64_t>(named);
}

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

void Stream::queue(std::function<void()> operation, std::chrono::nanoseconds takes) {
  Instant soonest;
  {
    const std::lock_guard lock(mutex_);
    soonest = soonest_ = std::max(soonest_, std::chrono::steady_clock::now()) + takes;
  }
  queue([soonest, operation = std::move(operation)] {
    operation();
    std::this_thread::sleep_until(soonest);
  });
}

Instant Stream::soonest() {
  const std::lock_guard lock(mutex_);
  return soonest_;
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

Stream& stream_of(CUstream stream) {
  static auto* null_stream = new Stream(kAnyDevice);
  if (is_legacy(stream)) return *null_stream;
  if (stream != kThreadsStream) return *reinterpret_cast<Stream*>(stream);
  thread_local auto* threads_own = new Stream(kAnyDevice);
  return *threads_own;
}

bool is_of_context(CUstream stream) {
  const int device = stream_of(stream).device();
  return device == kAnyDevice || device == current_device();
}

MODEL CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  if ((flags & ~kStreamNonBlocking) != 0) return kCudaInvalidValue;
  ++counts().streams_asked;
  while (settings().hold_stream_create != 0) std::this_thread::sleep_for(kLook);
  if (const uint64_t result = settings().stream_result; result != 0)
    return static_cast<CUresult>(result);
  *stream = reinterpret_cast<CUstream>(new Stream(current_device()));
  return kCudaSuccess;
}

MODEL CUresult cuStreamDestroy_v2(CUstream stream) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  delete reinterpret_cast<Stream*>(stream);
  return kCudaSuccess;
}

MODEL CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  if (const CUresult result = ready(); result != kCudaSuccess) return result;
  if (flags != 0) return kCudaInvalidValue;
  const std::shared_ptr<Recording> last = event_of(event).last;
  if (last != nullptr) stream_of(stream).queue([last] { wait_for(*last); });
  return kCudaSuccess;
}

MODEL CUresult cuStreamQuery(CUstream stream) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  return stream_of(stream).idle() ? kCudaSuccess : kCudaNotReady;
}

MODEL CUresult cuStreamIsCapturing(CUstream stream, int* status) {
  if (const CUresult result = ready(); result != kCudaSuccess) return result;
  if (is_legacy(stream) && is_captured(stream)) return kCudaCaptureImplicit;
  *status = is_captured(stream) ? 1 : kCaptureStatusNone;
  return kCudaSuccess;
}

MODEL CUresult cuStreamSynchronize(CUstream stream) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  stream_of(stream).drain();
  return kCudaSuccess;
}

MODEL CUresult cuEventCreate(CUevent* event, unsigned) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  *event = reinterpret_cast<CUevent>(new Event{current_device(), nullptr});
  ++counts().events;
  return kCudaSuccess;
}

MODEL CUresult cuEventDestroy_v2(CUevent event) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  delete &event_of(event);
  --counts().events;
  return kCudaSuccess;
}

MODEL CUresult cuEventRecord(CUevent event, CUstream stream) {
  if (const CUresult result = ready(); result != kCudaSuccess) return result;
  if (!is_of_context(stream)) return kCudaInvalidHandle;
  if (event_of(event).device != current_device()) return kCudaInvalidHandle;
  if (is_legacy(stream) && is_captured(stream)) {
    ++counts().broken_captures;
    return kCudaCaptureImplicit;
  }
  event_of(event).captured = is_captured(stream);
  if (event_of(event).captured) return kCudaSuccess;
  const auto recording = std::make_shared<Recording>();
  recording->soonest = stream_of(stream).soonest();
  event_of(event).last = recording;
  stream_of(stream).queue([recording] { recording->done.store(true, std::memory_order_release); });
  return kCudaSuccess;
}

MODEL CUresult cuEventQuery(CUevent event) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  if (event_of(event).captured) {
    ++counts().broken_captures;
    return kCudaCapturedEvent;
  }
  const std::shared_ptr<Recording> last = event_of(event).last;
  ++counts().looks;
  if (last != nullptr && std::chrono::steady_clock::now() < last->soonest) ++counts().early_looks;
  counts().look_slack_ns = static_cast<uint64_t>(::prctl(PR_GET_TIMERSLACK));
  return last == nullptr || last->done.load(std::memory_order_acquire) ? kCudaSuccess
                                                                       : kCudaNotReady;
}

MODEL CUresult cuEventSynchronize(CUevent event) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  const std::shared_ptr<Recording> last = event_of(event).last;
  if (last != nullptr) wait_for(*last);
  return kCudaSuccess;
}

}  // namespace kvw::cuda_model
