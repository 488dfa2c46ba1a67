// What a client makes of a remote store: lookups that count what the presence filter has, and loads
// and pins that fetch it, with a worker at the other end of the link that ends each get as the test
// says.
#include <ranges>

#include "tests/remote_field.h"
#include "tests/slow_line.h"

namespace kvw {
namespace {

using Field = RemoteField;

constexpr uint64_t kPatienceNs = uint64_t{kPatienceMs} * kMillisecondNs;

// --- lookups

TEST(lookup_counts_whole_runs_behind_what_is_stored) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 4 * kRun + 5);
  CHECK_EQ(field.lookup(chain).pages(), 0);
  field.put(chain);
  CHECK_EQ(field.lookup(chain).remote, 4 * kRun);  // the end of the prompt is inside a run
  Chain begun(field.daemon.shape(), 1, kRun + 3);
  begun.store_all(*field.client);
  const LookupResult found = field.lookup(chain);
  CHECK_EQ(found.dram, kRun + 3);
  CHECK_EQ(found.remote, 3 * kRun - 3);
  CHECK_EQ(found.pages(), 4 * kRun);
  CHECK_EQ(field.counted(Counter::lookup_hit_remote), 4 * kRun + 3 * kRun - 3);
  CHECK_EQ(field.counted(Counter::lookup_missed), chain.pages.size() + 2 * 5);
  CHECK_EQ(field.asked(), 0);
}

TEST(lookup_ends_at_the_first_run_that_the_store_has_not) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 40 * kRun);
  field.put(chain);
  CHECK_EQ(field.lookup(chain).remote, 40 * kRun);
  for (const uint32_t gone : {39u, 17u, 16u, 1u, 0u}) {
    field.remove_from_filter(chain.pages[gone * kRun + kRun - 1].key);
    CHECK_EQ(field.lookup(chain).remote, gone * kRun);
  }
}

TEST(nothing_is_remote_while_the_tier_serves_nothing_of_the_namespace) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 2 * kRun);
  field.put(chain);
  CHECK_EQ(field.lookup(chain).remote, 2 * kRun);
  field.serves(false);
  CHECK_EQ(field.lookup(chain).remote, 0);
  CHECK_EQ(field.load(chain, 0), "remote_off");
  field.serves(true);
  CHECK_EQ(field.lookup(chain).remote, 2 * kRun);
  const uint64_t epoch = field.clear();
  CHECK_EQ(field.lookup(chain).remote, 0);
  CHECK_EQ(field.load(chain, 0), "missing");
  field.serve_epoch(7, epoch);  // what was put before is of an older one
  CHECK_EQ(field.lookup(chain).remote, 0);
  field.put(chain, 7);
  CHECK_EQ(field.lookup(chain).remote, 2 * kRun);
  field.end_worker();
  eventually([&] { return !field.serving(); });
  CHECK_EQ(field.lookup(chain).remote, 0);
}

TEST(client_of_a_daemon_without_the_tier_asks_for_nothing) {
  Daemon daemon(shape_of(kShard, 1));
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, kRun);
  CHECK_EQ(chain.found(client), 0);
  LoadReport report;
  CHECK_EQ(chain.load(client, 0, &report), 0);
  CHECK_EQ(report.reasons.at("missing"), kRun);
}

TEST(filter_is_mapped_by_later_calls_once_there_is_one_and_again_when_it_was_replaced) {
  Field field(32 * kMiB, false);
  const Chain chain(field.daemon.shape(), 1, kRun);
  CHECK_EQ(field.lookup(chain).remote, 0);
  field.make_filter();
  field.put(chain);
  const auto sees = [&](uint64_t pages) {
    eventually([&] {
      field.client->refresh(kSecondNs);
      return field.lookup(chain).remote == pages;
    });
  };
  sees(kRun);
  field.make_filter(2000);  // of another size: a file in its place
  sees(0);
  field.put(chain);
  sees(kRun);
}

// --- pages by an engine's keys

struct Keys {
  explicit Keys(uint32_t count) {
    for (uint32_t at = 0; at < count; ++at) texts.push_back("key " + std::to_string(at));
  }
  std::span<const std::byte> at(size_t page) const { return std::as_bytes(std::span(texts[page])); }
  std::vector<std::span<const std::byte>> part(size_t begin, size_t end) const {
    std::vector<std::span<const std::byte>> found;
    for (size_t page = begin; page < end; ++page) found.push_back(at(page));
    return found;
  }
  // Of one run.
  Prompt prompt(uint32_t begin, uint32_t end) const {
    return Prompt::of_runs(
        part(begin, end),
        {{end - begin, begin, begin == 0 ? std::span<const std::byte>{} : at(begin - 1)}});
  }
  Key key(size_t page) const {
    return engine_key(Secret(test_secret().data(), kSecretBytes), kSpace, at(page));
  }
  std::vector<std::string> texts;
};

