// The arena's mapping, registered with CUDA slab by slab in the background, so that copies of it
// need no second one on the host. Until a slab is registered, and where the driver refuses, copies
// go through a pinned buffer: slower, never wrong.
//
// Registering a slab holds a lock of the driver's that the engine's own calls wait for, so it rests
// after each for as long as that took.
//
// Undone in reverse order on destruction, before the mapping may go: whoever copies under it holds
// it. That takes as long as registering did, so one that is replaced stops at once and is undone in
// the background too, slab by slab by its successor, once no call holds it any more. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpu/device.h"

namespace kvw::gpu {

// Memory to register. By slabs, so that no page lies in two registrations; the driver takes no copy
// that does.
struct Registrable {
  std::byte* data = nullptr;
  size_t bytes = 0;
  size_t slab_bytes = 0;
  bool writable = true;
  // Whether a slab's memory is there: registering would otherwise allocate it.
  std::function<bool(size_t slab)> populated;
  std::shared_ptr<const void> keeper;  // holds the mapping
};

class Registration {
 public:
  // `before`: what this one replaces, or null.
  Registration(std::shared_ptr<const Device> device, Registrable memory,
               std::shared_ptr<Registration> before = nullptr);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // Registers and undoes nothing more in the background; what is registered stays so. False: the
  // slab that is under way takes longer than the time.
  bool stop(std::chrono::nanoseconds time);
  // Whether copies of these bytes, which must be of one slab, are asynchronous as they are.
  bool covers(const std::byte* data, size_t bytes) const;
  size_t registered_bytes() const;
  // Nothing is left to do: every slab is registered, or was refused.
  bool settled() const;
  // Why a slab was refused; empty if none was.
  std::string refusal() const;

 private:
  enum class State : uint8_t { waiting, registered, refused };

  std::byte* slab_at(size_t slab) const { return memory_.data + slab * memory_.slab_bytes; }
  size_t slab_size(size_t slab) const {
    return std::min(memory_.slab_bytes, memory_.bytes - slab * memory_.slab_bytes);
  }
  void work();
  void try_all();
  void stop_before();
  bool undo_before();
  // False: it is to end.
  bool rest(std::chrono::nanoseconds time);
  void try_slab(size_t slab);
  CUresult register_slab(size_t slab) const;
  void refuse(size_t slab, const std::string& why);
  bool undo_slab();  // once the thread has ended

  std::shared_ptr<const Device> device_;
  Registrable memory_;
  std::vector<std::atomic<State>> states_;
  mutable std::mutex mutex_;  // the next three
  std::string refusal_;
  bool ending_ = false;  // the thread is to end
  bool ended_ = false;   // and has
  std::condition_variable changed_;
  std::shared_ptr<Registration> before_;  // the thread's
  std::thread thread_;
};

}  // namespace kvw::gpu
