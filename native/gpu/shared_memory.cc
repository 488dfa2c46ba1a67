#include "gpu/shared_memory.h"

#include <fcntl.h>

#include <string>

#include "base/error.h"

namespace kvw::gpu {

namespace {

CUmemAllocationProp properties_of(const Device& device) {
  CUmemAllocationProp properties{};
  properties.type = kAllocationPinned;
  properties.requested_handle_types = kHandleFd;
  properties.location = {kLocationDevice, device.handle()};
  return properties;
}

Error refused(const Device& device, const std::string& why) {
  return Error(ErrorKind::usage, "no_shared_memory",
               "device " + std::to_string(device.ordinal()) + " " + why);
}

bool supports(const Device& device, int attribute) {
  int supported = 0;
  return device.cuda().cuDeviceGetAttribute(&supported, attribute, device.handle()) ==
             kCudaSuccess &&
         supported != 0;
}

uint64_t granule_of(const Device& device) {
  if (!supports(device, kAttributeVirtualMemory) || !supports(device, kAttributeSharesByFd))
    throw refused(device,
                  "shares no memory by file descriptors (cuMem*); the HBM tier needs a GPU and a "
                  "system that do");
  const CUmemAllocationProp properties = properties_of(device);
  size_t granule = 0;
  device.cuda().check(
      device.cuda().cuMemGetAllocationGranularity(&granule, &properties, kGranularityRecommended),
      "cuMemGetAllocationGranularity");
  return granule;
}

}  // namespace

std::unique_ptr<SharedMemory> SharedMemory::create(std::shared_ptr<const Device> device,
                                                   uint64_t bytes) {
  const Device::Current current(*device);
  const uint64_t granule = granule_of(*device);
  const uint64_t whole = bytes / granule * granule;
  if (whole == 0)
    throw refused(*device, "shares memory in pieces of " + std::to_string(granule) + " bytes; " +
                               std::to_string(bytes) + " are less than one");
  const CUmemAllocationProp properties = properties_of(*device);
  std::unique_ptr<SharedMemory> made(new SharedMemory(std::move(device), whole));
  const Driver& cuda = made->device_->cuda();
  cuda.check(cuda.cuMemCreate(&made->handle_, whole, &properties, 0), "cuMemCreate");
  made->has_handle_ = true;
  made->map(granule);
  cuda.check(made->set_access(kAccessReadWrite), "cuMemSetAccess");
  return made;
}

std::unique_ptr<SharedMemory> SharedMemory::import(std::shared_ptr<const Device> device, int fd,
                                                   uint64_t bytes) {
  const Device::Current current(*device);
  const uint64_t granule = granule_of(*device);
  std::unique_ptr<SharedMemory> made(new SharedMemory(std::move(device), bytes));
  const Driver& cuda = made->device_->cuda();
  // A descriptor goes as the pointer's value.
  void* given = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));  // NOLINT
  cuda.check(cuda.cuMemImportFromShareableHandle(&made->handle_, given, kHandleFd),
             "cuMemImportFromShareableHandle");
  made->has_handle_ = true;
  made->map(granule);
  if (made->set_access(kAccessRead) != kCudaSuccess)
    cuda.check(made->set_access(kAccessReadWrite), "cuMemSetAccess");
  return made;
}

void SharedMemory::map(uint64_t alignment) {
  const Driver& cuda = device_->cuda();
  cuda.check(cuda.cuMemAddressReserve(&address_, bytes_, alignment, 0, 0), "cuMemAddressReserve");
  cuda.check(cuda.cuMemMap(address_, bytes_, 0, handle_, 0), "cuMemMap");
  mapped_ = true;
}

CUresult SharedMemory::set_access(int flags) const {
  const CUmemAccessDesc access{{kLocationDevice, device_->handle()}, flags};
  return device_->cuda().cuMemSetAccess(address_, bytes_, &access, 1);
}

SharedMemory::~SharedMemory() {
  if (device_->forked()) return;
  const Device::Current current(*device_, std::nothrow);
  const Driver& cuda = device_->cuda();
  if (mapped_) cuda.cuMemUnmap(address_, bytes_);
  if (address_ != 0) cuda.cuMemAddressFree(address_, bytes_);
  if (has_handle_) cuda.cuMemRelease(handle_);
}

Fd SharedMemory::export_fd() const {
  const Device::Current current(*device_);
  int fd = -1;
  device_->cuda().check(device_->cuda().cuMemExportToShareableHandle(&fd, handle_, kHandleFd, 0),
                        "cuMemExportToShareableHandle");
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return Fd(fd);
}

}  // namespace kvw::gpu
