#include "gpu/registration.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/start_thread.h"

namespace kvw::gpu {

namespace {

// How often slabs are looked at that the daemon has not populated yet.
constexpr std::chrono::milliseconds kLook{100};

}  // namespace

Registration::Registration(std::shared_ptr<const Device> device, Registrable memory,
                           std::shared_ptr<Registration> before)
    : device_(std::move(device)),
      memory_(std::move(memory)),
      states_((memory_.bytes + memory_.slab_bytes - 1) / memory_.slab_bytes),
      before_(std::move(before)) {
  thread_ = start_thread("kvw-register", [this] { work(); });
}

Registration::~Registration() {
  if (device_->forked()) {
    // The thread is the parent's; so is what it registered. Neither can be ended from here, and a
    // condition that the thread was waiting for would be waited for in its turn.
    ::new (&thread_) std::thread();
    ::new (&changed_) std::condition_variable();
    return;
  }
  if (thread_.joinable()) {  // not by its successor yet
    stop(std::chrono::nanoseconds(0));
    thread_.join();
  }
  while (undo_slab()) {
  }
}

bool Registration::covers(const std::byte* data, size_t bytes) const {
  if (data < memory_.data || data + bytes > memory_.data + memory_.bytes) return false;
  const size_t slab = static_cast<size_t>(data - memory_.data) / memory_.slab_bytes;
  return states_[slab].load(std::memory_order_acquire) == State::registered;
}

size_t Registration::registered_bytes() const {
  size_t bytes = 0;
  for (size_t slab = 0; slab < states_.size(); ++slab)
    if (states_[slab].load(std::memory_order_acquire) == State::registered)
      bytes += slab_size(slab);
  return bytes;
}

bool Registration::settled() const {
  return std::ranges::none_of(states_, [](const std::atomic<State>& state) {
    return state.load(std::memory_order_acquire) == State::waiting;
  });
}

std::string Registration::refusal() const {
  const std::lock_guard lock(mutex_);
  return refusal_;
}

void Registration::work() {
  stop_before();
  do {
    try_all();
    if (undo_before() && settled()) break;
  } while (rest(kLook));
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
}

bool Registration::rest(std::chrono::nanoseconds time) {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, time, [this] { return ending_; });
}

bool Registration::stop(std::chrono::nanoseconds time) {
  std::unique_lock lock(mutex_);
  ending_ = true;
  changed_.notify_all();
  return changed_.wait_for(lock, time, [this] { return ended_; });
}

// What is replaced registers nothing more, whoever holds it still.
void Registration::stop_before() {
  if (before_ == nullptr) return;
  before_->stop(std::chrono::nanoseconds(0));
  before_->thread_.join();
}

// True: it is gone. Calls that began under it hold it until they are over, and none of them is to
// pay for its end. Nobody else has it, so once this is alone with it, it stays so.
bool Registration::undo_before() {
  while (before_ != nullptr) {
    if (before_.use_count() > 1 || !rest(std::chrono::nanoseconds(0))) return false;
    const auto begun = std::chrono::steady_clock::now();
    if (!before_->undo_slab()) {
      std::shared_ptr<Registration> older = std::move(before_->before_);
      before_ = std::move(older);
    } else if (!rest(std::chrono::steady_clock::now() - begun)) {
      return false;
    }
  }
  return true;
}

void Registration::try_all() {
  for (size_t slab = 0; slab < states_.size(); ++slab) {
    undo_before();  // as soon as it can be: it is memory that stays pinned, and nobody's
    if (!rest(std::chrono::nanoseconds(0))) return;
    if (states_[slab].load(std::memory_order_relaxed) != State::waiting || !memory_.populated(slab))
      continue;
    const auto begun = std::chrono::steady_clock::now();
    try_slab(slab);
    if (!rest(std::chrono::steady_clock::now() - begun)) return;
  }
}

void Registration::try_slab(size_t slab) {
  if (!memory_.writable && !device_->read_only_flags())
    return refuse(slab, "this device registers no memory that is mapped read-only");
  try {
    const CUresult result = register_slab(slab);
    // A graph is being captured, beside which this cannot be done, or somebody else has registered
    // some of it: that will be over.
    if (of_a_capture(result) || result == kCudaHostMemoryAlreadyRegistered) return;
    if (result == kCudaInvalidValue)
      return refuse(slab, "cuMemHostRegister: " + device_->cuda().told(result) +
                              "; Linux lets nobody pin files of a disk: give the daemon an "
                              "--arena-dir on tmpfs");
    device_->cuda().check(result, "cuMemHostRegister");
    states_[slab].store(State::registered, std::memory_order_release);
  } catch (const Error& error) {
    refuse(slab, error.what());
  }
}

CUresult Registration::register_slab(size_t slab) const {
  const Device::Current current(*device_);
  const unsigned more = memory_.writable ? 0 : device_->read_only_flags().value_or(0);
  const unsigned flags = kHostRegisterPortable | more;
  return device_->cuda().cuMemHostRegister(slab_at(slab), slab_size(slab), flags);
}

void Registration::refuse(size_t slab, const std::string& why) {
  const std::lock_guard lock(mutex_);
  refusal_ = why;
  states_[slab].store(State::refused, std::memory_order_release);
}

// The last that is registered. False: none is.
bool Registration::undo_slab() {
  size_t slab = states_.size();
  while (slab > 0 && states_[slab - 1].load(std::memory_order_relaxed) != State::registered) --slab;
  if (slab-- == 0) return false;
  const Device::Current current(*device_, std::nothrow);
  device_->cuda().cuMemHostUnregister(slab_at(slab));
  states_[slab].store(State::waiting, std::memory_order_relaxed);
  return true;
}

}  // namespace kvw::gpu
