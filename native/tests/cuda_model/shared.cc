// The model's shared memory: allocations that are files in memory, handed over by descriptor, and
// windows of addresses into which they are mapped. Their contents are read and written at an alias,
// as all of the device's.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/cuda_model/calls.h"

namespace kvw::cuda_model {

namespace {

constexpr uint64_t kWindowBytes = uint64_t{64}
                                  << 30;  // of addresses; memory is taken by files alone
constexpr const char* kFileName = "kvw_cuda_model_";  // and the machine's number of the device

struct Allocation {
  int fd;
  int device;
  uint64_t bytes;
  bool released = false;
  int mappings = 0;
};

struct Mapped {
  uint64_t bytes;
  CUmemHandle handle;
  int access = 0;
};

struct Shared {
  Shared() {
    void* told = ::mmap(nullptr, kWindowBytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void* real = ::mmap(nullptr, kWindowBytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (told == MAP_FAILED || real == MAP_FAILED) std::abort();
    begin = reinterpret_cast<uint64_t>(told);
    real_begin = reinterpret_cast<uint64_t>(real);
  }
  uint64_t begin, real_begin;
  std::mutex mutex;
  std::map<CUmemHandle, Allocation> allocations;
  std::map<uint64_t, uint64_t> reserved;  // address to bytes
  std::map<uint64_t, Mapped> mapped;
  CUmemHandle next = 1;
  uint64_t given_bytes = 0;
};

std::mutex& shared_mutex();

Shared& shared() {
  static auto* made = [] {
    hold_across_forks<shared_mutex>();
    return new Shared();
  }();
  return *made;
}

std::mutex& shared_mutex() { return shared().mutex; }

uint64_t granule() { return settings().granule; }

template <class Map, class Bytes>
auto holding(Map& ranges, uint64_t address, Bytes bytes_of) {
  auto found = ranges.upper_bound(address);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return address < found->first + bytes_of(found->second) ? found : ranges.end();
}

auto mapping_at(Shared& all, uint64_t address) {
  return holding(all.mapped, address, [](const Mapped& each) { return each.bytes; });
}

CUresult bad_properties(const CUmemAllocationProp& properties) {
  if (settings().shares == 0) return kCudaNotSupported;
  if (properties.type != kAllocationPinned || properties.location.type != kLocationDevice ||
      properties.requested_handle_types != kHandleFd || properties.win32_handle_metadata != nullptr)
    return kCudaInvalidValue;
  if (properties.location.id < 0 ||
      static_cast<uint64_t>(properties.location.id) >= settings().devices)
    return kCudaInvalidDevice;
  return kCudaSuccess;
}

void let_go(Shared& all, CUmemHandle handle) {
  const auto found = all.allocations.find(handle);
  if (!found->second.released || found->second.mappings != 0) return;
  ::close(found->second.fd);
  all.given_bytes -= found->second.bytes;
  all.allocations.erase(found);
}

void remap(uint64_t real, uint64_t bytes, int fd, int rights) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  if (::mmap(reinterpret_cast<void*>(real), bytes, rights, flags | MAP_FIXED, fd, 0) == MAP_FAILED)
    std::abort();
}

// Which of the machine's devices the file is memory of; -1: none of the model's.
int device_of_file(int fd) {
  char link[64], name[128] = "";
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (::readlink(link, name, sizeof name - 1) < 0) return -1;
  const std::string prefix = std::string("/memfd:") + kFileName;
  return std::strncmp(name, prefix.c_str(), prefix.size()) == 0 ? std::atoi(name + prefix.size())
                                                                : -1;
}

}  // namespace

uint64_t shared_alias(uint64_t address) {
  const Shared& all = shared();
  if (address < all.begin || address >= all.begin + kWindowBytes) return address;
  return all.real_begin + (address - all.begin);
}

bool is_shared(CUdeviceptr address, size_t bytes, bool writing) {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  const auto found = mapping_at(all, address);
  if (found == all.mapped.end() || address + bytes > found->first + found->second.bytes)
    return false;
  const int access = found->second.access;
  return writing ? access == kAccessReadWrite : access != 0;
}

int shared_device_of(CUdeviceptr address) {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  const auto found = mapping_at(all, address);
  if (found == all.mapped.end() || found->second.access == 0) return -1;
  return all.allocations.at(found->second.handle).device;
}

MODEL CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* properties,
                                             int option) {
  if (const CUresult bad = bad_properties(*properties); bad != kCudaSuccess) return bad;
  if (option != 0 && option != kGranularityRecommended) return kCudaInvalidValue;
  *bytes = granule();
  return kCudaSuccess;
}

MODEL CUresult cuMemCreate(CUmemHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                           unsigned long long flags) {
  if (const CUresult result = beside_captures(); result != kCudaSuccess) return result;
  if (settings().lost != 0) return kCudaIllegalAddress;
  if (const CUresult bad = bad_properties(*properties); bad != kCudaSuccess) return bad;
  if (flags != 0 || bytes == 0 || bytes % granule() != 0) return kCudaInvalidValue;
  ++counts().creates_asked;
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  if (all.given_bytes + bytes > settings().create_limit) return kCudaOutOfMemory;
  const int device = properties->location.id;
  const std::string name = kFileName + std::to_string(device + static_cast<int>(settings().first));
  const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kCudaOutOfMemory;
  all.given_bytes += bytes;
  *handle = all.next++;
  all.allocations[*handle] = {fd, device, bytes};
  ++counts().handles;
  return kCudaSuccess;
}

MODEL CUresult cuMemRelease(CUmemHandle handle) {
  if (const CUresult result = beside_captures(); result != kCudaSuccess) return result;
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  const auto found = all.allocations.find(handle);
  if (found == all.allocations.end() || found->second.released) return kCudaInvalidValue;
  found->second.released = true;
  --counts().handles;
  let_go(all, handle);
  return kCudaSuccess;
}

MODEL CUresult cuMemExportToShareableHandle(void* shareable, CUmemHandle handle, int type,
                                            unsigned long long flags) {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  const auto found = all.allocations.find(handle);
  if (found == all.allocations.end() || found->second.released || type != kHandleFd || flags != 0)
    return kCudaInvalidValue;
  *static_cast<int*>(shareable) = ::dup(found->second.fd);
  return kCudaSuccess;
}

MODEL CUresult cuMemImportFromShareableHandle(CUmemHandle* handle, void* shareable, int type) {
  if (const CUresult result = beside_captures(); result != kCudaSuccess) return result;
  if (settings().lost != 0) return kCudaIllegalAddress;
  if (settings().shares == 0) return kCudaNotSupported;
  const int fd = static_cast<int>(reinterpret_cast<uintptr_t>(shareable));
  const int device = device_of_file(fd) - static_cast<int>(settings().first);
  struct stat info{};
  if (type != kHandleFd || device_of_file(fd) < 0 || ::fstat(fd, &info) != 0)
    return kCudaInvalidValue;
  // Memory of a device that this process does not have.
  if (device < 0 || static_cast<uint64_t>(device) >= settings().devices) return kCudaInvalidDevice;
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  *handle = all.next++;
  const auto bytes = static_cast<uint64_t>(info.st_size);
  all.allocations[*handle] = {::dup(fd), device, bytes};
  all.given_bytes += bytes;
  ++counts().handles;
  return kCudaSuccess;
}

MODEL CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t alignment,
                                   CUdeviceptr, unsigned long long flags) {
  const bool power = (alignment & (alignment - 1)) == 0;
  if (bytes == 0 || bytes % granule() != 0 || !power || flags != 0) return kCudaInvalidValue;
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  const uint64_t step = std::max<uint64_t>(alignment, granule());
  uint64_t at = (all.begin + step - 1) / step * step;
  for (const auto& [start, size] : all.reserved) {
    if (start >= at + bytes) break;
    at = (start + size + step - 1) / step * step;
  }
  if (at + bytes > all.begin + kWindowBytes) return kCudaOutOfMemory;
  all.reserved[at] = bytes;
  counts().reserved_bytes += bytes;
  *pointer = at;
  return kCudaSuccess;
}

