#include "gpu/device.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/keep.h"
#include "gpu/looks.h"
#include "gpu/mover.h"

namespace kvw::gpu {

namespace {

constexpr uint64_t kMomentNs = 1'000'000;
// Of an event behind a mark that was written: it is a microsecond away.
constexpr int kLooksWithoutSleep = 16;

uint64_t now_ns() { return system_clock().boot_ns(); }

void pause(uint64_t ns) {
  const timespec pause{static_cast<time_t>(ns / kSecondNs), static_cast<long>(ns % kSecondNs)};
  ::nanosleep(&pause, nullptr);
}

// This thread's sleeps end when they are to: by default the kernel adds up to 50 us.
class ExactSleeps {
 public:
  ExactSleeps() : before_(::prctl(PR_GET_TIMERSLACK)) { ::prctl(PR_SET_TIMERSLACK, 1000UL); }
  ~ExactSleeps() {
    if (before_ > 0) ::prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(before_));
  }
  ExactSleeps(const ExactSleeps&) = delete;
  ExactSleeps& operator=(const ExactSleeps&) = delete;

 private:
  int before_;
};

}  // namespace

int device_of(uint64_t address) {
  const Driver& cuda = driver();
  const BesideCaptures beside(cuda);
  unsigned type = 0;
  int ordinal = -1;
  const bool known =
      cuda.cuPointerGetAttribute(&type, kPointerMemoryType, address) == kCudaSuccess &&
      type == kMemoryTypeDevice &&
      cuda.cuPointerGetAttribute(&ordinal, kPointerDeviceOrdinal, address) == kCudaSuccess;
  if (!known)
    throw Error(ErrorKind::usage, "bad_device_memory",
                "address " + std::to_string(address) +
                    " is not in the memory of a GPU; give data_ptr() of a tensor on the device, or "
                    "pass pages in host memory as they are");
  return ordinal;
}

Device::Device(int ordinal, const std::string& image)
    : cuda_(driver()), ordinal_(ordinal), forks_(fork_count()) {
  const BesideCaptures beside(cuda_);
  cuda_.check(cuda_.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
  const auto has = [this](int attribute) {
    int value = 0;
    return cuda_.cuDeviceGetAttribute(&value, attribute, device_) == kCudaSuccess && value != 0;
  };
  if (has(kAttributeReadOnlyRegister))
    read_only_flags_ = kHostRegisterReadOnly;
  else if (has(kAttributeHostPageTables))
    read_only_flags_ = 0;  // no flag is needed there, and this one is refused
  cuda_.check(cuda_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    if (!image.empty()) load_kernels(image);
  } catch (...) {
    cuda_.cuDevicePrimaryCtxRelease(device_);
    throw;
  }
}

void Device::load_kernels(const std::string& image) {
  const Current current(*this);
  cuda_.check(cuda_.cuModuleLoadData(&module_, image.c_str()), "cuModuleLoadData");
  const CUresult result = [&] {
    const CUresult first = cuda_.cuModuleGetFunction(&gather_, module_, "kvw_gather");
    return first != kCudaSuccess ? first
                                 : cuda_.cuModuleGetFunction(&scatter_, module_, "kvw_scatter");
  }();
  if (result == kCudaSuccess) return;
  cuda_.cuModuleUnload(module_);
  cuda_.check(result, "cuModuleGetFunction");
}

Device::~Device() {
  if (forked()) {
    for (std::unique_ptr<Mover>& mover : idle_) keep_forever(std::move(mover));  // the parent's
    ::new (&back_) std::condition_variable();  // whose waiters are too: its end would wait for them
    return;
  }
  idle_.clear();
  const BesideCaptures beside(cuda_);
  {
    const Current current(*this, std::nothrow);
    if (module_ != nullptr) cuda_.cuModuleUnload(module_);
  }
  cuda_.cuDevicePrimaryCtxRelease(device_);
}

CUuuid Device::uuid() const {
  CUuuid found{};
  cuda_.check(cuda_.cuDeviceGetUuid(&found, device_), "cuDeviceGetUuid");
  return found;
}

bool Device::forked() const { return forks_ != fork_count(); }

Device::Borrowed Device::borrow(uint64_t deadline_ns) {
  const auto returning = [this](Mover* mover) { give_back(mover); };
  std::unique_lock lock(mutex_);
  while (idle_.empty() && made_ == kMovers) {
    const uint64_t now = now_ns();
    if (now >= deadline_ns) return {nullptr, returning};
    back_.wait_for(lock, std::chrono::nanoseconds(deadline_ns - now));
  }
  if (!idle_.empty()) {
    Mover* mover = idle_.back().release();
    idle_.pop_back();
    return {mover, returning};
  }
  ++made_;
  lock.unlock();  // the driver may wait for the device: nobody else's call is to wait with it
  try {
    return {std::make_unique<Mover>(*this).release(), returning};
  } catch (...) {
    lock.lock();
    --made_;
    lock.unlock();
    back_.notify_one();
    throw;
  }
}

void Device::make_ready() {
  try {
    borrow(now_ns())->take_memory();
  } catch (const Error& error) {
    if (error.code() != "gpu_memory") throw;
  }
}

void Device::give_back(Mover* mover) {
  std::unique_ptr<Mover> owned(mover);
  if (!owned->idle()) {
    // The device may still write to its memory: it is nobody's any more. Its place is not lent
    // again either, so that a device that hangs costs at most kMovers of them.
    keep_forever(std::move(owned));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(owned));
  }
  back_.notify_one();
}

