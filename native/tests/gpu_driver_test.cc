// The driver's seam, and the contract that the model of the driver keeps its callers to: what a
// test over the model shows is worth what the model refuses.
#include "gpu/driver.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "base/error.h"
#include "tests/cuda_world.h"

namespace kvw {
namespace {

using namespace gpu;  // NOLINT(google-build-using-namespace): the driver's names

// The device's context on this thread.
struct World : CudaModel {
  World() : cuda(driver()) {
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), kCudaSuccess);
    CHECK_EQ(cuda.cuCtxPushCurrent(context), kCudaSuccess);
  }
  ~World() {
    set("hold", 0);
    set("lost", 0);
    cuda.cuCtxPopCurrent(nullptr);
    cuda.cuDevicePrimaryCtxRelease(0);
  }
  CUstream stream() const {
    CUstream made = nullptr;
    CHECK_EQ(cuda.cuStreamCreate(&made, kStreamNonBlocking), kCudaSuccess);
    return made;
  }
  CUevent event() const {
    CUevent made = nullptr;
    CHECK_EQ(cuda.cuEventCreate(&made, kEventDisableTiming), kCudaSuccess);
    return made;
  }
  CUdeviceptr memory(size_t bytes) const {
    CUdeviceptr made = 0;
    CHECK_EQ(cuda.cuMemAlloc(&made, bytes), kCudaSuccess);
    return made;
  }
  std::vector<std::byte> peeked(CUdeviceptr address, size_t bytes) const {
    std::vector<std::byte> data(bytes);
    peek(address, data.data(), bytes);
    return data;
  }
  const Driver& cuda;
  CUcontext context = nullptr;
};

struct Mapped {
  Mapped(size_t size, int rights)
      : bytes(size), data(::mmap(nullptr, size, rights, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Mapped() { ::munmap(data, bytes); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  size_t bytes;
  void* data;
};

TEST(driver_is_refused_with_what_to_do_when_there_is_none) {
  CHECK_THROWS(load_driver("libkvw_no_such_driver.so.1"), "no_gpu");
  try {
    load_driver("libkvw_no_such_driver.so.1");
  } catch (const Error& error) {
    const std::string text = error.what();
    CHECK(text.find("libkvw_no_such_driver.so.1") != std::string::npos);
    CHECK(text.find("host memory") != std::string::npos);
  }
}

TEST(library_that_is_no_driver_is_refused_by_the_first_name_it_lacks) {
  try {
    load_driver("libm.so.6");
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), "no_gpu");
    CHECK(std::string(error.what()).find("cuInit") != std::string::npos);
  }
}

TEST(driver_without_devices_is_refused_with_its_own_words) {
  World world;
  world.set("devices", 0);
  try {
    load_driver(KVW_CUDA_MODEL);
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), "no_gpu");
    CHECK(std::string(error.what()).find("CUDA_ERROR_NO_DEVICE") != std::string::npos);
    CHECK(std::string(error.what()).find("CUDA_VISIBLE_DEVICES") != std::string::npos);
  }
  world.set("devices", 1);
}

TEST(error_names_the_call_the_error_and_what_to_do) {
  World world;
  CUdeviceptr made = 0;
  try {
    world.cuda.check(world.cuda.cuMemAlloc(&made, size_t{1} << 40), "cuMemAlloc");
    CHECK(false);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), "gpu_memory");
    CHECK(error.kind() == ErrorKind::capacity);
    const std::string text = error.what();
    CHECK(text.find("cuMemAlloc") != std::string::npos);
    CHECK(text.find("CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
    CHECK(text.find("gpu_memory_utilization") != std::string::npos);
  }
  CHECK_EQ(world.cuda.told(12345), "CUDA error 12345");
  CHECK_THROWS(world.cuda.check(kCudaIllegalAddress, "cuEventQuery"), "gpu_error");
  for (const CUresult result : {kCudaCaptureUnsupported, kCudaCaptureInvalidated,
                                kCudaCaptureImplicit, kCudaCapturedEvent}) {
    try {
      world.cuda.check(result, "cuMemAlloc");
      CHECK(false);
    } catch (const Error& error) {
      CHECK_EQ(error.code(), "gpu_capture");
      CHECK(std::string(error.what()).find("captures a CUDA graph") != std::string::npos);
    }
  }
}

