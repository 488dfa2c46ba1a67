// Takes the place of libcuda.so.1 in tests of kvikio's host side: a driver that is there and has no
// device. Every call answers CUDA_ERROR_NOT_INITIALIZED, for which kvikio takes a pointer as host memory.
// Not a model of the driver: nothing can be moved to a device with it. Never installed.
#define ANSWER(name) \
  int name(void) { return 3; }

ANSWER(cuInit)
ANSWER(cuCtxGetCurrent)
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
ANSWER(cuMemFreeHost)
ANSWER(cuMemFree_v2)
ANSWER(cuMemGetAddressRange_v2)
ANSWER(cuMemHostAlloc)
ANSWER(cuMemHostRegister_v2)
ANSWER(cuMemHostUnregister)
ANSWER(cuMemcpyDtoHAsync_v2)
ANSWER(cuMemcpyDtoH_v2)
ANSWER(cuMemcpyBatchAsync)
ANSWER(cuMemcpyHtoDAsync_v2)
ANSWER(cuMemcpyHtoD_v2)
ANSWER(cuMemcpyAsync)
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
ANSWER(cuStreamSynchronize)
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
