// The core's thread and those that ask it for something, or wait for something to become true: they
// hear of it when it is, give up in their time, and at the core's end nobody waits for an answer
// that will not come. A populating thread that did held the daemon's end up for a minute.
#include "tests/check.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>

#include "client/connection.h"
#include "io/faulty_engine.h"
#include "server/feed_reader.h"
#include "server/inbox.h"
#include "server/keep_prompt.h"
#include "tests/daemon_world.h"

namespace kvw {
namespace {

constexpr int kWaitMs = kPatienceMs / 3;

// The code that `ask` ended with; empty if it was answered.
std::string code_of(const std::function<void()>& ask) {
  try {
    ask();
  } catch (const Error& error) {
    return error.code();
  }
  return "";
}

// Keeps the core at a command, until let_go().
class BusyCore {
 public:
  explicit BusyCore(Server& server)
      : asking_([this, &server] {
          server.call(
              [this](Warehouse&) {
                begun_.set_value();
                release_.get_future().wait();
                return 0;
              },
              kPatienceMs);
        }) {
    begun_.get_future().wait();
  }
  // Returns when it was answered.
  void let_go() {
    release_.set_value();
    asking_.join();
  }

 private:
  std::promise<void> begun_, release_;
  check::Thread asking_;
};

// Ends the core while `ask` is in its queue, behind a command that it is busy with. Returns the
// code that `ask` ended with.
std::string code_of_one_left_in_the_queue(const std::function<void(Server&)>& ask) {
  const Daemon world(shape_of(4096));
  Server server(world.options, world.socket());
  server.start();

  BusyCore busy(server);
  std::string code;
  check::Thread asking([&] { code = code_of([&] { ask(server); }); });
  asking.until_it_waits();  // whoever asks after the end is refused, with the same code
  check::Thread stopping([&] { server.stop(); });
  const auto nothing = [](Warehouse&) { return 0; };
  while (code_of([&] { server.call(nothing, 0); }) != "stopped") std::this_thread::yield();
  busy.let_go();
  for (check::Thread* thread : {&asking, &stopping}) thread->join();
  return code;
}

TEST(core_that_ends_leaves_no_call_waiting) {
  const auto ask = [](Server& server) { server.call([](Warehouse&) { return 0; }, kWaitMs); };
  CHECK_EQ(code_of_one_left_in_the_queue(ask), "stopped");
}

TEST(core_that_ends_leaves_no_check_waiting) {
  const auto ask = [](Server& server) { server.check(CheckRequest{}, kWaitMs); };
  CHECK_EQ(code_of_one_left_in_the_queue(ask), "stopped");
}

// Who asked is told that it failed, so nobody knows of what the core makes later.
TEST(keep_that_the_core_did_not_answer_in_time_is_not_left_behind) {
  const Daemon world(shape_of(4096));
  Server server(world.options, world.socket());
  server.start();
  BusyCore busy(server);
  Prompt prompt = Prompt::of_tokens({});
  prompt.bind(server.warehouse_before_start().secret(), kSpace, 16);
  const KeepRequest request{1, kSpace, UINT64_MAX, false, 0};
  CHECK_EQ(code_of([&] { keep_prompt(server, request, prompt, 0); }), "core_busy");
  busy.let_go();
  const auto keeps = [](Warehouse& warehouse) { return warehouse.keeps().size(); };
  CHECK_EQ(server.call(keeps, kPatienceMs), 0);
}

TEST(commands_beyond_the_bound_of_those_that_wait_are_refused) {
  const Daemon world(shape_of(4096));
  Server server(world.options, world.socket());
  server.start();
  BusyCore busy(server);
  const auto ask = [&] { server.call([](Warehouse&) { return 0; }, 0); };
  const auto kind = [&] {
    try {
      ask();
    } catch (const Error& error) {
      CHECK_EQ(error.code(), "core_busy");
      return error.kind();
    }
    CHECK(false);
  };
  size_t waiting = 0;
  while (kind() == ErrorKind::transport) ++waiting;  // not done in its time, which is none
  busy.let_go();
  CHECK(waiting == 4096 || waiting == 4095);  // the thread that allocates slabs asks too
  // The core may still be busy with the one that it was let go from.
  for (bool answered = false; !answered;) {
    try {
      server.call([](Warehouse&) { return 0; }, kPatienceMs);
      answered = true;
    } catch (const Error& error) {
      CHECK_EQ(error.code(), "core_busy");
    }
  }
}

// Incident: all that were queued ran in one go, thousands of them beside operators' tools.
TEST(clients_are_served_between_two_commands_that_wait) {
  const Daemon world(shape_of(4096));
  Server server(world.options, world.socket());
  server.start();
  BusyCore busy(server);
  const auto connections = std::make_shared<std::vector<uint64_t>>();  // that each command saw
  const auto look = [connections, &server](Warehouse&) {
    connections->push_back(server.connections());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // more than one step may take
    return 0;
  };
  for (int i = 0; i < 8; ++i) code_of([&] { server.call(look, 0); });
  const Connection client(world.socket(), std::nullopt,
                          system_clock().boot_ns() + kPatienceMs * kMillisecondNs);
  busy.let_go();
  server.call([](Warehouse&) { return 0; }, kPatienceMs);
  CHECK_EQ(connections->size(), 8);
  CHECK_EQ(connections->at(2), 1);
}

// Incident: in a folder that all may write to, a file of another user kept the daemon from
// starting.
TEST(daemon_listens_where_somebody_keeps_the_name_that_it_binds_first) {
  const Daemon world(shape_of(4096));
  const std::string taken = world.socket() + ".new";
  CHECK(std::filesystem::create_directory(taken));  // unlink() takes none, whoever the test runs as
  Server server(world.options, world.socket());
  server.start();
  const auto connect = [&] {
    const Connection client(world.socket(), std::nullopt,
                            system_clock().boot_ns() + kPatienceMs * kMillisecondNs);
  };
  connect();
  CHECK_EQ(::unlink(world.socket().c_str()), 0);
  server.listen_again(kPatienceMs);
  connect();
  server.stop();
  for (const auto& left : std::filesystem::directory_iterator(world.directory.path()))
    CHECK(left.path() == taken || left.path().string().find("kvw.sock") == std::string::npos);
}

// Incident: it removed whatever was there, the socket of another daemon too.
TEST(daemon_that_ends_leaves_alone_what_is_another_at_its_socket_by_then) {
  const Daemon world(shape_of(4096));
  const auto is_there_after = [&](bool replaced) {
    Server server(world.options, world.socket());
    server.start();
    if (replaced) {
      CHECK_EQ(::unlink(world.socket().c_str()), 0);
      std::ofstream(world.socket()) << "another's";
    }
    server.stop();
    return std::filesystem::exists(world.socket());
  };
  CHECK(!is_there_after(false));
  CHECK(is_there_after(true));
}

TEST(daemon_with_the_longest_path_of_a_socket_listens_there_too) {
  constexpr size_t kLongest = 102;  // MAX_PATH_BYTES of kvwarehouse/client/endpoint.py
  const Daemon world(shape_of(4096));
  std::string path = world.directory.path() + "/";
  path.append(kLongest - path.size(), 's');
  CHECK(std::filesystem::create_directory(path + ".new"));
  Server server(world.options, path);
  server.start();
  const Connection client(path, std::nullopt,
                          system_clock().boot_ns() + kPatienceMs * kMillisecondNs);
}

// Incident: nobody closed them, and after sixteen nobody could watch until a restart.
TEST(feeds_whose_opening_was_given_up_are_let_go) {
  const Daemon world(shape_of(4096));
  Server server(world.options, world.socket());
  server.start();
  BusyCore busy(server);
  for (size_t i = 0; i < Feeds::kMaxFeeds; ++i)
    CHECK_EQ(code_of([&] { FeedReader(server, {}, 0); }), "core_busy");
  busy.let_go();
  const FeedReader reader(server, {}, kPatienceMs);
  const auto count = [](Warehouse& warehouse) { return warehouse.feeds().size(); };
  CHECK_EQ(server.call(count, kPatienceMs), 1);
}

// Incident: the command ran after all, and lines for the log went where nobody looked.
TEST(what_was_given_up_on_is_there_for_who_asks_next) {
  const Daemon world(shape_of(4096));
  Server server(world.options, world.socket());
  server.start();
  Inbox<std::pair<std::string, std::string>> events;
  const auto take = [](Warehouse& warehouse) {
    warehouse.on_event("x", "");
    return warehouse.take_events();
  };
  const auto count = [](const auto& taken) {
    return std::ranges::count(taken, "x", [](const auto& event) { return event.first; });
  };
  BusyCore busy(server);
  CHECK_EQ(code_of([&] { events.take(server, take, 0); }), "core_busy");
  busy.let_go();
  CHECK_EQ(count(events.take(server, take, kPatienceMs)), 2);
  CHECK_EQ(count(events.take(server, take, kPatienceMs)), 1);
}

TEST(lines_for_the_log_are_bounded_and_those_left_out_counted) {
  const Daemon world(shape_of(4096));
  Server server(world.options, world.socket());
  server.start();
  const auto told = server.call(
      [](Warehouse& warehouse) {
        warehouse.take_events();
        for (int i = 0; i < 2000; ++i) warehouse.on_event("x", "");
        return std::pair(warehouse.take_events().size(), warehouse.status().events_dropped);
      },
      kPatienceMs);
  CHECK_EQ(told.first, 1024);
  CHECK_EQ(told.second, 2000 - 1024);
}

// A daemon with an NVMe tier whose device can be held up, and a chain stored in it.
struct SlowDisk {
  explicit SlowDisk(uint64_t write_queue_bytes = 0) : world(shape_of(4096, 1)) {
    world.options.nvme_dir = world.directory.path() + "/nvme";
    world.options.nvme_capacity_bytes = 8 * kMiB;
    world.options.write_queue_bytes = write_queue_bytes;
    world.options.make_engine = [faults = faults] {
      return make_faulty_engine(make_io_engine("auto", 8), faults);
    };
    world.start();
    client = std::make_unique<Client>(world.client_options());
    faults->hold(true);
    CHECK_EQ(chain.store(*client, 0).stored, kPages);
  }
  ~SlowDisk() { faults->hold(false); }