// Copies that nothing orders are a race, as they are meant to be: not where races end a run.
#if defined(__SANITIZE_THREAD__)
constexpr bool kUnordered = false;
#else
constexpr bool kUnordered = true;
#endif

TEST(model_copies_in_the_order_of_a_stream_and_of_events_alone) {
  World world;
  const CUstream one = world.stream(), two = world.stream();
  const CUevent event = world.event();
  constexpr size_t kBytes = 300000;
  const CUdeviceptr middle = world.memory(kBytes);
  void *from = nullptr, *to = nullptr;
  CHECK_EQ(world.cuda.cuMemHostAlloc(&from, kBytes, kHostAllocPortable), kCudaSuccess);
  CHECK_EQ(world.cuda.cuMemHostAlloc(&to, kBytes, kHostAllocPortable), kCudaSuccess);
  uint64_t early = 0;
  // Which of two streams is first is chance where none waits: until that one was late once.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  const auto late = [&] { return std::chrono::steady_clock::now() >= deadline; };
  for (int round = 0; round < 40 || (kUnordered && early == 0 && !late()); ++round) {
    const bool waits = !kUnordered || round % 2 == 0;
    std::memset(from, 1 + round % 255, kBytes);
    std::memset(to, 0, kBytes);
    CHECK_EQ(world.cuda.cuMemcpyHtoDAsync(middle, from, kBytes, one), kCudaSuccess);
    CHECK_EQ(world.cuda.cuEventRecord(event, one), kCudaSuccess);
    if (waits) CHECK_EQ(world.cuda.cuStreamWaitEvent(two, event, 0), kCudaSuccess);
    CHECK_EQ(world.cuda.cuMemcpyDtoHAsync(to, middle, kBytes, two), kCudaSuccess);
    CHECK_EQ(world.cuda.cuEventRecord(event, two), kCudaSuccess);
    CHECK_EQ(world.cuda.cuEventSynchronize(event), kCudaSuccess);
    const bool same = std::memcmp(from, to, kBytes) == 0;
    if (waits)
      CHECK(same);
    else
      early += same ? 0 : 1;
    while (world.cuda.cuStreamQuery(one) == kCudaNotReady) {
    }
  }
  CHECK_EQ(early > 0, kUnordered);  // a wait that is missing shows
  for (void* memory : {from, to}) CHECK_EQ(world.cuda.cuMemFreeHost(memory), kCudaSuccess);
  CHECK_EQ(world.cuda.cuMemFree(middle), kCudaSuccess);
  CHECK_EQ(world.cuda.cuEventDestroy(event), kCudaSuccess);
  for (const CUstream stream : {one, two})
    CHECK_EQ(world.cuda.cuStreamDestroy(stream), kCudaSuccess);
  CHECK_EQ(world.count("violations"), 0);
}

TEST(model_counts_copies_of_memory_that_is_not_pinned_and_refuses_half_of_it) {
  World world;
  const CUstream stream = world.stream();
  const CUdeviceptr to = world.memory(64 << 10);
  Mapped host(64 << 10, PROT_READ | PROT_WRITE);
  auto* data = static_cast<std::byte*>(host.data);
  const uint64_t before = world.count("unpinned_copies");
  CHECK_EQ(world.cuda.cuMemcpyHtoDAsync(to, data, 8192, stream), kCudaSuccess);
  CHECK_EQ(world.count("unpinned_copies"), before + 1);
  CHECK_EQ(world.cuda.cuMemHostRegister(data, 32 << 10, kHostRegisterPortable), kCudaSuccess);
  CHECK_EQ(world.cuda.cuMemcpyHtoDAsync(to, data, 8192, stream), kCudaSuccess);
  CHECK_EQ(world.count("unpinned_copies"), before + 1);
  CHECK_EQ(world.cuda.cuMemcpyHtoDAsync(to, data, 33 << 10, stream), kCudaInvalidValue);
  CHECK_EQ(world.cuda.cuMemcpyHtoDAsync(to + (60 << 10), data, 8192, stream), kCudaInvalidValue);
  CHECK_EQ(world.cuda.cuStreamDestroy(stream), kCudaSuccess);
  CHECK_EQ(world.cuda.cuMemHostUnregister(data), kCudaSuccess);
  CHECK_EQ(world.cuda.cuMemFree(to), kCudaSuccess);
}

