// A contract model of NVIDIA's driver, for tests on machines without a GPU: a library with the same
// symbols (gpu/driver.h), built as libcuda.so.1, that keeps its callers to the driver's contract
// and is as unhelpful as a device may be.
//
//  - Device memory is not readable at the addresses that callers get: only copies and kernels reach
//    it (at an alias), so that code which touches device memory by itself ends in SIGSEGV.
//  - A stream is a queue that a thread of its own works off, with random pauses between operations
//    and between the parts of a copy. Streams wait for each other through events alone, the null
//    stream included, so that a wait that was forgotten shows as wrong bytes.
//  - The default streams, by null or their numbers, wait for no other stream either.
//  - Asynchronous copies of host memory that is neither registered nor allocated here are made in
//    the call, as the driver makes them, and counted.
//  - Registering what is registered, writable where the mapping is not, or writable what is of a
//    file on a disk, and unregistering or freeing what a queued operation still uses, is refused or
//    counted as a violation.
//  - While "capture" is set, another thread captures a graph in the mode global: what is not merely
//    queued on a stream fails on every thread whose own mode is not relaxed, and is counted as a
//    capture that was broken. Stricter than the driver, which lets some of it pass.
//  - While "captured" is a stream's handle besides, it captures that one: an event recorded there
//    is part of the graph, and whoever looks at it breaks the capture. 1: it captures a blocking
//    stream, and whoever uses the default one breaks that. Only events, and asking, know of this.
//  - Contexts are retained and released: one that nobody holds, and none, is no thread's. Streams
//    and events belong to the device that they were made on, and are used under its context alone.
//  - Kernels are the project's own source, compiled for the host.
//  - Memory that is shared (cuMemCreate) is a file in memory, so that another process has it by its
//    descriptor, also after its maker's death. Sizes that are no whole granules, mappings of what
//    is not reserved or mapped already, parts of mappings, and foreign descriptors are refused;
//    what is mapped is memory of the device only once access was set, and copies write where it was
//    set for writing.
//
// What it does not model: time but that of copies (copy_us_per_mib), several devices' peer access,
// sticky errors of a lost context other than by kvw_model_set("lost", 1).
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "gpu/driver.h"

