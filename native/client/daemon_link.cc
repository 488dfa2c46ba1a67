#include "client/daemon_link.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/error.h"

namespace kvw {

namespace {

// What a lookup may spend on a new daemon's hello, unless the client was told; a load spends up to
// a quarter of its own time, so that a busy machine does not keep it from the new daemon for ever.
// And how long they then leave it alone: one that is not there refuses at once, one that is stopped
// costs the whole time.
constexpr uint64_t kImpatientNs = 20 * kMillisecondNs;
constexpr uint64_t kMostNs = 500 * kMillisecondNs;
constexpr uint64_t kRetryNs = 50 * kMillisecondNs;
constexpr uint64_t kStalledNs = 1000 * kMillisecondNs;

// A file of somebody else's could be read, changed and cut by him while it is mapped here.
void refuse_foreign(const ParentFd& file, uid_t daemon_uid) {
  struct stat info{};
  if (::fstat(file.get(), &info) != 0)
    throw storage_error("cannot stat a file of the daemon", errno);
  if (!S_ISREG(info.st_mode) || info.st_uid != daemon_uid)
    throw Error(ErrorKind::transport, "daemon_untrusted",
                "the daemon of uid " + std::to_string(daemon_uid) +
                    " handed over a file that belongs to uid " + std::to_string(info.st_uid) +
                    "; its arena directory must be its own");
}

}  // namespace

DaemonLink::DaemonLink(ClientOptions options) : options_(std::move(options)), forks_(fork_count()) {
  const std::lock_guard lock(socket_mutex_);
  reconnect(system_clock().boot_ns() + options_.timeout_ns);
}

void DaemonLink::close() {
  std::shared_ptr<Attachment> last;  // unmapped after the locks
  {
    // First, so that other threads begin nothing while one of them has the socket.
    const std::lock_guard state(state_mutex_);
    closed_ = true;
  }
  const std::scoped_lock lock(socket_mutex_, state_mutex_);
  connection_.close();
  last.swap(attachment_);
}

bool DaemonLink::connected() {
  refuse_forked();
  const std::lock_guard lock(socket_mutex_);
  return !connection_.hung_up();
}

std::shared_ptr<Attachment> DaemonLink::attachment() {
  refuse_forked();
  const std::lock_guard state(state_mutex_);
  if (closed_) throw Error(ErrorKind::usage, "closed", "this client is closed; connect again");
  return attachment_;
}

void DaemonLink::refuse_forked() const {
  if (forked())
    throw Error(ErrorKind::transport, "forked",
                "this client was connected before the process forked; connect again in the child");
}

void DaemonLink::renew(bool patient, uint64_t deadline_ns) {
  refuse_forked();
  if (!patient && options_.patience_ns == 0) return;
  std::unique_lock lock(socket_mutex_, std::defer_lock);
  if (patient)
    lock = lock_socket(deadline_ns);
  else if (!lock.try_lock())
    return;  // another thread is talking to the daemon, or renewing already
  const uint64_t now = system_clock().boot_ns();
  if (!patient && now < retry_at_ns_) return;
  const uint64_t left_ns = deadline_ns > now ? deadline_ns - now : 0;
  const uint64_t patience_ns =
      options_.patience_ns.value_or(std::clamp(left_ns / 4, kImpatientNs, kMostNs));
  const bool replaced = attachment()->view->outdated();  // refuses a closed client
  try {
    if (replaced || connection_.hung_up())
      reconnect(patient ? deadline_ns : now + patience_ns);
    else if (patient)
      settle_lost(deadline_ns);
  } catch (const Error& error) {
    // No daemon: what it left in shared memory is still good.
    if (patient) throw;
    retry_at_ns_ = system_clock().boot_ns() + (error.code() == "deadline" ? kStalledNs : kRetryNs);
  }
}

bool DaemonLink::talks() {
  if (std::unique_lock(socket_mutex_, std::try_to_lock)) return false;
  return !reconnects_ && !attachment()->view->outdated();
}

bool DaemonLink::refresh(uint64_t timeout_ns) {
  refuse_forked();
  if (talks()) return true;
  try {
    renew(true, system_clock().boot_ns() + timeout_ns);
  } catch (const Error& error) {
    if (error.code() == "memory_lost") return false;
    if (error.kind() != ErrorKind::transport) throw;
    return talks();  // its socket may have been another thread's, which says as much
  }
  return true;
}

void DaemonLink::reconnect(uint64_t deadline_ns) {
  struct Reconnects {
    std::atomic<bool>& now;
    explicit Reconnects(std::atomic<bool>& flag) : now(flag) { now = true; }
    ~Reconnects() { now = false; }
  } const reconnects(reconnects_);
  connection_.close();
  Connection fresh(options_.socket_path, options_.daemon_uid, deadline_ns);
  Connection::Reply welcome = say_hello(fresh, {}, deadline_ns);
  adopt(welcome);
  std::swap(connection_, fresh);
  settle_listed(std::move(welcome), deadline_ns);
  attached()->remote.renew(
      [this](Writer& message, uint64_t until_ns) {
        return connection_.ask(message, MessageType::presence_shared, until_ns);
      },
      deadline_ns);
}

void DaemonLink::renew_remote(uint64_t deadline_ns) {
  attachment()->remote.renew(
      [this](Writer& message, uint64_t until_ns) {
        return ask(message, MessageType::presence_shared, until_ns);
      },
      deadline_ns);
}

Connection::Reply DaemonLink::say_hello(Connection& to, std::optional<SlotRef> after,
                                        uint64_t deadline_ns) {
  Writer hello(MessageType::hello);
  const auto last = attached();
  hello.put(Hello{last ? last->session->id() : 0, static_cast<uint64_t>(::getpid())});
  if (after) hello.put(*after);
  hello.set_counts(after ? 1 : 0, 0, options_.read_only ? kHelloReadOnly : 0);
  Connection::Reply reply = to.ask(hello, MessageType::welcome, deadline_ns);
  if (reply.descriptors.size() < reply.head().second) {  // the kernel leaves out what has no place
    to.close();
    throw Error(
        ErrorKind::capacity, "no_file_handles",
        "this process has no file handle left for the memory that it shares with the daemon: "
        "it got " +
            std::to_string(reply.descriptors.size()) + " of " +
            std::to_string(reply.head().second) +
            "; close files that are not used, or raise its limit (ulimit -n, LimitNOFILE)");
  }
  Reader body = reply.body();
  body.take<Welcome>();
  body.take_array<SlotRef>(reply.head().first);
  if (!body.ok() || reply.descriptors.size() != reply.head().second ||
      reply.head().second < (last ? 4 : 5)) {
    to.close();
    throw Error(ErrorKind::transport, "daemon_gone", "the daemon's welcome is malformed");
  }
  for (const ParentFd& file : reply.descriptors) refuse_foreign(file, to.daemon_uid());
  return reply;
}

std::shared_ptr<Attachment> DaemonLink::attached() {
  const std::lock_guard state(state_mutex_);
  return attachment_;
}

void DaemonLink::adopt(Connection::Reply& welcome) {
  auto& fds = welcome.descriptors;
  std::shared_ptr<Attachment> last = attached();
  auto view = std::make_shared<const View>(std::move(fds[0]), std::move(fds[1]), std::move(fds[2]),
                                           std::move(fds[3]), !options_.read_only,
                                           last == nullptr ? nullptr : last->view->arena());
  auto session = last == nullptr ? nullptr : last->session;
  if (fds.size() == 5) {
    session = std::make_shared<ClientSession>(std::move(fds[4]));
    unsettled_.clear();  // another session's reservations are nothing to this one
  }
  auto fresh =
      std::make_shared<Attachment>(std::move(view), std::move(session), welcome.head().flags);
  const std::lock_guard state(state_mutex_);
  attachment_ = std::move(fresh);
}

void DaemonLink::settle_lost(uint64_t deadline_ns) {
  if (lost_) settle_listed(say_hello(connection_, {}, deadline_ns), deadline_ns);
}

void DaemonLink::settle_listed(Connection::Reply welcome, uint64_t deadline_ns) {
  lost_ = false;  // first: what is given up from here on may not be looked at
  try {
    for (;;) {
      Reader body = welcome.body();
      body.take<Welcome>();
      const size_t count = welcome.head().first;
      const std::span listed(body.take_array<SlotRef>(count), count);
      if (const auto idle = unsettled_.idle(listed); !idle.empty()) {
        Writer message(MessageType::settle);
        message.put_bytes(idle.data(), idle.size() * sizeof(SlotRef));
        message.set_counts(static_cast<uint32_t>(idle.size()));
        connection_.ask(message, MessageType::settled, deadline_ns);
      }
      if (count < kUnsettledPerWelcome) return;
      welcome = say_hello(connection_, listed.back(), deadline_ns);
    }
  } catch (...) {
    lost_ = true;
    throw;
  }
}

void DaemonLink::give_up(std::span<const SlotRef> refs) {
  unsettled_.ended(refs);
  lost_ = true;
}

std::unique_lock<std::timed_mutex> DaemonLink::lock_socket(uint64_t deadline_ns) {
  const uint64_t now = system_clock().boot_ns();
  std::unique_lock lock(socket_mutex_, std::defer_lock);
  const std::chrono::nanoseconds left(deadline_ns > now ? deadline_ns - now : 0);
#if defined(__SANITIZE_THREAD__)  // gcc 12's does not know the call behind the steady clock's wait
  const auto until = std::chrono::system_clock::now() + left;
#else
  const auto until = std::chrono::steady_clock::now() + left;
#endif
  if (!lock.try_lock_until(until))
    throw Error(ErrorKind::transport, "deadline",
                "another thread of this client waits for the daemon, which does not answer");
  return lock;
}

Connection::Reply DaemonLink::ask(Writer& message, MessageType expected, uint64_t deadline_ns) {
  const auto lock = lock_socket(deadline_ns);
  settle_lost(deadline_ns);
  return connection_.ask(message, expected, deadline_ns);
}

Connection::Reply DaemonLink::exchange(const Attachment& from, Writer& message,
                                       std::span<const Seal> seals,
                                       std::span<const uint32_t> shards, uint64_t deadline_ns) {
  std::vector<SlotRef> sealed;
  for (const Seal& seal : seals) sealed.push_back({seal.generation, seal.slot, seal.shard});
  try {
    const auto lock = lock_socket(deadline_ns);
    if (attached().get() != &from)
      throw Error(ErrorKind::transport, "daemon_replaced",
                  "the daemon was replaced during this store; its unfinished pages are given up, "
                  "store them again");
    settle_lost(deadline_ns);
    Connection::Reply reply = connection_.ask(message, MessageType::exchanged, deadline_ns);
    Reader body = reply.body();
    body.take_array<SealAnswer>(seals.size());
    const auto* answers = body.take_array<ReserveAnswer>(shards.size());
    if (!body.ok() || reply.head().first != seals.size() || reply.head().second != shards.size()) {
      connection_.close();
      throw Error(ErrorKind::transport, "daemon_gone", "the daemon's answer is malformed");
    }
    unsettled_.ended(sealed);
    unsettled_.granted({answers, shards.size()}, shards);
    return reply;
  } catch (...) {
    give_up(sealed);  // and what it may have granted
    throw;
  }
}

void DaemonLink::tell(Writer& message, uint64_t deadline_ns) {
  try {
    const auto lock = lock_socket(deadline_ns);
    connection_.tell(message);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
    // Nobody to tell; the next reader will see the same and miss too.
  }
}

}  // namespace kvw