TEST(model_refuses_registrations_that_the_driver_refuses) {
  World world;
  Mapped writable(1 << 20, PROT_READ | PROT_WRITE), read_only(1 << 20, PROT_READ);
  auto* data = static_cast<std::byte*>(writable.data);
  CHECK_EQ(world.cuda.cuMemHostRegister(data, 1 << 20, kHostRegisterPortable), kCudaSuccess);
  CHECK_EQ(world.cuda.cuMemHostRegister(data + 4096, 4096, kHostRegisterPortable),
           kCudaHostMemoryAlreadyRegistered);
  CHECK_EQ(world.cuda.cuMemHostUnregister(data + 4096), kCudaInvalidValue);
  CHECK_EQ(world.cuda.cuMemHostUnregister(data), kCudaSuccess);
  CHECK_EQ(world.cuda.cuMemHostUnregister(data), kCudaHostMemoryNotRegistered);
  CHECK_EQ(world.cuda.cuMemHostRegister(read_only.data, 1 << 20, kHostRegisterPortable),
           kCudaInvalidValue);
  const unsigned flags = kHostRegisterPortable | kHostRegisterReadOnly;
  CHECK_EQ(world.cuda.cuMemHostRegister(read_only.data, 1 << 20, flags), kCudaNotSupported);
  world.set("read_only_register", 1);
  CHECK_EQ(world.cuda.cuMemHostRegister(read_only.data, 1 << 20, flags), kCudaSuccess);
  CHECK_EQ(world.cuda.cuMemHostUnregister(read_only.data), kCudaSuccess);
}

// As the kernel refuses it to the driver: an arena on a disk is never registered.
TEST(model_registers_files_in_memory_and_none_on_a_disk) {
  World world;
  const auto registered = [&](int file) {
    CHECK(file >= 0 && ::ftruncate(file, 4096) == 0);
    void* data = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(data != MAP_FAILED);
    const CUresult result = world.cuda.cuMemHostRegister(data, 4096, kHostRegisterPortable);
    if (result == kCudaSuccess) CHECK_EQ(world.cuda.cuMemHostUnregister(data), kCudaSuccess);
    ::munmap(data, 4096);
    ::close(file);
    return result;
  };
  CHECK_EQ(registered(::memfd_create("kvw-test", MFD_CLOEXEC)), kCudaSuccess);
  const FileHere file;
  CHECK_EQ(registered(file.descriptor), file.on_tmpfs ? kCudaSuccess : kCudaInvalidValue);
}

