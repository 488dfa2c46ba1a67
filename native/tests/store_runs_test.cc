// Stores of many runs in one call, against a real daemon core: what is refused in one run leaves
// the others alone, what is only refused for now is asked for again, and every page is counted.
#include <string>
#include <thread>
#include <unordered_map>

#include "exchange/drop_counters.h"
#include "tests/check.h"
#include "tests/daemon_world.h"

namespace kvw {
namespace {

constexpr uint64_t kShard = 5000;
constexpr uint64_t kTimeoutNs = uint64_t{kPatienceMs} * kMillisecondNs;

using Hash = std::span<const std::byte>;

// Page `at` of a prompt, as an engine names it.
struct Page {
  uint64_t prompt;
  uint32_t at;
  std::string name() const { return std::to_string(prompt) + "." + std::to_string(at); }
};

// A call: runs of pages, and the bytes that each has.
struct Call {
  void add(uint64_t prompt, uint32_t begin, uint32_t end) {
    parents.push_back(begin == 0 ? "" : Page{prompt, begin - 1}.name());
    runs.push_back({end - begin, begin, {}});
    for (uint32_t at = begin; at < end; ++at) pages.push_back(Page{prompt, at});
  }
  Prompt prompt() {
    names.clear();
    for (const Page& page : pages) names.push_back(page.name());
    std::vector<Hash> keys;
    for (const std::string& name : names) keys.push_back(std::as_bytes(std::span(name)));
    for (size_t i = 0; i < runs.size(); ++i)
      runs[i].parent = std::as_bytes(std::span(std::as_const(parents[i])));
    return Prompt::of_runs(std::move(keys), runs);
  }
  static std::vector<std::byte> bytes(const Page& page, uint32_t shard) {
    return bytes_of(Key{page.prompt, page.at}, shard, kShard);
  }
  StoreReport store(Client& client, uint32_t shard, uint64_t timeout_ns = kTimeoutNs) {
    Rows rows(pages.size(), kShard);
    for (size_t i = 0; i < pages.size(); ++i)
      std::memcpy(rows.row(i), bytes(pages[i], shard).data(), kShard);
    Prompt asked = prompt();
    return client.store(kSpace, asked, 0, rows, shard, timeout_ns);
  }
  uint64_t load(Client& client, uint32_t shard) {
    Rows rows(pages.size(), kShard);
    Prompt asked = prompt();
    const LoadReport got = client.load(kSpace, asked, 0, rows, shard, 0);
    for (size_t i = 0; i < got.pages; ++i)
      CHECK(std::memcmp(rows.row(i), bytes(pages[i], shard).data(), kShard) == 0);
    return got.pages;
  }

