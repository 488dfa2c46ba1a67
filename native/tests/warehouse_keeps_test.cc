// Keeps: what is kept stays through everything that makes room, is counted once, and is as all
// other pages again once its keep has ended.
#include <poll.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/warehouse_world.h"

namespace kvw {
namespace {

constexpr uint64_t kHourNs = 3600 * kSecondNs;

struct Kept {
  World world;
  std::unique_ptr<Peer> peer;
  uint64_t others = 1000;  // the next prompt that nobody keeps

  explicit Kept(uint64_t shard_bytes = 64 * 1024, const std::function<void(World&)>& change = {},
                uint64_t dram_bytes = 8 * kMiB)
      : world(shape_of(shard_bytes, 1), dram_bytes) {
    world.options.keep_bytes = dram_bytes / 2;
    if (change) change(world);
    world.start();
    peer = std::make_unique<Peer>(world);
  }

  void again() {
    peer.reset();
    world.restart();
    peer = std::make_unique<Peer>(world);
  }
  KeepStep keep(KeepId id, const std::vector<TestPage>& pages, KeepTime time = {UINT64_MAX, 0}) {
    CHECK(world->keeps().begin(id, time) == KeepRefusal::none);
    std::vector<PageOfRun> run;
    for (const TestPage& page : pages) run.push_back({page.key, run.empty()});
    return world->keep(id, world.shape().id, run, false);
  }
  void end(KeepId id) {
    CHECK(world->keeps().end(id));
    while (world->goes_on()) world->go_on();
  }
  // Stores prompts of others, three times what the tier holds.
  void fill() {
    const uint64_t pages = 3 * world.capacity();
    for (uint64_t at = 0; at < pages; ++at) {
      peer->store(world.page(others++));
      world.pass(kMillisecondNs);
      while (world->goes_on()) world->go_on();
    }
  }
  size_t stored(const std::vector<TestPage>& pages) {
    size_t count = 0;
    for (const TestPage& page : pages) count += world.stored(page) ? 1 : 0;
    return count;
  }
  std::vector<TestPage> prompt(uint64_t chain, uint32_t pages) {
    return store(pages_of(world.shape(), chain, pages));
  }
  // The first `shared` pages of a prompt, and others behind them.
  std::vector<TestPage> branch(const std::vector<TestPage>& from, size_t shared, uint32_t pages) {
    static const std::vector<std::byte> bytes = test_secret();
    const Secret secret(bytes.data(), kSecretBytes);
    std::vector<TestPage> made(from.begin(), from.begin() + static_cast<ptrdiff_t>(shared));
    for (uint32_t at = 0; at < pages; ++at) {
      TestPage page = world.page(others++);
      page.parent = made.back().key;
      page.position = static_cast<uint32_t>(made.size());
      page.key = chain_key(secret, page.parent, page.tokens);
      made.push_back(page);
    }
    return store(std::move(made));
  }
  std::vector<TestPage> store(std::vector<TestPage> pages) {
    for (const TestPage& page : pages) CHECK(peer->store(page));
    return pages;
  }
  void check_nothing_is_held() {
    while (world->goes_on()) world->go_on();
    CHECK_EQ(world->keeps().used_pages(), 0);
    CHECK_EQ(world->keeps().used_bytes(), 0);
  }
};

TEST(kept_prompt_stays_until_its_keep_ends_with_each_policy) {
  for (const char* policy : {"lru", "adaptive"}) {
    Kept kept(64 * 1024, [&](World& world) { world.options.policy = policy; });
    const auto prompt = kept.prompt(1, 5), other = kept.prompt(2, 5);
    const KeepStep run = kept.keep(7, prompt);
    CHECK(run.refusal == KeepRefusal::none && !run.is_broken && run.on_nvme.empty());
    kept.fill();
    CHECK_EQ(kept.stored(prompt), 5);
    CHECK_EQ(kept.stored(other), 0);
    const WarehouseStatus status = kept.world->status();
    CHECK_EQ(status.keeps, 1);
    CHECK_EQ(status.kept_pages, 5);
    CHECK_EQ(status.kept_bytes, 5 * kept.world.shape().slot_bytes());
    kept.end(7);
    kept.check_nothing_is_held();
    kept.fill();
    CHECK_EQ(kept.stored(prompt), 0);
    kept.world.check_no_slot_leaks();
  }
}

TEST(what_is_stored_of_a_prompt_is_kept_up_to_the_first_page_that_is_not) {
  Kept kept;
  const auto whole = pages_of(kept.world.shape(), 1, 6);
  CHECK(kept.peer->store_all({whole.data(), 4}));
  const KeepStep run = kept.keep(1, whole);
  CHECK(run.refusal == KeepRefusal::none && run.is_broken);
  CHECK_EQ(kept.world->keeps().report(1)->pages, 4);
  CHECK_EQ(kept.world->keeps().ends(1).size(), 1);
  // Pages that stand alone are prompts of their own: one that is missing hides no other.
  std::vector<PageOfRun> lone;
  for (const uint64_t chain : {50, 51, 52}) {
    const TestPage page = kept.world.page(chain);
    if (chain != 51) CHECK(kept.peer->store(page));
    lone.push_back({page.key, true});
  }
  CHECK(kept.world->keeps().begin(2, {UINT64_MAX, 0}) == KeepRefusal::none);
  CHECK(kept.world->keep(2, kept.world.shape().id, lone, false).refusal == KeepRefusal::none);
  CHECK_EQ(kept.world->keeps().ends(2).size(), 2);
  kept.fill();
  CHECK(kept.world.stored(kept.world.page(50)) && kept.world.stored(kept.world.page(52)));
}

TEST(what_prompts_share_is_counted_once_and_stays_with_the_last_of_them) {
  Kept kept;
  const auto one = kept.prompt(1, 6);
  const auto two = kept.branch(one, 4, 3);
  const std::vector<TestPage> beginning(one.begin(), one.begin() + 2);
  kept.keep(1, one);
  kept.keep(2, two);
  kept.keep(3, beginning);
  CHECK_EQ(kept.world->keeps().used_pages(), 9);
  CHECK_EQ(kept.world->keeps().report(2)->pages, 7);
  kept.end(1);
  CHECK_EQ(kept.world->keeps().used_pages(), 7);
  kept.fill();
  CHECK_EQ(kept.stored(two), 7);
  CHECK_EQ(kept.stored(one), 4);
  kept.end(2);
  CHECK_EQ(kept.world->keeps().used_pages(), 2);
  kept.fill();
  CHECK_EQ(kept.stored(two), 2);
  kept.end(3);
  kept.check_nothing_is_held();
}

TEST(keeps_hold_no_more_than_their_share) {
  Kept kept;
  const uint64_t page_bytes = kept.world.shape().slot_bytes();
  const auto most = static_cast<uint32_t>(kept.world.options.keep_bytes / page_bytes);
  const auto prompt = kept.prompt(1, most + 1);
  CHECK(kept.keep(1, prompt).refusal == KeepRefusal::bytes);
  CHECK_EQ(kept.world->keeps().used_pages(), most);
  kept.end(1);
  kept.check_nothing_is_held();
  const std::vector<TestPage> all(prompt.begin(), prompt.end() - 1);
  CHECK(kept.keep(2, all).refusal == KeepRefusal::none);
  CHECK(kept.keep(3, {kept.prompt(2, 1)}).refusal == KeepRefusal::bytes);
  CHECK(kept.keep(4, all).refusal == KeepRefusal::none);  // takes no more
  kept.fill();
  CHECK_EQ(kept.stored(all), most);
}

TEST(no_more_keeps_and_ends_than_their_bounds) {
  Kept kept;
  const auto prompt = kept.prompt(1, 1);
  for (KeepId id = 0; id < Keeps::kMostKeeps; ++id)
    CHECK(kept.keep(id, prompt).refusal == KeepRefusal::none);
  CHECK(kept.world->keeps().begin(Keeps::kMostKeeps, {}) == KeepRefusal::keeps);
  CHECK(kept.world->keeps().begin(0, {}) == KeepRefusal::keeps);
  for (KeepId id = 0; id < Keeps::kMostKeeps; ++id) kept.end(id);
  // The same page as its own prompt, over and over.
  const std::vector<PageOfRun> many(Keeps::kMostEndsOfKeep + 1, {prompt[0].key, true});
  for (KeepId id = 0; id <= Keeps::kMostKeepEnds / Keeps::kMostEndsOfKeep; ++id) {
    CHECK(kept.world->keeps().begin(id, {UINT64_MAX, 0}) == KeepRefusal::none);
    CHECK(kept.world->keep(id, kept.world.shape().id, many, false).refusal == KeepRefusal::ends);
    const bool was_first = id < Keeps::kMostKeepEnds / Keeps::kMostEndsOfKeep;
    CHECK_EQ(kept.world->keeps().report(id)->pages, was_first ? Keeps::kMostEndsOfKeep : 0);
  }
  for (KeepId id = 0; id <= Keeps::kMostKeepEnds / Keeps::kMostEndsOfKeep; ++id) kept.end(id);
  kept.check_nothing_is_held();
}

TEST(keep_ends_at_its_time_and_use_moves_that_where_it_was_asked_to) {
  Kept kept;
  const auto once = kept.prompt(1, 3), renewed = kept.prompt(2, 3);
  const uint64_t until = kept.world.clock.boot_ns() + kHourNs;
  kept.keep(1, once, {until, 0});
  kept.keep(2, renewed, {until, kHourNs});
  kept.world.pass(kHourNs / 2);
  for (const auto& prompt : {once, renewed})
    for (const TestPage& page : prompt) kept.peer->session().touch(*kept.world.entry(page));
  kept.world.pass(2 * kSecondNs);
  kept.world.pass(kHourNs * 3 / 4);
  CHECK(!kept.world->keeps().report(1));
  CHECK(kept.world->keeps().report(2).has_value());
  kept.fill();
  CHECK_EQ(kept.stored(once), 0);
  CHECK_EQ(kept.stored(renewed), 3);
  kept.world.pass(kHourNs);
  CHECK_EQ(kept.world->keeps().size(), 0);
  kept.check_nothing_is_held();
  CHECK(!kept.world->keeps().set_time(2, {UINT64_MAX, 0}));
}

TEST(clear_and_operator_take_what_is_kept_and_its_keep_ends) {
  for (const bool clears : {false, true}) {
    Kept kept;
    const auto prompt = kept.prompt(1, 5);
    kept.keep(1, prompt);
    if (clears) {
      kept.world->clear(0, 1);
    } else {
      uint64_t left = 0;
      kept.world->evict(-1, 5, "all", left);
      CHECK_EQ(left, 5);
    }
    CHECK_EQ(kept.stored(prompt), 0);
    CHECK_EQ(kept.world->keeps().used_pages(), 0);
    kept.world.pass(2 * kSecondNs);
    CHECK_EQ(kept.world->keeps().size(), 0);
    kept.check_nothing_is_held();
    kept.prompt(1, 5);
    CHECK_EQ(kept.world->keeps().used_pages(), 0);
  }
}

// A page in the middle is damaged, and stored anew: what is held of it by pages from before must
// not be given up for those that are kept now.
TEST(page_that_left_and_is_back_is_held_by_those_who_keep_it_anew) {
  Kept kept;
  const auto prompt = kept.prompt(1, 4);
  kept.keep(1, prompt);
  const SlotId slot = kept.world.slot_of(prompt[1]);
  kept.world.payload(slot)[0] ^= std::byte{1};
  kept.peer->report(*kept.world.entry(prompt[1]));
  while (kept.world.stored(prompt[1])) kept.world.pass(kSecondNs);
  CHECK(kept.peer->store(prompt[1]));
  for (const TestPage& page : prompt) kept.peer->store(page);
  kept.keep(2, {prompt[0], prompt[1]});
  kept.keep(3, prompt);
  kept.end(1);
  kept.fill();
  CHECK_EQ(kept.stored(prompt), 4);
  kept.end(3);
  kept.fill();
  CHECK_EQ(kept.stored(prompt), 2);
  kept.end(2);
  kept.check_nothing_is_held();
}

TEST(pages_of_a_long_keep_are_let_go_in_steps) {
  Kept kept(4096, {}, 64 * kMiB);
  const uint32_t pages = 6000;
  const auto prompt = kept.prompt(1, pages);
  CHECK(kept.keep(1, prompt).refusal == KeepRefusal::none);
  CHECK(kept.world->keeps().end(1));
  for (const uint64_t left : {uint64_t{pages}, pages - Keeps::kLetGoPerStep, uint64_t{0}}) {
    CHECK_EQ(kept.world->keeps().used_pages(), left);
    CHECK_EQ(kept.world->goes_on(), left != 0);
    kept.world->go_on();
  }
}

TEST(kept_pages_stay_where_the_index_is_at_its_bound) {
  Kept kept(4096, [](World& world) { world.options.index_pages = 1024; });
  const auto prompt = kept.prompt(1, 64);
  CHECK(kept.keep(1, prompt).refusal == KeepRefusal::none);
  for (uint64_t at = 0; at < 4096; ++at) kept.peer->store(kept.world.page(kept.others++));
  CHECK(kept.world->status().index_bound);
  CHECK_EQ(kept.stored(prompt), 64);
}

// A few kept pages in every slab: another page size gets one of them, and no more.
TEST(page_size_that_would_have_no_memory_gets_the_slab_with_the_fewest_kept_pages) {
  const NamespaceShape large = shape_of(512 * 1024, 1, {0x61, 0x62});
  Kept kept(64 * 1024, [&](World& world) { world.declared = {large}; });
  std::vector<std::vector<TestPage>> prompts;
  for (uint64_t chain = 0; chain < kept.world.capacity(); ++chain)
    prompts.push_back(kept.prompt(chain, 1));
  std::vector<std::vector<TestPage>> keeps;
  for (size_t at = 0; at < prompts.size(); at += 12) {
    CHECK(kept.keep(at, prompts[at]).refusal == KeepRefusal::none);
    keeps.push_back(prompts[at]);
  }
  kept.peer->use(large);
  uint64_t large_stored = 0;
  for (uint64_t chain = 5000; chain < 5064; ++chain) {
    large_stored += kept.peer->store(page_of(large, chain, 0)) ? 1 : 0;
    kept.world.pass(200 * kMillisecondNs);
  }
  CHECK(large_stored > 50);
  size_t stored = 0;
  for (const auto& prompt : keeps) stored += kept.stored(prompt);
  // Of all slabs but those that the large pages have, at least.
  CHECK(stored >= keeps.size() / 2);
  CHECK_EQ(kept.world->keeps().used_pages(), stored);
}

void with_nvme(World& world) {
  world.options.nvme_dir = world.directory.path() + "/nvme";
  std::filesystem::create_directory(world.options.nvme_dir);
  world.options.nvme_capacity_bytes = 16 * kMiB;
  world.options.io_engine = "pread";
}

void until(World& world, const std::function<bool()>& done) {
  for (int round = 0; !done(); ++round) {
    CHECK(round < 20000);
    world->poll_log();
    world->tick();
    pollfd ready{world->log_fd(), POLLIN, 0};
    ::poll(&ready, 1, 5);
  }
}

// Beside a working set that is hot, and more than reclaim may move of a segment.
TEST(kept_pages_stay_on_nvme_while_others_make_room) {
  for (const bool keeps : {false, true}) {
    Kept kept(64 * 1024, with_nvme);
    const auto prompt = kept.prompt(1, 48);
    until(kept.world, [&] { return kept.world->status().nvme_pages == 48; });
    if (keeps) CHECK(kept.keep(1, prompt).refusal == KeepRefusal::none);
    uint64_t left = 0;
    kept.world->evict(-1, 40, "dram", left);  // the others stay in DRAM as well
    CHECK_EQ(left, 40);
    std::vector<TestPage> hot;
    while (kept.world->status().log.reclaimed_segments < 60) {
      hot.push_back(kept.world.page(kept.others++));
      kept.peer->store(hot.back());
      for (size_t at = hot.size(); at > 0 && hot.size() - at < 60; --at)
        if (const auto entry = kept.world.entry(hot[at - 1])) kept.peer->session().touch(*entry);
      until(kept.world, [&] { return kept.world->flush_report().pending == 0; });
      kept.world.pass(kSecondNs);
    }
    if (!keeps) {
      CHECK(kept.stored(prompt) < 48);
      continue;
    }
    CHECK_EQ(kept.stored(prompt), 48);
    for (const TestPage& page : prompt) CHECK(kept.world.entry(page)->in_nvme());
  }
}

// Their records are twice as large as they are.
TEST(small_kept_pages_leave_room_on_nvme) {
  Kept kept(4096, with_nvme, 16 * kMiB);
  for (uint64_t at = 0; at < 2040; at += 20) {
    CHECK(kept.keep(at, kept.prompt(kept.others++, 20)).refusal == KeepRefusal::none);
    until(kept.world, [&] { return kept.world->flush_report().pending == 0; });
  }
  CHECK_EQ(kept.world->keeps().used_pages(), 2040);
}

TEST(keep_is_made_again_from_its_marks) {
  Kept kept;
  const auto one = kept.prompt(1, 5), two = kept.prompt(2, 3), other = kept.prompt(3, 3);
  kept.again();
  auto& warehouse = *kept.world;
  const KeepTime time{UINT64_MAX, 0};
  // The last page is not there any more: as much as there is.
  const std::vector<Key> marks{{123, 456}, one[3].key, one[1].key};
  CHECK(warehouse.restore_keep(9, time, marks, false) == KeepRefusal::none);
  CHECK_EQ(warehouse.keeps().report(9)->pages, 4);
  CHECK_EQ(warehouse.keeps().used_pages(), 4);
  // What prompts share is not walked over again, and held once.
  CHECK(warehouse.restore_keep(10, time, std::vector{one[4].key}, false) == KeepRefusal::none);
  CHECK_EQ(warehouse.keeps().report(10)->pages, 5);
  CHECK_EQ(warehouse.keeps().used_pages(), 5);
  // Of pages that stand alone each.
  const std::vector<Key> lone{two[0].key, {7, 8}, other[0].key};
  CHECK(warehouse.restore_keep(11, time, lone, true) == KeepRefusal::none);
  CHECK_EQ(warehouse.keeps().report(11)->pages, 2);
  CHECK(warehouse.restore_keep(12, time, std::vector{Key{7, 8}}, false) == KeepRefusal::gone);
  CHECK(!warehouse.keeps().report(12));
  CHECK(warehouse.restore_keep(9, time, marks, false) == KeepRefusal::keeps);
  kept.fill();
  CHECK_EQ(kept.stored(one), 5);
  CHECK_EQ(kept.stored(two) + kept.stored(other), 2);
  for (const KeepId id : {10, 11}) kept.end(id);
  CHECK_EQ(warehouse.keeps().used_pages(), 4);
  kept.end(9);
  kept.check_nothing_is_held();
}

TEST(keep_that_does_not_fit_a_new_daemon_is_not_made) {
  Kept kept;
  const auto prompt = kept.prompt(1, 5);
  kept.world.options.keep_bytes = 4 * kept.world.shape().slot_bytes();
  kept.again();
  const std::vector<Key> marks{prompt[4].key, prompt[0].key};
  CHECK(kept.world->restore_keep(9, {UINT64_MAX, 0}, marks, false) == KeepRefusal::bytes);
  CHECK_EQ(kept.world->keeps().size(), 0);
  kept.check_nothing_is_held();
}

// Engines' own keys say nothing of where their pages are.
TEST(pages_that_do_not_follow_each_other_from_the_first_on_are_not_kept_as_a_prompt) {
  Kept kept;
  const auto prompt = kept.prompt(1, 5), other = kept.prompt(2, 2);
  CHECK(kept.keep(1, {prompt[3], prompt[4]}).is_broken);
  CHECK_EQ(kept.world->keeps().report(1)->pages, 0);
  CHECK(kept.keep(2, {prompt[0], prompt[1], other[1]}).is_broken);
  CHECK_EQ(kept.world->keeps().report(2)->pages, 2);
  CHECK(kept.keep(3, {prompt[0], prompt[2]}).is_broken);
  CHECK_EQ(kept.world->keeps().report(3)->pages, 1);
  CHECK_EQ(kept.world->keeps().used_pages(), 2);
  for (const KeepId id : {1, 2, 3}) kept.end(id);
  kept.check_nothing_is_held();
}

// A refused one takes nothing from those that are made after it, before the core runs.
TEST(keep_that_does_not_fit_a_new_daemon_leaves_room_for_smaller_ones) {
  Kept kept;
  const auto large = kept.prompt(1, 5), small = kept.prompt(2, 3);
  kept.world.options.keep_bytes = 4 * kept.world.shape().slot_bytes();
  kept.again();
  const std::vector<Key> marks{large[4].key, large[0].key};
  CHECK(kept.world->restore_keep(9, {UINT64_MAX, 0}, marks, false) == KeepRefusal::bytes);
  CHECK(kept.world->restore_keep(8, {UINT64_MAX, 0}, std::vector{small[2].key}, false) ==
        KeepRefusal::none);
  CHECK_EQ(kept.world->keeps().used_pages(), 3);
  kept.end(8);
  kept.check_nothing_is_held();
}

// Each end goes up all that was lost above it, which many share.
TEST(keeps_that_share_a_long_prompt_go_once_over_what_a_clear_took) {
  Kept kept(4096, {}, 128 * kMiB);
  const uint32_t pages = 8000;
  const auto prompt = pages_of(kept.world.shape(), 1, pages);
  for (uint32_t at = 0; at < pages; at += 500)
    CHECK(kept.peer->store_all({prompt.data() + at, 500}));
  for (KeepId id = 0; id < 4000; ++id) {
    CHECK(kept.world->keeps().begin(id, {UINT64_MAX, 0}) == KeepRefusal::none);
    TestPage page = kept.world.page(kept.others++);
    page.parent = prompt.back().key;
    page.position = pages;
    page.key = Key{mixed(2 * id), mixed(2 * id + 1)};
    const std::vector<Key> marks{page.key};
    kept.store({page});
    CHECK(kept.world->keeps().end(id));
    CHECK(kept.world->restore_keep(id, {UINT64_MAX, 0}, marks, false) == KeepRefusal::none);
  }
  CHECK_EQ(kept.world->keeps().used_pages(), pages + 4000);
  kept.world->clear(0, 1);
  CHECK_EQ(kept.world->keeps().used_pages(), 0);
  for (int ticks = 0; kept.world->keeps().size() != 0; ++ticks) {
    CHECK(ticks < 10);
    kept.world.pass(2 * kSecondNs);
  }
  CHECK(kept.world->keeps().looks_at_lost() <= pages + 4000);
  kept.check_nothing_is_held();
}

// What is kept fills a page size's slab, while NVMe is never done with what another size stores.
TEST(page_size_all_of_whose_pages_are_kept_gets_room_beside_another_that_is_written) {
  const NamespaceShape large = shape_of(128 * 1024, 1, {0x61, 0x62});
  Kept kept(64 * 1024, [&](World& world) {
    world.declared = {large};
    world.options.nvme_dir = world.directory.path() + "/nvme";
    std::filesystem::create_directory(world.options.nvme_dir);
    world.options.nvme_capacity_bytes = 64 * kMiB;
    world.options.io_engine = "pread";
  });
  const auto settle = [&] {
    while (kept.world->flush_report().pending != 0) {
      kept.world->poll_log();
      pollfd ready{kept.world->log_fd(), POLLIN, 0};
      ::poll(&ready, 1, 5);
    }
    kept.world.pass(200 * kMillisecondNs);
    while (kept.world->goes_on()) kept.world->go_on();
  };
  // All slots of one slab.
  KeepId id = 1;
  const uint64_t slots = kept.world.capacity() / kept.world->arena().slab_count();
  for (uint64_t at = 0; at < slots; ++at) {
    const auto page = kept.prompt(kept.others++, 1);
    CHECK(kept.keep(id++, page).refusal == KeepRefusal::none);
    settle();
  }
  uint64_t chain = 5000;
  kept.peer->use(large);
  for (int at = 0; at < 200; ++at) {
    kept.peer->store(page_of(large, chain++, 0));
    settle();
  }
  uint64_t stored = 0;
  for (int at = 0; at < 20; ++at) {
    kept.peer->use(large);
    CHECK(kept.peer->store(page_of(large, chain++, 0)));
    kept.peer->use(kept.world.shape());
    stored += kept.peer->store(kept.world.page(kept.others++)) ? 1 : 0;
    settle();
  }
  CHECK(stored >= 18);
}

TEST(prompt_that_loses_its_end_keeps_the_rest) {
  Kept kept;
  const auto prompt = kept.prompt(1, 5);
  kept.keep(1, prompt);
  kept.keep(2, {prompt[0], prompt[1], prompt[2], prompt[3]});
  uint64_t left = 0;
  kept.world->evict(-1, 2, "all", left);  // its last pages
  CHECK_EQ(left, 2);
  CHECK_EQ(kept.world->keeps().used_pages(), 3);
  kept.world.pass(2 * kSecondNs);
  for (const KeepId id : {1, 2}) CHECK_EQ(kept.world->keeps().report(id)->pages, 3);
  kept.end(2);
  kept.fill();
  CHECK_EQ(kept.stored(prompt), 3);
  kept.end(1);
  kept.check_nothing_is_held();
}

TEST(tick_that_ends_many_keeps_lets_them_go_in_steps) {
  Kept kept(4096, {}, 64 * kMiB);
  for (KeepId id = 0; id < 3; ++id)
    CHECK(kept.keep(id, kept.prompt(id, 2000), {1, 0}).refusal == KeepRefusal::none);
  kept.world->keeps().tick(10 * kSecondNs);
  CHECK_EQ(kept.world->keeps().size(), 0);
  CHECK_EQ(kept.world->keeps().used_pages(), 6000);
  kept.world->go_on();
  CHECK_EQ(kept.world->keeps().used_pages(), 6000 - Keeps::kLetGoPerStep);
  kept.check_nothing_is_held();
}

// Whatever order things come in: no page that is kept leaves for another's room, and when all keeps
// have ended nothing is held.
TEST(random_keeps_hold_what_they_should_and_no_more) {
  auto source = check::random("keeps");
  const auto below = [&](uint64_t end) { return source() % end; };
  for (uint64_t round = 0; round < check::rounds(20); ++round) {
    Kept kept(64 * 1024,
              [&](World& world) { world.options.policy = below(2) == 0 ? "lru" : "adaptive"; });
    std::vector<std::vector<TestPage>> prompts;
    std::map<KeepId, std::vector<TestPage>> keeps;
    for (int step = 0; step < 200; ++step) {
      switch (below(6)) {
        case 0: {
          const auto& from =
              prompts.empty() ? kept.prompt(kept.others++, 4) : prompts[below(prompts.size())];
          if (kept.stored(from) == from.size())
            prompts.push_back(
                kept.branch(from, 1 + below(from.size()), 1 + static_cast<uint32_t>(below(4))));
          break;
        }
        case 1:
          prompts.push_back(kept.prompt(kept.others++, 1 + static_cast<uint32_t>(below(5))));
          break;
        case 2: {
          if (prompts.empty()) break;
          const auto& prompt = prompts[below(prompts.size())];
          const KeepId id = kept.others++;
          const KeepStep run = kept.keep(id, prompt);
          const auto report = *kept.world->keeps().report(id);
          if (run.refusal == KeepRefusal::none && report.pages != 0)
            keeps[id] =
                std::vector(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(report.pages));
          else
            kept.end(id);
          break;
        }
        case 3:
          if (keeps.empty()) break;
          kept.end(keeps.begin()->first);
          keeps.erase(keeps.begin());
          break;
        case 4:
          for (uint64_t at = below(40); at > 0; --at)
            kept.peer->store(kept.world.page(kept.others++));
          break;
        default:
          kept.world.pass(kSecondNs);
      }
      std::set<std::pair<uint64_t, uint64_t>> distinct;
      for (const auto& [id, pages] : keeps) {
        CHECK_EQ(kept.stored(pages), pages.size());
        for (const TestPage& page : pages) distinct.insert({page.key.lo, page.key.hi});
      }
      CHECK_EQ(kept.world->keeps().used_pages(), distinct.size());
    }
    for (const auto& [id, pages] : keeps) kept.end(id);
    kept.check_nothing_is_held();
    kept.world.check_no_slot_leaks();
  }
}

}  // namespace
}  // namespace kvw