TEST(model_refuses_contexts_that_nobody_holds_and_streams_of_others) {
  World world;
  world.set("devices", 2);
  CHECK_EQ(world.cuda.cuCtxPushCurrent(nullptr), kCudaInvalidContext);
  CUcontext other = nullptr;
  CHECK_EQ(world.cuda.cuDevicePrimaryCtxRetain(&other, 1), kCudaSuccess);
  CHECK_EQ(world.cuda.cuDevicePrimaryCtxRelease(1), kCudaSuccess);
  CHECK_EQ(world.cuda.cuCtxPushCurrent(other), kCudaInvalidContext);
  CHECK_EQ(world.cuda.cuDevicePrimaryCtxRelease(1), kCudaInvalidContext);
  const CUstream stream = world.stream();
  const CUevent event = world.event();
  CHECK_EQ(world.cuda.cuDevicePrimaryCtxRetain(&other, 1), kCudaSuccess);
  CHECK_EQ(world.cuda.cuCtxPushCurrent(other), kCudaSuccess);
  const CUevent own = world.event();
  CHECK_EQ(world.cuda.cuEventRecord(own, stream), kCudaInvalidHandle);
  CHECK_EQ(world.cuda.cuEventRecord(event, nullptr), kCudaInvalidHandle);
  CHECK_EQ(world.cuda.cuEventDestroy(own), kCudaSuccess);
  CHECK_EQ(world.cuda.cuCtxPopCurrent(nullptr), kCudaSuccess);
  CHECK_EQ(world.cuda.cuDevicePrimaryCtxRelease(1), kCudaSuccess);
  CHECK_EQ(world.cuda.cuEventRecord(event, stream), kCudaSuccess);
  CHECK_EQ(world.cuda.cuEventDestroy(event), kCudaSuccess);
  CHECK_EQ(world.cuda.cuStreamDestroy(stream), kCudaSuccess);
}

TEST(model_refuses_what_breaks_a_capture_of_another_thread_unless_the_mode_is_relaxed) {
  World world;
  const CUstream stream = world.stream();
  const CUevent event = world.event();
  const uint64_t before = world.count("broken_captures");
  world.set("capture", 1);
  CHECK_EQ(world.cuda.cuEventRecord(event, stream), kCudaSuccess);
  CHECK_EQ(world.cuda.cuEventQuery(event), kCudaCaptureUnsupported);
  CUdeviceptr made = 0;
  CHECK_EQ(world.cuda.cuMemAlloc(&made, 4096), kCudaCaptureUnsupported);
  CHECK_EQ(world.count("broken_captures"), before + 2);
  {
    const BesideCaptures beside(world.cuda);
    {
      const BesideCaptures again(world.cuda);
    }
    CHECK_EQ(world.cuda.cuEventSynchronize(event), kCudaSuccess);
    CHECK_EQ(world.cuda.cuEventQuery(event), kCudaSuccess);
  }
  CHECK_EQ(world.cuda.cuEventQuery(event), kCudaCaptureUnsupported);  // the thread's mode is back
  CHECK_EQ(world.count("broken_captures"), before + 3);
  world.set("capture", 0);
  CHECK_EQ(world.cuda.cuEventDestroy(event), kCudaSuccess);
  CHECK_EQ(world.cuda.cuStreamDestroy(stream), kCudaSuccess);
}

TEST(model_breaks_the_capture_of_a_stream_whose_event_is_looked_at_and_of_one_beside_the_default) {
  World world;
  const BesideCaptures beside(world.cuda);
  const CUstream stream = world.stream();
  const CUevent event = world.event();
  const auto legacy = reinterpret_cast<CUstream>(1);  // NOLINT(performance-no-int-to-ptr)
  int status = -1;
  world.set("captured", reinterpret_cast<uint64_t>(stream));
  world.set("capture", 1);
  const uint64_t before = world.count("broken_captures");
  CHECK_EQ(world.cuda.cuStreamIsCapturing(legacy, &status), kCudaSuccess);
  CHECK_EQ(status, kCaptureStatusNone);
  CHECK_EQ(world.cuda.cuStreamIsCapturing(stream, &status), kCudaSuccess);
  CHECK_EQ(status, 1);
  CHECK_EQ(world.cuda.cuEventRecord(event, stream), kCudaSuccess);
  CHECK_EQ(world.count("broken_captures"), before);
  CHECK_EQ(world.cuda.cuEventQuery(event), kCudaCapturedEvent);
  CHECK_EQ(world.count("broken_captures"), before + 1);
  world.set("captured", 1);
  CHECK_EQ(world.cuda.cuStreamIsCapturing(legacy, &status), kCudaCaptureImplicit);
  CHECK_EQ(world.count("broken_captures"), before + 1);
  CHECK_EQ(world.cuda.cuEventRecord(event, legacy), kCudaCaptureImplicit);
  CHECK_EQ(world.count("broken_captures"), before + 2);
  CHECK_EQ(world.cuda.cuEventRecord(event, stream), kCudaSuccess);
  CHECK_EQ(world.cuda.cuEventSynchronize(event), kCudaSuccess);
  CHECK_EQ(world.cuda.cuEventQuery(event), kCudaSuccess);
  world.set("capture", 0);
  world.set("captured", 0);
  CHECK_EQ(world.cuda.cuEventDestroy(event), kCudaSuccess);
  CHECK_EQ(world.cuda.cuStreamDestroy(stream), kCudaSuccess);
}

