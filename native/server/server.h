// The daemon's core on its own thread: it owns the warehouse, serves the local socket, runs the
// tick, and executes what other threads ask for. A second thread allocates slabs in the background.
//
// Thread-safe. Bounded: connections, messages per wake-up, queued commands.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "exchange/messages.h"
#include "server/core_link.h"
#include "warehouse/warehouse.h"

namespace kvw {

class Server {
 public:
  // Opens the warehouse: takes the directory's lock, creates or re-attaches its files.
  Server(WarehouseOptions options, std::string socket_path);
  ~Server();

  // Before start() only: namespaces and tombstones from the ledger.
  // Not after stop().
  Warehouse& warehouse_before_start() { return *warehouse_; }
  // Finds what is there; nobody is served yet. Once, before start().
  RecoverySummary recover();
  // Recovers where recover() was not called, binds the socket (0600), starts the threads.
  // Throws Error usage "started" the second time.
  RecoverySummary start();
  // Binds the socket anew, where somebody removed its file: those who are connected stay so. Throws
  // as start() and call() do.
  void listen_again(int timeout_ms);
  // Ends the threads and lets the directory go; the socket file goes away. Idempotent. Returns the
  // last of Warehouse::take_tombstones().
  std::vector<std::pair<Key, uint64_t>> stop();

  // Runs `work` on the core thread and returns its result; its exceptions pass through. Throws
  // Error transport "core_busy" when the core does not get to it within timeout_ms (it may still
  // run then, so `work` owns what it captures), "stopped" after stop().
  template <class Work>
  auto call(Work work, int timeout_ms) -> decltype(work(std::declval<Warehouse&>())) {
    using Result = decltype(work(std::declval<Warehouse&>()));
    auto task = std::make_shared<std::packaged_task<Result(Warehouse&)>>(std::move(work));
    std::future<Result> result = task->get_future();
    // The command's alone: a core that ends with it in its queue must break the promise.
    post([task = std::move(task)](Warehouse& warehouse) { (*task)(warehouse); });
    return answer_of(std::move(result), timeout_ms);
  }

  // Waits until everything sealed before is on stable media, or the time runs out. Any thread but
  // the core's.
  FlushReport flush(int timeout_ms);

  // A stretch of Warehouse::check(). Any thread but the core's; blocks for the device, and throws
  // Error transport "core_busy" after timeout_ms (the stretch then ends without anybody to tell).
  CheckReport check(const CheckRequest& request, int timeout_ms);

  // Each takes over the core's end of a link with a worker of the remote tier, for puts or for
  // gets, in place of the one before. Throws Error usage "bad_link", and as call() does.
  void attach_remote(Fd fd, int timeout_ms);
  void attach_remote_gets(Fd fd, int timeout_ms);

  uint64_t connections() const { return connection_count_.load(); }

  static constexpr size_t kMaxConnections =
      1100;  // a few above the sessions, to answer them kindly; half of them of one process

 private:
  struct Connection {
    Fd fd;
    SessionId session = 0;
    bool read_only = false;
    uint64_t since_ns = 0;
    uint64_t pid = 0;   // by the kernel's word; 0: of a process that is not seen from here
    bool late = false;  // in late_
  };
  // What a process may still say in this round; a connection, where its process is not seen.
  struct Turn {
    uint64_t pid;
    int left;
  };

  using Command = std::function<void(Warehouse&)>;
  // What somebody waits for until then: whether it holds is asked behind all that happens.
  struct Wait {
    std::function<bool(Warehouse&)> holds;
    std::promise<void> held;
    uint64_t until_ns;
  };
  void post(Command command);
  // Whether `holds`, which runs on the core thread, was true within timeout_ms. Its exceptions pass
  // through. Throws Error transport "stopped" after stop().
  bool wait_until(std::function<bool(Warehouse&)> holds, int timeout_ms);
  void look_at_waits();
  template <class Result>
  static Result answer_of(std::future<Result> result, int timeout_ms) {
    if (result.wait_for(std::chrono::milliseconds(timeout_ms)) != std::future_status::ready)
      throw_busy(timeout_ms);
    try {
      return result.get();
    } catch (const std::future_error&) {
      throw_stopped();
    }
  }
  [[noreturn]] static void throw_busy(int timeout_ms);
  [[noreturn]] static void throw_stopped();

  void bind_socket();
  void run();
  void run_commands();
  void accept_all();
  bool full(uint64_t pid) const;
  void serve(int fd);
  template <class Tick>
  void serve_late(Tick tick);
  Turn& turn_of(uint64_t pid);
  bool answer(Connection& connection, std::span<const std::byte> message);
  bool answer_hello(Connection& connection, const MessageHead& head, Reader& body);
  bool answer_exchange(Connection& connection, const MessageHead& head, Reader& body);
  bool answer_settle(Connection& connection, const MessageHead& head, Reader& body);
  bool answer_promote(Connection& connection, const MessageHead& head, Reader& body);
  bool answer_report(Connection& connection, const MessageHead& head, Reader& body);
  bool answer_locate(Connection& connection, const MessageHead& head);
  bool answer_hbm(Connection& connection, const MessageHead& head);
  bool answer_presence(Connection& connection, const MessageHead& head);
  bool answer_fetch(Connection& connection, const MessageHead& head, Reader& body);
  bool refuse(Connection& connection, uint64_t request, const Error& error);
  static bool send(Connection& connection, std::span<const std::byte> message,
                   std::span<const int> descriptors = {});
  void hang_up(int fd);
  // Of a worker of the remote tier.
  using Link = std::unique_ptr<CoreLink>;
  template <class Made>
  void attach_link(Link& link, Fd fd, int timeout_ms);
  // Ended where `go_on` says so.
  static void with_link(Link& link, bool (CoreLink::*go_on)());
  // Null: none has this descriptor.
  Link* link_of(int fd);
  void give_runs();
  void drop_silent();
  void populate();
  bool populate(uint32_t slab);  // false: there is no memory for it now
  void wake();

  std::string socket_path_;
  std::pair<dev_t, ino_t> socket_file_;  // what it was when it was bound
  std::unique_ptr<Warehouse> warehouse_;
  std::optional<RecoverySummary> recovered_;
  Fd listener_, epoll_, wake_;
  Fd spare_;  // given up for a moment to turn a client away when there are no descriptors left
  std::unordered_map<int, Connection> connections_;
  std::atomic<uint64_t> connection_count_{0};
  std::vector<Turn> turns_;  // of this round
  std::vector<int> late_;    // whose process had its turn: they are the first in the next round
  std::vector<std::byte> buffer_;
  std::vector<Wait> waits_;
  Link put_link_, get_link_;

  std::mutex mutex_;
  std::deque<Command> commands_;
  bool stopping_ = false;
  std::condition_variable populate_wake_;
  std::thread thread_, populator_;
};

}  // namespace kvw
