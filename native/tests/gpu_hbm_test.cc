// The HBM tier over a real daemon core, real clients and the contract model of the driver: what is
// loaded from it is what was stored, whatever is evicted, cleared, damaged, killed or refused.
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "hbm/places.h"
#include "tests/check.h"
#include "tests/hbm_world.h"

namespace kvw {
namespace {

constexpr uint64_t kPage = 64 * 1024;

TEST(used_pages_are_loaded_from_hbm_whatever_their_pieces_and_shards) {
  std::mt19937_64 random = check::random("hbm_round_trip");
  for (uint64_t round = 0; round < check::rounds(8); ++round) {
    const size_t bytes = std::vector<size_t>{1000, 4096, 12288, 70001, 300000}[random() % 5];
    const size_t piece = std::vector<size_t>{512, 4096, 8192, 400000}[random() % 4];
    const auto shards = static_cast<uint32_t>(1 + random() % 3);
    HbmRig rig(shape_of(bytes, shards), 8 * kMiB);
    rig.start();
    const auto client = rig.connect();
    const Chain chain(rig.daemon.shape(), 1, 6);
    chain.store_all(*client);
    CHECK_EQ(rig.check_load(*client, chain, piece), 0);
    rig.settle();
    CHECK_EQ(rig.status().pages, 6);
    for (uint32_t shard = 0; shard < shards; ++shard)
      CHECK_EQ(rig.check_load(*client, chain, piece, shard), 6);
    CHECK_EQ(rig.daemon.status().pins, 0);
    CHECK_EQ(rig.model.count("unpinned_copies"), 0);
    CHECK_EQ(rig.model.count("violations"), 0);
  }
}

TEST(page_is_moved_once_and_by_the_device_alone_when_it_is_in_hbm) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.start();
  const auto client = rig.connect();
  const Chain chain = rig.promoted(*client, 1, 20, kPage);
  const uint64_t bytes = rig.model.count("copied_bytes"), launches = rig.model.count("launches");
  CHECK_EQ(rig.check_load(*client, chain, kPage), 20);
  CHECK_EQ(rig.model.count("launches") - launches, 1);
  // Tables up and leaves down, no page.
  CHECK(rig.model.count("copied_bytes") - bytes < kPage);
}

TEST(page_is_promoted_at_its_second_use_unless_told_otherwise) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.daemon.options.hbm_at_first_use = false;
  rig.start();
  const auto client = rig.connect();
  const Chain once(rig.daemon.shape(), 1, 4), twice(rig.daemon.shape(), 2, 4);
  once.store_all(*client);
  twice.store_all(*client);
  rig.check_load(*client, once, kPage);
  // Uses within a second are one.
  rig.until([&] {
    rig.check_load(*client, twice, kPage);
    rig.settle();
    return rig.status().pages != 0;
  });
  CHECK_EQ(rig.prefix(once), 0);
  CHECK_EQ(rig.prefix(twice), 4);
}

TEST(colder_pages_make_room_and_prefixes_keep_no_gaps) {
  HbmRig rig(shape_of(kPage, 1), 4 * kMiB);  // 64 places
  rig.start();
  const auto client = rig.connect();
  std::vector<Chain> chains;
  for (uint64_t number = 1; number <= 4; ++number) {
    chains.emplace_back(rig.daemon.shape(), number, 40);
    chains.back().store_all(*client);
  }
  for (int round = 0; round < 3; ++round)
    for (const Chain& chain : chains) {
      rig.check_load(*client, chain, kPage);
      rig.settle();
      uint64_t all = 0;
      for (const Chain& each : chains) all += rig.prefix(each);
      CHECK_EQ(rig.prefix(chain), 40);  // the hottest
      CHECK_EQ(rig.status().pages, all);
      CHECK(all <= 64);
      CHECK(rig.status().used_bytes <= 4 * kMiB);
    }
  CHECK(rig.status().left[static_cast<size_t>(HbmLeaveReason::demoted)] > 0);
  CHECK_EQ(rig.check_load(*client, chains.back(), 4096), 40);
  CHECK_EQ(rig.model.count("violations"), 0);
}

