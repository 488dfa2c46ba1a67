// The driver's calls of memory, copies and pointers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <tuple>
#include <utility>

#include "tests/cuda_model/calls.h"

namespace kvw::cuda_model {

namespace {

constexpr size_t kPartBytes = 64 << 10;  // copies pause between parts

// A word, which somebody may watch.
void copy_word(uint64_t to, uint64_t from) {
  const uint64_t word = *reinterpret_cast<const uint64_t*>(alias(from));
  std::atomic_ref(*reinterpret_cast<uint64_t*>(alias(to))).store(word, std::memory_order_release);
}

// In parts, with pauses: whoever looks early sees some of it.
void copy_in_parts(uint64_t to, uint64_t from, size_t bytes) {
  if (bytes == sizeof(uint64_t) && (to | from) % bytes == 0) return copy_word(to, from);
  for (size_t at = 0; at < bytes; at += kPartBytes) {
    std::memcpy(reinterpret_cast<void*>(alias(to + at)),
                reinterpret_cast<const void*>(alias(from + at)), std::min(kPartBytes, bytes - at));
    Stream::pause();
  }
}

CUresult queue_copy(uint64_t to, uint64_t from, size_t bytes, CUstream stream) {
  auto uses = std::make_shared<std::pair<Use, Use>>(std::piecewise_construct,
                                                    std::forward_as_tuple(to, bytes),
                                                    std::forward_as_tuple(from, bytes));
  ++counts().copies;
  counts().copied_bytes += bytes;
  const std::chrono::nanoseconds takes(settings().copy_us_per_mib * 1000 * bytes >> 20);
  stream_of(stream).queue(
      [=]() mutable {
        copy_in_parts(to, from, bytes);
        uses.reset();
      },
      takes);
  return kCudaSuccess;
}

// Between host and device: asynchronous from pinned memory alone.
CUresult host_copy(const void* host, CUdeviceptr device, size_t bytes, bool to_device,
                   CUstream stream) {
  if (const CUresult result = ready(); result != kCudaSuccess) return result;
  if (!is_of_context(stream)) return kCudaInvalidHandle;
  if (bytes == 0) return kCudaSuccess;
  if (!is_device(device, bytes, to_device)) return kCudaInvalidValue;
  const auto address = reinterpret_cast<uint64_t>(host);
  const Pinned how = pinned(host, bytes);
  if (how == Pinned::partly) return kCudaInvalidValue;
  if (const CUresult result = how == Pinned::no ? beside_captures() : kCudaSuccess;
      result != kCudaSuccess)
    return result;
  queue_copy(to_device ? device : address, to_device ? address : device, bytes, stream);
  if (how == Pinned::no) {
    ++counts().unpinned_copies;
    stream_of(stream).drain();
  }
  return kCudaSuccess;
}

}  // namespace

// Bytes of device memory, for tests: at once, and not in the order of any stream.
MODEL void kvw_model_peek(CUdeviceptr address, void* to, size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(alias(address)), bytes);
}
MODEL void kvw_model_poke(CUdeviceptr address, const void* from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(alias(address)), from, bytes);
}

MODEL CUresult cuPointerGetAttribute(void* value, int attribute, CUdeviceptr pointer) {
  if (const CUresult result = beside_captures(); result != kCudaSuccess) return result;
  const int device = device_of(pointer);
  const bool host = device < 0 && pinned(reinterpret_cast<void*>(pointer), 1) == Pinned::yes;
  if (device < 0 && !host) return kCudaInvalidValue;
  if (attribute == kPointerMemoryType)
    *static_cast<unsigned*>(value) = host ? kMemoryTypeHost : kMemoryTypeDevice;
  else if (attribute == kPointerDeviceOrdinal)
    *static_cast<int*>(value) = std::max(device, 0);
  else
    return kCudaInvalidValue;
  return kCudaSuccess;
}

MODEL CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  return allocate(current_device(), bytes, pointer);
}

MODEL CUresult cuMemFree_v2(CUdeviceptr pointer) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  return free_device(pointer);
}

MODEL CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  return allocate_host(bytes, pointer);
}

MODEL CUresult cuMemFreeHost(void* pointer) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  return free_host(pointer);
}

MODEL CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned flags) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  std::this_thread::sleep_for(std::chrono::microseconds(settings().register_us));
  return register_host(pointer, bytes, flags);
}

MODEL CUresult cuMemHostUnregister(void* pointer) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  ++counts().unregisters_asked;
  while (settings().hold_unregister != 0)
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  return unregister_host(pointer);
}

MODEL CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes,
                                    CUstream stream) {
  return host_copy(from, to, bytes, true, stream);
}

MODEL CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return host_copy(to, from, bytes, false, stream);
}

// The last first: no copy of a batch may count on another.
MODEL CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes,
                                     size_t count, CUmemcpyAttributes* attributes,
                                     size_t* first_copies, size_t attribute_count,
                                     CUstream stream) {
  if (const uint64_t result = settings().batch_result; result != 0)
    return static_cast<CUresult>(result);
  if (count == 0 || attribute_count != 1 || first_copies[0] != 0 || stream == nullptr ||
      attributes->source_order != gpu::kSourceInStreamOrder)
    return kCudaInvalidValue;
  if (counts().batches >= settings().batch_limit) return kCudaOutOfMemory;
  ++counts().batches;
  for (size_t i = count; i-- > 0;) {
    const bool to_device = device_of(to[i]) >= 0;
    const CUresult result = host_copy(reinterpret_cast<const void*>(to_device ? from[i] : to[i]),
                                      to_device ? to[i] : from[i], bytes[i], to_device, stream);
    if (result != kCudaSuccess) return result;
  }
  return kCudaSuccess;
}

MODEL CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                    CUstream stream) {
  if (const CUresult result = ready(); result != kCudaSuccess) return result;
  if (!is_of_context(stream)) return kCudaInvalidHandle;
  if (bytes == 0) return kCudaSuccess;
  if (!is_device(to, bytes, true) || !is_device(from, bytes)) return kCudaInvalidValue;
  return queue_copy(to, from, bytes, stream);
}

}  // namespace kvw::cuda_model
