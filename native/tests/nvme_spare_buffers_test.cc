// Memory of headers that were read goes to the next reads: never with what looks like a record in
// it, and never without bound.
#include <sys/mman.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "base/fd.h"
#include "nvme/spare_buffers.h"
#include "tests/check.h"

using namespace kvw;
using namespace kvw::nvme;

// Whether a core dump of this process would have what lies here: proc(5), VmFlags.
static bool dumped(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto at = reinterpret_cast<uintptr_t>(address);
  uintptr_t begin = 0, end = 0;
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2)
      here = begin <= at && at < end;
    else if (here && line.starts_with("VmFlags:"))
      return line.find(" dd") == std::string::npos;
  }
  return true;
}

TEST(what_may_hold_kv_is_not_in_core_dumps) {
  const AlignedBuffer small(AlignedBuffer::kHeapBytes), large(AlignedBuffer::kHeapBytes + 1);
  CHECK(dumped(small.data()));  // else this test sees nothing
  CHECK(!dumped(large.data()));
  for (size_t i = 0; i < large.bytes(); ++i) CHECK(large.data()[i] == std::byte{});

  const Fd file(::memfd_create("kvw-test", MFD_CLOEXEC));
  CHECK_EQ(::ftruncate(file.get(), 2 * kBlockBytes), 0);
  const Mapping mapping(file.get(), 2 * kBlockBytes, true);
  CHECK(!dumped(mapping.data()));
  CHECK_EQ(::ftruncate(file.get(), 0), 0);
  *mapping.data() = std::byte{1};  // where the file's page was there is memory of this process now
  CHECK(mapping.lost());
  CHECK(!dumped(mapping.data()));
}

TEST(buffer_that_was_kept_is_taken_again_and_begins_with_zeros) {
  SpareBuffers spare;
  AlignedBuffer buffer = spare.take(100);
  CHECK_EQ(buffer.bytes(), kBlockBytes);
  const std::byte* at = buffer.data();
  std::memset(buffer.data(), 0xff, buffer.bytes());
  spare.keep(std::move(buffer));
  CHECK_EQ(spare.kept(), 1);
  const AlignedBuffer larger = spare.take(kBlockBytes + 1);
  CHECK_EQ(larger.bytes(), 2 * kBlockBytes);
  CHECK_EQ(spare.kept(), 1);
  const AlignedBuffer again = spare.take(kBlockBytes);
  CHECK(again.data() == at);
  CHECK_EQ(spare.kept(), 0);
  for (size_t i = 0; i < kBlockBytes; ++i) CHECK(again.data()[i] == std::byte{});
}

TEST(kept_buffers_are_bounded_in_number_and_in_size) {
  SpareBuffers spare;
  spare.keep(AlignedBuffer());
  spare.keep(AlignedBuffer(SpareBuffers::kMaxBytes + 1));
  CHECK_EQ(spare.kept(), 0);
  for (size_t i = 0; i < SpareBuffers::kMaxBuffers + 10; ++i) spare.keep(AlignedBuffer(1));
  CHECK_EQ(spare.kept(), SpareBuffers::kMaxBuffers);
}

TEST(each_buffer_of_several_sizes_is_handed_out_once) {
  SpareBuffers spare;
  for (const size_t blocks : {1, 2, 1, 3}) spare.keep(AlignedBuffer(blocks * kBlockBytes));
  std::vector<AlignedBuffer> taken;
  for (const size_t blocks : {3, 1, 1, 2, 1}) {
    taken.push_back(spare.take(blocks * kBlockBytes));
    CHECK_EQ(taken.back().bytes(), blocks * kBlockBytes);
    CHECK(taken.back().data() != nullptr);
    for (size_t i = 0; i + 1 < taken.size(); ++i) CHECK(taken[i].data() != taken.back().data());
  }
  CHECK_EQ(spare.kept(), 0);
}
