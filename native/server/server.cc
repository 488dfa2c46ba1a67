#include "server/server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/huge_pages.h"
#include "base/start_thread.h"
#include "copy/copy.h"
#include "server/get_link.h"
#include "server/put_link.h"

namespace kvw {

namespace {

constexpr int kTickMs = 100;
constexpr size_t kCommandsQueued = 4096;
constexpr uint64_t kCommandsNs = kMillisecondNs;  // that begin together
// Of a process, in a round of all that are ready: one that is busy on many connections takes no
// more from the rest than one that is on a single one.
constexpr int kMessagesPerWake = 16;
constexpr size_t kReadyAtOnce = Server::kMaxConnections;  // so that others are seen behind those
constexpr int kEventsBeforeTick = 64;                     // which no round holds up
constexpr uint64_t kHelloWithinNs = 10 * kSecondNs;
constexpr auto kGrowRetry = std::chrono::seconds(5);
// Of the core, to drop a wait: who waits has given up before, and has not heard that it stopped.
constexpr uint64_t kWaitGraceNs = kSecondNs;
constexpr int kLateReportMs = 1000;
constexpr int kFlushWalks = 4;  // so that a flush beside stores ends
constexpr int kNamesTried = 8;  // for a socket that is about to get its own

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw Error(ErrorKind::usage, "socket_path_too_long",
                "the socket path " + path + " has " + std::to_string(path.size()) +
                    " characters, the system allows " +
                    std::to_string(sizeof address.sun_path - 1) + "; choose a shorter --socket");
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

// Which file has the name: another one, or none (zeros), once somebody removed or replaced it.
std::pair<dev_t, ino_t> file_at(const std::string& path) {
  struct stat info{};
  if (::lstat(path.c_str(), &info) != 0) return {};
  return {info.st_dev, info.st_ino};
}

// Binds it beside `path`, and returns where. The first name is always the same, so that what a
// daemon left that was killed here is removed. In a folder like /tmp it may be somebody else's, who
// keeps it there: then one is taken that nobody can foresee, which is no longer than the name of
// the gRPC service's socket, for which every path has room.
std::string bind_beside(const std::string& path, const Fd& socket) {
  std::string fresh = path + ".new";
  ::unlink(fresh.c_str());
  for (int left = kNamesTried;; --left) {
    const sockaddr_un address = address_of(fresh);
    if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
      return fresh;
    uint32_t drawn = 0;
    if (errno != EADDRINUSE || left == 1 || ::getrandom(&drawn, sizeof drawn, 0) != sizeof drawn)
      throw storage_error("cannot bind " + fresh, errno);
    char suffix[16];
    std::snprintf(suffix, sizeof suffix, ".%04x", drawn & 0xffff);
    fresh = path + suffix;
  }
}

bool watch(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  return ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

// What a flush has come to, on the core's thread.
struct Flush {
  // What NVMe lacks is queued as its queue has room; then all of it has to be on stable media. What
  // this makes NVMe drop may lie behind the walk: while there is a place for it, another follows.
  bool ended(Warehouse& warehouse) {
    while (warehouse.has_log()) {
      if (!written(warehouse)) return false;
      if (--walks_left == 0 || !warehouse.has_room_for_unwritten()) break;
      walk = {true, {}};
      ticket.reset();
    }
    report = warehouse.flush_report();
    return true;
  }
  bool written(Warehouse& warehouse) {
    if (!ticket && warehouse.spill(walk)) ticket = warehouse.request_flush();
    return ticket && warehouse.flushed(*ticket);
  }

  Warehouse::Spill walk{true, {}};
  std::optional<uint64_t> ticket;
  int walks_left = kFlushWalks;
  FlushReport report;  // when it has ended
};

Fd spare_descriptor() { return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

// A client takes two descriptors here, its connection and its session file; the usual soft limit is
// reached long before the bound on sessions.
void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

Server::Server(WarehouseOptions options, std::string socket_path)
    : socket_path_(std::move(socket_path)), buffer_(kMessageBytes) {
  raise_descriptor_limit();  // for the sessions of an earlier daemon too, which are opened now
  warehouse_ = std::make_unique<Warehouse>(std::move(options), system_clock());
}

Server::~Server() { stop(); }

RecoverySummary Server::recover() {
  copy_path();  // an impossible KVW_COPY_PATH is refused here, not by the first copy
  return recovered_.emplace(warehouse_->recover());
}

RecoverySummary Server::start() {
  if (thread_.joinable() || stopping_)
    throw Error(ErrorKind::usage, "started", "this core was started before");
  if (!recovered_) recover();
  bind_socket();
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  spare_ = spare_descriptor();
  if (!watch(epoll_.get(), listener_.get()) || !watch(epoll_.get(), wake_.get()) ||
      (warehouse_->has_log() && !watch(epoll_.get(), warehouse_->log_fd())) ||
      (warehouse_->hbm() != nullptr && !watch(epoll_.get(), warehouse_->hbm()->event_fd())))
    throw storage_error("cannot watch the local socket", errno);
  thread_ = start_thread("kvw-core", [this] { run(); });
  populator_ = start_thread("kvw-populate", [this] { populate(); });
  return *recovered_;
}

void Server::bind_socket() {
  const sockaddr_un address = address_of(socket_path_);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  {
    Fd probe(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    // EAGAIN: somebody listens, and accepts nobody.
    if (::connect(probe.get(), generic, sizeof address) == 0 || errno == EAGAIN)
      throw Error(ErrorKind::storage, "socket_in_use",
                  "another daemon answers on " + socket_path_ + "; choose another --socket");
    struct stat info{};
    if (::lstat(socket_path_.c_str(), &info) == 0 && !S_ISSOCK(info.st_mode))
      throw Error(
          ErrorKind::storage, "socket_in_use",
          socket_path_ + " exists and is not a socket; remove it or choose another --socket");
  }
  // Bound under a private name and renamed in, so that it never exists with other permissions.
  listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_.valid()) throw storage_error("cannot make a socket", errno);
  const std::string fresh = bind_beside(socket_path_, listener_);
  socket_file_ = file_at(fresh);
  if (::chmod(fresh.c_str(), 0600) == 0 && ::listen(listener_.get(), SOMAXCONN) == 0 &&
      ::rename(fresh.c_str(), socket_path_.c_str()) == 0)
    return;
  const int error = errno;
  ::unlink(fresh.c_str());
  throw storage_error("cannot listen on " + socket_path_, error);
}

void Server::listen_again(int timeout_ms) {
  call(
      [this](Warehouse&) {
        bind_socket();
        if (!watch(epoll_.get(), listener_.get()))
          throw storage_error("cannot watch the local socket", errno);
        return 0;
      },
      timeout_ms);
}

template <class Made>
void Server::attach_link(Link& link, Fd fd, int timeout_ms) {
  call(
      [this, &link, shared = std::make_shared<Fd>(std::move(fd))](Warehouse& warehouse) {
        auto made = std::make_unique<Made>(std::move(*shared), warehouse);
        link.reset();
        if (!watch(epoll_.get(), made->fd()))
          throw storage_error("cannot watch the link with the remote tier's worker", errno);
        link = std::move(made);
        return 0;
      },
      timeout_ms);
}

void Server::attach_remote(Fd fd, int timeout_ms) {
  attach_link<PutLink>(put_link_, std::move(fd), timeout_ms);
}

void Server::attach_remote_gets(Fd fd, int timeout_ms) {
  attach_link<GetLink>(get_link_, std::move(fd), timeout_ms);
}

void Server::with_link(Link& link, bool (CoreLink::*go_on)()) {
  if (link && !(*link.*go_on)()) link.reset();
}

Server::Link* Server::link_of(int fd) {
  for (Link* link : {&put_link_, &get_link_})
    if (*link && (*link)->fd() == fd) return link;
  return nullptr;
}

void Server::give_runs() {
  for (Link* link : {&put_link_, &get_link_}) with_link(*link, &CoreLink::give);
}

std::vector<std::pair<Key, uint64_t>> Server::stop() {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return {};
    stopping_ = true;
  }
  populate_wake_.notify_all();
  if (wake_.valid()) wake();
  if (thread_.joinable()) thread_.join();
  if (populator_.joinable()) populator_.join();
  if (listener_.valid() && file_at(socket_path_) == socket_file_) ::unlink(socket_path_.c_str());
  connections_.clear();
  put_link_.reset();
  get_link_.reset();
  warehouse_->stop();
  auto tombstones = warehouse_->take_tombstones();
  warehouse_.reset();
  listener_.reset();
  return tombstones;
}

void Server::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

void Server::post(Command command) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_ || !thread_.joinable()) throw_stopped();
    if (commands_.size() >= kCommandsQueued)
      throw Error(ErrorKind::capacity, "core_busy", "too many commands are waiting for the core");
    commands_.push_back(std::move(command));
  }
  wake();
}

