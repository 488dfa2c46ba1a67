// Takes the place of libcuda.so.1 in tests of kvikio's host side: a driver that is there and whose
// device is the host. Memory is the host's, copies are made in the call, by no context and on the
// default stream; every other call answers CUDA_ERROR_NOT_INITIALIZED. Not a model of the driver:
// what it shows is what kvikio does with files. Never installed.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define ANSWER(name) \
  int name(void) { return 3; }

ANSWER(cuInit)
ANSWER(cuCtxGetDevice)
ANSWER(cuCtxPopCurrent_v2)
ANSWER(cuCtxPushCurrent_v2)
ANSWER(cuDeviceGet)
ANSWER(cuDeviceGetAttribute)
ANSWER(cuDeviceGetCount)
ANSWER(cuDevicePrimaryCtxRelease_v2)
ANSWER(cuDevicePrimaryCtxRetain)
ANSWER(cuGetErrorName)
ANSWER(cuGetErrorString)
ANSWER(cuMemAllocHost_v2)
ANSWER(cuMemAlloc_v2)
ANSWER(cuMemFree_v2)
ANSWER(cuMemGetAddressRange_v2)
ANSWER(cuMemcpyDtoHAsync_v2)
ANSWER(cuMemcpyDtoH_v2)
ANSWER(cuMemcpyBatchAsync)
ANSWER(cuMemcpyHtoD_v2)
ANSWER(cuMemcpyBatchAsync_v2)
ANSWER(cuCtxCreate_v4)
ANSWER(cuCtxDestroy_v2)
ANSWER(cuCtxGetDevice_v2)
ANSWER(cuStreamGetCtx)
ANSWER(cuCtxSetCurrent)
ANSWER(cuLaunchHostFunc)
ANSWER(cuPointerGetAttribute)
ANSWER(cuPointerGetAttributes)
ANSWER(cuStreamCreate)
ANSWER(cuStreamDestroy_v2)
ANSWER(cuEventCreate)
ANSWER(cuEventDestroy_v2)
ANSWER(cuEventQuery)
ANSWER(cuEventRecord)
ANSWER(cuEventSynchronize)
ANSWER(cuStreamWaitEvent)

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = NULL;
  return 0;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  *memory = malloc(bytes);
  (void)flags;
  return *memory == NULL ? 2 : 0;
}

int cuMemFreeHost(void* memory) {
  free(memory);
  return 0;
}

int cuMemHostRegister_v2(void) { return 0; }
int cuMemHostUnregister(void) { return 0; }
int cuStreamSynchronize(void) { return 0; }

int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  if (stream != NULL) return 400;
  memcpy((void*)to, (const void*)from, bytes);
  return 0;
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
  return cuMemcpyAsync(to, (unsigned long long)from, bytes, stream);
}
