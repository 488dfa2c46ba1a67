// The arena's mapping, registered with CUDA slice by slice in the background, so that copies of it
// need no second one on the host. Until a slice is registered, and where the driver refuses, copies
// go through a pinned buffer: slower, never wrong.
//
// Undone in reverse order on destruction, before the mapping may go: whoever copies under it holds
// it. Thread-safe.
#pragma once

#include <atomic>
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

// Memory to register. Slices are whole slabs, so that no page lies in two of them; the driver takes
// no copy that does.
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
  static constexpr size_t kSliceBytes = size_t{1} << 30;  // at most, unless a slab is larger

  Registration(std::shared_ptr<const Device> device, Registrable memory);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // Whether copies of these bytes, which must be of one slab, are asynchronous as they are.
  bool covers(const std::byte* data, size_t bytes) const;
  size_t registered_bytes() const;
  // Nothing is left to do: every slice is registered, or was refused.
  bool settled() const;
  // Why a slice was refused; empty if none was.
  std::string refusal() const;

 private:
  enum class State : uint8_t { waiting, registered, refused };

  size_t slice_at(size_t slice) const { return slice * slice_bytes_; }
  size_t slice_size(size_t slice) const {
    return std::min(slice_bytes_, memory_.bytes - slice_at(slice));
  }
  void work();
  bool try_all();
  bool populated(size_t slice) const;
  void try_slice(size_t slice);
  void undo();

  std::shared_ptr<const Device> device_;
  Registrable memory_;
  size_t slice_bytes_;
  std::vector<std::atomic<State>> states_;
  mutable std::mutex mutex_;  // refusal_, ending_
  std::condition_variable ending_changed_;
  std::string refusal_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace kvw::gpu