TEST(prefix_that_is_longer_than_the_pool_keeps_its_beginning) {
  HbmRig rig(shape_of(kPage, 1), 2 * kMiB);  // 32 places
  rig.start();
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 100);
  chain.store_all(*client);
  for (int round = 0; round < 3; ++round) {
    rig.check_load(*client, chain, kPage);
    rig.settle();
    CHECK_EQ(rig.prefix(chain), 32);
  }
  CHECK_EQ(rig.status().pages_promoted, 32);  // nothing was moved to and fro
}

TEST(page_that_is_loaded_alone_brings_what_is_before_it) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.start();
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 10);
  chain.store_all(*client);
  DeviceCache last(rig.model, 1, kPage, kPage);
  Prompt prompt = chain.prompt();
  CHECK_EQ(client->load(kSpace, prompt, 9, last, 0, HbmRig::kPatience).pages, 1);
  rig.settle();
  CHECK_EQ(rig.prefix(chain), 10);
}

TEST(sizes_of_pages_share_the_pool) {
  const NamespaceShape large = shape_of(512 * 1024, 1, {0x61, 1});
  HbmRig rig(shape_of(kPage, 1), 6 * kMiB, 64 * kMiB);  // three slabs
  rig.daemon.declared.push_back(large);
  rig.start();
  const auto client = rig.connect();
  const Chain small(rig.daemon.shape(), 1, 96), other(large, 2, 8);
  small.store_all(*client);
  other.store_all(*client);
  rig.check_load(*client, small, kPage);
  rig.settle();
  CHECK_EQ(rig.prefix(small), 96);  // the whole pool
  rig.until([&] {
    rig.check_load(*client, other, kPage);
    rig.settle();
    return rig.prefix(other) == 4;  // one slab
  });
  CHECK(rig.prefix(small) >= 32);
  CHECK_EQ(rig.status().left[static_cast<size_t>(HbmLeaveReason::rebalanced)], 32);
  rig.check_load(*client, small, 4096);
  CHECK_EQ(rig.model.count("violations"), 0);
}

TEST(damaged_copy_is_dropped_and_its_page_comes_from_dram) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.start();
  const auto client = rig.connect();
  const Chain chain = rig.promoted(*client, 1, 9, kPage);
  const std::byte flipped = bytes_of(chain.pages[5].key, 0, kPage)[kPage - 1] ^ std::byte{4};
  rig.model.poke(rig.address(chain.pages[5]) + kPage - 1, &flipped, 1);
  CHECK_EQ(rig.check_load(*client, chain, 4096), 5);  // those before it, all nine with right bytes
  CHECK_EQ(client->session()->counter(Counter::load_mismatch_hbm), 1);
  CHECK_EQ(client->session()->counter(Counter::load_mismatch), 0);
  CHECK_EQ(rig.daemon.status().quarantined, 0);
  CHECK_EQ(rig.status().left[static_cast<size_t>(HbmLeaveReason::damaged)], 1);
  rig.settle();
  CHECK_EQ(rig.check_load(*client, chain, 4096), 9);  // a fresh copy
}

TEST(page_damaged_in_dram_is_not_promoted_but_quarantined) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.start();
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 4);
  chain.store_all(*client);
  rig.daemon.call([&](Warehouse& w) {
    const auto entry = w.arena().index().find(chain.pages[3].key);
    w.arena().payload(entry->slot, w.arena().slots().layout(0))[7] ^= std::byte{1};
    // A use of it that nobody read: a client's touch.
    w.hbm()->used(*entry, true);
    w.hbm()->poll();
    return 0;
  });
  rig.until([&] { return rig.daemon.status().quarantined == 1; });
  CHECK_EQ(rig.prefix(chain), 3);
  CHECK_EQ(chain.found(*client), 3);
}

TEST(copies_go_with_their_pages_when_these_are_evicted_or_cleared) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.start();
  const auto client = rig.connect();
  for (uint64_t epoch = 1; epoch < 4; ++epoch) {
    const Chain chain = rig.promoted(*client, epoch, 9, kPage);
    CHECK_EQ(rig.status().pages, 9);
    if (epoch == 2)
      rig.daemon.call([&](Warehouse& w) { return w.clear(0, 100); });
    else
      CHECK_EQ(rig.evict("dram"), 9);
    CHECK_EQ(rig.status().pages, 0);
    DeviceCache cache(rig.model, 9, kPage, kPage);
    CHECK_EQ(rig.load(*client, chain, cache).pages, 0);
    rig.until([&] { return rig.status().used_bytes == 0; });
  }
  CHECK_EQ(rig.status().left[static_cast<size_t>(HbmLeaveReason::left_dram)], 27);
}

