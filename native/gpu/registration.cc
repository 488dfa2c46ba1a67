#include "gpu/registration.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/quiet_thread.h"

namespace kvw::gpu {

namespace {

// How often slabs are looked at that the daemon has not populated yet.
constexpr std::chrono::milliseconds kLook{100};

}  // namespace

Registration::Registration(std::shared_ptr<const Device> device, Registrable memory)
    : device_(std::move(device)),
      memory_(std::move(memory)),
      slice_bytes_(
          std::max(memory_.slab_bytes, kSliceBytes / memory_.slab_bytes * memory_.slab_bytes)),
      states_((memory_.bytes + slice_bytes_ - 1) / slice_bytes_) {
  thread_ = quiet_thread("kvw-register", [this] { work(); });
}

Registration::~Registration() {
  if (device_->forked()) {
    // The thread is the parent's; so is what it registered. Neither can be ended from here.
    ::new (&thread_) std::thread();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  ending_changed_.notify_all();
  thread_.join();
  undo();
}

bool Registration::covers(const std::byte* data, size_t bytes) const {
  if (data < memory_.data || data + bytes > memory_.data + memory_.bytes) return false;
  const size_t slice = static_cast<size_t>(data - memory_.data) / slice_bytes_;
  return states_[slice].load(std::memory_order_acquire) == State::registered;
}

size_t Registration::registered_bytes() const {
  size_t bytes = 0;
  for (size_t slice = 0; slice < states_.size(); ++slice)
    if (states_[slice].load(std::memory_order_acquire) == State::registered)
      bytes += slice_size(slice);
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
  std::unique_lock lock(mutex_);
  while (!ending_) {
    lock.unlock();
    const bool all = try_all();
    lock.lock();
    if (all) return;
    ending_changed_.wait_for(lock, kLook, [this] { return ending_; });
  }
}

// True: nothing is left to try.
bool Registration::try_all() {
  for (size_t slice = 0; slice < states_.size(); ++slice) {
    {
      const std::lock_guard lock(mutex_);
      if (ending_) return true;
    }
    if (states_[slice].load(std::memory_order_relaxed) == State::waiting && populated(slice))
      try_slice(slice);
  }
  return settled();
}

bool Registration::populated(size_t slice) const {
  const size_t begin = slice_at(slice) / memory_.slab_bytes;
  const size_t end = (slice_at(slice) + slice_size(slice)) / memory_.slab_bytes;
  for (size_t slab = begin; slab < end; ++slab)
    if (!memory_.populated(slab)) return false;
  return true;
}

void Registration::try_slice(size_t slice) {
  State made = State::refused;
  std::string why;
  if (!memory_.writable && !device_->registers_read_only()) {
    why = "this device registers no memory that is mapped read-only";
  } else {
    try {
      const Device::Current current(*device_);
      const unsigned flags = kHostRegisterPortable | (memory_.writable ? 0 : kHostRegisterReadOnly);
      device_->cuda().check(device_->cuda().cuMemHostRegister(memory_.data + slice_at(slice),
                                                              slice_size(slice), flags),
                            "cuMemHostRegister");
      made = State::registered;
    } catch (const Error& error) {
      why = error.what();
    }
  }
  states_[slice].store(made, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  if (made == State::refused) refusal_ = why;
}

void Registration::undo() {
  const Device::Current current(*device_, std::nothrow);
  for (size_t slice = states_.size(); slice-- > 0;)
    if (states_[slice].load(std::memory_order_relaxed) == State::registered)
      device_->cuda().cuMemHostUnregister(memory_.data + slice_at(slice));
}

}  // namespace kvw::gpu
