// The link between the core and the worker of the remote tier: runs go as many at a time as the
// worker asks for, and nothing that either end says, or leaves unsaid, harms the other.
#include <sys/socket.h>

#include "remote/link.h"

#include "tests/check.h"
#include "tests/daemon_world.h"

using namespace kvw;
using namespace kvw::remote;

namespace {

const Key kFleet{11, 13};
constexpr uint32_t kToday = 20785;
constexpr uint64_t kLongNs = uint64_t{kPatienceMs} * kMillisecondNs;

NamespaceShape one_page_runs() {
  NamespaceShape shape = shape_of(4096, 1);
  shape.page_tokens = kObjectTokens;
  return shape;
}

std::pair<Fd, Fd> pair_of_sockets(int type = SOCK_SEQPACKET) {
  std::array<int, 2> ends{};
  CHECK_EQ(::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {Fd(ends[0]), Fd(ends[1])};
}

// A daemon that puts whatever is stored, with a filter.
struct Tier {
  explicit Tier(RemoteWrite write = RemoteWrite::all) : daemon(one_page_runs(), 32 * kMiB) {
    daemon.options.remote_write = write;
    daemon.options.remote_fleet = kFleet;
    daemon.start();
    daemon.call([](Warehouse& w) { return w.set_remote_epoch(kSpace, 0, 0); });
    filter.emplace(
        PresenceFile::Wanted{daemon.options.arena_dir + "/presence", kFleet, 1000, 7, kToday});
    client = std::make_unique<Client>(daemon.client_options());
  }
  // The worker's end of a new link.
  Fd attach() {
    auto [core, worker] = pair_of_sockets();
    daemon.server().attach_remote(std::move(core), kPatienceMs);
    return std::move(worker);
  }
  void store(uint64_t chains) {
    for (uint64_t chain = 0; chain < chains; ++chain)
      CHECK_EQ(Chain(daemon.shape(), next_chain++, 1).store(*client, 0).stored, 1);
  }
  // Returns when the core has taken what was sent before: it looks at the link between commands,
  // so not by an answer, but by what it says then.
  void until(const std::function<bool(const PutsStatus&)>& holds) {
    while (!holds(daemon.status().puts)) std::this_thread::yield();
  }
  // The core gives runs at its ticks too, each of which changes its heartbeat.
  void tick_twice() {
    const auto beat = [this] { return client->view()->control().heartbeat_ns.value.load(); };
    for (int i = 0; i < 2; ++i)
      for (const uint64_t before = beat(); beat() == before;) std::this_thread::yield();
    daemon.status();
  }
  uint64_t events(const std::string& name) {
    for (const auto& [event, detail] : daemon.call([](Warehouse& w) { return w.take_events(); }))
      seen[event] += 1;
    return seen[name];
  }

  Daemon daemon;
  std::optional<PresenceFile> filter;
  std::unique_ptr<Client> client;
  uint64_t next_chain = 0;
  std::map<std::string, uint64_t> seen;
};

// What only who is told of its end hears.
bool is_closed(const Fd& end) {
  char byte;
  return ::recv(end.get(), &byte, 1, 0) <= 0;
}

}  // namespace

TEST(worker_gets_runs_after_it_said_that_it_is_ready_and_as_many_as_it_asked_for) {
  Tier tier;
  const WorkerLink link(tier.attach());
  tier.store(5);
  tier.tick_twice();
  CHECK(!link.next(0).has_value());
  link.ready(2);
  const auto first = link.next(kLongNs), second = link.next(kLongNs);
  CHECK(first->key == page_of(tier.daemon.shape(), 0, 0).key);
  CHECK(second->key == page_of(tier.daemon.shape(), 1, 0).key);
  tier.tick_twice();
  CHECK(!link.next(0).has_value());
  CHECK_EQ(tier.daemon.status().puts.under_way, 2);
  link.done(*first);
  CHECK(link.next(kLongNs)->key == page_of(tier.daemon.shape(), 2, 0).key);
  tier.tick_twice();
  CHECK(!link.next(0).has_value());
  link.ready(3);
  CHECK(link.next(kLongNs).has_value());
}

TEST(run_arrives_as_the_core_knows_it) {
  Tier tier;
  tier.store(1);
  const Key key = page_of(tier.daemon.shape(), 0, 0).key;
  tier.filter->writer().put(key, 0, kToday - 1);
  const WorkerLink link(tier.attach());
  link.ready(1);
  const auto run = link.next(kLongNs);
  CHECK(run->key == key);
  CHECK(run->namespace_id == tier.daemon.shape().id);
  CHECK_EQ(run->pages, 1);
  CHECK_EQ(run->first_position, 0);
  CHECK_EQ(*run->day, kToday - 1);
  CHECK_EQ(run->bytes(), 2 * kBlockBytes);
}

TEST(run_of_a_link_that_closed_is_offered_again_by_its_next_use) {
  Tier tier;
  tier.store(2);
  {
    const WorkerLink link(tier.attach());
    link.ready(1);
    CHECK(link.next(kLongNs).has_value());
  }
  tier.until([](const PutsStatus& puts) { return puts.under_way == 0; });
  CHECK_EQ(tier.daemon.status().puts.queued, 1);
  CHECK_EQ(tier.events("remote_link_dropped"), 0);
  const WorkerLink link(tier.attach());
  link.ready(1);
  CHECK(link.next(kLongNs)->key == page_of(tier.daemon.shape(), 1, 0).key);
  CHECK_EQ(Chain(tier.daemon.shape(), 0, 1).load(*tier.client, 0), 1);
  tier.until([](const PutsStatus& puts) { return puts.queued == 1; });
}

TEST(second_link_replaces_the_first) {
  Tier tier;
  tier.store(2);
  const WorkerLink first(tier.attach());
  first.ready(1);
  CHECK(first.next(kLongNs).has_value());
  const WorkerLink second(tier.attach());
  CHECK_THROWS(first.next(kLongNs), "link_closed");
  CHECK_EQ(tier.daemon.status().puts.under_way, 0);
  second.ready(1);
  CHECK(second.next(kLongNs).has_value());
}

TEST(garbage_ends_the_link_and_nothing_else) {
  struct Case {
    const char* name;
    std::vector<std::byte> bytes;
  };
  const auto message = [](const auto& body, auto change) {
    LinkMessage<std::decay_t<decltype(body)>> made{.body = body};
    change(made.head);
    const auto* bytes = reinterpret_cast<const std::byte*>(&made);
    return std::vector<std::byte>(bytes, bytes + sizeof made);
  };
  const auto same = [](LinkHead&) {};
  const auto ready = message(LinkReady{1, 0}, same);
  const std::vector<Case> cases{
      {"one byte", {std::byte{1}}},
      {"cut", {ready.begin(), ready.end() - 1}},
      {"long", std::vector<std::byte>(4096, std::byte{0x4b})},
      {"magic", message(LinkReady{1, 0}, [](LinkHead& head) { ++head.magic; })},
      {"version", message(LinkReady{1, 0}, [](LinkHead& head) { ++head.version; })},
      {"type", message(LinkReady{1, 0}, [](LinkHead& head) { head.type = LinkType{9}; })},
      {"a run", message(LinkRun{}, same)},
      {"no puts", message(LinkReady{0, 0}, same)},
      {"too many puts", message(LinkReady{kMostPuts + 1, 0}, same)},
      {"done with what it was not given", message(LinkDone{77}, same)},
  };
  Tier tier;
  tier.store(1);
  uint64_t dropped = 0;
  for (const Case& each : cases) {
    const Fd worker = tier.attach();
    CHECK(::send(worker.get(), each.bytes.data(), each.bytes.size(), MSG_NOSIGNAL) > 0);
    if (!is_closed(worker)) check::fail(__FILE__, __LINE__, each.name);
    CHECK_EQ(tier.events("remote_link_dropped"), ++dropped);
  }
  const WorkerLink link(tier.attach());
  link.ready(1);
  CHECK(link.next(kLongNs).has_value());
}

TEST(noise_ends_the_link_and_nothing_else) {
  Tier tier;
  auto random = check::random("noise_ends_the_link_and_nothing_else");
  for (uint64_t round = 0; round < check::rounds(50); ++round) {
    const Fd worker = tier.attach();
    std::vector<std::byte> noise(1 + random() % 300);
    for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
    CHECK(::send(worker.get(), noise.data(), noise.size(), MSG_NOSIGNAL) > 0);
    CHECK(is_closed(worker));
  }
  tier.store(1);
}

TEST(done_said_twice_is_garbage) {
  Tier tier;
  tier.store(1);
  const WorkerLink link(tier.attach());
  link.ready(1);
  const auto run = link.next(kLongNs);
  link.done(*run);
  link.done(*run);
  CHECK_THROWS(link.next(kLongNs), "link_closed");
}

TEST(worker_without_a_filter_is_told_that_the_link_is_closed) {
  Tier tier;
  std::filesystem::remove(tier.daemon.options.arena_dir + "/presence");
  const WorkerLink link(tier.attach());
  link.ready(1);
  CHECK_THROWS(link.next(kLongNs), "link_closed");
  CHECK_EQ(tier.events("remote_link_dropped"), 1);
}

TEST(worker_that_reads_nothing_is_given_no_more_than_it_asked_for) {
  Tier tier;
  tier.store(kMostPuts + 10);
  const WorkerLink link(tier.attach());
  link.ready(kMostPuts);
  tier.until([](const PutsStatus& puts) { return puts.under_way == kMostPuts; });
  CHECK_EQ(tier.daemon.status().puts.queued, 10);
  for (uint32_t i = 0; i < kMostPuts; ++i) CHECK(link.next(kLongNs).has_value());
  CHECK(!link.next(0).has_value());
}

TEST(core_that_writes_nothing_takes_a_link_and_gives_no_run) {
  Tier tier(RemoteWrite::none);
  tier.store(1);
  const WorkerLink link(tier.attach());
  link.ready(1);
  tier.tick_twice();
  CHECK(!link.next(0).has_value());
  CHECK_EQ(tier.daemon.status().puts.offered, 0);
}

TEST(core_that_ends_closes_the_link) {
  Tier tier;
  const WorkerLink link(tier.attach());
  check::Thread waiting([&] { CHECK_THROWS(link.next(kLongNs), "link_closed"); });
  waiting.until_it_waits();
  tier.client.reset();
  tier.daemon.stop();
  waiting.join();
  CHECK_THROWS(link.ready(1), "link_closed");
}

TEST(worker_that_closes_wakes_its_threads) {
  Tier tier;
  const WorkerLink link(tier.attach());
  check::Thread waiting([&] { CHECK_THROWS(link.next(kLongNs), "link_closed"); });
  waiting.until_it_waits();
  link.close();
  waiting.join();
  link.close();
}

TEST(garbage_of_the_core_ends_the_workers_link) {
  for (const bool sound : {true, false}) {
    auto [core, worker] = pair_of_sockets();
    const LinkEnd end(std::move(core));
    const WorkerLink link(std::move(worker));
    LinkRun run{1, {1, 2}, {3, 4}, 0, kBlockBytes, 8, 4, 0, 0};
    if (!sound) run.first_position = 9;  // where no run of 4 pages begins
    CHECK(end.send(run));
    if (sound)
      CHECK_EQ(link.next(kLongNs)->first_position, 8);
    else
      CHECK_THROWS(link.next(kLongNs), "link_closed");
  }
}

TEST(what_is_no_link_is_refused) {
  Tier tier;
  auto [stream, other] = pair_of_sockets(SOCK_STREAM);
  CHECK_THROWS(tier.daemon.server().attach_remote(std::move(stream), kPatienceMs), "bad_link");
  CHECK_THROWS(tier.daemon.server().attach_remote(Fd(), kPatienceMs), "bad_link");
  const WorkerLink link(tier.attach());
  CHECK_THROWS(link.ready(0), "bad_puts");
  CHECK_THROWS(link.ready(kMostPuts + 1), "bad_puts");
}