void Server::throw_busy(int timeout_ms) {
  throw Error(ErrorKind::transport, "core_busy",
              "the core did not answer within " + std::to_string(timeout_ms) + " ms");
}

void Server::throw_stopped() {
  throw Error(ErrorKind::transport, "stopped", "the core is not running");
}

void Server::run() {
  std::array<epoll_event, kReadyAtOnce> events;
  uint64_t next_tick = 0;
  const auto tick_if_due = [&] {
    const uint64_t now = system_clock().boot_ns();
    if (now < next_tick) return now;
    warehouse_->tick();
    drop_silent();
    give_runs();
    warehouse_->wake_waiters();
    next_tick = now + kTickMs * kMillisecondNs;
    return now;
  };
  for (;;) {
    const uint64_t now = tick_if_due();
    const bool goes_on = warehouse_->goes_on();  // as soon as others were served
    const int wait_ms =
        goes_on ? 0 : static_cast<int>((next_tick - std::min(now, next_tick)) / kMillisecondNs) + 1;
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), wait_ms);
    turns_.clear();
    serve_late(tick_if_due);
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == wake_.get()) {
        run_commands();
      } else if (fd == listener_.get()) {
        accept_all();
      } else if (warehouse_->has_log() && fd == warehouse_->log_fd()) {
        warehouse_->poll_log();
      } else if (warehouse_->hbm() != nullptr && fd == warehouse_->hbm()->event_fd()) {
        warehouse_->hbm()->poll();
      } else if (Link* link = link_of(fd)) {
        with_link(*link, &CoreLink::serve);
      } else {
        serve(fd);
      }
      warehouse_->wake_waiters();
      if ((i + 1) % kEventsBeforeTick == 0) tick_if_due();
    }
    look_at_waits();
    if (goes_on) warehouse_->go_on();
    const std::lock_guard lock(mutex_);
    if (stopping_) {
      commands_.clear();  // who waits for them, or for something to hold, hears "stopped"
      waits_.clear();
      return;
    }
  }
}

