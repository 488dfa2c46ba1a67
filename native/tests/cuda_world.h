// The contract model of CUDA's driver (tests/cuda_model), in place of the driver of this process,
// and what tests want of it.
#pragma once

#include <dlfcn.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "gpu/driver.h"
#include "tests/check.h"

namespace kvw {

// A file without a name where tests are built, or what started them is: on a disk, or not. The
// caller closes it.
struct FileHere {
  FileHere() {
    std::string name = "./kvw-test-XXXXXX";
    descriptor = ::mkstemp(name.data());
    CHECK(descriptor >= 0);
    ::unlink(name.c_str());
    struct statfs at{};
    CHECK_EQ(::fstatfs(descriptor, &at), 0);
    on_tmpfs = at.f_type == TMPFS_MAGIC;
  }
  int descriptor = -1;
  bool on_tmpfs = false;
};

// The model, which the seam loads too: set before anybody asks for the driver.
class CudaModel {
 public:
  CudaModel() {
    ::setenv("KVW_CUDA_DRIVER", KVW_CUDA_MODEL, 1);
    library_ = ::dlopen(KVW_CUDA_MODEL, RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw std::runtime_error(::dlerror());
    set("seed", check::run().seed);
  }
  ~CudaModel() {
    for (const char* name :
         {"hold", "hold_unregister", "hold_stream_create", "stream_result", "lost", "first",
          "capture", "captured", "register_us", "register_result", "read_only_register",
          "host_page_tables", "batch_result", "copy_us_per_mib"})
      set(name, 0);
    for (const char* name : {"register_limit", "batch_limit", "create_limit", "alloc_limit"})
      set(name, UINT64_MAX);
    for (const char* name : {"devices", "shares", "read_only_access"}) set(name, 1);
    set("granule", 2 << 20);
  }
  CudaModel(const CudaModel&) = delete;
  CudaModel& operator=(const CudaModel&) = delete;

  void set(const char* name, uint64_t value) const {
    at<void (*)(const char*, uint64_t)>("kvw_model_set")(name, value);
  }
  uint64_t count(const char* name) const {
    return at<uint64_t (*)(const char*)>("kvw_model_count")(name);
  }
  void peek(gpu::CUdeviceptr address, void* to, size_t bytes) const {
    at<void (*)(gpu::CUdeviceptr, void*, size_t)>("kvw_model_peek")(address, to, bytes);
  }
  void poke(gpu::CUdeviceptr address, const void* from, size_t bytes) const {
    at<void (*)(gpu::CUdeviceptr, const void*, size_t)>("kvw_model_poke")(address, from, bytes);
  }

 private:
  template <class F>
  F at(const char* name) const {
    return reinterpret_cast<F>(::dlsym(library_, name));
  }
  void* library_;
};

}  // namespace kvw
