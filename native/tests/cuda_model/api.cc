// The driver's symbols over the model, and a few of the test's own.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "tests/cuda_model/model.h"

namespace kvw::cuda_model {

namespace kernels {

#define KVW_AT(address) ::kvw::cuda_model::alias(address)
#include "../../../kvwarehouse/client/gpu/page_kernels.cu"

}  // namespace kernels

using namespace gpu;  // NOLINT(google-build-using-namespace): the driver's types and numbers

namespace {

// What a binary begins with; who takes it for text finds it empty behind four characters.
constexpr std::array<char, 8> kBinary{127, 'E', 'L', 'F', 0, 0, 0, 0};
constexpr size_t kPartBytes = 64 << 10;  // copies pause between parts

using Kernel = void (*)(kernels::u64, kernels::u64, kernels::u64, kernels::u64, kernels::u64);

struct Function {
  std::string name;
  Kernel kernel;
};

std::array<Function, 2>& functions() {
  static std::array<Function, 2> all{
      {{"kvw_gather", kernels::kvw_gather}, {"kvw_scatter", kernels::kvw_scatter}}};
  return all;
}

// Of the model's compiler.
struct Program {
  std::string source;
  bool binary;  // compiled for a real architecture
};

struct Number {
  const char* name;
  std::atomic<uint64_t>* value;
};

std::vector<Number> setting_names() {
  Settings& s = settings();
  return {{"seed", &s.seed},
          {"pause_us", &s.pause_us},
          {"hold", &s.hold},
          {"hold_unregister", &s.hold_unregister},
          {"lost", &s.lost},
          {"capture", &s.capture},
          {"devices", &s.devices},
          {"first", &s.first},
          {"device_bytes", &s.device_bytes},
          {"register_limit", &s.register_limit},
          {"register_us", &s.register_us},
          {"register_result", &s.register_result},
          {"read_only_register", &s.read_only_register},
          {"shares", &s.shares},
          {"read_only_access", &s.read_only_access},
          {"granule", &s.granule},
          {"alloc_limit", &s.alloc_limit},
          {"create_limit", &s.create_limit},
          {"compiler_newest", &s.compiler_newest},
          {"refuses_ptx", &s.refuses_ptx}};
}

std::vector<Number> count_names() {
  Counts& c = counts();
  return {{"copies", &c.copies},
          {"copied_bytes", &c.copied_bytes},
          {"unpinned_copies", &c.unpinned_copies},
          {"launches", &c.launches},
          {"violations", &c.violations},
          {"retains", &c.retains},
          {"creates_asked", &c.creates_asked},
          {"allocations", &c.allocations},
          {"frees", &c.frees},
          {"broken_captures", &c.broken_captures},
          {"registered_bytes", &c.registered_bytes},
          {"registrations", &c.registrations},
          {"registers_asked", &c.registers_asked},
          {"unregisters_asked", &c.unregisters_asked},
          {"device_bytes", &c.device_bytes},
          {"host_bytes", &c.host_bytes},
          {"busy_streams", &c.busy_streams},
          {"streams", &c.streams},
          {"events", &c.events},
          {"modules", &c.modules},
          {"contexts", &c.contexts},
          {"handles", &c.handles},
          {"reserved_bytes", &c.reserved_bytes},
          {"mapped_bytes", &c.mapped_bytes}};
}

std::atomic<uint64_t>& named(const std::vector<Number>& numbers, std::string_view name) {
  for (const Number& each : numbers)
    if (name == each.name) return *each.value;
  std::fprintf(stderr, "cuda model: no number is called %.*s\n", static_cast<int>(name.size()),
               name.data());
  std::abort();
}

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

// What almost every call begins with.
CUresult ready() {
  if (settings().lost != 0) return kCudaIllegalAddress;
  return g_contexts.empty() || !is_retained(g_contexts.back()) ? kCudaInvalidContext : kCudaSuccess;
}

// Likewise of one that may wait for the device, so that it is no call beside a capture.
CUresult ready_to_wait() {
  const CUresult result = ready();
  return result == kCudaSuccess ? beside_captures() : result;
}

int current_device() { return device_of_context(g_contexts.back()); }

Stream& stream_of(CUstream stream) {
  static auto* null_stream = new Stream(-1);
  return stream == nullptr ? *null_stream : *reinterpret_cast<Stream*>(stream);
}

// Whether the context that is current is that of the stream.
bool is_of_context(CUstream stream) {
  return stream == nullptr || stream_of(stream).device() == current_device();
}

Event& event_of(CUevent event) { return *reinterpret_cast<Event*>(event); }

// In parts, with pauses: whoever looks early sees some of it.
void copy_in_parts(uint64_t to, uint64_t from, size_t bytes) {
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
  stream_of(stream).queue([=]() mutable {
    copy_in_parts(to, from, bytes);
    uses.reset();
  });
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

void run_grid(Kernel kernel, unsigned blocks, unsigned threads,
              const std::array<kernels::u64, 5>& given) {
  kernels::blockDim.x = threads;
  // Backwards: no block may count on another.
  for (unsigned block = blocks; block-- > 0;)
    for (unsigned thread = 0; thread < threads; thread += 8) {
      kernels::blockIdx.x = block;
      kernels::threadIdx.x = thread;
      kernel(given[0], given[1], given[2], given[3], given[4]);
    }
}

// Settings of the environment, read as the library is loaded.
const bool g_environment_read = [] {
  for (const Number& each : setting_names()) {
    std::string name = std::string("KVW_TEST_CUDA_") + each.name;
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::toupper(c); });
    if (const char* value = std::getenv(name.c_str()))
      *each.value = std::strtoull(value, nullptr, 0);
  }
  return true;
}();

}  // namespace

