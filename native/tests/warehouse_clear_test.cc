// A clear beside other work: it takes pages out in steps, and clients store and load between them.
#include "tests/check.h"
#include "tests/warehouse_world.h"

using namespace kvw;

namespace {

uint32_t ordinal_in(World& world) { return world->add_namespace(kMaxNamespaces, world.shape(), 0); }

}  // namespace

TEST(what_is_stored_beside_a_clear_is_built_on_nothing_that_it_takes) {
  World world(shape_of(5000, 1));
  world.start();
  Peer peer(world);
  const uint32_t ordinal = ordinal_in(world);
  std::vector<TestPage> pages;
  for (uint32_t at = 0; at < 8; ++at) pages.push_back(world.page(1, at));
  CHECK(peer.store_all(std::span(pages).first(6)));
  world->begin_clear(ordinal, 5);
  // The prompt again, before the clear came to its pages: each is stored, none is there already.
  CHECK_EQ(peer.reserve(pages[6]).reason, Reason::parent_missing);
  CHECK(peer.store_all(std::span(pages).first(3)));
  uint64_t cleared = 0;
  for (PageId cursor = 0; cursor != kNoPage;) cleared += world->clear_some(ordinal, 5, cursor);
  for (int i = 0; i < 3; ++i) world.pass(kSecondNs);
  CHECK_EQ(cleared, 6);
  for (uint32_t at = 0; at < 8; ++at)
    CHECK(peer.load(pages[at]) == (at < 3 ? Got::right : Got::missing));
  CHECK(peer.store_all(std::span(pages).subspan(3)));
  world.restart();
  peer.hello();
  for (const TestPage& page : pages) CHECK(peer.load(page) == Got::right);
}

TEST(step_of_a_clear_takes_out_a_bounded_number_of_pages) {
  World world(shape_of(512, 1), 16 * kMiB);
  world.start();
  Peer peer(world);
  const uint32_t ordinal = ordinal_in(world);
  constexpr uint64_t kPages = 3000;
  for (uint64_t chain = 0; chain < kPages; ++chain) CHECK(peer.store(world.page(chain)));
  world->begin_clear(ordinal, 5);
  uint64_t cleared = 0;
  for (PageId cursor = 0; cursor != kNoPage;) {
    const uint64_t step = world->clear_some(ordinal, 5, cursor);
    CHECK(step <= 1024);
    cleared += step;
  }
  CHECK_EQ(cleared, kPages);
  CHECK_EQ(world->status().dram_pages, 0);
}
