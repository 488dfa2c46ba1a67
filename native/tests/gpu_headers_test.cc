// What gpu/driver.h declares of the driver, against NVIDIA's own cuda.h. Built where one is found
// (cmake/tests.cmake).
#include <cuda.h>  // before ours: its macros then rename the same calls in both

#include <concepts>
#include <string>
#include <type_traits>

#include "gpu/driver.h"
#include "tests/check.h"

namespace kvw {
namespace {

template <class T>
concept Complete = requires { sizeof(T); };

// Whether a call passes both in the same way: values of one size, pointers to what has one.
template <class Theirs, class Ours>
constexpr bool alike() {
  if constexpr (std::is_pointer_v<Theirs> && std::is_pointer_v<Ours>) {
    using To = std::remove_pointer_t<Theirs>;
    using OursTo = std::remove_pointer_t<Ours>;
    if constexpr (std::is_void_v<To> || std::is_void_v<OursTo>)
      return std::is_void_v<To> && std::is_void_v<OursTo>;
    else if constexpr (Complete<To> && Complete<OursTo>)
      return sizeof(To) == sizeof(OursTo);
    else
      return Complete<To> == Complete<OursTo>;  // handles
  } else {
    return std::is_pointer_v<Theirs> == std::is_pointer_v<Ours> && sizeof(Theirs) == sizeof(Ours);
  }
}
static_assert(!alike<long, int>() && !alike<int*, long*>() && !alike<int, int*>() &&
              !alike<void*, int*>() && alike<unsigned, int>() && alike<const char**, char**>());

template <class Theirs, class Ours>
struct Calls;
template <class Result, class... Theirs, class OursResult, class... Ours>
struct Calls<Result (*)(Theirs...), OursResult (*)(Ours...)> {
  static constexpr bool same() {
    if constexpr (sizeof...(Theirs) != sizeof...(Ours))
      return false;
    else
      return (alike<Result, OursResult>() && ... && alike<Theirs, Ours>());
  }
};
static_assert(!Calls<int (*)(int), int (*)(int, int)>::same());

TEST(calls_have_the_parameters_that_the_header_gives_them) {
  std::string differ;
#define KVW_COMPARE(name, symbol, parameters)                           \
  if (!Calls<decltype(&::symbol), decltype(gpu::Driver::name)>::same()) \
    differ += std::string(differ.empty() ? "" : ", ") + #symbol;
  KVW_CUDA_FUNCTIONS(KVW_COMPARE)
#if CUDA_VERSION >= 13000
  KVW_CUDA_NEWER_FUNCTIONS(KVW_COMPARE)
#endif
#undef KVW_COMPARE
  CHECK_EQ(differ, "");
}

TEST(numbers_are_those_of_the_header) {
#define KVW_SAME(ours, theirs) \
  CHECK_EQ(static_cast<long long>(gpu::ours), static_cast<long long>(theirs))
  KVW_SAME(kCudaSuccess, CUDA_SUCCESS);
  KVW_SAME(kCudaInvalidValue, CUDA_ERROR_INVALID_VALUE);
  KVW_SAME(kCudaOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
  KVW_SAME(kCudaNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
  KVW_SAME(kCudaDeinitialized, CUDA_ERROR_DEINITIALIZED);
  KVW_SAME(kCudaNoDevice, CUDA_ERROR_NO_DEVICE);
  KVW_SAME(kCudaInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
  KVW_SAME(kCudaInvalidImage, CUDA_ERROR_INVALID_IMAGE);
  KVW_SAME(kCudaInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
  KVW_SAME(kCudaNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
  KVW_SAME(kCudaUnsupportedPtx, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
  KVW_SAME(kCudaInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
  KVW_SAME(kCudaNotFound, CUDA_ERROR_NOT_FOUND);
  KVW_SAME(kCudaNotReady, CUDA_ERROR_NOT_READY);
  KVW_SAME(kCudaIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
  KVW_SAME(kCudaHostMemoryAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  KVW_SAME(kCudaHostMemoryNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  KVW_SAME(kCudaNotPermitted, CUDA_ERROR_NOT_PERMITTED);
  KVW_SAME(kCudaNotSupported, CUDA_ERROR_NOT_SUPPORTED);
  KVW_SAME(kCudaCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  KVW_SAME(kCudaCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  KVW_SAME(kCudaCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  KVW_SAME(kCudaCapturedEvent, CUDA_ERROR_CAPTURED_EVENT);
  KVW_SAME(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
  KVW_SAME(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
  KVW_SAME(kHostAllocPortable, CU_MEMHOSTALLOC_PORTABLE);
  KVW_SAME(kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
  KVW_SAME(kHostRegisterReadOnly, CU_MEMHOSTREGISTER_READ_ONLY);
  KVW_SAME(kAttributeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  KVW_SAME(kAttributeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  KVW_SAME(kAttributeHostPageTables,
           CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
  KVW_SAME(kAttributeVirtualMemory, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  KVW_SAME(kAttributeSharesByFd, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  KVW_SAME(kAttributeReadOnlyRegister, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
  KVW_SAME(kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
  KVW_SAME(kPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
  KVW_SAME(kMemoryTypeHost, CU_MEMORYTYPE_HOST);
  KVW_SAME(kMemoryTypeDevice, CU_MEMORYTYPE_DEVICE);
  KVW_SAME(kAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
  KVW_SAME(kHandleFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  KVW_SAME(kLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE);
  KVW_SAME(kAccessRead, CU_MEM_ACCESS_FLAGS_PROT_READ);
  KVW_SAME(kAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  KVW_SAME(kGranularityRecommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
#if CUDA_VERSION >= 12080
  KVW_SAME(kSourceInStreamOrder, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
  KVW_SAME(kBesideKernels, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
#endif
  KVW_SAME(kCaptureModeGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
  KVW_SAME(kCaptureModeRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
  KVW_SAME(kCaptureStatusNone, CU_STREAM_CAPTURE_STATUS_NONE);
#undef KVW_SAME
}

TEST(structs_are_laid_out_as_in_the_header) {
  CHECK_EQ(sizeof(gpu::CUuuid), sizeof(::CUuuid));
  CHECK_EQ(sizeof(gpu::CUmemLocation), sizeof(::CUmemLocation));
  CHECK_EQ(sizeof(gpu::CUmemAllocationProp), sizeof(::CUmemAllocationProp));
  CHECK_EQ(sizeof(gpu::CUmemAccessDesc), sizeof(::CUmemAccessDesc));
  CHECK_EQ(sizeof(gpu::CUmemHandle), sizeof(::CUmemGenericAllocationHandle));
  CHECK_EQ(sizeof(gpu::CUdeviceptr), sizeof(::CUdeviceptr));
#define KVW_SAME_PLACE(type, ours, theirs) \
  CHECK_EQ(offsetof(gpu::type, ours), offsetof(::type, theirs))
  KVW_SAME_PLACE(CUmemLocation, type, type);
  KVW_SAME_PLACE(CUmemLocation, id, id);
  KVW_SAME_PLACE(CUmemAllocationProp, type, type);
  KVW_SAME_PLACE(CUmemAllocationProp, requested_handle_types, requestedHandleTypes);
  KVW_SAME_PLACE(CUmemAllocationProp, location, location);
  KVW_SAME_PLACE(CUmemAllocationProp, win32_handle_metadata, win32HandleMetaData);
  KVW_SAME_PLACE(CUmemAllocationProp, flags, allocFlags);
  KVW_SAME_PLACE(CUmemAccessDesc, location, location);
  KVW_SAME_PLACE(CUmemAccessDesc, flags, flags);
#if CUDA_VERSION >= 12080
  CHECK_EQ(sizeof(gpu::CUmemcpyAttributes), sizeof(::CUmemcpyAttributes));
  KVW_SAME_PLACE(CUmemcpyAttributes, source_order, srcAccessOrder);
  KVW_SAME_PLACE(CUmemcpyAttributes, from_hint, srcLocHint);
  KVW_SAME_PLACE(CUmemcpyAttributes, to_hint, dstLocHint);
  KVW_SAME_PLACE(CUmemcpyAttributes, flags, flags);
#endif
#undef KVW_SAME_PLACE
}

}  // namespace
}  // namespace kvw
