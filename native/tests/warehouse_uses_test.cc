// What the warehouse counts as a use of a page, for its live miss-ratio curve.
#include <poll.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <functional>
#include <vector>

#include "replay/replay.h"
#include "tests/warehouse_world.h"

namespace kvw {
namespace {

constexpr uint64_t kOneShard = 16 * 1024;
constexpr uint32_t kChains = 60, kLongest = 20;

struct Traffic {
  World world{shape_of(kOneShard, 1)};
  std::unique_ptr<Peer> peer;

  explicit Traffic(uint64_t dram_bytes = 8 * kMiB, uint64_t nvme_bytes = 0)
      : world(shape_of(kOneShard, 1), dram_bytes) {
    if (nvme_bytes > 0) {
      world.options.nvme_dir = world.directory.path() + "/nvme";
      std::filesystem::create_directory(world.options.nvme_dir);
      world.options.nvme_capacity_bytes = nvme_bytes;
    }
    world.start();
    peer = std::make_unique<Peer>(world);
  }

  void until(const std::function<bool()>& done) {
    for (int round = 0; round < 20000; ++round) {
      world->poll_log();
      world->tick();
      if (done()) return;
      pollfd ready{world->log_fd(), POLLIN, 0};
      ::poll(&ready, 1, 5);
    }
    CHECK(!"the warehouse never got there");
  }

