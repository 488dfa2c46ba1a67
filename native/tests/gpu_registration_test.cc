// Registrations of memory with the driver, alone, over its contract model: how they take turns with
// the engine, and what becomes of one that is replaced or stopped.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "gpu/device.h"
#include "gpu/registration.h"
#include "tests/check.h"
#include "tests/cuda_world.h"

namespace kvw {
namespace {

// Memory of several slabs to register.
struct Slabs {
  static constexpr size_t kSlab = size_t{256} << 20, kCount = 5;
  Slabs() {
    void* memory = ::mmap(nullptr, kCount * kSlab, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED);
    arena.data = static_cast<std::byte*>(memory);
    arena.bytes = kCount * kSlab;
    arena.slab_bytes = kSlab;
    arena.populated = [](size_t) { return true; };
  }
  ~Slabs() { ::munmap(arena.data, arena.bytes); }
  Slabs(const Slabs&) = delete;
  Slabs& operator=(const Slabs&) = delete;
  gpu::Registrable arena;
};

void until_settled(const gpu::Registration& registration) {
  while (!registration.settled()) std::this_thread::yield();
}

std::shared_ptr<gpu::Registration> settled(const std::shared_ptr<gpu::Device>& device,
                                           const Slabs& slabs) {
  auto made = std::make_shared<gpu::Registration>(device, slabs.arena);
  until_settled(*made);
  return made;
}

// The driver's lock that it takes is one that the engine's own calls wait for.
TEST(registering_rests_after_each_slab_for_as_long_as_that_took) {
  const CudaModel model;
  const Slabs slabs;
  constexpr auto kEach = std::chrono::milliseconds(30);
  const auto device = std::make_shared<gpu::Device>(0, "");
  model.set("register_us", std::chrono::microseconds(kEach).count());
  const uint64_t before = model.count("registrations");
  {
    const auto begun = std::chrono::steady_clock::now();
    const gpu::Registration registration(device, slabs.arena);
    until_settled(registration);
    CHECK(std::chrono::steady_clock::now() - begun >= (2 * Slabs::kCount - 1) * kEach);
    CHECK_EQ(model.count("registrations") - before, Slabs::kCount);
    CHECK_EQ(registration.registered_bytes(), slabs.arena.bytes);
    CHECK(registration.covers(slabs.arena.data + Slabs::kSlab - 4096, 4096));
  }
  CHECK_EQ(model.count("registered_bytes"), 0);
}

TEST(memory_of_a_file_on_a_disk_is_refused_with_what_to_do) {
  const CudaModel model;
  const FileHere file;
  if (file.on_tmpfs) {
    std::printf("(skipped: this folder is not on a disk) ");
    ::close(file.descriptor);
    return;
  }
  CHECK_EQ(::ftruncate(file.descriptor, 4096), 0);
  void* data = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor, 0);
  CHECK(data != MAP_FAILED);
  {
    gpu::Registrable arena;
    arena.data = static_cast<std::byte*>(data);
    arena.bytes = arena.slab_bytes = 4096;
    arena.populated = [](size_t) { return true; };
    const gpu::Registration registration(std::make_shared<gpu::Device>(0, ""), arena);
    until_settled(registration);
    CHECK_EQ(registration.registered_bytes(), 0);
    CHECK(registration.refusal().find("--arena-dir on tmpfs") != std::string::npos);
  }
  ::munmap(data, 4096);
  ::close(file.descriptor);
}

TEST(registration_that_is_replaced_is_undone_beside_its_successor_and_not_after_it) {
  const CudaModel model;
  const Slabs one, two;
  const auto device = std::make_shared<gpu::Device>(0, "");
  auto before = settled(device, one);
  model.set("register_us", 10'000);
  const gpu::Registration after(device, two.arena, std::move(before));
  until_settled(after);
  CHECK_EQ(model.count("registered_bytes"), two.arena.bytes);
}

TEST(registration_that_is_replaced_registers_nothing_more_while_calls_hold_it) {
  const CudaModel model;
  // All but the first slab of the one come once its successor registers, which takes a while.
  std::atomic<bool> registers{false};
  Slabs one, two;
  one.arena.populated = [&](size_t slab) { return slab == 0 || registers; };
  two.arena.populated = [&](size_t slab) {
    if (slab == 1) registers = true;
    return true;
  };
  const auto device = std::make_shared<gpu::Device>(0, "");
  model.set("register_us", 30'000);
  const auto before = std::make_shared<gpu::Registration>(device, one.arena);
  while (before->registered_bytes() == 0) std::this_thread::yield();
  auto after = std::make_unique<gpu::Registration>(device, two.arena, before);
  until_settled(*after);
  CHECK_EQ(before->registered_bytes(), Slabs::kSlab);
  after.reset();
  CHECK_EQ(model.count("registered_bytes"), before->registered_bytes());
}

TEST(registration_stops_within_a_slab_of_its_own_or_of_what_it_replaces) {
  const CudaModel model;
  const Slabs one, two;
  const auto device = std::make_shared<gpu::Device>(0, "");
  auto before = settled(device, one);
  model.set("hold_unregister", 1);
  {
    const uint64_t asked = model.count("unregisters_asked");
    gpu::Registration after(device, two.arena, std::move(before));
    while (model.count("unregisters_asked") == asked) std::this_thread::yield();
    CHECK(!after.stop(std::chrono::milliseconds(1)));
    model.set("hold_unregister", 0);
    CHECK(after.stop(std::chrono::seconds(60)));
    CHECK_EQ(model.count("registered_bytes"), (Slabs::kCount - 1) * Slabs::kSlab);
  }
  CHECK_EQ(model.count("registered_bytes"), 0);
}

}  // namespace
}  // namespace kvw
