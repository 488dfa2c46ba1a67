// The log as its owner sees it: what was written comes back, in bounds, with its queue, its flushes
// and a device that fails.
#include <sys/stat.h>

#include "tests/nvme_world.h"

using namespace kvw;
using namespace kvw::nvme;

TEST(log_returns_exactly_what_was_written) {
  World world;
  world.open();
  world.append_all(0, 100);
  for (uint64_t number = 0; number < 100; ++number) CHECK(world.read(number));
  CHECK_EQ(world.log->stats().written_records, 100u);
  world.stop();
}
