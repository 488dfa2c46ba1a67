// The link on which the worker of the remote tier is given runs to get: as many at a time as it
// asks for, its word on how each ended, and nothing that worker, core or client says, or leaves
// unsaid, harms another. What clients ask of the core for it goes over the real socket.
#include "remote/get_link.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "client/connection.h"
#include "tests/check.h"
#include "tests/daemon_world.h"

using namespace kvw;
using namespace kvw::remote;

namespace {

constexpr uint64_t kEpoch = 3, kLongNs = uint64_t{kPatienceMs} * kMillisecondNs;
constexpr uint32_t kDay = 20785, kPages = 16;

std::pair<Fd, Fd> pair_of_sockets(int type = SOCK_SEQPACKET) {
  std::array<int, 2> ends{};
  CHECK_EQ(::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {Fd(ends[0]), Fd(ends[1])};
}

// A client that asks for runs and does nothing else.
class Asker {
 public:
  explicit Asker(const Daemon& daemon)
      : connection_(daemon.socket(), std::nullopt, system_clock().boot_ns() + kLongNs) {
    Writer hello(MessageType::hello);
    hello.put(Hello{0, 1});
    welcome_ = ask(hello, MessageType::welcome);
  }
  uint32_t welcome_flags() const { return welcome_.head().flags; }
  std::vector<FetchAnswer> fetch(std::span<const FetchRun> runs, Key space = kSpace) {
    Writer writer(MessageType::fetch);
    writer.put(FetchSpace{space, static_cast<uint32_t>(WitnessKind::tokens), 0});
    for (const FetchRun& run : runs) writer.put(run);
    writer.set_counts(static_cast<uint32_t>(runs.size()));
    const auto reply = ask(writer, MessageType::fetching);
    CHECK_EQ(reply.head().first, runs.size());
    const auto* answers = reply.body().take_array<FetchAnswer>(runs.size());
    CHECK(answers != nullptr);
    return {answers, answers + runs.size()};
  }
  FetchAnswer fetch(const FetchRun& run) { return fetch(std::span(&run, 1)).at(0); }
  ParentFd presence() {
    Writer writer(MessageType::presence);
    auto reply = ask(writer, MessageType::presence_shared);
    CHECK_EQ(reply.head().second, 1);
    CHECK_EQ(reply.descriptors.size(), 1);
    return std::move(reply.descriptors[0]);
  }

 private:
  Connection::Reply ask(Writer& writer, MessageType expected) {
    return connection_.ask(writer, expected, system_clock().boot_ns() + kLongNs);
  }

  Connection connection_;
  Connection::Reply welcome_;
};

struct Tier {
  explicit Tier(bool read = true) : daemon(shape_of(4096), 64 * kMiB) {
    daemon.options.remote_read = read;
    daemon.start();
    CHECK(daemon.call([](Warehouse& w) { return w.set_remote_epoch(kSpace, kEpoch, 0); }));
    client = std::make_unique<Asker>(daemon);
  }
  // The worker's end of a new link.
  Fd attach() {
    auto [core, worker] = pair_of_sockets();
    daemon.server().attach_remote_gets(std::move(core), kPatienceMs);
    return std::move(worker);
  }
  const ControlPage& control() {
    return *daemon.call([](Warehouse& w) -> const ControlPage* { return &w.arena().control(); });
  }
  // Returns when the core has taken what was sent before.
  void until(const std::function<bool()>& holds) {
    while (!holds()) {
      daemon.status();
      std::this_thread::yield();
    }
  }
  void until_serving(bool serving = true) {
    until([&, this] { return control().remote.serving.value.load() == (serving ? 1u : 0u); });
  }
  void serve(const WorkerGetLink& link, uint32_t gets) {
    link.ready(gets);
    link.state(kForeverNs, 0, 0);
    until_serving();
  }
  FetchRun run(uint64_t number) {
    return {Key{number, 1}, kDay, static_cast<uint32_t>(number) * kPages, kPages, 0, kLongNs};
  }
  FetchAnswer ask(uint64_t number) { return client->fetch(run(number)); }
  FetchesStatus status() { return daemon.status().fetches; }
  uint64_t events(const std::string& name) {
    for (const auto& [event, detail] : daemon.call([](Warehouse& w) { return w.take_events(); }))
      seen[event] += 1;
    return seen[name];
  }

  Daemon daemon;
  std::unique_ptr<Asker> client;
  std::map<std::string, uint64_t> seen;
};

// What only who is told of its end hears.
bool is_closed(const Fd& end) {
  char byte;
  return ::recv(end.get(), &byte, 1, 0) <= 0;
}

template <class Body>
std::vector<std::byte> message(const Body& body) {
  const LinkMessage<Body> made{.body = body};
  const auto* bytes = reinterpret_cast<const std::byte*>(&made);
  return {bytes, bytes + sizeof made};
}

// As a client does. False: nobody woke it.
bool wait_on(const std::atomic<uint64_t>& word, uint64_t seen) {
  const timespec most{kPatienceMs / 1000, 0};
  const auto* low = reinterpret_cast<const uint32_t*>(&word);
  return ::syscall(SYS_futex, low, FUTEX_WAIT, static_cast<uint32_t>(seen), &most, nullptr, 0) ==
             0 ||
         errno == EAGAIN;
}

std::string code_of(const std::function<void()>& ask) {
  try {
    ask();
  } catch (const Error& error) {
    return error.code();
  }
  return "";
}

}  // namespace

TEST(worker_gets_runs_as_many_at_a_time_as_it_asked_for) {
  Tier tier;
  const WorkerGetLink link(tier.attach());
  tier.serve(link, 2);
  for (uint64_t number = 0; number < 4; ++number) CHECK(tier.ask(number) == FetchAnswer::reading);
  const auto first = link.next(kLongNs), second = link.next(kLongNs);
  CHECK(first->key == Key({0, 1}));
  CHECK(second->key == Key({1, 1}));
  CHECK(first->namespace_id == kSpace);
  CHECK_EQ(first->epoch, kEpoch);
  CHECK_EQ(first->pages, kPages);
  CHECK_EQ(second->first_position, kPages);
  CHECK_EQ(first->day, kDay);
  CHECK_EQ(first->record_bytes, 3 * kBlockBytes);
  CHECK(first->within_ns <= kLongNs && first->within_ns > 0);
  CHECK_EQ(tier.status().under_way, 2);
  CHECK(!link.next(0).has_value());
  link.done(*first, GetEnd::missing, 0);
  CHECK(link.next(kLongNs)->key == Key({2, 1}));
  CHECK(tier.ask(0) == FetchAnswer::missing);
  link.ready(3);
  CHECK(link.next(kLongNs)->key == Key({3, 1}));
}

// A tick may come between in one of these, and does not in all.
TEST(run_is_given_when_it_is_asked_for_and_not_at_the_next_tick) {
  constexpr uint32_t kRuns = 20;
  Tier tier;
  const WorkerGetLink link(tier.attach());
  tier.serve(link, kRuns);
  for (uint64_t number = 0; number < kRuns; ++number) {
    CHECK(tier.ask(number) == FetchAnswer::reading);
    CHECK_EQ(tier.status().queued, 0);
  }
}

TEST(nothing_is_served_before_a_worker_says_so) {
  Tier tier;
  CHECK(tier.ask(1) == FetchAnswer::off);
  const WorkerGetLink link(tier.attach());
  link.ready(1);
  link.state(0, 0, 0);
  CHECK(tier.ask(1) == FetchAnswer::off);
  link.state(kForeverNs, 1000, 2000);
  tier.until_serving();
  CHECK_EQ(tier.control().remote.read_bytes_per_s.value.load(), 1000);
  CHECK_EQ(tier.control().remote.first_byte_ns.value.load(), 2000);
  CHECK(tier.ask(1) == FetchAnswer::reading);
  link.state(0, 0, 0);  // as of a store that fails
  tier.until_serving(false);
  CHECK(tier.ask(1) == FetchAnswer::off);
}

// Who waits is woken: it would wait for its whole time for what nobody fetches.
TEST(worker_that_dies_ends_its_gets) {
  Tier tier;
  std::optional<WorkerGetLink> link(tier.attach());
  tier.serve(*link, 1);
  CHECK(tier.ask(1) == FetchAnswer::reading);
  CHECK(tier.ask(2) == FetchAnswer::reading);
  CHECK(link->next(kLongNs).has_value());
  const auto& promoted = tier.control().promoted.value;
  const uint64_t before = promoted.load();
  check::Thread waiting([&] { CHECK(wait_on(promoted, before)); });
  waiting.until_it_waits();
  link.reset();
  waiting.join();
  CHECK(promoted.load() > before);
  tier.until_serving(false);
  CHECK(tier.ask(1) == FetchAnswer::off);
  CHECK_EQ(tier.status().ends[static_cast<size_t>(GetEnd::failed)], 2);
  CHECK_EQ(tier.status().under_way + tier.status().queued, 0);
  CHECK_EQ(tier.events("remote_link_dropped"), 0);
  const WorkerGetLink next(tier.attach());
  tier.serve(next, 1);
  CHECK(tier.ask(1) == FetchAnswer::failed);
  CHECK(tier.ask(3) == FetchAnswer::reading);
  CHECK(next.next(kLongNs)->key == Key({3, 1}));
}

TEST(second_link_replaces_the_first_and_the_link_for_puts_stays) {
  Tier tier;
  auto [core, worker] = pair_of_sockets();
  tier.daemon.server().attach_remote(std::move(core), kPatienceMs);
  const WorkerLink puts(std::move(worker));
  const WorkerGetLink first(tier.attach());
  tier.serve(first, 1);
  const WorkerGetLink second(tier.attach());
  CHECK_THROWS(first.next(kLongNs), "link_closed");
  CHECK_EQ(tier.control().remote.serving.value.load(), 0);
  tier.serve(second, 1);
  puts.ready(1);
  CHECK(!puts.next(0).has_value());
}

TEST(garbage_ends_the_link_and_nothing_else) {
  struct Case {
    const char* name;
    std::vector<std::byte> bytes;
  };
  auto cut = message(LinkGets{1, 0});
  cut.pop_back();
  const std::vector<Case> cases{
      {"one byte", {std::byte{1}}},
      {"cut", cut},
      {"long", std::vector<std::byte>(4096, std::byte{0x4b})},
      {"of the link for puts", message(LinkReady{1, 0})},
      {"a run", message(LinkGet{})},
      {"no gets", message(LinkGets{0, 0})},
      {"too many gets", message(LinkGets{kMostGets + 1, 0})},
      {"the end of what it was not given", message(LinkGot{77, 0, 0})},
      {"no end that there is", message(LinkGot{1, static_cast<uint32_t>(GetEnd::count), 0})},
      {"more pages than were wanted", message(LinkGot{1, 0, kPages + 1})},
  };
  Tier tier;
  uint64_t dropped = 0;
  for (const Case& each : cases) {
    const Fd worker = tier.attach();
    const auto say = [&](const std::vector<std::byte>& bytes) {
      CHECK(::send(worker.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0);
    };
    say(message(LinkGets{1, 0}));
    say(message(LinkState{kForeverNs, 0, 0}));
    tier.until_serving();
    CHECK(tier.ask(++dropped) == FetchAnswer::reading);
    std::array<std::byte, 256> run;
    CHECK(::recv(worker.get(), run.data(), run.size(), 0) > 0);
    say(each.bytes);
    if (!is_closed(worker)) check::fail(__FILE__, __LINE__, each.name);
    CHECK_EQ(tier.events("remote_link_dropped"), dropped);
    CHECK_EQ(tier.status().under_way, 0);
  }
  const WorkerGetLink link(tier.attach());
  tier.serve(link, 1);
}

TEST(worker_that_serves_without_taking_runs_is_garbage) {
  Tier tier;
  const Fd worker = tier.attach();
  const auto bytes = message(LinkState{kForeverNs, 0, 0});
  CHECK(::send(worker.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0);
  CHECK(is_closed(worker));
  CHECK(tier.ask(1) == FetchAnswer::off);
}

TEST(noise_ends_the_link_and_nothing_else) {
  Tier tier;
  auto random = check::random("noise_ends_the_link_and_nothing_else");
  for (uint64_t round = 0; round < check::rounds(50); ++round) {
    const Fd worker = tier.attach();
    std::vector<std::byte> noise(1 + random() % 300);
    for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
    if (random() % 2 == 0 && noise.size() >= sizeof(LinkHead)) {  // past the first gate
      const LinkHead head{.type = static_cast<LinkType>(random() % 9)};
      std::memcpy(noise.data(), &head, sizeof head);
      noise.resize(sizeof head + 8 * (1 + random() % 13));
      const uint32_t none = 0;  // of which no message may be
      std::memcpy(noise.data() + sizeof head, &none, sizeof none);
      if (head.type == LinkType::state) continue;  // it may be one that serves nothing
    }
    CHECK(::send(worker.get(), noise.data(), noise.size(), MSG_NOSIGNAL) > 0);
    CHECK(is_closed(worker));
  }
  const WorkerGetLink link(tier.attach());
  tier.serve(link, 1);
}

TEST(end_said_twice_is_garbage) {
  Tier tier;
  const WorkerGetLink link(tier.attach());
  tier.serve(link, 1);
  tier.ask(1);
  const auto run = link.next(kLongNs);
  link.done(*run, GetEnd::filled, kPages);
  link.done(*run, GetEnd::filled, kPages);
  CHECK_THROWS(link.next(kLongNs), "link_closed");
}

TEST(worker_that_reads_nothing_is_given_no_more_than_it_asked_for) {
  Tier tier;
  const WorkerGetLink link(tier.attach());
  tier.serve(link, kMostGets);
  std::vector<FetchRun> runs;
  for (uint64_t number = 0; number < kMostGets + 10; ++number) {
    runs.push_back(tier.run(number));
    runs.back().from = kPages - 1;  // so that all fit the bound of bytes
  }
  for (const FetchAnswer answer : tier.client->fetch(runs)) CHECK(answer == FetchAnswer::reading);
  tier.until([&] { return tier.status().under_way == kMostGets; });
  CHECK_EQ(tier.status().queued, 10);
  for (uint32_t i = 0; i < kMostGets; ++i) CHECK(link.next(kLongNs).has_value());
  CHECK(!link.next(0).has_value());
}

TEST(core_that_reads_nothing_takes_a_link_and_serves_nothing) {
  Tier tier(false);
  CHECK_EQ(tier.client->welcome_flags() & kWelcomeRemote, 0);
  const WorkerGetLink link(tier.attach());
  link.ready(1);
  link.state(kForeverNs, 1, 1);
  CHECK(tier.ask(1) == FetchAnswer::off);
  CHECK_EQ(tier.control().remote.serving.value.load(), 0);
  CHECK_EQ(code_of([&] { tier.client->presence(); }), "presence_not_ready");
  CHECK_EQ(tier.events("remote_link_dropped"), 0);
}

TEST(core_that_ends_closes_the_link) {
  Tier tier;
  const WorkerGetLink link(tier.attach());
  tier.serve(link, 1);
  CHECK(tier.ask(1) == FetchAnswer::reading);
  CHECK(link.next(kLongNs).has_value());
  check::Thread waiting([&] { CHECK_THROWS(link.next(kLongNs), "link_closed"); });
  waiting.until_it_waits();
  tier.client.reset();
  tier.daemon.stop();
  waiting.join();
  CHECK_THROWS(link.state(kForeverNs, 0, 0), "link_closed");
}

TEST(worker_that_closes_wakes_its_threads) {
  Tier tier;
  const WorkerGetLink link(tier.attach());
  check::Thread waiting([&] { CHECK_THROWS(link.next(kLongNs), "link_closed"); });
  waiting.until_it_waits();
  link.close();
  waiting.join();
  link.close();
}

TEST(garbage_of_the_core_ends_the_workers_link) {
  const RunToGet sound{.number = 1,
                       .namespace_id = {1, 2},
                       .key = {3, 4},
                       .epoch = 5,
                       .clear_epoch = 6,
                       .record_bytes = kBlockBytes,
                       .within_ns = 7,
                       .first_position = 8,
                       .pages = 4,
                       .from = 3,
                       .day = 9,
                       .witness_kind = WitnessKind::engine_key};
  const auto got = [](const LinkGet& wire) {
    auto [core, worker] = pair_of_sockets();
    const LinkEnd end(std::move(core));
    const WorkerGetLink link(std::move(worker));
    CHECK(end.send(wire));
    return link.next(kLongNs);
  };
  const auto run = got(link_get(sound));
  CHECK(link_get(*run).day == 9 && run->from == 3 && run->clear_epoch == 6);
  CHECK(run->witness_kind == WitnessKind::engine_key);
  const std::function<void(LinkGet&)> changes[] = {
      [](LinkGet& wire) { wire.first_position = 9; }, [](LinkGet& wire) { wire.from = 4; },
      [](LinkGet& wire) { wire.pages = 0; },          [](LinkGet& wire) { wire.witness_kind = 0; },
      [](LinkGet& wire) { wire.witness_kind = 3; },   [](LinkGet& wire) { wire.record_bytes = 0; },
      [](LinkGet& wire) { wire.record_bytes += 8; }};
  for (const auto& change : changes) {
    LinkGet wire = link_get(sound);
    change(wire);
    CHECK_THROWS(got(wire), "link_closed");
  }
}

TEST(what_is_no_link_is_refused) {
  Tier tier;
  auto [stream, other] = pair_of_sockets(SOCK_STREAM);
  CHECK_THROWS(tier.daemon.server().attach_remote_gets(std::move(stream), kPatienceMs), "bad_link");
  CHECK_THROWS(tier.daemon.server().attach_remote_gets(Fd(), kPatienceMs), "bad_link");
  const WorkerGetLink link(tier.attach());
  CHECK_THROWS(link.ready(0), "bad_gets");
  CHECK_THROWS(link.ready(kMostGets + 1), "bad_gets");
}

TEST(names_of_ends_are_all_different) {
  std::set<std::string> names;
  for (uint32_t end = 0; end < static_cast<uint32_t>(GetEnd::count); ++end)
    CHECK(names.insert(get_end_name(GetEnd(end))).second);
  CHECK_EQ(std::string(get_end_name(GetEnd::count)), "unknown");
}

// --- what clients ask for

TEST(client_is_given_the_presence_filter_to_read_and_not_to_write) {
  Tier tier;
  CHECK_EQ(tier.client->welcome_flags() & kWelcomeRemote, kWelcomeRemote);
  const std::string path = tier.daemon.options.arena_dir + "/presence";
  CHECK_EQ(code_of([&] { tier.client->presence(); }), "presence_not_ready");
  CHECK_EQ(::symlink("control", path.c_str()), 0);  // as whoever owns the directory might
  CHECK_EQ(code_of([&] { tier.client->presence(); }), "presence_not_ready");
  std::filesystem::remove(path);
  const PresenceFile file({path, {11, 13}, 1000, 7, kDay});
  const ParentFd given = tier.client->presence();
  CHECK_EQ(::fcntl(given.get(), F_GETFL) & O_ACCMODE, O_RDONLY);
  struct stat info{}, wanted{};
  CHECK_EQ(::fstat(given.get(), &info), 0);
  CHECK_EQ(::stat(path.c_str(), &wanted), 0);
  CHECK_EQ(info.st_ino, wanted.st_ino);
}

TEST(runs_that_there_cannot_be_are_refused_and_others_are_served) {
  Tier tier;
  const WorkerGetLink link(tier.attach());
  tier.serve(link, 1);
  FetchRun bad = tier.run(1);
  bad.pages = 3;
  CHECK_EQ(code_of([&] { tier.client->fetch(bad); }), "bad_fetch");
  const std::vector<FetchRun> many(kFetchRuns + 1, tier.run(1));
  CHECK_EQ(code_of([&] { tier.client->fetch(many); }), "message_too_large");
  CHECK(tier.client->fetch(std::span(many).first(0)).empty());
  CHECK(tier.ask(1) == FetchAnswer::reading);
}