MODEL CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  const auto found = all.reserved.find(pointer);
  if (found == all.reserved.end() || found->second != bytes) return kCudaInvalidValue;
  const auto mapped = all.mapped.lower_bound(pointer);
  if (mapped != all.mapped.end() && mapped->first < pointer + bytes) return kCudaInvalidValue;
  all.reserved.erase(found);
  counts().reserved_bytes -= bytes;
  return kCudaSuccess;
}

MODEL CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemHandle handle,
                        unsigned long long flags) {
  if (const CUresult result = beside_captures(); result != kCudaSuccess) return result;
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  const auto space =
      holding(all.reserved, pointer, [](uint64_t reserved_bytes) { return reserved_bytes; });
  const auto found = all.allocations.find(handle);
  if (offset != 0 || flags != 0 || bytes == 0 || bytes % granule() != 0 ||
      pointer % granule() != 0 || space == all.reserved.end() ||
      pointer + bytes > space->first + space->second || found == all.allocations.end() ||
      found->second.released || bytes > found->second.bytes)
    return kCudaInvalidValue;
  const auto next = all.mapped.lower_bound(pointer);
  if (mapping_at(all, pointer) != all.mapped.end() ||
      (next != all.mapped.end() && next->first < pointer + bytes))
    return kCudaInvalidValue;
  remap(shared().real_begin + (pointer - all.begin), bytes, found->second.fd,
        PROT_READ | PROT_WRITE);
  all.mapped[pointer] = {bytes, handle};
  ++found->second.mappings;
  counts().mapped_bytes += bytes;
  return kCudaSuccess;
}

MODEL CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  if (const CUresult result = beside_captures(); result != kCudaSuccess) return result;
  if (in_use(pointer, bytes)) violation("shared memory was unmapped that a queued operation uses");
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  const auto found = all.mapped.find(pointer);
  if (found == all.mapped.end() || found->second.bytes != bytes) return kCudaInvalidValue;
  const CUmemHandle handle = found->second.handle;
  remap(all.real_begin + (pointer - all.begin), bytes, -1, PROT_NONE);
  all.mapped.erase(found);
  counts().mapped_bytes -= bytes;
  --all.allocations.at(handle).mappings;
  let_go(all, handle);
  return kCudaSuccess;
}

MODEL CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc* access,
                              size_t count) {
  if (const CUresult result = beside_captures(); result != kCudaSuccess) return result;
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  const auto found = all.mapped.find(pointer);
  if (found == all.mapped.end() || found->second.bytes != bytes || count != 1 ||
      access->location.type != kLocationDevice)
    return kCudaInvalidValue;
  // Peer access is not modelled: the device's own is.
  if (access->location.id != all.allocations.at(found->second.handle).device)
    return kCudaInvalidDevice;
  const bool read_only = access->flags == kAccessRead;
  if (!read_only && access->flags != kAccessReadWrite) return kCudaInvalidValue;
  if (read_only && settings().read_only_access == 0) return kCudaNotSupported;
  found->second.access = access->flags;
  // A kernel that writes to what it may only read ends as on a device.
  ::mprotect(reinterpret_cast<void*>(all.real_begin + (pointer - all.begin)), bytes,
             read_only ? PROT_READ : PROT_READ | PROT_WRITE);
  return kCudaSuccess;
}

}  // namespace kvw::cuda_model
