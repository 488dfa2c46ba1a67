// Clients with the memory of a GPU whose device or driver fails, and clients that close, fork or
// stop, against a real daemon core and the contract model of the driver.
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <thread>

#include "gpu/device.h"
#include "tests/gpu_world.h"

namespace kvw {
namespace {

// A store beside close() once registered the mapping anew, and nobody undid that.
TEST(nothing_begins_on_a_device_while_the_client_closes) {
  Rig rig(5000);
  const uint64_t contexts = rig.model.count("contexts");
  const auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, 1);
  auto cache = std::make_unique<DeviceCache>(rig.model, 1, 5000, 1000);
  const auto view = client->view();
  rig.model.set("hold_unregister", 1);
  std::thread closing([&] { client->close(); });
  while (client->has_device(0)) std::this_thread::yield();
  CHECK_THROWS(client->use_device(0, kImage), "closed");
  CHECK_THROWS(rig.store(*client, chain, *cache), "closed");
  rig.model.set("hold_unregister", 0);
  closing.join();
  cache.reset();
  CHECK_EQ(rig.model.count("registered_bytes"), 0);
  CHECK_EQ(rig.model.count("contexts"), contexts);
  // A call that had come past the client's own look.
  Gpus gpus;
  gpus.add(0, kImage);
  gpus.close();
  CHECK_THROWS(gpus.add(0, kImage), "closed");
  CHECK_THROWS(gpus.device(0), "closed");
  CHECK_THROWS(gpus.use(0, *view), "closed");
}

TEST(device_that_is_not_given_or_not_there_is_refused_with_what_to_do) {
  Rig rig(5000);
  Client client(rig.daemon.client_options());
  const Chain chain(rig.daemon.shape(), 1, 1);
  DeviceCache cache(rig.model, 1, 5000, 1000);
  CHECK_THROWS(rig.load(client, chain, cache), "gpu_not_ready");
  CHECK_THROWS(rig.store(client, chain, cache), "gpu_not_ready");
  CHECK_THROWS(client.use_device(7, kImage), "gpu_error");
  CHECK_THROWS(client.use_device(0, "no kernels"), "gpu_error");
  CHECK(!client.has_device(0));
  client.use_device(0, kImage);
  CHECK_EQ(rig.load(client, chain, cache).pages, 0);
}

TEST(pages_stay_pinned_when_a_lost_device_cannot_say_that_it_is_done) {
  Rig rig(60000);
  auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, 4), other(rig.daemon.shape(), 2, 2);  // one window
  chain.store_all(*client);
  // What is loaded into is the device's still, when the load has failed.
  auto cache = std::make_unique<DeviceCache>(rig.model, 4, 60000, 6000);
  auto stored = std::make_unique<DeviceCache>(rig.model, 2, 60000, 6000);
  std::string loading_error, storing_error;
  const auto fail = [&](auto call, std::string& code) {
    rig.model.set("hold", 1);
    const uint64_t launches = rig.model.count("launches");
    std::thread calling([&] {
      try {
        call();
      } catch (const Error& error) {
        code = error.code();
      }
    });
    while (rig.model.count("launches") == launches) std::this_thread::yield();
    rig.model.set("lost", 1);
    calling.join();
    rig.model.set("lost", 0);
    rig.model.set("hold", 0);
  };
  fail([&] { rig.load(*client, chain, *cache); }, loading_error);
  CHECK_EQ(loading_error, "gpu_error");
  CHECK_EQ(rig.daemon.status().pins, 4);
  fail([&] { rig.store(*client, other, *stored); }, storing_error);
  CHECK_EQ(storing_error, "gpu_error");
  // Its slots are still this session's, and stay so: nothing says that nobody writes to them.
  CHECK_EQ(rig.daemon.status().reserved_slots, 2);
  CHECK_EQ(Chain(rig.daemon.shape(), 3, 1).store(*client, 0).stored, 1);  // settles what is owed
  CHECK_EQ(rig.daemon.status().reserved_slots, 2);
}

TEST(slots_of_a_store_that_failed_come_back_when_the_device_is_done) {
  Rig rig(60000);
  const Chain chain(rig.daemon.shape(), 1, 4);
  DeviceCache cache(rig.model, 4, 60000, 60);
  // Device memory that is used up: the batch cannot begin.
  const gpu::Driver& cuda = gpu::driver();
  gpu::CUcontext context = nullptr;
  CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), gpu::kCudaSuccess);
  CHECK_EQ(cuda.cuCtxPushCurrent(context), gpu::kCudaSuccess);
  std::vector<gpu::CUdeviceptr> taken;
  for (size_t bytes = size_t{1} << 30; bytes >= 4096;) {
    gpu::CUdeviceptr made = 0;
    if (cuda.cuMemAlloc(&made, bytes) == gpu::kCudaSuccess)
      taken.push_back(made);
    else
      bytes /= 2;
  }
  const auto client = rig.connect();
  CHECK_THROWS(rig.store(*client, chain, cache), "gpu_memory");
  for (const gpu::CUdeviceptr each : taken) cuda.cuMemFree(each);
  cuda.cuCtxPopCurrent(nullptr);
  cuda.cuDevicePrimaryCtxRelease(0);
  rig.fill(chain, cache);
  CHECK_EQ(rig.store(*client, chain, cache).stored, 4);  // settles what is owed, and is granted
  CHECK_EQ(rig.daemon.status().reserved_slots, 0);
  CHECK_EQ(chain.load(*client, 0), 4);
}

