// One GPU as a process of an engine uses it beside the engine: the device's primary context, which
// the engine's own frameworks use, the project's kernels, memory of both kinds, and movers that
// calls borrow.
//
// Thread-safe but for what a mover's borrower does with it. Nothing of it is a forked child's:
// there every destructor leaves the driver alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "gpu/driver.h"

namespace kvw::gpu {

class Mover;

// The ordinal of the device whose memory has the address. Throws Error usage "bad_device_memory" if
// none has, "no_gpu" where there is no driver.
int device_of(uint64_t address);

class Device {
 public:
  // Retains the context and loads the kernels. `image`: PTX or a cubin, or another text that the
  // driver takes; empty: no kernels, for who only copies. Throws Error as Driver::check, and usage
  // "no_gpu".
  Device(int ordinal, const std::string& image);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& cuda() const { return cuda_; }
  int ordinal() const { return ordinal_; }
  CUdevice handle() const { return device_; }
  // The same in every process, whatever CUDA_VISIBLE_DEVICES makes of ordinals there.
  CUuuid uuid() const;
  CUfunction gather() const { return gather_; }
  CUfunction scatter() const { return scatter_; }
  // Flags that registering memory needs that is mapped read-only; none: the device cannot.
  std::optional<unsigned> read_only_flags() const { return read_only_flags_; }
  bool forked() const;

  // A mover, back on destruction. Null: all are lent until the deadline (boot clock).
  using Borrowed = std::unique_ptr<Mover, std::function<void(Mover*)>>;
  Borrowed borrow(uint64_t deadline_ns);

  // Makes one mover, with its memory, so that the first call need not while an engine serves; where
  // there is no memory for it, the first call asks again. May wait for the device. Throws Error as
  // Driver::check, but "gpu_memory".
  void make_ready();

  // False: not until the deadline (boot clock). The event's stream is not held up. Null is done at
  // once. Blocks, and sleeps between looks. `mark`: pinned memory that is 0 until the device writes
  // to it, just before the event. It says when to ask the driver, which has a lock for that that
  // the engine's launches want too.
  bool wait(CUevent event, uint64_t deadline_ns, const std::atomic<uint64_t>* mark = nullptr) const;
  // For all of them; they have a moment also where the deadline is over: an event that was recorded
  // just now needs one to happen on a device with nothing to do.
  bool wait(const std::vector<CUevent>& events, uint64_t deadline_ns) const;

  // The device's context on this thread, beside what others capture, for as long as it lives.
  class Current {
   public:
    explicit Current(const Device& device);
    // For destructors: without it, where the driver does not let it.
    Current(const Device& device, std::nothrow_t) noexcept;
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Device& device_;
    BesideCaptures beside_;
    bool pushed_ = true;
  };

 private:
  static constexpr size_t kMovers = 4;  // calls at once; each has device and pinned memory

  void load_kernels(const std::string& image);
  void give_back(Mover* mover);

  const Driver& cuda_;
  int ordinal_;
  uint64_t forks_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction gather_ = nullptr, scatter_ = nullptr;
  std::optional<unsigned> read_only_flags_;
  std::mutex mutex_;
  std::condition_variable back_;
  size_t made_ = 0;
  std::vector<std::unique_ptr<Mover>> idle_;
};

// The device of this process that was published last and is there still, for who needs a context
// and no kernels for a moment: to retain one takes longer than what is done in it. Made where there
// is none, and gone again with its users. Throws Error as Device.
std::shared_ptr<const Device> device_at_hand(int ordinal);
void publish(const std::shared_ptr<const Device>& device);

// Memory of a device, or of the host and pinned. Grows by being made anew, so what was there is
// gone. Ends under the device's context by itself; the device must be there still.
template <bool kOnDevice>
class Memory {
 public:
  explicit Memory(const Device& device) : device_(device) {}
  ~Memory() { free(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  // At least so many bytes. Under the device's context. Throws Error capacity "gpu_memory".
  void need(size_t bytes);
  size_t bytes() const { return bytes_; }
  uint64_t address() const { return address_; }
  template <class T>
  T* as() const {
    static_assert(!kOnDevice, "device memory is not the host's to read");
    return reinterpret_cast<T*>(address_);  // NOLINT(performance-no-int-to-ptr): the driver's
  }

 private:
  void free();
  const Device& device_;
  uint64_t address_ = 0;
  size_t bytes_ = 0;
};

}  // namespace kvw::gpu