Settings& settings() {
  static auto* made = new Settings();
  return *made;
}

Counts& counts() {
  static auto* made = new Counts();
  return *made;
}

CUresult beside_captures() {
  if (settings().capture == 0 || g_capture_mode == kCaptureModeRelaxed) return kCudaSuccess;
  ++counts().broken_captures;
  return kCudaCaptureUnsupported;
}

void violation(const char* what) {
  std::fprintf(stderr, "cuda model: %s\n", what);
  ++counts().violations;
}

}  // namespace kvw::cuda_model

using namespace kvw::cuda_model;  // NOLINT(google-build-using-namespace)
using namespace kvw::gpu;         // NOLINT(google-build-using-namespace)

// The prototypes are the seam's: a definition that differs does not compile.
#define KVW_CUDA_DECLARE(name, symbol, parameters) extern "C" CUresult symbol parameters;
KVW_CUDA_FUNCTIONS(KVW_CUDA_DECLARE)

#define MODEL extern "C" __attribute__((visibility("default")))

MODEL void kvw_model_set(const char* name, uint64_t value) { named(setting_names(), name) = value; }
MODEL uint64_t kvw_model_count(const char* name) { return named(count_names(), name); }
// Bytes of device memory, for tests: at once, and not in the order of any stream.
MODEL void kvw_model_peek(CUdeviceptr address, void* to, size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(alias(address)), bytes);
}
MODEL void kvw_model_poke(CUdeviceptr address, const void* from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(alias(address)), from, bytes);
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
      {kCudaCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}};
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

MODEL CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                    CUstream stream) {
  if (const CUresult result = ready(); result != kCudaSuccess) return result;
  if (!is_of_context(stream)) return kCudaInvalidHandle;
  if (bytes == 0) return kCudaSuccess;
  if (!is_device(to, bytes, true) || !is_device(from, bytes)) return kCudaInvalidValue;
  return queue_copy(to, from, bytes, stream);
}

MODEL CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  if ((flags & ~kStreamNonBlocking) != 0) return kCudaInvalidValue;
  *stream = reinterpret_cast<CUstream>(new Stream(current_device()));
  return kCudaSuccess;
}

MODEL CUresult cuStreamDestroy_v2(CUstream stream) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  delete reinterpret_cast<Stream*>(stream);
  return kCudaSuccess;
}

MODEL CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  if (const CUresult result = ready(); result != kCudaSuccess) return result;
  if (flags != 0) return kCudaInvalidValue;
  const std::shared_ptr<Recording> last = event_of(event).last;
  if (last != nullptr) stream_of(stream).queue([last] { wait_for(*last); });
  return kCudaSuccess;
}

MODEL CUresult cuStreamQuery(CUstream stream) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  return stream_of(stream).idle() ? kCudaSuccess : kCudaNotReady;
}

MODEL CUresult cuStreamSynchronize(CUstream stream) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  stream_of(stream).drain();
  return kCudaSuccess;
}

MODEL CUresult cuEventCreate(CUevent* event, unsigned) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  *event = reinterpret_cast<CUevent>(new Event{current_device(), nullptr});
  ++counts().events;
  return kCudaSuccess;
}

MODEL CUresult cuEventDestroy_v2(CUevent event) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  delete &event_of(event);
  --counts().events;
  return kCudaSuccess;
}

MODEL CUresult cuEventRecord(CUevent event, CUstream stream) {
  if (const CUresult result = ready(); result != kCudaSuccess) return result;
  if (!is_of_context(stream)) return kCudaInvalidHandle;
  if (event_of(event).device != current_device()) return kCudaInvalidHandle;
  const auto recording = std::make_shared<Recording>();
  event_of(event).last = recording;
  stream_of(stream).queue([recording] { recording->done.store(true, std::memory_order_release); });
  return kCudaSuccess;
}

MODEL CUresult cuEventQuery(CUevent event) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  const std::shared_ptr<Recording> last = event_of(event).last;
  return last == nullptr || last->done.load(std::memory_order_acquire) ? kCudaSuccess
                                                                       : kCudaNotReady;
}

MODEL CUresult cuEventSynchronize(CUevent event) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  const std::shared_ptr<Recording> last = event_of(event).last;
  if (last != nullptr) wait_for(*last);
  return kCudaSuccess;
}