TEST(model_says_when_memory_goes_that_a_queued_copy_uses) {
  World world;
  const CUstream stream = world.stream();
  const CUdeviceptr to = world.memory(4096);
  Mapped host(4096, PROT_READ | PROT_WRITE);
  CHECK_EQ(world.cuda.cuMemHostRegister(host.data, 4096, kHostRegisterPortable), kCudaSuccess);
  world.set("hold", 1);
  CHECK_EQ(world.cuda.cuMemcpyHtoDAsync(to, host.data, 4096, stream), kCudaSuccess);
  const uint64_t before = world.count("violations");
  CHECK_EQ(world.cuda.cuMemHostUnregister(host.data), kCudaSuccess);
  CHECK_EQ(world.count("violations"), before + 1);
  CHECK_EQ(world.cuda.cuMemFree(to), kCudaSuccess);
  CHECK_EQ(world.count("violations"), before + 2);
  world.set("hold", 0);
  CHECK_EQ(world.cuda.cuStreamDestroy(stream), kCudaSuccess);
}

TEST(model_shows_device_memory_to_nobody_but_its_copies_and_kernels) {
  World world;
  const CUdeviceptr memory = world.memory(4096);
  const pid_t child = ::fork();
  if (child == 0) {
    *reinterpret_cast<volatile char*>(memory) = 1;  // NOLINT(performance-no-int-to-ptr)
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) != 0);  // a sanitizer exits instead
  CHECK(world.peeked(memory, 4096) == std::vector<std::byte>(4096, std::byte{0xdb}));
  CHECK_EQ(world.cuda.cuMemFree(memory), kCudaSuccess);
}

// Memory that processes share, as the driver's calls make it.
struct Shared : World {
  static constexpr size_t kBytes = 4 << 20;  // two granules

  CUmemAllocationProp properties() const {
    CUmemAllocationProp made{};
    made.type = kAllocationPinned;
    made.requested_handle_types = kHandleFd;
    made.location = {kLocationDevice, 0};
    return made;
  }
  CUmemHandle handle() const {
    const CUmemAllocationProp how = properties();
    CUmemHandle made = 0;
    CHECK_EQ(cuda.cuMemCreate(&made, kBytes, &how, 0), kCudaSuccess);
    return made;
  }
  CUdeviceptr window() const {
    CUdeviceptr made = 0;
    CHECK_EQ(cuda.cuMemAddressReserve(&made, kBytes, 0, 0, 0), kCudaSuccess);
    return made;
  }
  CUresult allow(CUdeviceptr at, int flags, size_t bytes = kBytes) const {
    const CUmemAccessDesc access{{kLocationDevice, 0}, flags};
    return cuda.cuMemSetAccess(at, bytes, &access, 1);
  }
  void unmap(CUdeviceptr at) const {
    CHECK_EQ(cuda.cuMemUnmap(at, kBytes), kCudaSuccess);
    CHECK_EQ(cuda.cuMemAddressFree(at, kBytes), kCudaSuccess);
  }
  void nothing_is_left() const {
    for (const char* name : {"handles", "reserved_bytes", "mapped_bytes"}) CHECK_EQ(count(name), 0);
  }
};

