// The project's kernels, compiled for the host, and the driver's and NVRTC's calls of kernels.
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "tests/cuda_model/calls.h"

namespace kvw::cuda_model {

namespace kernels {

#define KVW_AT(address) ::kvw::cuda_model::alias(address)
#include "../../../kvwarehouse/client/gpu/page_kernels.cu"

}  // namespace kernels

namespace {

// What a binary begins with; who takes it for text finds it empty behind four characters.
constexpr std::array<char, 8> kBinary{127, 'E', 'L', 'F', 0, 0, 0, 0};

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

void run_grid(Kernel kernel, unsigned blocks, unsigned threads,
              const std::array<kernels::u64, 5>& given) {
  kernels::blockDim.x = threads;
  // Backwards: no block may count on another.
  for (unsigned block = blocks; block-- > 0;)
    for (unsigned thread = 0; thread < threads; thread += 32) {
      kernels::blockIdx.x = block;
      kernels::threadIdx.x = thread;
      kernel(given[0], given[1], given[2], given[3], given[4]);
    }
}

}  // namespace

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

}  // namespace kvw::cuda_model
