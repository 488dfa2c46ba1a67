#include "gpu/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <optional>

#include "base/error.h"

namespace kvw::gpu {

namespace {

constexpr const char* kLibrary = "libcuda.so.1";

Error absent(const std::string& library, const std::string& why) {
  return Error(ErrorKind::usage, "no_gpu",
               "NVIDIA's driver is not here (" + library + ": " + why +
                   "), so nothing can be in the memory of a GPU: pass pages in host memory, or "
                   "install the driver (in a container: run it with the NVIDIA container runtime)");
}

std::string last_failure() {
  const char* text = ::dlerror();
  return text == nullptr ? "no reason given" : text;
}

void* symbol_of(void* library, const std::string& path, const char* name) {
  void* symbol = ::dlsym(library, name);
  if (symbol == nullptr)
    throw Error(ErrorKind::usage, "no_gpu",
                path + " has no " + name +
                    ": it is no NVIDIA driver of CUDA 11.4 or later; update the driver, or pass "
                    "pages in host memory");
  return symbol;
}

// What people can do about the errors that people meet.
const char* advice(CUresult result) {
  switch (result) {
    case kCudaOutOfMemory:
      return "leave some memory of the GPU free (vLLM: a lower gpu_memory_utilization)";
    case kCudaNotInitialized:
    case kCudaDeinitialized:
      return "the process forked after it used CUDA, or is ending: start processes by spawn";
    case kCudaNoDevice:
    case kCudaInvalidDevice:
      return "see CUDA_VISIBLE_DEVICES and nvidia-smi -L for the devices that this process has";
    case kCudaUnsupportedPtx:
      return "NVRTC is newer than the driver and does not know this GPU: update the driver, or "
             "install the NVRTC of the driver's version of CUDA (nvidia-smi shows it)";
    case kCudaNoBinaryForGpu:
    case kCudaInvalidImage:
      return "the kernels were compiled for another GPU, or by an NVRTC of a newer major version "
             "than "
             "the driver's: install the NVRTC of the driver's version of CUDA (nvidia-smi shows "
             "it)";
    case kCudaIllegalAddress:
      return "an address given in Regions is not memory of the engine; the process must be started "
             "again, its CUDA context is lost";
    case kCudaCaptureUnsupported:
    case kCudaCaptureInvalidated:
    case kCudaCaptureImplicit:
    case kCudaCapturedEvent:
      return "another thread captures a CUDA graph, beside which this cannot be done; it can be "
             "when that is over";
    default:
      return "nvidia-smi and the kernel's log (Xid) say whether the GPU is well";
  }
}

}  // namespace

std::string Driver::told(CUresult result) const {
  const char *name = nullptr, *text = nullptr;
  if (cuGetErrorName(result, &name) != kCudaSuccess || name == nullptr)
    return "CUDA error " + std::to_string(result);
  if (cuGetErrorString(result, &text) != kCudaSuccess || text == nullptr) return name;
  return std::string(name) + " (" + text + ")";
}

void Driver::check(CUresult result, const char* call) const {
  if (result == kCudaSuccess) return;
  const char* code = result == kCudaOutOfMemory ? "gpu_memory"
                     : of_a_capture(result)     ? "gpu_capture"
                                                : "gpu_error";
  const bool later = result == kCudaOutOfMemory || of_a_capture(result);
  throw Error(later ? ErrorKind::capacity : ErrorKind::storage, code,
              std::string(call) + ": " + told(result) + "; " + advice(result));
}

Driver load_driver(const std::string& library) {
  // Never closed: the driver has threads, and the engine has it open as well.
  void* opened = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) throw absent(library, last_failure());
  Driver made;
#define KVW_CUDA_LOAD(name, symbol, parameters) \
  made.name = reinterpret_cast<decltype(made.name)>(symbol_of(opened, library, #symbol));
  KVW_CUDA_FUNCTIONS(KVW_CUDA_LOAD)
#undef KVW_CUDA_LOAD
#define KVW_CUDA_LOAD(name, symbol, parameters) \
  made.name = reinterpret_cast<decltype(made.name)>(::dlsym(opened, #symbol));
  KVW_CUDA_NEWER_FUNCTIONS(KVW_CUDA_LOAD)
#undef KVW_CUDA_LOAD
  const CUresult result = made.cuInit(0);
  if (result != kCudaSuccess)
    throw absent(library, "cuInit: " + made.told(result) + "; " + advice(result));
  return made;
}

const Driver& driver() {
  static std::mutex mutex;
  static std::optional<Driver> loaded;
  const std::lock_guard lock(mutex);
  if (!loaded) {
    const char* named = std::getenv("KVW_CUDA_DRIVER");
    loaded = load_driver(named == nullptr || *named == '\0' ? kLibrary : named);
  }
  return *loaded;
}

}  // namespace kvw::gpu
