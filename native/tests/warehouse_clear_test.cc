// A clear beside other work: it takes pages out in steps, and clients store and load between them.
#include <functional>

#include "tests/check.h"
#include "tests/warehouse_world.h"
#include "warehouse/operator_eviction.h"

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

// --- an operator's evict, in steps

namespace {

uint64_t evict_with(World& world, OperatorEviction& eviction, const std::function<void()>& between) {
  while (eviction.step()) between();
  for (int i = 0; i < 3; ++i) world.pass(kSecondNs);
  return eviction.left();
}

}  // namespace

TEST(evict_takes_leaves_before_their_parents_whatever_comes_between_its_steps) {
  auto random = check::random("evict in steps");
  World world(shape_of(512, 1), 16 * kMiB);
  world.start();
  Peer peer(world);
  constexpr uint64_t kChains = 300;
  std::vector<uint32_t> length(kChains);
  for (uint64_t chain = 0; chain < kChains; ++chain) {
    length[chain] = 1 + static_cast<uint32_t>(random() % 9);
    for (uint32_t at = 0; at < length[chain]; ++at) CHECK(peer.store(world.page(chain, at)));
  }
  // Beside it chains grow and others begin: none may lose the page that it builds on.
  uint64_t grown = kChains;
  OperatorEviction eviction(*world, -1, 700, "dram");
  const uint64_t left = evict_with(world, eviction, [&] {
    CHECK(peer.store(world.page(grown++)));
    const uint64_t chain = random() % kChains;
    if (world.stored(world.page(chain, length[chain] - 1))) {
      CHECK(peer.store(world.page(chain, length[chain])));
      ++length[chain];
    }
  });
  CHECK_EQ(left, 700);
  CHECK_EQ(world->status().left_dram[static_cast<size_t>(Gone::orphaned)], 0);
  for (uint64_t chain = 0; chain < kChains; ++chain)
    for (uint32_t at = 1; at < length[chain]; ++at)
      CHECK(!world.stored(world.page(chain, at)) || world.stored(world.page(chain, at - 1)));
}

TEST(evict_of_everything_leaves_what_is_pinned_and_ends) {
  World world(shape_of(512, 1), 16 * kMiB);
  world.start();
  Peer peer(world);
  for (uint32_t at = 0; at < 2000; ++at) CHECK(peer.store(world.page(at % 50, at / 50)));
  CHECK(peer.pin(world.page(3, 39)) >= 0);
  OperatorEviction eviction(*world, -1, UINT64_MAX, "all");
  CHECK_EQ(evict_with(world, eviction, [] {}), 1999);
  CHECK_EQ(peer.load(world.page(3, 39)), Got::right);
}