void Server::look_at_waits() {
  std::erase_if(waits_, [this](Wait& wait) {
    try {
      if (wait.holds(*warehouse_)) {
        wait.held.set_value();
        return true;
      }
    } catch (...) {  // as of a call: whoever waits gets it
      wait.held.set_exception(std::current_exception());
      return true;
    }
    return system_clock().boot_ns() >= wait.until_ns;
  });
}

bool Server::wait_until(std::function<bool(Warehouse&)> holds, int timeout_ms) {
  timeout_ms = std::max(timeout_ms, 0);
  std::promise<void> promise;
  std::future<void> held = promise.get_future();
  const uint64_t until_ns = system_clock().boot_ns() + timeout_ms * kMillisecondNs + kWaitGraceNs;
  post([this, wait = std::make_shared<Wait>(Wait{std::move(holds), std::move(promise), until_ns})](
           Warehouse&) { waits_.push_back(std::move(*wait)); });
  if (held.wait_for(std::chrono::milliseconds(timeout_ms)) != std::future_status::ready)
    return false;
  answer_of(std::move(held), 0);
  return true;
}

// Those that fit in a millisecond: clients are served before the others, however many there are.
void Server::run_commands() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
  const uint64_t until_ns = system_clock().boot_ns() + kCommandsNs;
  for (;;) {
    Command command;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_ || commands_.empty()) return;
      command = std::move(commands_.front());
      commands_.pop_front();
    }
    command(*warehouse_);
    if (system_clock().boot_ns() >= until_ns) return wake();
  }
}

bool Server::full(uint64_t pid) const {
  if (connections_.size() >= kMaxConnections) return true;
  const auto of_process = [&](const auto& entry) { return entry.second.pid == pid; };
  return pid != 0 && static_cast<size_t>(std::ranges::count_if(connections_, of_process)) >=
                         kMaxConnections / 2;
}

void Server::accept_all() {
  for (;;) {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid() && (errno == EMFILE || errno == ENFILE)) {
      // The listener would stay readable and the loop spin: take the client, to turn it away.
      spare_.reset();
      const Fd turned_away(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      spare_ = spare_descriptor();
      warehouse_->on_event("peer_refused", "reason=no_descriptors");
      return;
    }
    if (!fd.valid()) return;
    ucred peer{};
    socklen_t size = sizeof peer;
    // Who may connect is decided here, by the kernel's word: the daemon's own user, or root.
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
        (peer.uid != ::geteuid() && peer.uid != 0)) {
      warehouse_->on_event("peer_refused", "uid=" + std::to_string(peer.uid));
      continue;
    }
    if (full(static_cast<uint64_t>(peer.pid))) continue;
    const int number = fd.get();
    if (!watch(epoll_.get(), number)) continue;
    connections_[number] = {std::move(fd), 0, false, system_clock().boot_ns(),
                            static_cast<uint64_t>(peer.pid)};
    connection_count_ = connections_.size();
  }
}