TEST(mover_that_cannot_be_made_costs_no_place) {
  Rig rig(5000);
  DeviceCache cache(rig.model, 2, 5000, 1000);
  rig.model.set("stream_result", gpu::kCudaOutOfMemory);
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 2);
  chain.store_all(*client);
  for (int round = 0; round < 6; ++round) {  // more often than there are places
    rig.model.set("stream_result", round % 2 == 0 ? gpu::kCudaNotPermitted : gpu::kCudaOutOfMemory);
    CHECK_THROWS(rig.load(*client, chain, cache), round % 2 == 0 ? "gpu_error" : "gpu_memory");
  }
  CHECK_EQ(rig.daemon.status().pins, 0);
  rig.model.set("stream_result", gpu::kCudaSuccess);
  CHECK_EQ(rig.load(*client, chain, cache).pages, 2);
  rig.check_loaded(chain, cache, 2);
}

TEST(call_that_waits_for_a_mover_gets_the_place_of_one_that_could_not_be_made) {
  const CudaModel model;
  gpu::Device device(0, "");
  const uint64_t deadline = system_clock().boot_ns() + 10 * kPatienceNs;
  std::vector<gpu::Device::Borrowed> lent;
  for (int place = 0; place < 3; ++place) lent.push_back(device.borrow(deadline));
  const uint64_t asked = model.count("streams_asked");
  model.set("hold_stream_create", 1);
  std::string refused;
  std::thread making([&] {
    try {
      device.borrow(deadline);
    } catch (const Error& error) {
      refused = error.code();
    }
  });
  while (model.count("streams_asked") == asked) std::this_thread::yield();
  std::atomic<bool> got{false};
  check::Thread waiting([&] {
    while (!got) {
      try {
        got = device.borrow(deadline) != nullptr;
      } catch (const Error&) {
        std::this_thread::yield();  // tried before the refusal was over
      }
    }
  });
  waiting.until_it_waits();
  model.set("stream_result", gpu::kCudaNotPermitted);
  model.set("hold_stream_create", 0);
  making.join();
  model.set("stream_result", gpu::kCudaSuccess);
  const uint64_t patience = system_clock().boot_ns() + kPatienceNs / 2;
  while (!got && system_clock().boot_ns() < patience) std::this_thread::yield();
  const bool without_another = got;
  lent.clear();
  waiting.join();
  CHECK_EQ(refused, "gpu_error");
  CHECK(without_another);
}

TEST(forked_child_leaves_the_driver_alone) {
  Rig rig(5000);
  auto client = rig.connect();
  start_registering(rig, *client);
  const uint64_t registered = rig.model.count("registered_bytes");
  const pid_t child = ::fork();
  if (child == 0) {
    client.reset();  // as an interpreter that ends does
    ::_exit(rig.model.count("registered_bytes") == registered && rig.model.count("modules") > 0
                ? 0
                : 1);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  const Chain chain(rig.daemon.shape(), 1, 2);
  DeviceCache cache(rig.model, 2, 5000, 1000);
  rig.fill(chain, cache);
  CHECK_EQ(rig.store(*client, chain, cache).stored, 2);
}

TEST(forked_child_does_not_wait_for_the_thread_that_registers) {
  const CudaModel model;
  std::atomic<int> looks{0};
  std::array<std::byte, 4096> slab{};
  gpu::Registrable arena;
  arena.data = slab.data();
  arena.bytes = arena.slab_bytes = slab.size();
  arena.populated = [&looks](size_t) { return ++looks < 0; };
  auto registration =
      std::make_unique<gpu::Registration>(std::make_shared<gpu::Device>(0, ""), arena);
  while (looks == 0) std::this_thread::yield();
  const timespec moment{0, 10'000'000};  // until it rests; what follows is true of any moment
  ::nanosleep(&moment, nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kPatienceMs / 1000);
    registration.reset();
    ::_exit(0);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// The last one: what it leaves registered stays so in the model.
TEST(client_that_stops_registering_undoes_nothing_and_begins_nothing) {
  Rig rig(5000);
  auto client = rig.connect();
  start_registering(rig, *client);
  const uint64_t registered = rig.model.count("registered_bytes");
  const uint64_t undone = rig.model.count("unregisters_asked");
  CHECK(client->stop_registering(60 * kSecondNs));
  const Chain chain(rig.daemon.shape(), 1, 1);
  DeviceCache cache(rig.model, 1, 5000, 1000);
  CHECK_THROWS(rig.store(*client, chain, cache), "closed");
  client.reset();
  CHECK_EQ(rig.model.count("registered_bytes"), registered);
  CHECK_EQ(rig.model.count("unregisters_asked"), undone);
}

}  // namespace
}  // namespace kvw