TEST(copies_are_evicted_alone_and_the_pages_stay) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.start();
  const auto client = rig.connect();
  const Chain chain = rig.promoted(*client, 1, 9, kPage);
  const uint64_t left = rig.daemon.call([&](Warehouse& w) {
    uint64_t count = 0;
    w.evict(0, 4, "hbm", count);
    return count;
  });
  CHECK_EQ(left, 4);
  CHECK_EQ(rig.prefix(chain), 5);
  CHECK_EQ(rig.check_load(*client, chain, kPage), 5);
}

TEST(three_batches_of_many_pages_are_under_way_and_every_byte_is_right) {
  constexpr uint32_t kPages = 4000;  // a batch has 1,024 at most
  HbmRig rig(shape_of(4096), 32 * kMiB, 64 * kMiB);
  rig.start();
  const auto client = rig.connect();
  const Chain chain = rig.promoted(*client, 1, kPages, 4096);
  rig.until([&] { return rig.prefix(chain) == kPages; });
  const DeviceCache cache(rig.model, kPages, 4096, 4096);
  const uint64_t launches = rig.model.count("launches");
  rig.model.set("hold", 1);
  std::thread loading([&] { CHECK_EQ(rig.load(*client, chain, cache).pages, kPages); });
  const bool three = rig.became([&] { return rig.model.count("launches") == launches + 3; });
  rig.model.set("hold", 0);
  loading.join();
  CHECK(three);
  HbmRig::check(chain, cache);
  CHECK_EQ(rig.model.count("launches"), launches + 4);
}

TEST(place_is_not_given_out_again_while_a_device_may_read_it) {
  HbmRig rig(shape_of(kPage, 1), 2 * kMiB);
  rig.start();
  const auto client = rig.connect();
  const Chain chain = rig.promoted(*client, 1, 8, kPage);
  DeviceCache cache(rig.model, 8, kPage, 4096);
  rig.model.set("hold", 1);
  const uint64_t launches = rig.model.count("launches");
  LoadReport report;
  std::thread loading([&] { report = rig.load(*client, chain, cache); });
  while (rig.model.count("launches") == launches) std::this_thread::yield();
  rig.evict("hbm");
  rig.daemon.tick();
  const HbmStatus during = rig.status();
  rig.model.set("hold", 0);
  loading.join();
  CHECK_EQ(during.pages, 0);
  CHECK_EQ(during.leaving, 8);
  CHECK_EQ(during.used_bytes, 8 * kPage);
  CHECK_EQ(report.pages, 8);
  HbmRig::check(chain, cache);
  rig.settle();
  CHECK_EQ(rig.status().leaving, 0);
  CHECK_EQ(rig.check_load(*client, chain, kPage), 8);  // promoted anew
  CHECK_EQ(rig.status().used_bytes, 8 * kPage);
}

TEST(word_of_another_generation_names_no_place) {
  CHECK_EQ(hbm_offset(hbm_word(7, 3 * kBlockBytes), 7).value(), 3 * kBlockBytes);
  CHECK(!hbm_offset(hbm_word(7, 0), 8));
  CHECK_EQ(hbm_offset(hbm_word((1ull << 32) + 7, 0), 7).value(),
           0);  // the low half, as an entry has
  CHECK(!hbm_offset(0, 0));
}

TEST(places_of_one_size_are_never_in_anothers_slab) {
  std::mt19937_64 random = check::random("hbm_places");
  constexpr uint64_t kSlab = 64 * kBlockBytes;
  HbmPlaces places(9 * kSlab + 5, kSlab);
  std::map<uint64_t, uint64_t> taken;  // offset to bytes
  uint64_t used = 0;
  for (uint64_t round = 0; round < check::rounds(20000); ++round) {
    const uint64_t bytes = (1 + random() % 9) * kBlockBytes;
    if (random() % 100 < 55) {
      if (const auto offset = places.take(bytes)) {
        const auto next = taken.lower_bound(*offset);
        CHECK(next == taken.end() || next->first >= *offset + bytes);
        CHECK(next == taken.begin() || std::prev(next)->first + std::prev(next)->second <= *offset);
        CHECK(*offset + bytes <= 9 * kSlab);
        CHECK(!places.closing(*offset));
        taken[*offset] = bytes;
        used += bytes;
      } else if (places.slabs_of(bytes) == 0) {
        if (const auto slab = places.close_one()) CHECK(places.slabs_of(bytes) == 0);
      }
    } else if (!taken.empty()) {
      const auto found = std::next(taken.begin(), static_cast<ptrdiff_t>(random() % taken.size()));
      places.give_back(found->first);
      used -= found->second;
      taken.erase(found);
    }
    CHECK_EQ(places.used_bytes(), used);
  }
  for (const auto& [offset, bytes] : taken) places.give_back(offset);
  CHECK_EQ(places.used_bytes(), 0);
  for (int slab = 0; slab < 9; ++slab) CHECK(places.take(kSlab));  // all of it for one size
  CHECK(!places.take(kBlockBytes));
}

