// Memory of headers that were read goes to the next reads: never with what looks like a record in
// it, and never without bound.
#include <cstring>

#include "nvme/spare_buffers.h"
#include "tests/check.h"

using namespace kvw;
using namespace kvw::nvme;

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