  std::vector<Page> pages;
  std::vector<KeyRun> runs;
  std::vector<std::string> parents, names;
};

uint64_t total(const StoreReport& report) {
  uint64_t pages = report.stored + report.already;
  for (const auto& [reason, dropped] : report.dropped) pages += dropped;
  return pages;
}

uint64_t dropped(const StoreReport& report, const char* reason) {
  const auto found = report.dropped.find(reason);
  return found == report.dropped.end() ? 0 : found->second;
}

TEST(store_of_runs_counts_every_page_as_a_dictionary_does) {
  auto random = check::random("store_of_runs_counts_every_page_as_a_dictionary_does");
  Daemon daemon(shape_of(kShard, 1), 64 * kMiB);
  daemon.start();
  Client client(daemon.client_options());
  std::set<std::string> stored;
  for (uint64_t round = 0; round < check::rounds(60); ++round) {
    Call call;
    StoreReport expected;
    for (uint64_t i = 1 + random() % 30; i > 0; --i) {
      const uint64_t prompt = round * 1000 + i;  // each once a call, some of the round before
      const uint64_t which = random() % 3 == 0 && round > 0 ? prompt - 1000 : prompt;
      const auto begin = static_cast<uint32_t>(random() % 3);
      const auto end = static_cast<uint32_t>(begin + 1 + (random() % 4 == 0 ? random() % 40 : 0));
      call.add(which, begin, end);
      bool refused = false;
      for (uint32_t at = begin; at < end; ++at) {
        const bool chained = at == 0 || stored.contains(Page{which, at - 1}.name());
        if (refused)
          ++expected.dropped["refused_tail"];
        else if (stored.contains(Page{which, at}.name()))
          ++expected.already;
        else if (!chained)
          ++expected.dropped["parent_missing"], refused = true;
        else
          ++expected.stored, stored.insert(Page{which, at}.name());
      }
    }
    const StoreReport got = call.store(client, 0);
    CHECK_EQ(got.stored, expected.stored);
    CHECK_EQ(got.already, expected.already);
    CHECK_EQ(dropped(got, "parent_missing"), dropped(expected, "parent_missing"));
    CHECK_EQ(dropped(got, "refused_tail"), dropped(expected, "refused_tail"));
    CHECK_EQ(total(got), call.pages.size());
  }
  CHECK_EQ(daemon.status().dram_pages, stored.size());
}

// Each rank's pages stay unfinished until the other has stored its part, and there is room for a
// fraction of them: both are refused for now again and again. Runs go on in others of the call,
// whose pages are asked for while their parents wait.
TEST(runs_that_build_on_each_other_are_stored_whole_when_room_comes_late) {
  auto random =
      check::random("runs_that_build_on_each_other_are_stored_whole_when_room_comes_late");
  for (uint64_t round = 0; round < check::rounds(5); ++round) {
    Daemon daemon(shape_of(kShard, 2), 16 * kMiB);
    daemon.start();
    Call call;
    for (uint64_t prompt = 0; prompt < 10; ++prompt)
      for (uint32_t begin = 0; begin < 30;) {
        const auto end = static_cast<uint32_t>(std::min<uint64_t>(30, begin + 1 + random() % 9));
        call.add(prompt, begin, end);
        begin = end;
      }
    Call other = call;
    StoreReport first, second;
    {
      Client one(daemon.client_options()), two(daemon.client_options());
      std::thread rank([&] { first = call.store(one, 0); });
      second = other.store(two, 1);
      rank.join();
    }
    for (const StoreReport& report : {first, second}) {
      CHECK_EQ(report.stored, 300);
      CHECK_EQ(total(report), 300);
    }
    Client reader(daemon.client_options());
    CHECK_EQ(call.load(reader, 0), 300);
    CHECK_EQ(call.load(reader, 1), 300);
  }
}

// A store of more than there is room for, in so much time, while nobody stores shard 1. False: the
// time ended before the daemon had refused anything.
bool counts_each_run_by_what_it_waited_for(uint64_t timeout_ns) {
  Daemon daemon(shape_of(kShard, 2), 8 * kMiB);
  daemon.start();
  Client client(daemon.client_options());
  Call call;
  for (uint64_t prompt = 0; prompt < 100; ++prompt) call.add(prompt, 0, 2);
  StoreReport got;
  try {
    got = call.store(client, 0, timeout_ns);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), "deadline");
    return false;
  }
  CHECK_EQ(total(got), 200);
  if (dropped(got, "reserve_limit") == 0) return false;
  CHECK(got.stored > 0);
  CHECK_EQ(dropped(got, "reserve_limit") + dropped(got, "timeout") + dropped(got, "refused_tail") +
               got.stored,
           200);
  // Asked for again and again, and counted once, as the caller was told.
  for (uint32_t at = 1; at < static_cast<uint32_t>(Reason::count); ++at) {
    const Counter counter = drop_counter(Reason(at));
    if (counter != Counter::dropped_other)
      CHECK_EQ(client.session()->counter(counter), dropped(got, reason_name(Reason(at))));
  }
  CHECK_EQ(client.session()->counter(Counter::dropped_other), 0);
  return true;
}

TEST(store_whose_time_ends_counts_each_run_by_what_it_waited_for) {
  // On a busy machine the daemon's first answers take longer than that: then it gets twice as long.
  uint64_t timeout_ns = 50 * kMillisecondNs;
  while (!counts_each_run_by_what_it_waited_for(timeout_ns)) {
    timeout_ns *= 2;
    CHECK(timeout_ns < kTimeoutNs);
  }
}

TEST(store_whose_daemon_dies_counts_each_page) {
  Daemon daemon(shape_of(kShard, 2), 8 * kMiB);
  daemon.start_process();
  Client client(daemon.client_options()), watcher(daemon.client_options());
  Call call;
  for (uint64_t prompt = 0; prompt < 5; ++prompt) call.add(prompt, 0, 2);
  for (uint32_t shard = 0; shard < 2; ++shard) CHECK_EQ(call.store(watcher, shard).stored, 10);
  for (uint64_t prompt = 5; prompt < 100; ++prompt) call.add(prompt, 0, 2);
  Call begun;
  begun.add(5, 0, 1);
  CHECK_EQ(begun.store(watcher, 1).stored, 1);
  const auto is_full = [&](uint64_t prompt) {
    Call alone;
    alone.add(prompt, 0, 1);
    try {
      return dropped(alone.store(watcher, 0, kMillisecondNs), "reserve_limit") > 0;
    } catch (const Error& error) {
      CHECK_EQ(error.code(), "deadline");  // on a busy machine the daemon answers later
      return false;
    }
  };
  check::Thread killer([&] {  // once there is no room for a page more, and the store waits
    while (begun.load(watcher, 0) == 0) std::this_thread::yield();
    for (uint64_t prompt = 1000; !is_full(prompt);) ++prompt;
    daemon.kill(SIGKILL);
  });
  const StoreReport got = call.store(client, 0);  // nobody stores shard 1
  killer.join();
  CHECK(got.already >= 10);
  CHECK(dropped(got, "unreachable") > 0);
  CHECK_EQ(total(got), 200);
}

}  // namespace
}  // namespace kvw
