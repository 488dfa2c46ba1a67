// The model's memory: the device's, what callers pin, and what queued operations use.
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/cuda_model/model.h"

namespace kvw::cuda_model {

using namespace gpu;  // NOLINT(google-build-using-namespace): the driver's numbers

namespace {

constexpr uint64_t kAlignment = 512;  // the driver promises 256 at least
constexpr int kDevices = 2;

struct Range {
  size_t bytes;
  int device = -1;
};

// Allocations and registrations by address. One mutex for all: tests are small.
struct Memory {
  std::mutex mutex;
  std::map<uint64_t, Range> device, host, registered;
  std::multimap<uint64_t, size_t> uses;
};

std::mutex& memory_mutex();

Memory& memory() {
  // Threads of streams may outlive static destruction.
  static auto* made = [] {
    hold_across_forks<memory_mutex>();
    return new Memory();
  }();
  return *made;
}

std::mutex& memory_mutex() { return memory().mutex; }

// A device's memory, twice: where callers are told it is, unreadable, and where the model reads it.
struct Bank {
  uint64_t told = 0, real = 0, bytes = 0, next = 0;
};

Bank& bank(int device) {
  static std::array<Bank, kDevices> banks;
  static std::once_flag made;
  std::call_once(made, [] {
    for (Bank& each : banks) {
      each.bytes = settings().device_bytes.load();
      // The address space is reserved without access; the alias has the bytes.
      void* told = ::mmap(nullptr, each.bytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      void* real = ::mmap(nullptr, each.bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (told == MAP_FAILED || real == MAP_FAILED) std::abort();
      each.told = reinterpret_cast<uint64_t>(told);
      each.real = reinterpret_cast<uint64_t>(real);
    }
  });
  return banks[static_cast<size_t>(device)];
}

// The entry whose range has the address, or end().
template <class Map>
auto holding(Map& ranges, uint64_t address) {
  auto found = ranges.upper_bound(address);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return address < found->first + found->second.bytes ? found : ranges.end();
}

bool overlaps(const std::map<uint64_t, Range>& ranges, uint64_t address, size_t bytes) {
  const auto next = ranges.lower_bound(address);
  if (next != ranges.end() && next->first < address + bytes) return true;
  return holding(ranges, address) != ranges.end();
}

bool in_use(const Memory& all, uint64_t address, size_t bytes) {
  for (const auto& [start, length] : all.uses)
    if (start < address + bytes && address < start + length) return true;
  return false;
}

// Takes an allocation or registration out that begins at `address`.
bool take_out(std::map<uint64_t, Range>& ranges, uint64_t address, std::atomic<uint64_t>& total,
              const char* what) {
  const auto found = ranges.find(address);
  if (found == ranges.end()) return false;
  if (in_use(memory(), address, found->second.bytes)) violation(what);
  total -= found->second.bytes;
  ranges.erase(found);
  return true;
}

// Whether the whole range is mapped and writable, and any of it is a file's of which the kernel
// tracks dirty pages: pages of those it lets nobody hold for long who may write to them
// (Linux 6.5).
struct Access {
  bool mapped = false, writable = true, tracked = false;
};

bool is_tracked(const std::string& path) {
  if (path.empty() || path[0] != '/' || path.starts_with("/memfd:") || path == "/dev/zero")
    return false;
  struct statfs at{};
  if (::statfs(path.c_str(), &at) != 0 &&  // removed
      ::statfs(path.substr(0, path.rfind('/') + 1).c_str(), &at) != 0)
    return false;
  const auto type = static_cast<uint64_t>(at.f_type);
  return type != TMPFS_MAGIC && type != HUGETLBFS_MAGIC && type != RAMFS_MAGIC;
}

Access access_of(uint64_t address, size_t bytes) {
  Access access;
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return access;
  char line[512];
  uint64_t reached = address;
  while (std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long long begin = 0, end = 0;
    char rights[5] = "", path[400] = "";
    if (std::sscanf(line, "%llx-%llx %4s %*s %*s %*s %399s", &begin, &end, rights, path) < 3)
      continue;
    if (begin > reached || end <= reached) continue;
    access.writable = access.writable && rights[1] == 'w';
    access.tracked = access.tracked || (rights[3] == 's' && is_tracked(path));
    reached = end;
    if (reached >= address + bytes) break;
  }
  std::fclose(maps);
  access.mapped = reached >= address + bytes;
  return access;
}

}  // namespace

bool in_use(uint64_t address, size_t bytes) {
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  return in_use(all, address, bytes);
}

uint64_t alias(uint64_t address) {
  for (int device = 0; device < kDevices; ++device) {
    const Bank& own = bank(device);
    if (address >= own.told && address < own.told + own.bytes)
      return own.real + (address - own.told);
  }
  return shared_alias(address);
}

int device_of(CUdeviceptr address) {
  if (const int device = shared_device_of(address); device >= 0) return device;
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  const auto found = holding(all.device, address);
  return found == all.device.end() ? -1 : found->second.device;
}

bool is_device(CUdeviceptr address, size_t bytes, bool writing) {
  if (is_shared(address, bytes, writing)) return true;
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  const auto found = holding(all.device, address);
  return found != all.device.end() && address + bytes <= found->first + found->second.bytes;
}

CUresult allocate(int device, size_t bytes, CUdeviceptr* address) {
  ++counts().allocations;
  if (bytes == 0) return kCudaInvalidValue;
  if (counts().device_bytes + bytes > settings().alloc_limit) return kCudaOutOfMemory;
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  Bank& own = bank(device);
  // First fit between what is there.
  uint64_t at = own.told;
  for (const auto& [start, range] : all.device) {
    if (range.device != device) continue;
    if (start >= at + bytes) break;
    at = (start + range.bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (at + bytes > own.told + own.bytes) return kCudaOutOfMemory;
  all.device[at] = {bytes, device};
  counts().device_bytes += bytes;
  // New memory holds anything but what somebody hopes for.
  std::memset(reinterpret_cast<void*>(own.real + (at - own.told)), 0xdb, bytes);
  *address = at;
  return kCudaSuccess;
}

CUresult free_device(CUdeviceptr address) {
  ++counts().frees;
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  return take_out(all.device, address, counts().device_bytes,
                  "device memory was freed that a queued operation uses")
             ? kCudaSuccess
             : kCudaInvalidValue;
}

CUresult allocate_host(size_t bytes, void** address) {
  ++counts().allocations;
  if (bytes == 0) return kCudaInvalidValue;
  void* made = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (made == nullptr) return kCudaOutOfMemory;
  std::memset(made, 0xbd, bytes);
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  all.host[reinterpret_cast<uint64_t>(made)] = {bytes};
  counts().host_bytes += bytes;
  *address = made;
  return kCudaSuccess;
}

CUresult free_host(void* address) {
  ++counts().frees;
  {
    Memory& all = memory();
    const std::lock_guard lock(all.mutex);
    if (!take_out(all.host, reinterpret_cast<uint64_t>(address), counts().host_bytes,
                  "pinned memory was freed that a queued operation uses"))
      return kCudaInvalidValue;
  }
  std::free(address);
  return kCudaSuccess;
}

CUresult register_host(void* address, size_t bytes, unsigned flags) {
  const auto start = reinterpret_cast<uint64_t>(address);
  ++counts().registers_asked;
  if (bytes == 0 || (flags & ~15u) != 0) return kCudaInvalidValue;
  if (const uint64_t result = settings().register_result; result != 0)
    return static_cast<CUresult>(result);
  const Access access = access_of(start, bytes);
  const bool read_only = (flags & kHostRegisterReadOnly) != 0;
  if (read_only && settings().read_only_register == 0) return kCudaNotSupported;
  const bool may = access.writable || read_only || settings().host_page_tables != 0;
  if (!access.mapped || !may) return kCudaInvalidValue;
  if (access.tracked && !read_only && settings().host_page_tables == 0) return kCudaInvalidValue;
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  if (overlaps(all.registered, start, bytes) || overlaps(all.host, start, bytes))
    return kCudaHostMemoryAlreadyRegistered;
  if (counts().registered_bytes + bytes > settings().register_limit) return kCudaOutOfMemory;
  all.registered[start] = {bytes};
  counts().registered_bytes += bytes;
  ++counts().registrations;
  return kCudaSuccess;
}

CUresult unregister_host(void* address) {
  const auto start = reinterpret_cast<uint64_t>(address);
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  const auto found = all.registered.find(start);
  if (found == all.registered.end())
    return holding(all.registered, start) == all.registered.end() ? kCudaHostMemoryNotRegistered
                                                                  : kCudaInvalidValue;
  if (!access_of(start, found->second.bytes).mapped)
    violation("registered memory was unmapped before it was unregistered");
  take_out(all.registered, start, counts().registered_bytes,
           "memory was unregistered that a queued operation uses");
  return kCudaSuccess;
}

Pinned pinned(const void* address, size_t bytes) {
  const auto start = reinterpret_cast<uint64_t>(address);
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  for (const auto* ranges : {&all.registered, &all.host}) {
    const auto found = holding(*ranges, start);
    if (found != ranges->end() && start + bytes <= found->first + found->second.bytes)
      return Pinned::yes;
  }
  return overlaps(all.registered, start, bytes) || overlaps(all.host, start, bytes) ? Pinned::partly
                                                                                    : Pinned::no;
}

Use::Use(uint64_t address, size_t bytes) : address_(address), bytes_(bytes) {
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  all.uses.emplace(address, bytes);
}

Use::~Use() {
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  const auto [begin, end] = all.uses.equal_range(address_);
  for (auto found = begin; found != end; ++found)
    if (found->second == bytes_) {
      all.uses.erase(found);
      return;
    }
}

}  // namespace kvw::cuda_model
