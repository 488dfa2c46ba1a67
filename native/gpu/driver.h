// NVIDIA's driver, loaded at run time: nothing of CUDA is needed to build or to start, and where
// there is no driver only calls with device memory say so.
//
// Types, prototypes and numbers are declared here as NVIDIA's public "CUDA Driver API" reference
// has them (docs.nvidia.com/cuda/cuda-driver-api; cuda.h maps some names to symbols with a version,
// such as cuMemAlloc_v2: the second column). Only what is used.
// Stateless once loaded; thread-safe as the driver is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvw::gpu {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUmemHandle = unsigned long long;  // CUmemGenericAllocationHandle

struct CUuuid {
  char bytes[16];
};
struct CUmemLocation {
  int type, id;
};
struct CUmemAllocationProp {
  int type, requested_handle_types;
  CUmemLocation location;
  void* win32_handle_metadata;
  struct {
    unsigned char compression, gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
struct CUmemcpyAttributes {
  int source_order;
  CUmemLocation from_hint, to_hint;
  unsigned flags;
};
static_assert(sizeof(CUmemAllocationProp) == 32 && sizeof(CUmemAccessDesc) == 12 &&
              sizeof(CUmemcpyAttributes) == 24);

inline constexpr CUresult kCudaSuccess = 0;
inline constexpr CUresult kCudaInvalidValue = 1;
inline constexpr CUresult kCudaOutOfMemory = 2;
inline constexpr CUresult kCudaNotInitialized = 3;
inline constexpr CUresult kCudaDeinitialized = 4;
inline constexpr CUresult kCudaNoDevice = 100;
inline constexpr CUresult kCudaInvalidDevice = 101;
inline constexpr CUresult kCudaInvalidImage = 200;
inline constexpr CUresult kCudaInvalidContext = 201;
inline constexpr CUresult kCudaNoBinaryForGpu = 209;
inline constexpr CUresult kCudaUnsupportedPtx = 222;  // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
inline constexpr CUresult kCudaInvalidHandle = 400;
inline constexpr CUresult kCudaNotFound = 500;
inline constexpr CUresult kCudaNotReady = 600;
inline constexpr CUresult kCudaIllegalAddress = 700;
inline constexpr CUresult kCudaHostMemoryAlreadyRegistered = 712;
inline constexpr CUresult kCudaHostMemoryNotRegistered = 713;
inline constexpr CUresult kCudaNotPermitted = 800;
inline constexpr CUresult kCudaNotSupported = 801;
inline constexpr CUresult kCudaCaptureUnsupported = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
inline constexpr CUresult kCudaCaptureInvalidated = 901;  // ..._INVALIDATED
inline constexpr CUresult kCudaCaptureImplicit = 906;     // ..._IMPLICIT
inline constexpr CUresult kCudaCapturedEvent = 907;       // CUDA_ERROR_CAPTURED_EVENT

inline constexpr unsigned kStreamNonBlocking = 1;     // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventDisableTiming = 2;    // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned kHostAllocPortable = 1;     // CU_MEMHOSTALLOC_PORTABLE
inline constexpr unsigned kHostRegisterPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE
inline constexpr unsigned kHostRegisterReadOnly = 8;  // CU_MEMHOSTREGISTER_READ_ONLY
inline constexpr int kAttributeCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...
inline constexpr int kAttributeCapabilityMinor = 76;  // ..._MINOR
inline constexpr int kAttributeHostPageTables = 100;  // ..._USES_HOST_PAGE_TABLES
inline constexpr int kAttributeVirtualMemory = 102;   // ..._VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
inline constexpr int kAttributeSharesByFd = 103;  // ..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
inline constexpr int kAttributeReadOnlyRegister = 113;  // ..._READ_ONLY_HOST_REGISTER_SUPPORTED
inline constexpr int kPointerMemoryType = 2;            // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
inline constexpr int kPointerDeviceOrdinal = 9;         // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
inline constexpr unsigned kMemoryTypeHost = 1;          // CU_MEMORYTYPE_HOST
inline constexpr unsigned kMemoryTypeDevice = 2;        // CU_MEMORYTYPE_DEVICE
inline constexpr int kAllocationPinned = 1;             // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kHandleFd = 1;                     // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr int kLocationDevice = 1;               // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kAccessRead = 1;                   // CU_MEM_ACCESS_FLAGS_PROT_READ
inline constexpr int kAccessReadWrite = 3;              // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
inline constexpr int kGranularityRecommended = 1;       // CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
inline constexpr int kSourceInStreamOrder = 1;          // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
inline constexpr unsigned kBesideKernels = 1;  // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
inline constexpr int kCaptureModeGlobal = 0;   // CU_STREAM_CAPTURE_MODE_GLOBAL
inline constexpr int kCaptureModeRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr int kCaptureStatusNone = 0;   // CU_STREAM_CAPTURE_STATUS_NONE

// name, symbol in the library, parameters
#define KVW_CUDA_FUNCTIONS(X)                                                                      \
  X(cuInit, cuInit, (unsigned flags))                                                              \
  X(cuDriverGetVersion, cuDriverGetVersion, (int* version))                                        \
  X(cuGetErrorName, cuGetErrorName, (CUresult error, const char** name))                           \
  X(cuGetErrorString, cuGetErrorString, (CUresult error, const char** text))                       \
  X(cuDeviceGetCount, cuDeviceGetCount, (int* count))                                              \
  X(cuDeviceGet, cuDeviceGet, (CUdevice * device, int ordinal))                                    \
  X(cuDeviceGetName, cuDeviceGetName, (char* name, int bytes, CUdevice device))                    \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute, (int* value, int attribute, CUdevice device))      \
  X(cuDeviceGetUuid, cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice device))                         \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))    \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                    \
  X(cuCtxGetCurrent, cuCtxGetCurrent, (CUcontext * context))                                       \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext context))                                    \
  X(cuCtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext * context))                                    \
  X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int* mode))             \
  X(cuPointerGetAttribute, cuPointerGetAttribute,                                                  \
    (void* value, int attribute, CUdeviceptr pointer))                                             \
  X(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr * pointer, size_t bytes))                              \
  X(cuMemFree, cuMemFree_v2, (CUdeviceptr pointer))                                                \
  X(cuMemHostAlloc, cuMemHostAlloc, (void** pointer, size_t bytes, unsigned flags))                \
  X(cuMemFreeHost, cuMemFreeHost, (void* pointer))                                                 \
  X(cuMemHostRegister, cuMemHostRegister_v2, (void* pointer, size_t bytes, unsigned flags))        \
  X(cuMemHostUnregister, cuMemHostUnregister, (void* pointer))                                     \
  X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                                       \
    (CUdeviceptr to, const void* from, size_t bytes, CUstream stream))                             \
  X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2,                                                       \
    (void* to, CUdeviceptr from, size_t bytes, CUstream stream))                                   \
  X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2,                                                       \
    (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                             \
  X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity,                                  \
    (size_t* bytes, const CUmemAllocationProp* properties, int option))                            \
  X(cuMemCreate, cuMemCreate,                                                                      \
    (CUmemHandle * handle, size_t bytes, const CUmemAllocationProp* properties,                    \
     unsigned long long flags))                                                                    \
  X(cuMemRelease, cuMemRelease, (CUmemHandle handle))                                              \
  X(cuMemExportToShareableHandle, cuMemExportToShareableHandle,                                    \
    (void* shareable, CUmemHandle handle, int type, unsigned long long flags))                     \
  X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle,                                \
    (CUmemHandle * handle, void* shareable, int type))                                             \
  X(cuMemAddressReserve, cuMemAddressReserve,                                                      \
    (CUdeviceptr * pointer, size_t bytes, size_t alignment, CUdeviceptr wish,                      \
     unsigned long long flags))                                                                    \
  X(cuMemAddressFree, cuMemAddressFree, (CUdeviceptr pointer, size_t bytes))                       \
  X(cuMemMap, cuMemMap,                                                                            \
    (CUdeviceptr pointer, size_t bytes, size_t offset, CUmemHandle handle,                         \
     unsigned long long flags))                                                                    \
  X(cuMemUnmap, cuMemUnmap, (CUdeviceptr pointer, size_t bytes))                                   \
  X(cuMemSetAccess, cuMemSetAccess,                                                                \
    (CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc* access, size_t count))              \
  X(cuStreamCreate, cuStreamCreate, (CUstream * stream, unsigned flags))                           \
  X(cuStreamDestroy, cuStreamDestroy_v2, (CUstream stream))                                        \
  X(cuStreamWaitEvent, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))        \
  X(cuStreamQuery, cuStreamQuery, (CUstream stream))                                               \
  X(cuStreamIsCapturing, cuStreamIsCapturing, (CUstream stream, int* status))                      \
  X(cuEventCreate, cuEventCreate, (CUevent * event, unsigned flags))                               \
  X(cuEventDestroy, cuEventDestroy_v2, (CUevent event))                                            \
  X(cuEventRecord, cuEventRecord, (CUevent event, CUstream stream))                                \
  X(cuEventQuery, cuEventQuery, (CUevent event))                                                   \
  X(cuEventSynchronize, cuEventSynchronize, (CUevent event))                                       \
  X(cuModuleLoadData, cuModuleLoadData, (CUmodule * module, const void* image))                    \
  X(cuModuleUnload, cuModuleUnload, (CUmodule module))                                             \
  X(cuModuleGetFunction, cuModuleGetFunction,                                                      \
    (CUfunction * function, CUmodule module, const char* name))                                    \
  X(cuLaunchKernel, cuLaunchKernel,                                                                \
    (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,     \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** arguments, \
     void** extra))