// As a daemon that a test forks beside a client in the middle of a load.
TEST(model_can_be_asked_in_a_child_whatever_a_thread_was_asking_at_the_fork) {
  const Shared world;
  const auto ask = [&] {
    CHECK_EQ(world.cuda.cuMemFree(world.memory(512)), kCudaSuccess);
    CHECK_EQ(world.cuda.cuMemRelease(world.handle()), kCudaSuccess);
  };
  std::atomic<bool> ends{false};
  std::thread asking([&] {
    CHECK_EQ(world.cuda.cuCtxPushCurrent(world.context), kCudaSuccess);
    while (!ends) ask();
  });
  int status = 0;
  for (int round = 0; round < 200 && status == 0; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(30);
      ask();
      ::_exit(0);
    }
    ::waitpid(child, &status, 0);
  }
  ends = true;
  asking.join();
  CHECK_EQ(status, 0);
}

TEST(model_shares_memory_by_descriptor_also_when_its_maker_is_dead) {
  Shared world;
  std::array<int, 2> sockets{};
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets.data()), 0);
  const pid_t maker = ::fork();
  if (maker == 0) {
    const CUmemHandle handle = world.handle();
    const CUdeviceptr at = world.window();
    world.cuda.cuMemMap(at, Shared::kBytes, 0, handle, 0);
    world.allow(at, kAccessReadWrite);
    world.poke(at + 70000, "sealed", 6);
    int fd = -1;
    world.cuda.cuMemExportToShareableHandle(&fd, handle, kHandleFd, 0);
    char byte = 'm';
    iovec piece{&byte, 1};
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{nullptr, 0, &piece, 1, control.data(), control.size(), 0};
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    ::sendmsg(sockets[1], &message, 0);
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(maker, nullptr, 0);
  char byte = 0;
  iovec piece{&byte, 1};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{nullptr, 0, &piece, 1, control.data(), control.size(), 0};
  CHECK_EQ(::recvmsg(sockets[0], &message, MSG_DONTWAIT), 1);
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
  CUmemHandle handle = 0;
  void* given = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));  // NOLINT
  CHECK_EQ(world.cuda.cuMemImportFromShareableHandle(&handle, given, kHandleFd), kCudaSuccess);
  ::close(fd);  // it stays the caller's
  const CUdeviceptr at = world.window();
  CHECK_EQ(world.cuda.cuMemMap(at, Shared::kBytes, 0, handle, 0), kCudaSuccess);
  CHECK_EQ(world.allow(at, kAccessRead), kCudaSuccess);
  CHECK_EQ(world.cuda.cuMemRelease(handle), kCudaSuccess);  // the mapping holds it
  const auto bytes = world.peeked(at + 70000, 6);
  CHECK(std::memcmp(bytes.data(), "sealed", 6) == 0);
  world.unmap(at);
  world.nothing_is_left();
  for (const int each : sockets) ::close(each);
}