void Server::drop_silent() {
  const uint64_t now = system_clock().boot_ns();
  std::vector<int> silent;
  for (const auto& [fd, connection] : connections_)
    if (connection.session == 0 && now - connection.since_ns > kHelloWithinNs) silent.push_back(fd);
  for (const int fd : silent) hang_up(fd);
}

void Server::hang_up(int fd) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  if (found->second.session != 0) warehouse_->sessions().hung_up(found->second.session);
  if (found->second.late) std::erase(late_, fd);  // another may get its number
  connections_.erase(found);
  connection_count_ = connections_.size();
}

void Server::serve(int fd) {
  for (Turn* turn = nullptr;; --turn->left) {
    const auto found = connections_.find(fd);
    if (found == connections_.end() || found->second.late) return;
    if (turn == nullptr) turn = &turn_of(found->second.pid);
    if (turn->left == 0) {
      found->second.late = true;
      late_.push_back(fd);
      return;
    }
    const ssize_t got = ::recv(fd, buffer_.data(), buffer_.size(), MSG_DONTWAIT | MSG_TRUNC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    const bool sane = got > 0 && static_cast<size_t>(got) <= buffer_.size();
    if (!sane || !answer(found->second, std::span(buffer_).first(static_cast<size_t>(got)))) {
      hang_up(fd);
      return;
    }
  }
}

// In the order in which they came to be late, so that each of a process has its turn.
template <class Tick>
void Server::serve_late(Tick tick) {
  int served = 0;
  for (const int fd : std::exchange(late_, {})) {
    const auto found = connections_.find(fd);
    if (found == connections_.end()) continue;
    found->second.late = false;
    serve(fd);
    warehouse_->wake_waiters();
    if (++served % kEventsBeforeTick == 0) tick();
  }
}

// Good until the next call.
Server::Turn& Server::turn_of(uint64_t pid) {
  const auto found = std::ranges::find(turns_, pid, &Turn::pid);
  if (pid != 0 && found != turns_.end()) return *found;
  turns_.push_back({pid, kMessagesPerWake});
  return turns_.back();
}

void Server::populate() {
  for (;;) {
    try {
      const std::optional<uint32_t> slab =
          call([](Warehouse& warehouse) { return warehouse.next_slab_to_populate(); }, 60000);
      if (slab && populate(*slab)) continue;
      if (!slab && end_huge_page_process()) return;
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // The core is stopping, or too busy to answer for a minute: the next round finds out.
    }
    std::unique_lock lock(mutex_);
    if (populate_wake_.wait_for(lock, kGrowRetry, [this] { return stopping_; })) return;
  }
}

bool Server::populate(uint32_t slab) {
  const int err = warehouse_->arena().populate_slab(slab);
  call(
      [slab, err](Warehouse& warehouse) {
        warehouse.slab_populated(slab, err);
        return 0;
      },
      60000);
  return err == 0;
}

FlushReport Server::flush(int timeout_ms) {
  auto flush = std::make_shared<Flush>();
  if (wait_until([flush](Warehouse& warehouse) { return flush->ended(warehouse); }, timeout_ms))
    return flush->report;
  FlushReport unfinished =
      call([](Warehouse& warehouse) { return warehouse.flush_report(); }, kLateReportMs);
  unfinished.pending = std::max<uint64_t>(unfinished.pending, 1);  // the flush itself
  return unfinished;
}

CheckReport Server::check(const CheckRequest& request, int timeout_ms) {
  auto promise = std::make_shared<std::promise<CheckReport>>();
  std::future<CheckReport> result = promise->get_future();
  // As in call(): who waits does not hold the promise.
  call(
      [request, promise = std::move(promise)](Warehouse& warehouse) {
        warehouse.check(request,
                        [promise](CheckReport&& report) { promise->set_value(std::move(report)); });
        return 0;
      },
      timeout_ms);
  return answer_of(std::move(result), timeout_ms);
}

}  // namespace kvw