TEST(run_that_begins_inside_a_prompt_counts_behind_what_is_stored_or_in_the_store) {
  Field field;
  const Keys keys(3 * kRun);
  for (uint32_t last = kRun - 1; last < 3 * kRun; last += kRun) field.put(keys.key(last));
  const auto remote = [&](uint32_t begin, uint32_t end) {
    Prompt prompt = keys.prompt(begin, end);
    const auto tiers = field.client->tiers(kSpace, prompt);
    const auto ends =
        std::ranges::find_if_not(tiers, [](PageTier t) { return t == PageTier::remote; });
    CHECK(std::all_of(ends, tiers.end(), [](PageTier t) { return t == PageTier::missing; }));
    return static_cast<uint32_t>(ends - tiers.begin());
  };
  CHECK_EQ(remote(0, 3 * kRun), 3 * kRun);
  CHECK_EQ(remote(0, 2 * kRun + 3), 2 * kRun);
  CHECK_EQ(remote(kRun, 3 * kRun), 2 * kRun);  // behind an object
  CHECK_EQ(remote(kRun + 1, 3 * kRun), 0);     // behind a page that nobody knows of
  Rows rows(kRun + 1, kShard);
  Prompt begun = keys.prompt(0, kRun + 1);
  CHECK_EQ(field.client->store(kSpace, begun, 0, rows, 0, kSecondNs).stored, kRun + 1);
  CHECK_EQ(remote(kRun + 1, 3 * kRun), 2 * kRun - 1);
  CHECK_EQ(remote(kRun + 2, 3 * kRun), 0);
}

TEST(load_of_a_run_behind_a_page_that_is_not_stored_ends_at_once) {
  Field field;
  const Keys keys(2 * kRun);
  for (uint32_t last = kRun - 1; last < 2 * kRun; last += kRun) field.put(keys.key(last));
  Prompt prompt = keys.prompt(kRun, 2 * kRun);
  Rows rows(kRun, kShard);
  const LoadReport report = field.client->load(kSpace, prompt, 0, rows, 0, kPatienceNs);
  CHECK_EQ(report.pages, 0);
  CHECK_EQ(report.reasons.at("missing"), kRun);
  CHECK_EQ(field.asked(), 0);
}

// --- loads

TEST(load_brings_what_the_store_has_and_counts_it) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 6 * kRun + 4);
  field.put(chain);
  Chain begun(field.daemon.shape(), 1, kRun + 3);
  begun.store_all(*field.client);
  CHECK_EQ(field.load(chain, 6 * kRun), "missing");
  CHECK_EQ(field.counted(Counter::pages_loaded), 6 * kRun);
  CHECK_EQ(field.counted(Counter::pages_loaded_remote), 5 * kRun - 3);
  CHECK_EQ(field.lookup(chain).dram, 6 * kRun);
  const uint64_t asked = field.asked();
  CHECK_EQ(field.load(chain, 6 * kRun), "missing");
  CHECK_EQ(field.counted(Counter::pages_loaded_remote), 5 * kRun - 3);
  CHECK_EQ(field.asked(), asked);
}

TEST(load_of_the_end_of_a_prompt_brings_what_it_hangs_on) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 4 * kRun);
  field.put(chain);
  Rows rows(5, kShard);
  Prompt prompt = chain.prompt();
  const LoadReport report = field.client->load(kSpace, prompt, 2 * kRun + 7, rows, 0, kPatienceNs);
  CHECK_EQ(report.pages, 5);
  CHECK_EQ(report.fetched, 5);
  CHECK_EQ(field.lookup(chain).dram, 3 * kRun);
}

TEST(load_asks_for_many_runs_in_windows_that_the_daemon_has_room_for) {
  Field field(16 * kMiB);
  const Chain chain(field.daemon.shape(), 1, 60 * kRun);
  field.put(chain);
  CHECK_EQ(field.load(chain, 60 * kRun), "");
  CHECK_EQ(field.counted(Counter::pages_loaded_remote), 60 * kRun);
}

TEST(load_takes_runs_whose_gets_are_told_of_in_any_order) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 4 * kRun);
  field.put(chain);
  std::vector<RunToGet> held;
  const auto answers = field.answers([&](const RunToGet& run) {
    held.push_back(run);
    if (held.size() < 4) return GetEnd::count;  // later
    for (const RunToGet& each : held) CHECK(field.fill(each) == GetEnd::filled);
    for (const RunToGet& each : held | std::views::reverse) field.done(each, GetEnd::filled);
    return GetEnd::count;
  });
  CHECK_EQ(field.load(chain, 4 * kRun), "");
}

TEST(load_ends_where_a_get_does_with_its_reason) {
  struct Case {
    GetEnd end;
    const char* reason;
  };
  for (const Case& each :
       {Case{GetEnd::missing, "remote_missing"}, Case{GetEnd::damaged, "remote_damaged"},
        Case{GetEnd::failed, "remote_failed"}, Case{GetEnd::no_room, "no_room"}}) {
    Field field;
    const Chain chain(field.daemon.shape(), 1, 3 * kRun);
    field.put(chain);
    const auto answers = field.answers([&](const RunToGet& run) {
      return run.first_position == kRun ? each.end : field.fill(run);
    });
    CHECK_EQ(field.load(chain, kRun), each.reason);
    CHECK_EQ(field.load(chain, kRun), each.reason);  // and within a second without another get
  }
}