TEST(graph_that_the_engine_captures_is_not_broken_by_loads_from_hbm) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.start();
  const auto storing = rig.connect();
  const Chain chain = rig.promoted(*storing, 1, 9, kPage);
  DeviceCache cache(rig.model, 9, kPage, 4096);
  const auto client = rig.connect();
  const uint64_t before = rig.model.count("broken_captures");
  rig.model.set("capture", 1);
  CHECK_EQ(rig.load(*client, chain, cache).pages, 9);
  client->close();
  rig.model.set("capture", 0);
  CHECK_EQ(rig.model.count("broken_captures"), before);
}

TEST(clients_share_the_pool_and_a_reader_needs_no_right_to_write) {
  for (const uint64_t read_only_access : {1, 0}) {
    HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
    rig.model.set("read_only_access", read_only_access);
    rig.start();
    const auto writer = rig.connect(), reader = rig.connect(0, true);
    const Chain chain(rig.daemon.shape(), 1, 9);
    chain.store_all(*writer);
    rig.check_load(*reader, chain, kPage);
    rig.settle();
    CHECK_EQ(rig.check_load(*reader, chain, kPage), 9);
    CHECK_EQ(rig.check_load(*writer, chain, 4096), 9);
    rig.model.set("read_only_access", 1);
  }
}

TEST(client_of_another_device_loads_from_dram) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.model.set("devices", 2);
  rig.daemon.options.hbm.device = 1;
  rig.start();
  const auto client = rig.connect(0);
  const Chain chain = rig.promoted(*client, 1, 9, kPage);
  CHECK_EQ(rig.status().pages, 9);
  CHECK_EQ(rig.check_load(*client, chain, kPage), 0);
}

TEST(new_daemon_begins_with_nothing_in_hbm_and_all_in_dram) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.start();
  const auto client = rig.connect();
  const Chain chain = rig.promoted(*client, 1, 9, kPage);
  CHECK_EQ(rig.check_load(*client, chain, kPage), 9);
  rig.daemon.stop();
  CHECK_EQ(rig.check_load(*client, chain, kPage), 9);  // the old pool, which nobody writes
  rig.start();
  CHECK_EQ(rig.status().pages, 0);
  CHECK(client->refresh(HbmRig::kPatience));
  CHECK_EQ(rig.check_load(*client, chain, kPage), 0);
  rig.settle();
  rig.until([&] { return rig.check_load(*client, chain, kPage) == 9; });
  client->close();
  rig.daemon.stop();
  for (const char* name : {"handles", "reserved_bytes", "mapped_bytes", "host_bytes", "violations"})
    CHECK_EQ(rig.model.count(name), 0);
}

TEST(killed_daemon_takes_nothing_from_those_who_read_its_pool) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.daemon.when_up = [&] { rig.model.set("hold", 0); };  // a fork's, from its parent
  rig.daemon.start_process();
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 30);
  chain.store_all(*client);
  rig.until([&] { return rig.check_load(*client, chain, kPage) == 30; });
  for (int round = 0; round < 3; ++round) {
    rig.model.set("hold", 1);
    DeviceCache cache(rig.model, 30, kPage, 4096);
    const uint64_t launches = rig.model.count("launches");
    LoadReport report;
    std::thread loading([&] { report = rig.load(*client, chain, cache); });
    while (rig.model.count("launches") == launches) std::this_thread::yield();
    rig.daemon.kill(SIGKILL);
    // A load waits 30 s for its device, and on a disk with much to do a daemon may start no sooner.
    std::atomic<bool> up{round == 0}, waiting{false};
    std::thread letting_go([&] {
      waiting = true;
      const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (!up && std::chrono::steady_clock::now() < latest)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      rig.model.set("hold", 0);
    });
    // A thread that begins allocates, and AddressSanitizer's allocator is locked for a fork's child
    // then.
    while (!waiting) std::this_thread::yield();
    if (round != 0) rig.daemon.start_process();
    up = true;
    letting_go.join();
    loading.join();
    CHECK_EQ(report.pages, 30);
    HbmRig::check(chain, cache);
    if (round == 0) {
      CHECK_EQ(rig.check_load(*client, chain, kPage), 30);
      rig.daemon.start_process();
    }
    CHECK(client->refresh(HbmRig::kPatience));
    rig.until([&] { return rig.check_load(*client, chain, kPage) == 30; });
  }
  CHECK_EQ(rig.model.count("violations"), 0);
}

