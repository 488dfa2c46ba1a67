// The core's thread and those that ask it for something: at its end, nobody waits for an answer
// that will not come. A populating thread that did held the daemon's end up for a minute.
#include "tests/check.h"

#include <future>
#include <string>
#include <thread>

#include "tests/daemon_world.h"

namespace kvw {
namespace {

constexpr int kWaitMs = kPatienceMs / 3;
// To be asked before the end. Who is later is refused, with the same code.
constexpr auto kHeadStart = std::chrono::milliseconds(100);

// The code that `ask` ended with; empty if it was answered.
std::string code_of(const std::function<void()>& ask) {
  try {
    ask();
  } catch (const Error& error) {
    return error.code();
  }
  return "";
}

// Ends the core while `ask` is in its queue, behind a command that it is busy with. Returns the
// code that `ask` ended with.
std::string code_of_one_left_in_the_queue(const std::function<void(Server&)>& ask) {
  const Daemon world(shape_of(4096));
  Server server(world.options, world.socket());
  server.start();

  std::promise<void> begun, release;
  std::thread busy([&] {
    server.call(
        [&](Warehouse&) {
          begun.set_value();
          release.get_future().wait();
          return 0;
        },
        kPatienceMs);
  });
  begun.get_future().wait();
  std::string code;
  std::thread asking([&] { code = code_of([&] { ask(server); }); });
  std::this_thread::sleep_for(kHeadStart);
  std::thread stopping([&] { server.stop(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  release.set_value();
  for (std::thread* thread : {&busy, &asking, &stopping}) thread->join();
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

}  // namespace
}  // namespace kvw