  // As a client does when it loads the page; then time for the daemon to see it.
  bool load(const TestPage& page) {
    const auto entry = world.entry(page);
    if (!entry) return false;
    peer->session().touch(*entry);
    world.pass(100 * kMillisecondNs);
    return true;
  }
  // A request: loads what is there of the prompt and stores the rest.
  void ask(uint64_t chain, uint32_t pages) {
    uint32_t at = 0;
    for (; at < pages && world.stored(world.page(chain, at)); ++at)
      peer->session().touch(*world.entry(world.page(chain, at)));
    world.pass(2 * kSecondNs);
    std::vector<TestPage> rest;
    for (; at < pages; ++at) rest.push_back(world.page(chain, at));
    CHECK(peer->store_all(rest));
  }
  MissRatioCurve::Curve curve(int space = -1) { return world->miss_ratio(space).curve; }
};

double hits_at(const MissRatioCurve::Curve& curve, uint64_t bytes) {
  size_t step = 0;
  while (step + 1 < MissRatioCurve::kSizes && MissRatioCurve::size_bytes(step + 1) <= bytes) ++step;
  return curve.hits[step];
}

}  // namespace

TEST(store_of_a_page_that_no_tier_has_is_a_use_and_one_that_is_there_already_is_none) {
  Traffic traffic;
  const TestPage page = traffic.world.page(1);
  CHECK(traffic.peer->store(page));
  CHECK_EQ(traffic.curve().uses, 1);
  CHECK(traffic.peer->reserve(page).answer == Answer::already);
  CHECK_EQ(traffic.curve().uses, 1);
  CHECK_EQ(hits_at(traffic.curve(), UINT64_MAX), 0);
}

TEST(load_is_a_use_at_the_distance_of_what_was_used_in_between) {
  Traffic traffic;
  for (uint64_t chain = 0; chain < 5; ++chain)
    CHECK(traffic.peer->store(traffic.world.page(chain)));
  CHECK(traffic.load(traffic.world.page(0)));
  CHECK_EQ(traffic.curve().uses, 6);
  CHECK_EQ(hits_at(traffic.curve(), 4 * kOneShard), 0);
  CHECK_EQ(hits_at(traffic.curve(), 6 * kOneShard), 1);
  CHECK_EQ(traffic.curve(0).uses, 6);
}

TEST(pin_and_load_behind_it_and_loads_of_all_ranks_are_one_use) {
  Traffic traffic;
  Peer other(traffic.world);
  const TestPage page = traffic.world.page(1);
  CHECK(traffic.peer->store(page));
  const auto entry = traffic.world.entry(page);
  traffic.peer->session().touch(*entry);
  other.session().touch(*entry);
  traffic.world.pass(100 * kMillisecondNs);
  traffic.peer->session().touch(*entry);
  traffic.world.pass(100 * kMillisecondNs);
  CHECK_EQ(traffic.curve().uses, 2);  // the store, and that
  traffic.world.pass(2 * kSecondNs);
  CHECK(traffic.load(page));
  CHECK_EQ(traffic.curve().uses, 3);
}

TEST(page_that_is_used_all_the_time_is_a_use_each_second) {
  Traffic traffic;
  const TestPage page = traffic.world.page(1);
  CHECK(traffic.peer->store(page));
  traffic.world.pass(2 * kSecondNs);
  const auto entry = traffic.world.entry(page);
  for (int touch = 0; touch < 100; ++touch) {
    traffic.peer->session().touch(*entry);
    traffic.world.pass(100 * kMillisecondNs);
  }
  // Ten seconds, which begin and end within half of one.
  const uint64_t loads = traffic.curve().uses - 1;
  CHECK(loads == 10 || loads == 11);
  CHECK_EQ(hits_at(traffic.curve(), 2 * kOneShard), loads);
}

TEST(page_that_an_earlier_daemon_left_on_nvme_counts_at_the_size_that_held_it) {
  Traffic traffic(8 * kMiB, 64 * kMiB);
  World& world = traffic.world;
  const TestPage page = world.page(1);
  CHECK(traffic.peer->store(page));
  traffic.until([&] { return world->status().nvme_pages == 1; });
  world.restart();
  traffic.peer->hello();
  uint64_t left = 0;
  world->evict(-1, 1, "dram", left);
  CHECK_EQ(left, 1);
  std::vector<PromoteAnswer> answers;
  world->promote(std::array<Key, 1>{page.key}, answers);
  traffic.until([&] { return world->status().pages_promoted == 1; });
  CHECK(traffic.load(page));
  CHECK_EQ(traffic.curve().uses, 1);
  CHECK_EQ(hits_at(traffic.curve(), 16 * kMiB), 0);
  CHECK_EQ(hits_at(traffic.curve(), 80 * kMiB), 1);
}

TEST(page_that_an_earlier_daemon_stored_counts_at_the_size_that_held_it) {
  Traffic traffic;
  const TestPage page = traffic.world.page(1);
  CHECK(traffic.peer->store(page));
  traffic.world.restart();
  CHECK_EQ(traffic.curve().uses, 0);
  traffic.peer->hello();
  CHECK(traffic.load(page));
  CHECK_EQ(traffic.curve().uses, 1);
  CHECK_EQ(hits_at(traffic.curve(), 8 * kMiB - kMiB), 0);
  CHECK_EQ(hits_at(traffic.curve(), 9 * kMiB), 1);
}

// Incident: an engine that has a prompt's beginning itself loads what is behind it alone. Reclaim
// let the beginning go, and all of the rest with it.
TEST(beginning_of_a_prompt_is_of_use_to_who_loads_its_end) {
  constexpr uint32_t kPages = 6, kFrom = 3;
  for (const bool from_the_end : {true, false}) {
    Traffic traffic(8 * kMiB, 64 * kMiB);
    World& world = traffic.world;
    for (const uint64_t chain : {1, 2})
      for (uint32_t at = 0; at < kPages; ++at) CHECK(traffic.peer->store(world.page(chain, at)));
    traffic.until([&] { return world->status().nvme_pages == 2 * kPages; });
    for (uint32_t at = kFrom; at < kPages; ++at) {
      const uint32_t page = from_the_end ? kFrom + kPages - 1 - at : at;
      traffic.peer->session().touch(*world.entry(world.page(1, page)));
    }
    world.pass(100 * kMillisecondNs);
    nvme::LogHost& host = *world;
    for (const uint64_t chain : {1, 2})
      for (uint32_t at = 0; at < kPages; ++at) {
        const auto entry = world.entry(world.page(chain, at));
        CHECK(host.use_of(entry->key, entry->extent) ==
              (chain == 1 ? nvme::RecordUse::hot : nvme::RecordUse::cold));
      }
  }
}

TEST(touches_that_come_too_fast_are_lost_and_counted) {
  Traffic traffic;
  const TestPage page = traffic.world.page(1);
  CHECK(traffic.peer->store(page));
  const auto entry = traffic.world.entry(page);
  for (int i = 0; i < 10000; ++i) traffic.peer->session().touch(*entry);
  traffic.world.pass(100 * kMillisecondNs);
  CHECK_EQ(traffic.world->miss_ratio(-1).uses_lost, 10000 - 4096);
}

// The daemon's own cache is small here, so most of what the curve says about larger ones it never
// saw happen.
TEST(curve_of_a_small_warehouse_says_what_an_exact_replay_says_of_larger_ones) {
  Traffic traffic;
  auto random = check::random("small warehouse");
  std::vector<std::vector<PageId>> requests;
  std::vector<uint32_t> lengths(kChains, 3);
  for (int request = 0; request < 1500; ++request) {
    const uint64_t chain = std::min(random() % kChains, random() % kChains);
    std::vector<PageId> pages;
    for (uint32_t at = 0; at < lengths[chain]; ++at)
      pages.push_back(static_cast<PageId>(chain * kLongest + at));
    traffic.ask(chain, lengths[chain]);
    requests.push_back(pages);
    if (lengths[chain] < kLongest) ++lengths[chain];
  }
  CHECK(traffic.world->status().left_dram[static_cast<size_t>(LeaveReason::evicted)] > 0);
  const auto all = traffic.curve();
  for (const uint64_t capacity : {60, 120, 240, 480, 900}) {
    Replay replay({"lru", capacity, 0, true}, kChains * kLongest);
    double hits = 0, asked = 0;
    for (const auto& pages : requests) {
      hits += replay.request(pages).dram;
      asked += static_cast<double>(pages.size());
    }
    const double said = hits_at(all, capacity * kOneShard) / static_cast<double>(all.uses);
    std::printf("%llu pages: %.3f, exactly %.3f, ", static_cast<unsigned long long>(capacity), said,
                hits / asked);
    CHECK(std::abs(said - hits / asked) <= 0.02);
  }
}

}  // namespace kvw