// An image is any text that names the kernels, as their source and as PTX do; or such a text behind
// the head of a binary.
MODEL CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  const bool binary = std::strncmp(static_cast<const char*>(image), kBinary.data(), 4) == 0;
  if (!binary && settings().refuses_ptx != 0) return kCudaUnsupportedPtx;
  const std::string_view text(static_cast<const char*>(image) + (binary ? kBinary.size() : 0));
  for (const auto& function : functions())
    if (text.find(function.name) == std::string_view::npos) return kCudaInvalidImage;
  *module = reinterpret_cast<CUmodule>(&functions());
  ++counts().modules;
  return kCudaSuccess;
}

MODEL CUresult cuModuleUnload(CUmodule) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  --counts().modules;
  return kCudaSuccess;
}

MODEL CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  if (const CUresult result = ready_to_wait(); result != kCudaSuccess) return result;
  for (auto& each : functions())
    if (each.name == name) {
      *function = reinterpret_cast<CUfunction>(&each);
      return kCudaSuccess;
    }
  return kCudaNotFound;
}

MODEL CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                              unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                              unsigned shared_bytes, CUstream stream, void** arguments,
                              void** extra) {
  if (const CUresult result = ready(); result != kCudaSuccess) return result;
  if (!is_of_context(stream)) return kCudaInvalidHandle;
  if (grid_x == 0 || block_x == 0 || block_x > 1024 || block_x % 32 != 0 || shared_bytes != 0 ||
      grid_y * grid_z * block_y * block_z != 1 || extra != nullptr)
    return kCudaInvalidValue;
  std::array<kernels::u64, 5> given{};
  for (size_t i = 0; i < given.size(); ++i)
    given[i] = *static_cast<const kernels::u64*>(arguments[i]);
  const Kernel kernel = reinterpret_cast<Function*>(function)->kernel;
  ++counts().launches;
  stream_of(stream).queue([=] { run_grid(kernel, grid_x, block_x, given); });
  return kCudaSuccess;
}

// NVRTC, to go with it: "compiles" text to itself, which cuModuleLoadData above takes, and knows
// devices up to settings().compiler_newest.
constexpr int kOldest = 75;

MODEL int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(settings().compiler_newest) - kOldest + 1;
  return 0;
}
MODEL int nvrtcGetSupportedArchs(int* known) {
  for (int each = kOldest; each <= static_cast<int>(settings().compiler_newest); ++each)
    *known++ = each;
  return 0;
}
MODEL int nvrtcCreateProgram(void** program, const char* source, const char*, int, const char**,
                             const char**) {
  *program = new Program{source, false};
  return 0;
}
MODEL int nvrtcCompileProgram(void* program, int count, const char** options) {
  constexpr int kInvalidOption = 5, kCompilation = 6;  // NVRTC_ERROR_...
  auto& made = *static_cast<Program*>(program);
  for (int i = 0; i < count; ++i) {
    std::string_view option = options[i];
    if (!option.starts_with("--gpu-architecture=")) continue;
    option.remove_prefix(option.find('=') + 1);
    made.binary = option.starts_with("sm_");
    const auto digits = std::string(option.substr(option.find('_') + 1));
    if (std::strtoull(digits.c_str(), nullptr, 10) > settings().compiler_newest)
      return kInvalidOption;
  }
  return made.source.find("kvw_gather") == std::string::npos ? kCompilation : 0;
}
MODEL int nvrtcGetPTXSize(void* program, size_t* bytes) {
  *bytes = static_cast<Program*>(program)->source.size() + 1;
  return 0;
}
MODEL int nvrtcGetPTX(void* program, char* text) {
  const std::string& source = static_cast<Program*>(program)->source;
  std::memcpy(text, source.c_str(), source.size() + 1);
  return 0;
}
MODEL int nvrtcGetCUBINSize(void* program, size_t* bytes) {
  const auto& made = *static_cast<Program*>(program);
  *bytes = made.binary ? kBinary.size() + made.source.size() + 1 : 0;
  return 0;
}
MODEL int nvrtcGetCUBIN(void* program, char* image) {
  const auto& made = *static_cast<Program*>(program);
  if (!made.binary) return 0;
  std::memcpy(image, kBinary.data(), kBinary.size());
  std::memcpy(image + kBinary.size(), made.source.c_str(), made.source.size() + 1);
  return 0;
}
MODEL int nvrtcGetProgramLogSize(void*, size_t* bytes) {
  *bytes = sizeof "no kernels";
  return 0;
}
MODEL int nvrtcGetProgramLog(void*, char* text) {
  std::memcpy(text, "no kernels", sizeof "no kernels");
  return 0;
}
MODEL int nvrtcDestroyProgram(void** program) {
  delete static_cast<Program*>(*program);
  *program = nullptr;
  return 0;
}
MODEL const char* nvrtcGetErrorString(int) { return "an error of the contract model"; }