TEST(load_says_why_a_run_does_not_come_whoever_takes_it_out_of_the_filter_first) {
  for (const auto& [end, reason] : {std::pair(GetEnd::missing, "remote_missing"),
                                    std::pair(GetEnd::damaged, "remote_damaged")}) {
    Field field;
    const Chain chain(field.daemon.shape(), 1, 2 * kRun);
    field.put(chain);
    const Key second = chain.pages[2 * kRun - 1].key;
    const auto answers = field.answers([&, ends = end](const RunToGet& run) {
      if (!(run.key == second)) return field.fill(run);
      field.remove_from_filter(second);  // as a worker does that was told 404, or other bytes
      return ends;
    });
    CHECK_EQ(field.load(chain, kRun), reason);
    CHECK_EQ(field.lookup(chain).pages(), kRun);
  }
}

TEST(load_whose_time_is_up_ends_and_what_it_asked_for_comes_all_the_same) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 2 * kRun);
  field.put(chain);
  std::atomic<bool> begun{false}, goes_on{false};
  const auto answers = field.answers([&](const RunToGet& run) {
    begun = true;
    while (!goes_on) std::this_thread::yield();
    return field.fill(run);
  });
  CHECK_EQ(field.load(chain, 0, 0), "timeout");
  CHECK_EQ(field.asked(), 0);
  uint64_t loads = 0;
  do {  // on a busy machine, until a worker has what was asked for
    CHECK_EQ(field.load(chain, 0, 30 * kMillisecondNs), "timeout");
    ++loads;
  } while (!begun);
  CHECK_EQ(field.counted(Counter::load_timeout), (1 + loads) * 2 * kRun);
  CHECK(field.asked() < loads * 20);
  goes_on = true;
  eventually([&] { return field.lookup(chain).dram >= kRun; });  // the second may be late by now
}

TEST(load_ends_when_the_daemon_answers_what_makes_no_sense) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 2 * kRun);
  field.put(chain);
  const auto no_get_ends = field.answers([](const RunToGet&) { return GetEnd::count; });
  std::atomic<uint32_t> answers{2};
  SlowLine line(field.daemon.socket());
  line.edit([&](MessageHead& head, std::byte* body) {
    if (head.type != MessageType::fetching) return;
    std::memset(body, 0x7f, sizeof(FetchAnswer));
    head.first = answers;
  });
  ClientOptions options = field.daemon.client_options();
  options.socket_path = line.socket();
  field.client = std::make_unique<Client>(options);
  for (const uint32_t count : {2u, 1u, 0u, 3u}) {
    answers = count;
    CHECK_EQ(field.load(chain, 0), "unreachable");
  }
  field.client.reset();
}

TEST(load_ends_when_the_worker_dies_under_it) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 2 * kRun);
  field.put(chain);
  const auto answers = field.answers([&](const RunToGet&) {
    field.leave();
    return GetEnd::count;
  });
  const std::string why = field.load(chain, 0);
  CHECK(why == "remote_off" || why == "remote_failed");
}

TEST(load_ends_when_the_namespace_is_cleared_under_it) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 2 * kRun);
  field.put(chain);
  const auto answers = field.answers([&](const RunToGet& run) {
    field.clear();
    return field.fill(run);  // it is of before
  });
  CHECK_EQ(field.load(chain, 0), "cleared");
  CHECK_EQ(field.lookup(chain).pages(), 0);
}

TEST(loads_of_many_threads_fetch_a_run_once) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 8 * kRun);
  field.put(chain);
  std::atomic<uint64_t> gets{0};
  const auto answers = field.answers([&](const RunToGet& run) {
    ++gets;
    return field.fill(run);
  });
  std::vector<std::unique_ptr<check::Thread>> threads;
  for (int i = 0; i < 4; ++i)
    threads.push_back(
        std::make_unique<check::Thread>([&] { CHECK_EQ(field.load(chain, 8 * kRun), ""); }));
  for (const auto& thread : threads) thread->join();
  CHECK_EQ(gets, 8u);
}

TEST(pin_fetches_first) {
  Field field;
  const Chain chain(field.daemon.shape(), 1, 2 * kRun + 1);
  field.put(chain);
  Prompt prompt = chain.prompt();
  CHECK_EQ(field.client->pin(kSpace, prompt, 0, 0)->pages(), 0);
  CHECK_EQ(field.asked(), 0);
  CHECK_EQ(field.client->pin(kSpace, prompt, 0, kPatienceNs)->pages(), 2 * kRun);
  CHECK_EQ(field.counted(Counter::pages_loaded_remote), 0);
}

}  // namespace
}  // namespace kvw