TEST(places_of_a_client_that_was_killed_come_back) {
  HbmRig rig(shape_of(kPage, 1), 2 * kMiB);
  const Chain chain(rig.daemon.shape(), 1, 8);
  std::array<int, 2> ready{};
  CHECK_EQ(::pipe2(ready.data(), O_CLOEXEC), 0);
  std::array<int, 2> go{};
  CHECK_EQ(::pipe2(go.data(), O_CLOEXEC), 0);
  // Before this process has threads and locks that a child would share.
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    if (::read(go[0], &byte, 1) != 1) ::_exit(1);
    const auto client = rig.connect();
    const uint64_t launches = rig.model.count("launches");
    while (rig.check_load(*client, chain, kPage) != 8) {
    }
    rig.model.set("hold", 1);
    std::thread loading([&] {
      DeviceCache cache(rig.model, 8, kPage, kPage);
      rig.load(*client, chain, cache);
    });
    while (rig.model.count("launches") == launches) std::this_thread::yield();
    while (rig.model.count("events") < 3) std::this_thread::yield();
    if (::write(ready[1], "r", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  rig.start();
  Client storing(rig.daemon.client_options());
  chain.store_all(storing);
  CHECK_EQ(::write(go[1], "g", 1), 1);
  char byte = 0;
  CHECK_EQ(::read(ready[0], &byte, 1), 1);
  rig.until([&] { return rig.daemon.status().pins == 8; });
  rig.evict("hbm");
  rig.daemon.tick();
  CHECK_EQ(rig.status().leaving, 8);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  rig.until([&] {
    rig.daemon.tick();
    return rig.status().leaving == 0;
  });
  for (const int fd : {ready[0], ready[1], go[0], go[1]}) ::close(fd);
}

// The daemon's own tick promotes what was used, and comes by the clock: the quicker a machine was,
// the fewer ticks its 120 rounds had, and one with an unlucky seed loaded nothing from HBM. So the
// threads make the daemon tick, and the churn goes on until what it is about has happened.
TEST(bytes_are_right_while_pages_are_evicted_promoted_and_demoted_beneath_them) {
  HbmRig rig(shape_of(kPage, 1), 2 * kMiB, 8 * kMiB);
  rig.start();
  constexpr int kThreads = 3;
  std::vector<uint64_t> seeds;
  std::mt19937_64 random = check::random("hbm_churn");
  for (int number = 0; number < kThreads; ++number) seeds.push_back(random());
  std::atomic<uint64_t> hits{0}, rounds_done{0};
  std::atomic<bool> over{false};
  std::deque<check::Thread> threads;
  for (const uint64_t seed : seeds)
    threads.emplace_back([&, seed] {
      std::mt19937_64 own(seed);
      const auto client = rig.connect();
      for (uint64_t before = 0; !over; ++rounds_done) {
        const Chain chain(rig.daemon.shape(), 1 + own() % 14, 1 + own() % 12);
        if (own() % 3 == 0) chain.store(*client, 0);
        DeviceCache cache(rig.model, chain.pages.size(), kPage, own() % 2 == 0 ? 4096 : kPage);
        const uint64_t pages = rig.load(*client, chain, cache).pages;
        for (size_t page = 0; page < pages; ++page)
          CHECK(cache.page(page) == bytes_of(chain.pages[page].key, 0, kPage));
        const uint64_t now = HbmRig::from_hbm(*client);
        hits += now - std::exchange(before, now);
        if (own() % 20 == 0) rig.evict(own() % 2 == 0 ? "hbm" : "dram");
        if (own() % 4 == 0) rig.daemon.tick();
      }
    });
  const auto happened = [&] {
    const HbmStatus status = rig.status();
    const auto left = [&](HbmLeaveReason why) { return status.left[static_cast<size_t>(why)]; };
    return rounds_done >= kThreads * check::rounds(120) && hits > 0 &&
           left(HbmLeaveReason::demoted) > 0 && left(HbmLeaveReason::left_dram) > 0 &&
           left(HbmLeaveReason::operator_) > 0;
  };
  const bool all = rig.became(happened);
  over = true;
  for (check::Thread& thread : threads) thread.join();
  CHECK(all);
  CHECK_EQ(rig.daemon.status().pins, 0);
  CHECK_EQ(rig.model.count("violations"), 0);
}

TEST(device_without_room_is_asked_again_and_says_so_meanwhile) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.model.set("create_limit", kMiB);
  rig.daemon.start();
  rig.until([&] { return rig.status().health == "waiting"; });
  const uint64_t retains = rig.model.count("retains"), asked = rig.model.count("creates_asked");
  rig.until([&] { return rig.model.count("creates_asked") > asked + 2; });
  CHECK_EQ(rig.model.count("retains"), retains);  // no new context for each try
  CHECK(rig.status().reason.find("CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 9);
  chain.store_all(*client);
  CHECK_EQ(rig.check_load(*client, chain, kPage), 0);
  rig.model.set("create_limit", UINT64_MAX);
  rig.until([&] { return rig.status().health == "ok"; });
  CHECK_EQ(rig.status().reason, "");
  rig.until([&] { return rig.check_load(*client, chain, kPage) == 9; });
}

TEST(tier_is_off_and_says_why_where_the_device_is_not_there_or_shares_nothing) {
  const auto reason = [](int device, const char* setting, uint64_t value) {
    HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
    if (setting != nullptr) rig.model.set(setting, value);
    rig.daemon.options.hbm.device = device;
    rig.daemon.start();
    rig.until([&] { return rig.status().health == "failed"; });
    const std::string why = rig.status().reason;
    rig.model.set("shares", 1);
    rig.model.set("granule", 2 << 20);
    const auto client = rig.connect();
    const Chain chain(rig.daemon.shape(), 1, 9);
    chain.store_all(*client);
    CHECK_EQ(rig.check_load(*client, chain, kPage), 0);
    CHECK_EQ(rig.check_load(*client, chain, kPage), 0);
    return why;
  };
  CHECK(reason(7, nullptr, 0).find("CUDA_ERROR_INVALID_DEVICE") != std::string::npos);
  CHECK(reason(0, "shares", 0).find("shares no memory") != std::string::npos);
  CHECK(reason(0, "granule", 16 << 20).find("less than one") != std::string::npos);
}

TEST(device_that_is_lost_ends_the_tier_and_serving_goes_on) {
  HbmRig rig(shape_of(kPage, 1), 8 * kMiB);
  rig.start();
  auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 9), other(rig.daemon.shape(), 2, 9);
  chain.store_all(*client);
  other.store_all(*client);
  rig.check_load(*client, chain, kPage);
  rig.settle();
  CHECK_EQ(rig.check_load(*client, chain, kPage), 9);
  // Used only now, and by one that does without the device: else a tick of the daemon's own may
  // promote it before the device is lost.
  rig.model.set("lost", 1);
  Client host(rig.daemon.client_options());
  CHECK_EQ(other.load(host, 0), 9);
  rig.daemon.tick();
  rig.until([&] { return rig.status().health == "failed"; });
  rig.model.set("lost", 0);
  CHECK(rig.status().reason.find("CUDA_ERROR_ILLEGAL_ADDRESS") != std::string::npos);
  CHECK_EQ(rig.status().pages, 0);
  CHECK_EQ(rig.check_load(*client, chain, kPage), 0);  // one that had the pool
  CHECK_EQ(rig.check_load(*rig.connect(), chain, kPage), 0);
  bool said = false;
  for (const auto& [name, detail] : rig.daemon.call([](Warehouse& w) { return w.take_events(); }))
    said = said || (name == "hbm_failed" && detail.find("started again") != std::string::npos);
  CHECK(said);
}

}  // namespace
}  // namespace kvw