  static constexpr uint32_t kPages = 20;
  std::shared_ptr<Faults> faults = std::make_shared<Faults>();
  Daemon world;
  Chain chain{world.shape(), 1, kPages};
  std::unique_ptr<Client> client;
};

TEST(flush_ends_when_all_is_durable_and_not_before) {
  SlowDisk disk;
  FlushReport report;
  std::atomic<bool> ended{false};
  check::Thread flushing([&] {
    report = disk.world.flush();
    ended = true;
  });
  flushing.until_it_waits();
  for (int look = 0; look < 10; ++look) disk.world.tick();  // whether it has ended
  CHECK(!ended);
  disk.faults->hold(false);
  flushing.join();
  CHECK_EQ(report.flushed, SlowDisk::kPages);
  CHECK_EQ(report.pending, 0u);
}

TEST(flush_writes_what_a_full_queue_refused) {
  SlowDisk disk(3 * 2 * kBlockBytes);  // three records of a header and a page
  CHECK(disk.world.status().not_admitted["queue_full"] > 0);
  disk.faults->hold(false);
  const FlushReport report = disk.world.flush();
  CHECK_EQ(report.flushed, SlowDisk::kPages);
  CHECK_EQ(report.not_admitted, 0u);
}

TEST(flush_that_the_disk_holds_up_gives_up_in_its_time_and_says_so) {
  SlowDisk disk;
  CHECK(disk.world.flush(20).pending > 0);
  CHECK(disk.world.flush(0).pending > 0);
  disk.faults->hold(false);
  CHECK_EQ(disk.world.flush().pending, 0u);
}

TEST(core_that_ends_leaves_no_flush_waiting) {
  SlowDisk disk;
  Server& server = disk.world.server();
  std::string code;
  check::Thread flushing([&] { code = code_of([&] { server.flush(kPatienceMs); }); });
  flushing.until_it_waits();
  check::Thread stopping([&] { server.stop(); });
  flushing.join();
  disk.faults->hold(false);  // the disk's thread waits for what it has submitted
  stopping.join();
  CHECK_EQ(code, "stopped");
}

// --- its start

TEST(daemon_starts_on_more_sessions_than_the_soft_limit_of_descriptors) {
  Daemon world(shape_of(4096));
  world.start();
  world.stop();
  for (uint64_t id = 1; id <= 100; ++id)
    Fd(::open((world.options.arena_dir + "/sessions/" + std::to_string(id)).c_str(),
              O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const Fd lowest(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(lowest.get()) + 50;
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  world.start();
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK(Client(world.client_options()).connected());
}

}  // namespace
}  // namespace kvw
