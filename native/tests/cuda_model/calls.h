// What the files with the driver's symbols share: how a symbol is defined, what calls begin with,
// and what their handles stand for.
#pragma once

#include "tests/cuda_model/model.h"

#define MODEL extern "C" __attribute__((visibility("default")))

namespace kvw::cuda_model {

using namespace gpu;  // NOLINT(google-build-using-namespace): the driver's types and numbers

// The prototypes are the seam's: a definition that differs does not compile.
#define KVW_CUDA_DECLARE(name, symbol, parameters) extern "C" CUresult symbol parameters;
KVW_CUDA_FUNCTIONS(KVW_CUDA_DECLARE)
KVW_CUDA_NEWER_FUNCTIONS(KVW_CUDA_DECLARE)
#undef KVW_CUDA_DECLARE

// --- contexts.cc

// What almost every call begins with.
CUresult ready();
// Likewise of one that may wait for the device, so that it is no call beside a capture.
CUresult ready_to_wait();
// Of a call that a capture of another thread's prohibits, unless this thread's mode is relaxed.
CUresult beside_captures();
int current_device();

// --- streams.cc

Stream& stream_of(CUstream stream);
// Whether the context that is current is that of the stream.
bool is_of_context(CUstream stream);

}  // namespace kvw::cuda_model
