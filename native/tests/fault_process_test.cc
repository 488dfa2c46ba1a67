// Real processes that are killed, stopped, continued and forked at any moment, with clients at full
// speed around them: nothing sealed is lost, no byte is wrong, every call ends, and what the dead
// had reserved comes back.
#include <functional>

#include "base/sequence_point.h"
#include "tests/check.h"
#include "tests/daemon_world.h"
#include "tests/swarm.h"
#include "tests/tally.h"

namespace kvw {
namespace {

constexpr uint64_t kShard = 12 * 1024;
constexpr uint64_t kMoreThanFits = 1000;  // chains: evicted and stored again all the time

// Anywhere in what the other process is doing: that is the point.
void a_while(std::mt19937_64& random) {
  const uint64_t end = system_clock().boot_ns() + random() % (4 * kMillisecondNs);
  while (system_clock().boot_ns() < end) ::sched_yield();
}

struct Field {
  explicit Field(uint64_t timeout_ns = kSecondNs, uint64_t chains = kChains)
      : daemon(shape_of(kShard), 16 * kMiB), swarm(daemon, timeout_ns, chains) {
    daemon.options.limbo_after_ns = 20 * kMillisecondNs;
    daemon.options.grace_ns = kMillisecondNs;
    daemon.start_process();
  }
  Daemon daemon;
  Swarm swarm;
};

TEST(daemon_killed_under_traffic_loses_nothing_that_was_reported_stored) {
  auto random = check::random("daemon_killed_under_traffic");
  Field field;
  field.swarm.start_all(random);
  for (uint64_t round = 0; round < check::rounds(10); ++round) {
    field.swarm.advance(1 + random() % 20);
    a_while(random);
    field.daemon.kill(SIGKILL);
    field.daemon.start_process();
    field.swarm.be_answered();  // by themselves they find it
    field.swarm.check_nothing_lost();
    check::tally("daemon core killed (SIGKILL) under traffic of native clients");
  }
  field.swarm.end();
}

TEST(client_killed_under_traffic_leaves_nothing_behind) {
  auto random = check::random("client_killed_under_traffic");
  Field field(kSecondNs, kMoreThanFits);
  field.swarm.start_all(random);
  for (uint64_t round = 0; round < check::rounds(30); ++round) {
    const size_t worker = random() % kWorkers;
    field.swarm.advance(1 + random() % 4);
    a_while(random);
    field.swarm.kill(worker);
    field.swarm.advance(1, worker);
    field.swarm.start(worker, random());
    if (round % 8 == 0) field.swarm.check_nothing_lost();
    check::tally("client killed (SIGKILL) in a store, load or pin");
  }
  field.swarm.end();
}

TEST(client_stopped_for_longer_than_every_deadline_harms_nobody_when_it_goes_on) {
  auto random = check::random("client_stopped_for_longer_than_every_deadline");
  Field field(50 * kMillisecondNs, kMoreThanFits);
  Client watcher(field.daemon.client_options());
  field.swarm.start_all(random);
  for (uint64_t round = 0; round < check::rounds(6); ++round) {
    const size_t worker = random() % kWorkers;
    field.swarm.advance(1 + random() % 4);
    a_while(random);
    field.swarm.pause_in_a_store(worker, *watcher.view());
    const uint64_t over = system_clock().boot_ns() + 150 * kMillisecondNs;  // limbo, and a tick
    field.swarm.until([&] { return system_clock().boot_ns() > over; });
    field.swarm.be_answered(worker);
    field.swarm.resume(worker);
    field.swarm.be_answered();
    field.swarm.check_nothing_spoilt();
    field.swarm.check_nothing_lost();
    check::tally("client stopped (SIGSTOP) beyond every deadline, and continued");
  }
  field.swarm.end();
}

TEST(daemon_stopped_for_longer_than_every_deadline_holds_no_call_and_goes_on) {
  auto random = check::random("daemon_stopped_for_longer_than_every_deadline");
  Field field(30 * kMillisecondNs);
  field.swarm.start_all(random);
  for (uint64_t round = 0; round < check::rounds(6); ++round) {
    field.swarm.advance(1 + random() % 6);
    a_while(random);
    field.daemon.kill(SIGSTOP);
    field.swarm.advance(3);  // every call ends, of whatever kind
    field.daemon.kill(SIGCONT);
    field.swarm.be_answered();
    field.swarm.check_nothing_lost();
    check::tally("daemon stopped (SIGSTOP) beyond every deadline, and continued");
  }
  field.swarm.end();
}

// What a forked child finds; its exit status.
int child_of(Client& parents, Pins* pins, const Daemon& daemon, const Chain& old, uint64_t fresh) {
  const Chain own(daemon.shape(), fresh, 2);
  int refused = 0;
  const auto refuses = [&](const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      refused += error.code() == "forked" ? 1 : 0;
    }
  };
  refuses([&] { old.found(parents); });
  refuses([&] { old.load(parents, 0); });
  refuses([&] { own.store(parents, 0); });
  refuses([&] {
    Prompt prompt = old.prompt();
    parents.pin(kSpace, prompt, 0, 0);
  });
  refuses([&] { parents.refresh(0); });
  if (refused != 5) return 1;
  if (pins != nullptr) pins->release();
  parents.close();
  // A connection of its own is as good as anybody's.
  Client client(daemon.client_options());
  own.store_all(client);
  return own.load(client, 1) == 2 ? 0 : 2;
}

TEST(fork_at_any_step_of_a_client_harms_neither_parent_nor_child) {
  auto random = check::random("fork_at_any_step_of_a_client");
  const std::array<const char*, 7> places{
      "store: granted", "store: copied",    "load: entry found", "load: metadata read",
      "load: copied",   "pin: entry found", "pin: stored"};
  Daemon daemon(shape_of(kShard), 16 * kMiB);
  daemon.options.grace_ns = kMillisecondNs;
  daemon.start_process();
  Client client(daemon.client_options());
  const Chain held(daemon.shape(), 1, 4);
  held.store_all(client);
  Prompt held_prompt = held.prompt();
  const auto pins = client.pin(kSpace, held_prompt, 0, kSecondNs);
  for (uint64_t round = 0; round < check::rounds(20); ++round) {
    const uint64_t number = 100 + round % 200;
    const Chain chain(daemon.shape(), number, 3);
    const char* place = places[random() % places.size()];
    int status = -1;
    at_sequence_point = [&](std::string_view reached) {
      if (reached != place) return;
      at_sequence_point = nullptr;
      const pid_t child = ::fork();
      if (child == 0) {
        int found = 9;
        try {
          found = child_of(client, pins.get(), daemon, held, 1000 + round);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "child: %s\n", error.what());
        }
        ::_exit(found);
      }
      ::waitpid(child, &status, 0);
    };
    chain.store_all(client);
    Prompt prompt = chain.prompt();
    const auto more = client.pin(kSpace, prompt, 0, kSecondNs);
    CHECK_EQ(more->pages(), 3);
    CHECK_EQ(chain.load(client, 1), 3);
    if (at_sequence_point) {  // the chain was there already, so nothing was stored
      at_sequence_point = nullptr;
      continue;
    }
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    // The child has gone, and everything of its parent's is as it was.
    CHECK_EQ(pins->pages(), 4);
    CHECK_EQ(held.load(client, 0), 4);
    check::tally("client forked at a step of a store, load or pin");
  }
}

}  // namespace
}  // namespace kvw
