// Why a page is not there: each way in which pages leave or are not stored is told as what it was,
// with its times; and what is stored in a page's place.
#include <poll.h>

#include <array>
#include <filesystem>
#include <functional>
#include <string>

#include "tests/warehouse_world.h"

namespace kvw {
namespace {

using State = PageWhy::State;

std::vector<Key> keys_of(const std::vector<TestPage>& pages) {
  std::vector<Key> keys;
  for (const TestPage& page : pages) keys.push_back(page.key);
  return keys;
}

struct Asked {
  World world;
  std::unique_ptr<Peer> peer;

  explicit Asked(uint64_t shard_bytes = 16 * 1024, bool nvme = false)
      : world(shape_of(shard_bytes, 1)) {
    if (nvme) {
      world.options.nvme_dir = world.directory.path() + "/nvme";
      std::filesystem::create_directory(world.options.nvme_dir);
      world.options.nvme_capacity_bytes = 8 * kMiB;
      world.options.io_engine = "pread";
    }
    world.start();
    peer = std::make_unique<Peer>(world);
  }

  PageWhy why(const TestPage& page, uint64_t as_of_ns = 0) {
    return world->why(world.shape().id, std::array{page.key}, as_of_ns).at(0);
  }
  // "left evicted", "dram"
  std::string said(const TestPage& page, uint64_t as_of_ns = 0) {
    const PageWhy found = why(page, as_of_ns);
    if (found.state != State::absent) return page_state_name(found.state);
    return std::string(found.absence.refused ? "refused " : "left ") + found.absence.name();
  }
  void until(const std::function<bool()>& done) {
    for (int round = 0; !done(); ++round) {
      CHECK(round < 20000);
      world->poll_log();
      world->tick();
      pollfd ready{world->log_fd(), POLLIN, 0};
      ::poll(&ready, 1, 5);
    }
  }
};

TEST(pages_that_are_there_are_told_with_the_tier_that_is_fastest) {
  Asked asked(16 * 1024, true);
  const auto prompt = pages_of(asked.world.shape(), 1, 3);
  CHECK(asked.peer->store_all({prompt.data(), 2}));
  asked.until([&] { return asked.world->status().nvme_pages == 2; });
  uint64_t left = 0;
  asked.world->evict(-1, 1, "dram", left);
  const auto found = asked.world->why(asked.world.shape().id, keys_of(prompt), 0);
  CHECK(found[0].state == State::dram && found[1].state == State::nvme);
  CHECK(found[2].state == State::unknown && found[2].remembered_s == 0);
}

TEST(page_that_is_being_stored_is_told_as_that) {
  Asked asked;
  const auto grant = asked.peer->reserve(asked.world.page(1));
  CHECK_EQ(asked.said(asked.world.page(1)), "storing");
  CHECK(asked.peer->seal(grant, 0, asked.peer->copy(grant, asked.world.page(1))) == Reason::none);
  CHECK_EQ(asked.said(asked.world.page(1)), "dram");
}

TEST(evicted_page_is_told_with_when_it_was_stored_used_and_left) {
  Asked asked;
  asked.world.pass(100 * kSecondNs);
  const TestPage first = asked.world.page(0);
  CHECK(asked.peer->store(first));
  asked.world.pass(20 * kSecondNs);
  asked.peer->session().touch(*asked.world.entry(first));
  asked.world.pass(kSecondNs);
  const uint32_t used_s = absence_time(asked.world.clock.boot_ns());
  asked.world.pass(39 * kSecondNs);
  for (uint64_t chain = 1; asked.world.stored(first); ++chain)
    CHECK(asked.peer->store(asked.world.page(chain)));
  const Absence absence = asked.why(first).absence;
  CHECK_EQ(asked.said(first), "left evicted");
  CHECK_EQ(absence.at_s - absence.stored_at_s, 60);
  CHECK(used_s - absence.used_at_s <= 1 && !absence.perhaps_earlier);
  CHECK_EQ(absence.at_s, absence_time(asked.world.clock.boot_ns()));
  CHECK(asked.world->status().stored_again[size_t(LeaveReason::evicted)] == 0);
  CHECK(asked.peer->store(first));
  CHECK_EQ(asked.said(first), "dram");
  CHECK_EQ(asked.world->status().stored_again[size_t(LeaveReason::evicted)], 1);
}

// The clock of uses goes round after nine hours.
TEST(use_of_long_ago_is_told_as_the_latest_that_it_can_have_been) {
  for (const uint64_t hours : {8, 10}) {
    Asked asked;
    const TestPage first = asked.world.page(0), unused = asked.world.page(1);
    CHECK(asked.peer->store(first) && asked.peer->store(unused));
    asked.peer->session().touch(*asked.world.entry(first));
    asked.world.pass(kSecondNs);
    asked.world.pass(hours * 3600 * kSecondNs);
    uint64_t left = 0;
    asked.world->evict(-1, 2, "dram", left);
    const Absence absence = asked.why(first).absence;
    CHECK_EQ(absence.perhaps_earlier, hours == 10);
    const auto about = [&](uint32_t ago_s, uint64_t expected_s) {
      return ago_s <= expected_s && expected_s - ago_s <= expected_s / 64;
    };
    CHECK(about(absence.at_s - absence.stored_at_s, hours * 3600 + 1));
    CHECK_EQ(asked.why(unused).absence.used_at_s, 0);
    if (hours == 8) CHECK(about(absence.at_s - absence.used_at_s, hours * 3600));
  }
}

TEST(cleared_pages_are_told_as_cleared_before_the_clear_has_reached_them) {
  Asked asked;
  const auto prompt = pages_of(asked.world.shape(), 1, 3);
  CHECK(asked.peer->store_all(prompt));
  const uint32_t ordinal = asked.world->add_namespace(kMaxNamespaces, asked.world.shape(), 0);
  asked.world->begin_clear(ordinal, 1);
  CHECK_EQ(asked.said(prompt[2]), "left cleared");
  asked.world->clear(ordinal, 1);
  CHECK_EQ(asked.said(prompt[2]), "left cleared");
  CHECK(asked.why(prompt[2]).absence.stored_at_s != 0);
  CHECK(asked.peer->store_all(prompt));
  CHECK_EQ(asked.world->status().stored_again[size_t(LeaveReason::cleared)], 3);
}

TEST(what_an_operator_an_orphan_and_damage_took_is_told_as_that) {
  Asked asked;
  const auto prompt = pages_of(asked.world.shape(), 1, 4);
  CHECK(asked.peer->store_all(prompt));
  const EntryView entry = *asked.world.entry(prompt[1]);
  asked.world.payload(entry.slot)[7] ^= std::byte{1};
  asked.peer->report(entry);
  asked.world.pass(kSecondNs);
  CHECK_EQ(asked.said(prompt[1]), "left quarantined");
  asked.world->sweep(100);
  CHECK_EQ(asked.said(prompt[2]), "left orphaned");
  CHECK_EQ(asked.said(prompt[3]), "left orphaned");
  uint64_t left = 0;
  asked.world->evict(-1, 1, "all", left);
  CHECK_EQ(asked.said(prompt[0]), "left operator");
}

TEST(page_that_left_nvme_last_is_told_as_reclaimed) {
  Asked asked(64 * 1024, true);
  const TestPage first = asked.world.page(0);
  CHECK(asked.peer->store(first));
  asked.until([&] { return asked.world->status().nvme_pages == 1; });
  uint64_t left = 0;
  asked.world->evict(-1, 1, "dram", left);
  CHECK_EQ(asked.said(first), "nvme");
  for (uint64_t chain = 1; asked.world.stored(first); ++chain) {
    CHECK(chain < 1000);
    CHECK(asked.peer->store(asked.world.page(chain)));
    asked.until([&] { return asked.world->flush_report().pending == 0; });
  }
  CHECK_EQ(asked.said(first), "left reclaimed");
  CHECK_EQ(asked.why(first).absence.stored_at_s, 0);  // its time is in the record alone
}

TEST(page_that_is_refused_is_told_with_the_reason_of_the_time) {
  Asked asked;
  const auto prompt = pages_of(asked.world.shape(), 1, 3);
  CHECK(asked.peer->reserve(prompt[1]).reason == Reason::parent_missing);
  CHECK_EQ(asked.said(prompt[1]), "refused parent_missing");
  asked.world->drain();
  CHECK(asked.peer->reserve(prompt[0]).reason == Reason::draining);
  CHECK_EQ(asked.said(prompt[0]), "refused draining");
  asked.world->undrain();
  // Whoever stores it gives up.
  const auto grant = asked.peer->reserve(prompt[0]);
  asked.peer->settle(grant);
  CHECK_EQ(asked.said(prompt[0]), "refused stale");
  // And at last it is stored: it was not here before.
  CHECK(asked.peer->store_all(prompt));
  for (const uint64_t pages : asked.world->status().stored_again) CHECK_EQ(pages, 0);
}

// Under pressure a store is put off, and its pages are refused for want of their parent until it
// comes again: they come back all the same.
TEST(pages_that_come_back_late_are_counted_by_why_they_had_left) {
  Asked asked;
  const auto prompt = pages_of(asked.world.shape(), 0, 3);
  CHECK(asked.peer->store_all(prompt));
  uint64_t left = 0;
  asked.world->evict(-1, 3, "dram", left);
  std::vector<ReserveAnswer> unfinished;
  for (uint64_t chain = 1;; ++chain) {
    const auto grant = asked.peer->reserve(asked.world.page(chain));
    if (grant.answer == Answer::dropped) break;
    unfinished.push_back(grant);
  }
  asked.world.pass(2 * kSecondNs);
  CHECK_EQ(asked.peer->store_some(prompt), 0);
  CHECK_EQ(asked.said(prompt[0]), "refused reserve_limit");
  CHECK_EQ(asked.said(prompt[1]), "refused parent_missing");
  for (const ReserveAnswer& grant : unfinished) asked.peer->settle(grant);
  CHECK(asked.peer->store_all(prompt));
  CHECK_EQ(asked.world->status().stored_again[size_t(LeaveReason::operator_)], 3);
}

// What the asker stored behind its lookup was refused at first.
TEST(what_was_refused_since_is_no_reason_of_a_moment_ago) {
  Asked asked;
  const auto prompt = pages_of(asked.world.shape(), 0, 2);
  CHECK(asked.peer->store_all(prompt));
  uint64_t left = 0;
  asked.world->evict(-1, 1, "dram", left);
  asked.world.pass(5 * kSecondNs);
  const TestPage unknown = asked.world.page(9, 1);
  const uint64_t then_ns = asked.world.clock.wall_ns();
  for (const uint64_t later_ns : {0 * kSecondNs, 3 * kSecondNs}) {
    asked.world.pass(later_ns);
    CHECK(asked.peer->reserve(unknown).reason == Reason::parent_missing);
    CHECK_EQ(asked.said(unknown, then_ns), "unknown");
    CHECK_EQ(asked.said(unknown), "refused parent_missing");
  }
  CHECK_EQ(asked.said(prompt[1], then_ns), "left operator");
  asked.world->evict(-1, 1, "dram", left);
  CHECK_EQ(asked.said(prompt[0], then_ns), "unknown");
  CHECK_EQ(asked.said(prompt[0]), "left operator");
}

TEST(page_that_parts_from_others_is_told_with_the_one_most_like_it) {
  Asked asked;
  auto prompt = pages_of(asked.world.shape(), 1, 3);
  CHECK(asked.peer->store_all(prompt));
  const auto branch = [&](uint32_t common) {  // behind the first page
    TestPage page = prompt[1];
    for (uint32_t at = common; at < page.tokens.size(); ++at) page.tokens[at] += 1000 + common;
    static const std::vector<std::byte> bytes = test_secret();
    page.key = chain_key(Secret(bytes.data(), kSecretBytes), page.parent, page.tokens);
    return page;
  };
  for (const uint32_t common : {3, 9, 5}) CHECK(asked.peer->store(branch(common)));
  std::vector<uint32_t> wanted = branch(9).tokens;
  wanted[12] = 7;
  Branches found;
  const Key space = asked.world.shape().id;
  asked.world->add_branches(space, prompt[0].key, 1, wanted, 0, found);
  CHECK_EQ(found.pages, 4);
  CHECK_EQ(found.compared, 4);
  CHECK_EQ(found.common_tokens, 12);
  CHECK(found.tokens == branch(9).tokens && found.key == branch(9).key && !found.more);
  // Of keys there are no tokens to compare.
  Branches by_keys;
  asked.world->add_branches(space, prompt[0].key, 1, {}, 0, by_keys);
  CHECK(by_keys.pages == 4 && by_keys.compared == 0 && by_keys.tokens.empty());
  // A page at another position, or that is not there, has nothing behind it.
  Branches none;
  asked.world->add_branches(space, prompt[0].key, 2, wanted, 0, none);
  asked.world->add_branches(space, asked.world.page(9).key, 1, wanted, 0, none);
  CHECK_EQ(none.pages, 0);
}

TEST(first_pages_of_other_prompts_are_found_all_over_the_index_within_a_bound) {
  Asked asked(4096);
  asked.world->add_namespace(kMaxNamespaces, shape_of(4096, 1, Key{1, 1}), 0);
  for (uint64_t chain = 0; chain < Branches::kMostBranches; ++chain) {
    const auto prompt = pages_of(asked.world.shape(), chain, chain < 3 ? 2 : 1);
    CHECK(asked.peer->store_all(prompt));
  }
  const auto look = [&](const Key& space, const std::vector<uint32_t>& tokens,
                        uint64_t as_of_ns = 0) {
    Branches found;
    PageId cursor = 0;
    while (cursor != kNoPage) asked.world->add_first_pages(space, cursor, tokens, as_of_ns, found);
    return found;
  };
  std::vector<uint32_t> wanted = asked.world.page(77).tokens;
  wanted[15] = 0;
  const Branches found = look(asked.world.shape().id, wanted);
  CHECK_EQ(found.pages, Branches::kMostBranches);
  CHECK(!found.more && found.common_tokens == 15 && found.key == asked.world.page(77).key);
  CHECK_EQ(look(Key{1, 1}, wanted).pages, 0);
  CHECK(asked.peer->store(asked.world.page(Branches::kMostBranches)));
  CHECK(look(asked.world.shape().id, wanted).more);
  // Those that do not count are looks, too.
  const Branches since = look(asked.world.shape().id, wanted, 1);
  CHECK(since.pages == 0 && since.more && since.looks == Branches::kMostBranches);
}

// A note of what a request missed may come when its engine has stored that.
TEST(pages_that_were_stored_since_are_told_as_they_were) {
  Asked asked;
  const auto prompt = pages_of(asked.world.shape(), 1, 3);
  CHECK(asked.peer->store_all({prompt.data(), 2}));
  asked.world.pass(kSecondNs);
  uint64_t left = 0;
  asked.world->evict(-1, 1, "all", left);
  asked.world.pass(kSecondNs);
  const uint64_t then_ns = asked.world.clock.wall_ns();
  asked.world.pass(kSecondNs);
  CHECK(asked.peer->store(prompt[1]));
  const auto grant = asked.peer->reserve(prompt[2]);
  CHECK_EQ(asked.said(prompt[0], then_ns), "dram");
  CHECK_EQ(asked.said(prompt[1], then_ns), "left operator");
  CHECK_EQ(asked.said(prompt[2], then_ns), "unknown");
  CHECK_EQ(asked.said(prompt[1]), "dram");
  CHECK_EQ(asked.said(prompt[2]), "storing");
  const auto behind = [&](uint64_t as_of_ns) {
    Branches found;
    asked.world->add_branches(asked.world.shape().id, prompt[0].key, 1, {}, as_of_ns, found);
    return found.pages;
  };
  CHECK(behind(then_ns) == 0 && behind(0) == 1);
  asked.world.pass(kSecondNs);
  CHECK_EQ(asked.said(prompt[2], asked.world.clock.wall_ns() - kSecondNs / 2), "storing");
  asked.peer->settle(grant);
}

TEST(namespace_that_is_not_there_is_refused) {
  Asked asked;
  Branches found;
  PageId cursor = 0;
  const Key unknown{4, 4};
  const auto code_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.code();
    }
    return "";
  };
  CHECK_EQ(code_of([&] { asked.world->why(unknown, {}, 0); }), "namespace_unknown");
  CHECK_EQ(code_of([&] { asked.world->add_branches(unknown, {}, 1, {}, 0, found); }),
           "namespace_unknown");
  CHECK_EQ(code_of([&] { asked.world->add_first_pages(unknown, cursor, {}, 0, found); }),
           "namespace_unknown");
}

}  // namespace
}  // namespace kvw
