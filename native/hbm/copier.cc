#include "hbm/copier.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/keep.h"
#include "base/sequence_point.h"
#include "base/start_thread.h"
#include "copy/copy.h"
#include "gpu/shared_memory.h"

namespace kvw {

namespace {

constexpr uint64_t kStallNs = 30 * kSecondNs;  // far beyond what a batch takes on any bus
constexpr auto kEndWithin = std::chrono::seconds(5);

uint64_t bytes_of(const HbmPage& page) {
  return page.digests.size() * round_up(page.shard_bytes, kBlockBytes);
}

// What the thread has of the device, in the order in which it must go.
struct Device {
  Device(std::shared_ptr<gpu::Device> on, const HbmOptions& options)
      : gpu(std::move(on)), pool(gpu::SharedMemory::create(gpu, options.bytes)), bounce(*gpu) {
    const gpu::Device::Current current(*gpu);
    const gpu::Driver& cuda = gpu->cuda();
    bounce.need(HbmCopier::kBatchBytes);
    cuda.check(cuda.cuStreamCreate(&stream, gpu::kStreamNonBlocking), "cuStreamCreate");
    const gpu::CUresult made = cuda.cuEventCreate(&done, gpu::kEventDisableTiming);
    if (made != gpu::kCudaSuccess) cuda.cuStreamDestroy(stream);
    cuda.check(made, "cuEventCreate");
  }
  ~Device() {
    const gpu::Device::Current current(*gpu, std::nothrow);
    gpu->cuda().cuEventDestroy(done);
    gpu->cuda().cuStreamDestroy(stream);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void copy(std::vector<HbmPage>& batch);

  std::shared_ptr<gpu::Device> gpu;
  std::unique_ptr<gpu::SharedMemory> pool;
  gpu::Memory<false> bounce;
  gpu::CUstream stream = nullptr;
  gpu::CUevent done = nullptr;
};

void Device::copy(std::vector<HbmPage>& batch) {
  const gpu::Device::Current current(*gpu);
  const gpu::Driver& cuda = gpu->cuda();
  uint64_t bytes = 0, at = 0;
  for (const HbmPage& page : batch) bytes += bytes_of(page);
  bounce.need(bytes);
  for (HbmPage& page : batch) {
    const uint64_t stride = round_up(page.shard_bytes, kBlockBytes);
    std::byte* staged = bounce.as<std::byte>() + at;
    page.same = true;
    for (uint32_t shard = 0; shard < page.digests.size(); ++shard) {
      const Piece to{staged + shard * stride, page.shard_bytes};
      page.same = scatter_digest(std::span(&to, 1), page.from + shard * stride, page.key, shard) ==
                      page.digests[shard] &&
                  page.same;
    }
    if (page.same)
      cuda.check(
          cuda.cuMemcpyHtoDAsync(pool->address() + page.offset, staged, bytes_of(page), stream),
          "cuMemcpyHtoDAsync");
    at += bytes_of(page);
  }
  cuda.check(cuda.cuEventRecord(done, stream), "cuEventRecord");
  if (!gpu->wait(done, system_clock().boot_ns() + kStallNs))
    throw Error(ErrorKind::storage, "gpu_stalled",
                "device " + std::to_string(gpu->ordinal()) + " has not finished " +
                    std::to_string(batch.size()) + " pages in " +
                    std::to_string(kStallNs / kSecondNs) +
                    " s; see nvidia-smi and the kernel's log (Xid)");
}

}  // namespace

// Shared with the thread, which may outlive the copier.
struct HbmCopier::State {
  explicit State(const HbmOptions& given)
      : options(given), event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!event.valid()) throw storage_error("cannot make an event for the HBM tier", errno);
  }

  void run();
  std::unique_ptr<Device> open();
  bool copy(Device& device, std::vector<HbmPage> batch);
  void tell(const std::string& trouble, bool over);
  void ring() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(event.get(), &one, sizeof one);
  }
  bool rest(std::unique_lock<std::mutex>& lock, uint64_t ns) {
    changed.wait_for(lock, std::chrono::nanoseconds(ns), [this] { return stopping; });
    return !stopping;
  }

  HbmOptions options;
  Fd event;
  std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false, ended = false;
  std::vector<HbmPage> asked;
  News news;
};

// Null: there will be none.
std::unique_ptr<Device> HbmCopier::State::open() {
  // Kept while the device has no room: a context takes a second to make, and whoever shares the
  // device waits for it.
  std::shared_ptr<gpu::Device> gpu;
  for (;;) {
    try {
      if (gpu == nullptr) gpu = std::make_shared<gpu::Device>(options.device, "");
      auto made = std::make_unique<Device>(gpu, options);
      Pool pool{made->pool->bytes(), made->pool->address(), {}, made->pool->export_fd()};
      const gpu::CUuuid id = made->gpu->uuid();
      std::memcpy(pool.device.data(), id.bytes, pool.device.size());
      const std::lock_guard lock(mutex);
      news.pool = std::move(pool);
      ring();
      return made;
    } catch (const Error& error) {
      const bool later = error.kind() == ErrorKind::capacity;
      tell(error.what(), !later);
      std::unique_lock lock(mutex);
      // The pool of a daemon before goes when the last of its clients has found this one.
      if (!later || !rest(lock, options.retry_ns)) return nullptr;
    }
  }
}

void HbmCopier::State::tell(const std::string& trouble, bool over) {
  const std::lock_guard lock(mutex);
  news.trouble = trouble;
  news.over = over;
  ring();
}

// False: the device is lost, or may still be at it.
bool HbmCopier::State::copy(Device& device, std::vector<HbmPage> batch) {
  try {
    device.copy(batch);
  } catch (const Error& error) {
    tell(error.what(), true);
    return false;
  }
  const std::lock_guard lock(mutex);
  news.copied = std::move(batch);
  ring();
  return true;
}

void HbmCopier::State::run() {
  std::unique_ptr<Device> device = open();
  std::unique_lock lock(mutex);
  while (device != nullptr && !stopping) {
    changed.wait(lock, [this] { return stopping || !asked.empty(); });
    if (stopping) break;
    std::vector<HbmPage> batch = std::exchange(asked, {});
    lock.unlock();
    if (!copy(*device, std::move(batch))) {
      // The device may still read the pinned memory, and clients the pool: nobody's to free.
      keep_forever(std::exchange(device, nullptr));
    }
    lock.lock();
  }
  lock.unlock();
  device.reset();
  lock.lock();
  ended = true;
  changed.notify_all();
}

HbmCopier::HbmCopier(const HbmOptions& options) : state_(std::make_shared<State>(options)) {
  thread_ = start_thread("kvw-hbm", [state = state_] { state->run(); });
}

HbmCopier::~HbmCopier() {
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, kEndWithin, [this] { return state_->ended; });
  lock.unlock();
  if (ended)
    thread_.join();
  else
    thread_.detach();
}

int HbmCopier::event_fd() const { return state_->event.get(); }

HbmCopier::News HbmCopier::take() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(state_->event.get(), &count, sizeof count);
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->news, {});
}

void HbmCopier::submit(std::vector<HbmPage> batch) {
  const std::lock_guard lock(state_->mutex);
  state_->asked = std::move(batch);
  state_->changed.notify_all();
}

}  // namespace kvw