bool Device::wait(CUevent event, uint64_t deadline_ns, const std::atomic<uint64_t>* mark) const {
  if (event == nullptr) return true;
  const Current current(*this);
  const auto marked = [mark] {
    return mark != nullptr && mark->load(std::memory_order_acquire) != 0;
  };
  std::optional<ExactSleeps> exact;
  Looks looks;
  int awake = 0;
  for (;;) {
    const uint64_t now = now_ns();
    const uint64_t left_ns = deadline_ns - std::min(deadline_ns, now);
    const uint64_t next_ns = std::min(looks.next_ns(now), left_ns);
    if (next_ns != 0 && !(marked() && awake++ < kLooksWithoutSleep)) {
      if (!exact) exact.emplace();
      pause(next_ns);
    }
    // That a device is lost only the driver knows: it is asked now and then without the mark too.
    if (mark != nullptr && !marked() && next_ns < std::min(left_ns, Looks::kLongestNs)) continue;
    const CUresult result = cuda_.cuEventQuery(event);
    if (result == kCudaSuccess) return true;
    // Beside a capture it cannot be said yet. An event that is part of one never comes to this.
    if (result != kCudaCaptureUnsupported && result != kCudaCaptureInvalidated &&
        result != kCudaNotReady)
      cuda_.check(result, "cuEventQuery");
    if (now_ns() >= deadline_ns) return false;
  }
}

bool Device::wait(const std::vector<CUevent>& events, uint64_t deadline_ns) const {
  if (events.empty()) return true;
  const uint64_t end_ns = std::max(deadline_ns, now_ns() + kMomentNs);
  return std::ranges::all_of(events, [&](CUevent event) { return wait(event, end_ns); });
}

Device::Current::Current(const Device& device) : device_(device), beside_(device.cuda_) {
  device_.cuda_.check(device_.cuda_.cuCtxPushCurrent(device_.context_), "cuCtxPushCurrent");
}

Device::Current::Current(const Device& device, std::nothrow_t) noexcept
    : device_(device),
      beside_(device.cuda_),
      pushed_(device.cuda_.cuCtxPushCurrent(device.context_) == kCudaSuccess) {}

Device::Current::~Current() {
  if (pushed_) device_.cuda_.cuCtxPopCurrent(nullptr);
}

namespace {

struct AtHand {
  std::mutex mutex;
  std::map<int, std::weak_ptr<const Device>> devices;  // by ordinal
};

AtHand& at_hand() {
  static auto* all = new AtHand();  // never destroyed: destructors of other threads' still ask
  return *all;
}

}  // namespace

void publish(const std::shared_ptr<const Device>& device) {
  AtHand& all = at_hand();
  const std::lock_guard lock(all.mutex);
  all.devices[device->ordinal()] = device;
}

std::shared_ptr<const Device> device_at_hand(int ordinal) {
  {
    AtHand& all = at_hand();
    const std::lock_guard lock(all.mutex);
    const auto found = all.devices.find(ordinal);
    if (found != all.devices.end()) {
      auto device = found->second.lock();
      if (device != nullptr && !device->forked()) return device;
    }
  }
  return std::make_shared<const Device>(ordinal, "");
}

template <bool kOnDevice>
void Memory<kOnDevice>::need(size_t bytes) {
  if (bytes <= bytes_) return;
  free();
  const Driver& cuda = device_.cuda();
  if constexpr (kOnDevice) {
    CUdeviceptr made = 0;
    cuda.check(cuda.cuMemAlloc(&made, bytes), "cuMemAlloc");
    address_ = made;
  } else {
    void* made = nullptr;
    cuda.check(cuda.cuMemHostAlloc(&made, bytes, kHostAllocPortable), "cuMemHostAlloc");
    address_ = reinterpret_cast<uint64_t>(made);
  }
  bytes_ = bytes;
}

template <bool kOnDevice>
void Memory<kOnDevice>::free() {
  if (address_ == 0 || device_.forked()) return;
  const Device::Current current(device_, std::nothrow);  // whoever ends has none, mostly
  if constexpr (kOnDevice)
    device_.cuda().cuMemFree(address_);
  else
    device_.cuda().cuMemFreeHost(as<void>());
  address_ = 0;
  bytes_ = 0;
}

template class Memory<true>;
template class Memory<false>;

}  // namespace kvw::gpu