namespace kvw::cuda_model {

// Held across each fork from now on, so that a child finds what `mutex_of` guards whole and free.
template <std::mutex& (*mutex_of)()>
void hold_across_forks() {
  ::pthread_atfork([] { mutex_of().lock(); }, [] { mutex_of().unlock(); },
                   [] { mutex_of().unlock(); });
}

using gpu::CUdeviceptr;
using gpu::CUresult;

// What tests set; kvw_model_set by name. Environment at load: KVW_TEST_CUDA_<NAME>.
struct Settings {
  std::atomic<uint64_t> seed{1};
  std::atomic<uint64_t> pause_us{100};          // the longest before an operation or a part of one
  std::atomic<uint64_t> hold{0};                // 1: no stream begins anything
  std::atomic<uint64_t> hold_unregister{0};     // 1: unregistering waits
  std::atomic<uint64_t> hold_stream_create{0};  // 1: making a stream waits
  std::atomic<uint64_t> stream_result{0};       // what making a stream ends with, if not 0
  std::atomic<uint64_t> lost{0};                // 1: every call fails, as after an illegal address
  std::atomic<uint64_t> capture{0};             // 1: another thread captures a graph
  std::atomic<uint64_t> captured{0};            // and where: a stream's handle
  std::atomic<uint64_t> devices{1};
  std::atomic<uint64_t> first{0};  // the machine's number of the device that is ordinal 0 here
  std::atomic<uint64_t> device_bytes{uint64_t{512} << 20};  // of each device
  std::atomic<uint64_t> register_limit{UINT64_MAX};         // bytes that may be registered at once
  std::atomic<uint64_t> register_us{0};                     // that registering takes
  std::atomic<uint64_t> register_result{0};                 // what registering ends with, if not 0
  std::atomic<uint64_t> read_only_register{0};              // whether devices do; few on x86
  std::atomic<uint64_t> host_page_tables{0};                // whether devices use them (Grace)
  std::atomic<uint64_t> shares{1};                          // whether devices share by descriptors
  std::atomic<uint64_t> read_only_access{1};                // whether mappings may be read-only
  std::atomic<uint64_t> granule{2 << 20};                   // of memory that can be shared
  std::atomic<uint64_t> alloc_limit{UINT64_MAX};   // bytes that cuMemAlloc may give at once
  std::atomic<uint64_t> create_limit{UINT64_MAX};  // bytes that cuMemCreate may give at once
  std::atomic<uint64_t> compiler_newest{90};  // ten times the compute capability NVRTC knows last
  std::atomic<uint64_t> refuses_ptx{0};       // 1: NVRTC is newer than the driver
  std::atomic<uint64_t> batch_limit{UINT64_MAX};  // batches of copies that there is room for
  std::atomic<uint64_t> batch_result{0};          // what a batch of copies ends with, if not 0
  std::atomic<uint64_t> copy_us_per_mib{0};       // that copies take at least
};

// What tests read; kvw_model_count by name.
struct Counts {
  std::atomic<uint64_t> copies{0}, copied_bytes{0}, batches{0}, unpinned_copies{0}, launches{0},
      violations{0};
  std::atomic<uint64_t> registered_bytes{0}, registrations{0}, registers_asked{0},
      unregisters_asked{0}, streams_asked{0};
  std::atomic<uint64_t> device_bytes{0}, host_bytes{0};
  std::atomic<uint64_t> retains{0}, creates_asked{0};  // calls, of contexts and shared memory
  std::atomic<uint64_t> allocations{0}, frees{0};      // calls, of device and of pinned memory
  std::atomic<uint64_t> broken_captures{0};            // calls that broke another thread's
  std::atomic<uint64_t> busy_streams{0};               // with something under way now
  // Queries of events: all, and those before the time that the copies before the event take.
  std::atomic<uint64_t> looks{0}, early_looks{0};
  std::atomic<uint64_t> look_slack_ns{0};  // the timer slack of the thread of the last one
  std::atomic<uint64_t> streams{0}, events{0}, modules{0}, contexts{0};
  std::atomic<uint64_t> handles{0}, reserved_bytes{0}, mapped_bytes{0};  // of shared memory
};

// --- numbers.cc

Settings& settings();
Counts& counts();
// Says it on stderr and counts it.
void violation(const char* what);

// --- memory.cc

// Where an address of the device can be read; the address itself if it is none.
uint64_t alias(uint64_t address);
// Device memory of one allocation or shared mapping?
bool is_device(CUdeviceptr address, size_t bytes, bool writing = false);
int device_of(CUdeviceptr address);  // -1: no device's
CUresult allocate(int device, size_t bytes, CUdeviceptr* address);
CUresult free_device(CUdeviceptr address);
CUresult allocate_host(size_t bytes, void** address);
CUresult free_host(void* address);
CUresult register_host(void* address, size_t bytes, unsigned flags);
CUresult unregister_host(void* address);

// --- shared.cc: memory that processes share

// Where an address of a shared mapping can be read; the address itself if it is none.
uint64_t shared_alias(uint64_t address);
// Whether all of it is mapped, and access set: for writing, if `writing`.
bool is_shared(CUdeviceptr address, size_t bytes, bool writing);
int shared_device_of(CUdeviceptr address);  // -1: no mapping with access

// Whether a queued operation uses any of it. memory.cc
bool in_use(uint64_t address, size_t bytes);

enum class Pinned { no, partly, yes };
Pinned pinned(const void* address, size_t bytes);

// Memory that a queued operation uses: freeing or unregistering it meanwhile is a violation.
class Use {
 public:
  Use(uint64_t address, size_t bytes);
  ~Use();
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  uint64_t address_;
  size_t bytes_;
};

// --- streams.cc

using Instant = std::chrono::steady_clock::time_point;

// One recording of an event.
struct Recording {
  std::atomic<bool> done{false};
  Instant soonest;  // by the time that copies take
};

struct Event {
  int device;
  std::shared_ptr<Recording> last;  // null: never recorded, which counts as done
  bool captured = false;            // recorded last where a graph was captured
};

class Stream {
 public:
  explicit Stream(int device);
  int device() const { return device_; }
  ~Stream();  // after all that is queued
  void queue(std::function<void()> operation);
  // That takes its time, behind what is queued: it ends no sooner than that.
  void queue(std::function<void()> operation, std::chrono::nanoseconds takes);
  Instant soonest();  // when all that is queued may be done
  bool idle();
  void drain();
  // Pauses as the settings say.
  static void pause();

 private:
  void work();

  int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> operations_;
  bool busy_ = false, ending_ = false;
  Instant soonest_;
  std::thread thread_;
};

// Blocks until done.
void wait_for(const Recording& recording);

}  // namespace kvw::cuda_model
