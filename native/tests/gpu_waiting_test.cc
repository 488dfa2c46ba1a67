// When a device is looked at that somebody waits for: seldom, and soon after it is done.
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>

#include "base/clock.h"
#include "gpu/device.h"
#include "gpu/looks.h"
#include "tests/gpu_world.h"

namespace kvw {
namespace {

constexpr uint64_t kUs = 1000;

TEST(end_is_seen_an_eighth_late_at_most) {
  for (uint64_t takes_ns = kUs; takes_ns < kSecondNs; takes_ns += takes_ns / 7 + 1) {
    gpu::Looks looks;
    uint64_t now_ns = kSecondNs;
    do now_ns += looks.next_ns(now_ns);
    while (now_ns < kSecondNs + takes_ns);
    CHECK(now_ns - kSecondNs - takes_ns <= std::clamp(takes_ns / 8, 5 * kUs, 500 * kUs));
  }
}

// Each look of the driver takes a lock that the engine's launches want.
TEST(driver_is_not_asked_before_a_batch_can_be_done) {
  constexpr size_t kPages = 4, kPageBytes = 256 << 10;
  Rig rig(kPageBytes);
  const auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, kPages);
  chain.store_all(*client);
  const DeviceCache cache(rig.model, kPages, kPageBytes, kPageBytes);
  rig.model.set("copy_us_per_mib", 1000);
  const uint64_t looks = rig.model.count("looks"), early = rig.model.count("early_looks");
  for (int load = 0; load < 20; ++load) CHECK_EQ(rig.load(*client, chain, cache).pages, kPages);
  CHECK(rig.model.count("looks") - looks >= 20);
  CHECK_EQ(rig.model.count("early_looks") - early, 0);
}

// A device, a stream with an event on it, and pinned memory for a mark.
struct Waiting {
  Waiting() : device(0, ""), current(device), pinned(device) {
    pinned.need(sizeof(uint64_t));
    CHECK_EQ(device.cuda().cuStreamCreate(&stream, gpu::kStreamNonBlocking), gpu::kCudaSuccess);
    CHECK_EQ(device.cuda().cuEventCreate(&event, gpu::kEventDisableTiming), gpu::kCudaSuccess);
    mark().store(0);
  }
  ~Waiting() {
    model.set("hold", 0);
    device.cuda().cuEventDestroy(event);
    device.cuda().cuStreamDestroy(stream);
  }
  std::atomic<uint64_t>& mark() const { return *pinned.as<std::atomic<uint64_t>>(); }
  void record() const { CHECK_EQ(device.cuda().cuEventRecord(event, stream), gpu::kCudaSuccess); }
  static uint64_t soon_ns(uint64_t ns = kMillisecondNs) { return system_clock().boot_ns() + ns; }

  CudaModel model;
  gpu::Device device;
  gpu::Device::Current current;
  gpu::Memory<false> pinned;
  gpu::CUstream stream = nullptr;
  gpu::CUevent event = nullptr;
};

TEST(mark_says_no_more_than_when_to_ask) {
  const Waiting waiting;
  waiting.model.set("hold", 1);
  waiting.record();
  waiting.mark().store(1);
  CHECK(!waiting.device.wait(waiting.event, Waiting::soon_ns(), &waiting.mark()));
  waiting.mark().store(0);
  waiting.model.set("hold", 0);
  CHECK(waiting.device.wait(waiting.event, Waiting::soon_ns(kPatienceNs), &waiting.mark()));
}

TEST(lost_device_writes_no_mark_and_is_noticed) {
  const Waiting waiting;
  waiting.model.set("hold", 1);
  waiting.record();
  waiting.model.set("lost", 1);
  CHECK_THROWS(waiting.device.wait(waiting.event, Waiting::soon_ns(kPatienceNs), &waiting.mark()),
               "gpu_error");
  waiting.model.set("lost", 0);
}

TEST(thread_that_waits_sleeps_exactly_and_then_as_before) {
  const Waiting waiting;
  const int usual = ::prctl(PR_GET_TIMERSLACK);
  CHECK_EQ(::prctl(PR_SET_TIMERSLACK, 12345UL), 0);
  waiting.model.set("hold", 1);
  waiting.record();
  CHECK(!waiting.device.wait(waiting.event, Waiting::soon_ns()));
  CHECK_EQ(waiting.model.count("look_slack_ns"), 1000);
  CHECK_EQ(::prctl(PR_GET_TIMERSLACK), 12345);
  ::prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(usual));
  waiting.model.set("hold", 0);
  CHECK(waiting.device.wait(waiting.event, Waiting::soon_ns(kPatienceNs)));
}

// The last look is at the deadline, also where there is no mark.
TEST(device_that_never_answers_is_given_up_at_the_deadline) {
  const Waiting waiting;
  waiting.model.set("hold", 1);
  waiting.record();
  const uint64_t before = waiting.model.count("looks");
  CHECK(!waiting.device.wait(waiting.event, Waiting::soon_ns(), &waiting.mark()));
  CHECK_EQ(waiting.model.count("looks") - before, 1);
  CHECK(!waiting.device.wait(waiting.event, system_clock().boot_ns(), &waiting.mark()));
}

}  // namespace
}  // namespace kvw
