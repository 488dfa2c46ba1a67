// The driver's calls of errors, devices, contexts and threads' modes beside captures.
#include <array>
#include <cstdio>
#include <utility>

#include "tests/cuda_model/calls.h"

namespace kvw::cuda_model {

namespace {

// As the driver: a context for a thread is the top of its stack.
thread_local std::vector<CUcontext> g_contexts;

thread_local int g_capture_mode = kCaptureModeGlobal;

constexpr int kMostDevices = 8;
std::array<std::atomic<int>, kMostDevices> g_retained;

CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device + 1));
}

int device_of_context(CUcontext context) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
}

bool is_retained(CUcontext context) {
  return context != nullptr && g_retained[static_cast<size_t>(device_of_context(context))] > 0;
}

}  // namespace

CUresult ready() {
  if (settings().lost != 0) return kCudaIllegalAddress;
  return g_contexts.empty() || !is_retained(g_contexts.back()) ? kCudaInvalidContext : kCudaSuccess;
}

CUresult ready_to_wait() {
  const CUresult result = ready();
  return result == kCudaSuccess ? beside_captures() : result;
}

int current_device() { return device_of_context(g_contexts.back()); }

CUresult beside_captures() {
  if (settings().capture == 0 || g_capture_mode == kCaptureModeRelaxed) return kCudaSuccess;
  ++counts().broken_captures;
  return kCudaCaptureUnsupported;
}

MODEL CUresult cuInit(unsigned flags) {
  if (flags != 0) return kCudaInvalidValue;
  return settings().devices == 0 ? kCudaNoDevice : kCudaSuccess;
}

MODEL CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return kCudaSuccess;
}

MODEL CUresult cuGetErrorName(CUresult error, const char** name) {
  static const std::map<CUresult, const char*> names{
      {kCudaSuccess, "CUDA_SUCCESS"},
      {kCudaInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kCudaOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kCudaNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kCudaNoDevice, "CUDA_ERROR_NO_DEVICE"},
      {kCudaInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kCudaInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kCudaUnsupportedPtx, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
      {kCudaInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kCudaInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kCudaNotFound, "CUDA_ERROR_NOT_FOUND"},
      {kCudaNotReady, "CUDA_ERROR_NOT_READY"},
      {kCudaIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kCudaHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {kCudaHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
      {kCudaNotPermitted, "CUDA_ERROR_NOT_PERMITTED"},
      {kCudaNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
      {kCudaCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {kCudaCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
      {kCudaCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
      {kCudaCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT"}};
  const auto found = names.find(error);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kCudaInvalidValue : kCudaSuccess;
}

MODEL CUresult cuGetErrorString(CUresult error, const char** text) {
  const CUresult result = cuGetErrorName(error, text);
  if (result == kCudaSuccess) *text = "as the contract model has it";
  return result;
}

MODEL CUresult cuDeviceGetCount(int* count) {
  *count = static_cast<int>(settings().devices);
  return kCudaSuccess;
}

MODEL CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || static_cast<uint64_t>(ordinal) >= settings().devices)
    return kCudaInvalidDevice;
  *device = ordinal;
  return kCudaSuccess;
}

MODEL CUresult cuDeviceGetName(char* name, int bytes, CUdevice) {
  std::snprintf(name, static_cast<size_t>(bytes), "contract model");
  return kCudaSuccess;
}

MODEL CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  switch (attribute) {
    case kAttributeCapabilityMajor:
      *value = 9;
      return kCudaSuccess;
    case kAttributeCapabilityMinor:
      *value = 0;
      return kCudaSuccess;
    case kAttributeReadOnlyRegister:
      *value = static_cast<int>(settings().read_only_register);
      return kCudaSuccess;
    case kAttributeHostPageTables:
      *value = static_cast<int>(settings().host_page_tables);
      return kCudaSuccess;
    case kAttributeVirtualMemory:
    case kAttributeSharesByFd:
      *value = static_cast<int>(settings().shares);
      return kCudaSuccess;
    default:
      return kCudaInvalidValue;
  }
}

// Of the machine's device, whatever its ordinal is in this process: KVW_TEST_CUDA_FIRST shifts
// ordinals as CUDA_VISIBLE_DEVICES does.
MODEL CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  *uuid = {};
  std::snprintf(uuid->bytes, sizeof uuid->bytes, "model %d",
                device + static_cast<int>(settings().first));
  return kCudaSuccess;
}

MODEL CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (settings().lost != 0) return kCudaIllegalAddress;
  if (const CUresult result = beside_captures(); result != kCudaSuccess) return result;
  *context = context_of(device);
  ++g_retained[static_cast<size_t>(device)];
  ++counts().contexts;
  ++counts().retains;
  return kCudaSuccess;
}

MODEL CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  if (const CUresult result = beside_captures(); result != kCudaSuccess) return result;
  if (g_retained[static_cast<size_t>(device)] == 0) return kCudaInvalidContext;
  --g_retained[static_cast<size_t>(device)];
  --counts().contexts;
  return kCudaSuccess;
}

MODEL CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = g_contexts.empty() ? nullptr : g_contexts.back();
  return kCudaSuccess;
}

MODEL CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (!is_retained(context)) return kCudaInvalidContext;
  g_contexts.push_back(context);
  return kCudaSuccess;
}

MODEL CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (g_contexts.empty()) return kCudaInvalidContext;
  if (context != nullptr) *context = g_contexts.back();
  g_contexts.pop_back();
  return kCudaSuccess;
}

MODEL CUresult cuCtxSetCurrent(CUcontext context) {
  if (!g_contexts.empty()) g_contexts.pop_back();
  if (context != nullptr) g_contexts.push_back(context);
  return kCudaSuccess;
}

MODEL CUresult cuCtxGetDevice(CUdevice* device) {
  if (g_contexts.empty()) return kCudaInvalidContext;
  *device = current_device();
  return kCudaSuccess;
}

MODEL CUresult cuCtxSynchronize() { return ready_to_wait(); }

MODEL CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < kCaptureModeGlobal || *mode > kCaptureModeRelaxed) return kCudaInvalidValue;
  std::swap(*mode, g_capture_mode);
  return kCudaSuccess;
}

}  // namespace kvw::cuda_model
