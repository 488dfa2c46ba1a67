// When a device is looked at that somebody waits for: seldom, and soon after it is done.
#include <sys/prctl.h>

#include <algorithm>
#include <vector>

#include "base/clock.h"
#include "gpu/device.h"
#include "gpu/pace.h"
#include "tests/gpu_world.h"

namespace kvw {
namespace {

constexpr uint64_t kUs = 1000;
constexpr uint64_t kBytes = 16 << 20;

struct Seen {
  uint64_t looks = 0, late_ns = 0;
  bool closely = false;
};

// Somebody who looks at a device that is done after `takes_ns`, by a clock of the test's own.
Seen look(gpu::Looks looks, uint64_t from_ns, uint64_t takes_ns) {
  Seen seen;
  uint64_t now_ns = from_ns;
  do {
    now_ns += looks.next_ns(now_ns);
    ++seen.looks;
  } while (now_ns < from_ns + takes_ns);
  seen.late_ns = now_ns - from_ns - takes_ns;
  seen.closely = looks.closely();
  return seen;
}

// Works of one kind, each queued when the one before it was seen done.
struct Works {
  Seen next(uint64_t bytes, uint64_t takes_ns) {
    const uint64_t begun_ns = now_ns;
    const uint64_t from_ns = pace.from_ns(begun_ns);
    const Seen seen = look(gpu::Looks(from_ns, pace.expected_ns(bytes)), begun_ns, takes_ns);
    now_ns += takes_ns + seen.late_ns;
    pace.learn(bytes, begun_ns, now_ns, seen.closely);
    return seen;
  }
  gpu::Pace pace;
  uint64_t now_ns = kSecondNs;
};

TEST(end_of_unknown_work_is_seen_an_eighth_late_at_most) {
  for (uint64_t takes_ns = kUs; takes_ns < kSecondNs; takes_ns += takes_ns / 7 + 1) {
    const Seen seen = look({}, kSecondNs, takes_ns);
    CHECK(seen.late_ns <= std::clamp(takes_ns / 8, 5 * kUs, 500 * kUs));
  }
}

TEST(work_whose_time_is_known_is_seen_by_the_third_look) {
  for (const uint64_t takes_ns : {76 * kUs, 305 * kUs, 671 * kUs, 4000 * kUs}) {
    Works works;
    for (int work = 0; work < 40; ++work) works.next(kBytes, takes_ns);
    for (int work = 0; work < 40; ++work) {
      const Seen seen = works.next(kBytes, takes_ns);
      CHECK(seen.looks <= 3);
      CHECK(seen.late_ns <= takes_ns / 8);
    }
  }
}

TEST(small_work_says_nothing_of_the_time_of_a_large_one) {
  Works works;
  const auto takes_ns = [](uint64_t bytes) { return 15 * kUs + bytes / 55; };  // 55 GB/s
  for (int round = 0; round < 50; ++round) {
    for (const uint64_t bytes : {uint64_t{4096}, uint64_t{256} << 10, kBytes})
      CHECK(works.next(bytes, takes_ns(bytes)).late_ns <= takes_ns(bytes) / 8 + 5 * kUs);
  }
  const uint64_t before_ns = works.pace.expected_ns(kBytes);
  for (int round = 0; round < 1000; ++round) works.next(4096, takes_ns(4096));
  CHECK(works.pace.expected_ns(kBytes) <= before_ns);
  CHECK(works.next(kBytes, takes_ns(kBytes)).late_ns <= takes_ns(kBytes) / 8 + 5 * kUs);
}

TEST(one_late_work_makes_the_next_no_later_than_an_eighth) {
  Works works;
  for (int work = 0; work < 40; ++work) works.next(kBytes, 305 * kUs);
  works.next(kBytes, 100 * kMillisecondNs);
  for (int work = 0; work < 10; ++work)
    CHECK(works.next(kBytes, 305 * kUs).late_ns <= 305 * kUs / 8);
}

TEST(work_that_is_looked_at_long_after_its_end_teaches_nothing) {
  Works works;
  for (int work = 0; work < 40; ++work) works.next(kBytes, 305 * kUs);
  const uint64_t before_ns = works.pace.expected_ns(kBytes);
  // Two that were queued one behind the other, and done when somebody came to look.
  const uint64_t begun_ns = works.now_ns, found_ns = begun_ns + kSecondNs;
  works.pace.learn(kBytes, begun_ns, found_ns, false);
  works.pace.learn(kBytes, begun_ns, found_ns + kUs, false);
  CHECK_EQ(works.pace.expected_ns(kBytes), before_ns);
}

TEST(device_that_copies_is_hardly_looked_at_before_it_can_be_done) {
  constexpr size_t kPages = 4, kPageBytes = 256 << 10;
  Rig rig(kPageBytes);
  const auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, kPages);
  chain.store_all(*client);
  const DeviceCache cache(rig.model, kPages, kPageBytes, kPageBytes);
  rig.model.set("copy_us_per_mib", 4000);
  // A thread that is late makes a load seem long, so not every load: most of them, once learnt.
  std::vector<uint64_t> early;
  const auto most = [&] {
    std::vector<uint64_t> last(early.end() - std::min<ptrdiff_t>(std::ssize(early), 15),
                               early.end());
    std::ranges::sort(last);
    return last.size() < 15 ? UINT64_MAX : last[last.size() / 2];
  };
  const uint64_t deadline_ns = system_clock().boot_ns() + kPatienceNs;
  while (most() > 3 && system_clock().boot_ns() < deadline_ns) {
    const uint64_t before = rig.model.count("early_looks");
    CHECK_EQ(rig.load(*client, chain, cache).pages, kPages);
    early.push_back(rig.model.count("early_looks") - before);
  }
  CHECK(most() <= 3);
}

TEST(thread_that_waits_sleeps_exactly_and_then_as_before) {
  const CudaModel model;
  const gpu::Device device(0, "");
  gpu::CUstream stream = nullptr;
  gpu::CUevent event = nullptr;
  void* pinned = nullptr;
  const gpu::Device::Current current(device);
  gpu::Memory<true> memory(device);
  memory.need(4096);
  CHECK_EQ(device.cuda().cuMemHostAlloc(&pinned, 4096, 1), gpu::kCudaSuccess);
  CHECK_EQ(device.cuda().cuStreamCreate(&stream, gpu::kStreamNonBlocking), gpu::kCudaSuccess);
  CHECK_EQ(device.cuda().cuEventCreate(&event, gpu::kEventDisableTiming), gpu::kCudaSuccess);
  const int usual = ::prctl(PR_GET_TIMERSLACK);
  CHECK_EQ(::prctl(PR_SET_TIMERSLACK, 12345UL), 0);
  model.set("hold", 1);
  CHECK_EQ(device.cuda().cuMemcpyHtoDAsync(memory.address(), pinned, 4096, stream),
           gpu::kCudaSuccess);
  CHECK_EQ(device.cuda().cuEventRecord(event, stream), gpu::kCudaSuccess);
  CHECK(!device.wait(event, system_clock().boot_ns() + kMillisecondNs));
  CHECK_EQ(model.count("look_slack_ns"), 1000);
  CHECK_EQ(::prctl(PR_GET_TIMERSLACK), 12345);
  ::prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(usual));
  model.set("hold", 0);
  CHECK(device.wait(event, system_clock().boot_ns() + kPatienceNs));
  device.cuda().cuEventDestroy(event);
  device.cuda().cuStreamDestroy(stream);
  device.cuda().cuMemFreeHost(pinned);
}

