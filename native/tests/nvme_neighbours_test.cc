// Reads that lie one behind the other go to the device as one operation while others wait, and each
// is judged by itself all the same.
#include <algorithm>
#include <thread>

#include "tests/disk_world.h"

using namespace kvw;
using namespace kvw::nvme;

namespace {

constexpr unsigned kPlaces = 6;  // of the device's eight, for reads
constexpr uint64_t kOther = 1;   // a segment that no test looks at

struct Scene : DiskWorld {
  // The device's places are taken, so that what is read next waits.
  explicit Scene(unsigned taken = kPlaces) {
    CHECK_EQ(files.prepare(kOther, 1 << 20), 0);
    for (unsigned i = 0; i < taken; ++i) read(kOther, 2 * i * kBlockBytes, kBlockBytes);
    engine->order_when(taken);
  }
  ~Scene() {
    engine->allow(1000);
    if (stopping.joinable()) stopping.join();
  }
  void read(uint32_t segment, uint64_t offset, uint64_t bytes) {
    auto job = std::make_unique<DiskJob>();
    job->kind = DiskJob::Kind::read;
    job->segment = segment;
    job->offset = offset;
    job->buffer = AlignedBuffer(bytes);
    job->add_piece(job->buffer.data(), bytes);
    const size_t number = errors.size();
    errors.push_back(-1);
    job->done = [this, number](int error) {
      errors[number] = error;
      ++ended[DiskJob::Kind::read];
    };
    disk->post(std::move(job));
  }
  // One behind the other.
  void read_row(unsigned count, uint64_t bytes) {
    post_together([&] {
      for (unsigned i = 0; i < count; ++i) read(0, i * bytes, bytes);
    });
  }
  // Of the first operation of what waits, for which a place becomes free.
  uint64_t next_bytes() {
    engine->allow(1);
    return engine->bytes_when(kPlaces + 1).at(kPlaces);
  }
  // Eight neighbours, as one operation and alone under way; what ends from now on fails.
  void fail_row() {
    read_row(8, kBlockBytes);
    CHECK_EQ(next_bytes(), 8 * kBlockBytes);
    engine->allow(kPlaces - 1);
    deliver_until(DiskJob::Kind::read, kPlaces);
    engine->fail(EIO);
  }
  void finish(unsigned count) {
    engine->allow(1000);
    deliver_until(DiskJob::Kind::read, kPlaces + count);
  }

  std::vector<int> errors;  // of each read; -1: under way
  std::thread stopping;
};

}  // namespace

TEST(neighbours_that_wait_are_one_operation_of_bounded_length) {
  Scene scene;
  scene.read_row(12, kBlockBytes);
  CHECK_EQ(scene.next_bytes(), 8 * kBlockBytes);
  scene.finish(12);
}

TEST(neighbours_are_one_operation_of_a_few_mebibytes) {
  constexpr uint64_t kRecordBytes = (1 << 20) + kBlockBytes;
  Scene scene;
  scene.read_row(12, kRecordBytes);
  CHECK_EQ(scene.next_bytes(), 4 * kRecordBytes);
  scene.finish(12);
}

TEST(reads_that_are_no_neighbours_are_operations_of_their_own) {
  Scene scene;
  scene.post_together([&] {
    scene.read(0, 0, kBlockBytes);
    scene.read(0, 2 * kBlockBytes, kBlockBytes);       // behind a gap
    scene.read(kOther, 3 * kBlockBytes, kBlockBytes);  // in another file
    scene.read(kOther, 2 * kBlockBytes, kBlockBytes);  // before it
  });
  scene.engine->allow(kPlaces);
  for (const uint64_t bytes : scene.engine->bytes_when(kPlaces + 4)) CHECK_EQ(bytes, kBlockBytes);
  scene.finish(4);
}

// An idle device does more with six operations than with one.
TEST(neighbours_share_the_places_that_are_free) {
  Scene scene(0);
  scene.read_row(12, kBlockBytes);
  for (const uint64_t bytes : scene.engine->bytes_when(kPlaces)) CHECK_EQ(bytes, 2 * kBlockBytes);
  scene.engine->allow(1000);
  scene.deliver_until(DiskJob::Kind::read, 12);
}

TEST(neighbours_that_fail_are_read_again_one_by_one) {
  Scene scene;
  scene.fail_row();
  scene.engine->allow(1);
  scene.engine->order_when(kPlaces + 2);  // it has failed
  scene.engine->fail(0);
  scene.finish(8);
  CHECK(scene.errors == std::vector<int>(kPlaces + 8, 0));
  const auto bytes = scene.engine->bytes_when(kPlaces + 9);
  for (size_t i = kPlaces + 1; i < kPlaces + 9; ++i) CHECK_EQ(bytes.at(i), kBlockBytes);
}

TEST(neighbours_that_fail_again_fail_each_by_itself) {
  Scene scene;
  scene.fail_row();
  scene.engine->allow(1 + 3);  // all of them, and three of them again
  scene.deliver_until(DiskJob::Kind::read, kPlaces + 3);
  scene.engine->fail(0);
  scene.finish(8);
  CHECK_EQ(std::count(scene.errors.begin(), scene.errors.end(), EIO), 3);
  CHECK_EQ(std::count(scene.errors.begin(), scene.errors.end(), 0), kPlaces + 5);
}

TEST(neighbours_that_fail_while_the_disk_stops_leave_nobody_waiting) {
  Scene scene;
  scene.fail_row();
  scene.stopping = std::thread([&] { scene.disk->stop(); });
  scene.engine->allow(1000);
  scene.stopping.join();
  scene.disk->deliver();
  for (unsigned i = kPlaces; i < kPlaces + 8; ++i)
    CHECK(scene.errors[i] == ECANCELED || scene.errors[i] == EIO);
}