TEST(model_refuses_shared_memory_that_the_driver_refuses) {
  Shared world;
  const Driver& cuda = world.cuda;
  CUmemAllocationProp how = world.properties();
  CUmemHandle handle = 0;
  CHECK_EQ(cuda.cuMemCreate(&handle, Shared::kBytes + 1, &how, 0), kCudaInvalidValue);
  how.requested_handle_types = 0;
  CHECK_EQ(cuda.cuMemCreate(&handle, Shared::kBytes, &how, 0), kCudaInvalidValue);
  how = world.properties();
  how.location.id = 5;
  CHECK_EQ(cuda.cuMemCreate(&handle, Shared::kBytes, &how, 0), kCudaInvalidDevice);
  world.set("create_limit", Shared::kBytes);
  handle = world.handle();
  CUmemHandle second = 0;
  how = world.properties();
  CHECK_EQ(cuda.cuMemCreate(&second, Shared::kBytes, &how, 0), kCudaOutOfMemory);
  world.set("create_limit", UINT64_MAX);
  // A descriptor of something else.
  void* standard = reinterpret_cast<void*>(uintptr_t{2});  // NOLINT
  CHECK_EQ(cuda.cuMemImportFromShareableHandle(&second, standard, kHandleFd), kCudaInvalidValue);
  CUdeviceptr at = 0;
  CHECK_EQ(cuda.cuMemAddressReserve(&at, 4096, 0, 0, 0), kCudaInvalidValue);
  at = world.window();
  CHECK_EQ(cuda.cuMemMap(at + Shared::kBytes, Shared::kBytes, 0, handle, 0), kCudaInvalidValue);
  CHECK_EQ(cuda.cuMemMap(at, 2 * Shared::kBytes, 0, handle, 0), kCudaInvalidValue);
  CHECK_EQ(cuda.cuMemMap(at, Shared::kBytes, 4096, handle, 0), kCudaInvalidValue);
  CHECK_EQ(world.allow(at, kAccessReadWrite), kCudaInvalidValue);  // nothing is mapped
  CHECK_EQ(cuda.cuMemMap(at, Shared::kBytes, 0, handle, 0), kCudaSuccess);
  CHECK_EQ(cuda.cuMemMap(at, Shared::kBytes, 0, handle, 0), kCudaInvalidValue);
  CHECK_EQ(cuda.cuMemAddressFree(at, Shared::kBytes), kCudaInvalidValue);  // mapped
  CHECK_EQ(cuda.cuMemUnmap(at, Shared::kBytes / 2), kCudaInvalidValue);
  world.unmap(at);
  CHECK_EQ(cuda.cuMemRelease(handle), kCudaSuccess);
  CHECK_EQ(cuda.cuMemRelease(handle), kCudaInvalidValue);
  world.nothing_is_left();
}

TEST(model_copies_shared_memory_only_where_access_was_set) {
  Shared world;
  const CUstream stream = world.stream();
  const CUdeviceptr other = world.memory(4096);
  const CUmemHandle handle = world.handle();
  const CUdeviceptr at = world.window();
  CHECK_EQ(world.cuda.cuMemMap(at, Shared::kBytes, 0, handle, 0), kCudaSuccess);
  const auto read = [&] { return world.cuda.cuMemcpyDtoDAsync(other, at, 4096, stream); };
  const auto write = [&] { return world.cuda.cuMemcpyDtoDAsync(at, other, 4096, stream); };
  CHECK_EQ(read(), kCudaInvalidValue);
  CHECK_EQ(world.allow(at, kAccessRead), kCudaSuccess);
  CHECK_EQ(read(), kCudaSuccess);
  CHECK_EQ(write(), kCudaInvalidValue);
  CHECK_EQ(world.allow(at, kAccessReadWrite), kCudaSuccess);
  CHECK_EQ(write(), kCudaSuccess);
  world.set("read_only_access", 0);
  CHECK_EQ(world.allow(at, kAccessRead), kCudaNotSupported);
  world.set("read_only_access", 1);
  while (world.cuda.cuStreamQuery(stream) == kCudaNotReady) {
  }
  world.set("hold", 1);
  CHECK_EQ(read(), kCudaSuccess);
  const uint64_t before = world.count("violations");
  world.unmap(at);
  CHECK(world.count("violations") > before);
  // What is queued would read what is gone: mapped again before it runs.
  const CUdeviceptr again = world.window();
  CHECK_EQ(again, at);
  CHECK_EQ(world.cuda.cuMemMap(again, Shared::kBytes, 0, handle, 0), kCudaSuccess);
  CHECK_EQ(world.allow(again, kAccessRead), kCudaSuccess);
  world.set("hold", 0);
  CHECK_EQ(world.cuda.cuStreamDestroy(stream), kCudaSuccess);
  world.unmap(again);
  CHECK_EQ(world.cuda.cuMemRelease(handle), kCudaSuccess);
  CHECK_EQ(world.cuda.cuMemFree(other), kCudaSuccess);
  world.nothing_is_left();
}

}  // namespace
}  // namespace kvw