// Likewise, of calls that older drivers lack: null there. cuMemcpyBatchAsync is of CUDA 13.0; a
// function of that name in 12.8 and 12.9 has one parameter more.
#define KVW_CUDA_NEWER_FUNCTIONS(X)                                                \
  X(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2,                                     \
    (CUdeviceptr * to, CUdeviceptr * from, size_t* bytes, size_t count,            \
     CUmemcpyAttributes* attributes, size_t* first_copies, size_t attribute_count, \
     CUstream stream))

// Of a call that cannot be made while another thread captures a graph, and can be when that is
// over.
constexpr bool of_a_capture(CUresult result) {
  return result == kCudaCaptureUnsupported || result == kCudaCaptureInvalidated ||
         result == kCudaCaptureImplicit || result == kCudaCapturedEvent;
}

struct Driver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): parameters are a list in parentheses
#define KVW_CUDA_MEMBER(name, symbol, parameters) CUresult(*name) parameters = nullptr;
  KVW_CUDA_FUNCTIONS(KVW_CUDA_MEMBER)
  KVW_CUDA_NEWER_FUNCTIONS(KVW_CUDA_MEMBER)
#undef KVW_CUDA_MEMBER

  // Throws what `result` of the call named is: Error capacity "gpu_memory" and "gpu_capture" (it
  // can be made when a capture of another thread's is over), storage "gpu_error".
  void check(CUresult result, const char* call) const;
  // "CUDA_ERROR_NOT_READY (device not ready)"
  std::string told(CUresult result) const;
};

// The process's driver, loaded and initialised by the first call: libcuda.so.1, or the library that
// KVW_CUDA_DRIVER names (tests). Throws Error usage "no_gpu" that says what is missing; asked
// again, it tries again.
const Driver& driver();

// This thread's calls beside a graph that another thread captures, for as long as it lives. Engines
// capture in the mode (global) in which any call of the process that might wait for the device
// fails with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, and breaks the capture, unless its thread has
// said that it has nothing to do with it (relaxed). Everything of ours says so.
class BesideCaptures {
 public:
  explicit BesideCaptures(const Driver& cuda) noexcept : cuda_(cuda) { exchange(); }
  ~BesideCaptures() { exchange(); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  void exchange() noexcept { cuda_.cuThreadExchangeStreamCaptureMode(&mode_); }
  const Driver& cuda_;
  int mode_ = kCaptureModeRelaxed;  // the thread's own, while this has its place
};

// Loads and initialises a library. The same errors.
Driver load_driver(const std::string& library);

}  // namespace kvw::gpu