// The last look is at the deadline, whatever was expected.
TEST(device_that_never_answers_is_given_up_at_the_deadline) {
  const CudaModel model;
  const gpu::Device device(0, "");
  gpu::CUstream stream = nullptr;
  gpu::CUevent event = nullptr;
  const gpu::Device::Current current(device);
  CHECK_EQ(device.cuda().cuStreamCreate(&stream, gpu::kStreamNonBlocking), gpu::kCudaSuccess);
  CHECK_EQ(device.cuda().cuEventCreate(&event, gpu::kEventDisableTiming), gpu::kCudaSuccess);
  model.set("hold", 1);
  CHECK_EQ(device.cuda().cuEventRecord(event, stream), gpu::kCudaSuccess);
  const uint64_t now_ns = system_clock().boot_ns();
  gpu::Looks looks(now_ns, 1000 * kPatienceNs);
  const uint64_t before = model.count("looks");
  CHECK(!device.wait(event, now_ns + kMillisecondNs, looks));
  CHECK_EQ(model.count("looks") - before, 1);
  gpu::Looks late(now_ns, 1000 * kPatienceNs);
  CHECK(!device.wait(event, now_ns, late));
  model.set("hold", 0);
  device.cuda().cuEventDestroy(event);
  device.cuda().cuStreamDestroy(stream);
}

}  // namespace
}  // namespace kvw
