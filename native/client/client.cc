#include "client/client.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/error.h"
#include "client/device_stage.h"
#include "copy/copy.h"

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

bool Pins::take_room() {
  uint64_t pinned = pinned_bytes_;
  do {
    if (pinned + bytes_each_ > limit_bytes_) return false;
  } while (!pinned_bytes_.compare_exchange_weak(pinned, pinned + bytes_each_));
  return true;
}

void Pins::release() {
  if (session_ != nullptr && forks_ == fork_count()) {
    for (const int place : places_) session_->drop_pin(place);
    give_back_room(places_.size());
  }
  places_.clear();
  session_.reset();
}

Client::Client(ClientOptions options) : options_(std::move(options)), forks_(fork_count()) {
  copy_path();  // an impossible KVW_COPY_PATH is refused here, not by the first copy
  const std::lock_guard lock(socket_mutex_);
  reconnect(system_clock().boot_ns() + options_.timeout_ns);
}

Client::~Client() = default;

void Client::close() {
  if (forks_ != fork_count()) return;  // the parent's; nothing of it is the child's to close
  {
    // First, so that no other thread begins anything on a device while they are let go of.
    const std::lock_guard lock(state_mutex_);
    closed_ = true;
  }
  gpus_.close();
  std::map<int, HbmAnswer> hbm;  // unmapped after the locks
  const std::scoped_lock lock(socket_mutex_, state_mutex_);
  hbm.swap(hbm_);
  has_hbm_ = false;
  connection_.close();
  view_.reset();
  session_.reset();
  folder_.reset();
}

void Client::refuse_forked() const {
  if (fork_count() != forks_)
    throw Error(ErrorKind::transport, "forked",
                "this client was connected before the process forked; connect again in the child");
}

void Client::refuse_closed() const {
  if (closed_) throw Error(ErrorKind::usage, "closed", "this client is closed; connect again");
}

void Client::renew(bool patient, uint64_t deadline_ns) {
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
  const bool replaced = view()->outdated();  // refuses a closed client
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

void Client::reconnect(uint64_t deadline_ns) {
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
}

Connection::Reply Client::say_hello(Connection& to, std::optional<SlotRef> after,
                                    uint64_t deadline_ns) {
  Writer hello(MessageType::hello);
  {
    const std::lock_guard state(state_mutex_);
    hello.put(Hello{session_ ? session_->id() : 0, static_cast<uint64_t>(::getpid())});
  }
  if (after) hello.put(*after);
  hello.set_counts(after ? 1 : 0, 0, options_.read_only ? kHelloReadOnly : 0);
  Connection::Reply reply = to.ask(hello, MessageType::welcome, deadline_ns);
  Reader body = reply.body();
  body.take<Welcome>();
  body.take_array<SlotRef>(reply.head().first);
  if (!body.ok() || reply.descriptors.size() != reply.head().second || reply.head().second < 4) {
    to.close();
    throw Error(ErrorKind::transport, "daemon_gone", "the daemon's welcome is malformed");
  }
  for (const ParentFd& file : reply.descriptors) refuse_foreign(file, to.daemon_uid());
  return reply;
}

void Client::adopt(Connection::Reply& welcome) {
  auto& fds = welcome.descriptors;
  auto view = std::make_shared<const View>(std::move(fds[0]), std::move(fds[1]), std::move(fds[2]),
                                           std::move(fds[3]), !options_.read_only, arena_now());
  std::map<int, HbmAnswer> hbm;  // the old daemon's, let go outside the lock
  const std::lock_guard state(state_mutex_);
  if (fds.size() == 5) {
    session_ = std::make_shared<ClientSession>(std::move(fds[4]));
    writing_.clear();  // another session's reservations are nothing to this one
  }
  view_ = std::move(view);
  locates_ = (welcome.head().flags & kWelcomeLocates) != 0;
  has_hbm_ = (welcome.head().flags & kWelcomeHbm) != 0;
  hbm.swap(hbm_);
  folder_.reset();  // a new daemon may have another one
}

std::shared_ptr<const MappedArena> Client::arena_now() {
  const std::lock_guard state(state_mutex_);
  return view_ == nullptr ? nullptr : view_->arena();
}

void Client::settle_lost(uint64_t deadline_ns) {
  if (lost_) settle_listed(say_hello(connection_, {}, deadline_ns), deadline_ns);
}

void Client::settle_listed(Connection::Reply welcome, uint64_t deadline_ns) {
  lost_ = false;  // first: what is given up from here on may not be looked at
  try {
    for (;;) {
      Reader body = welcome.body();
      body.take<Welcome>();
      const size_t count = welcome.head().first;
      const std::span listed(body.take_array<SlotRef>(count), count);
      settle_idle(listed, deadline_ns);
      if (count < kUnsettledPerWelcome) return;
      welcome = say_hello(connection_, listed.back(), deadline_ns);
    }
  } catch (...) {
    lost_ = true;
    throw;
  }
}

void Client::settle_idle(std::span<const SlotRef> listed, uint64_t deadline_ns) {
  std::vector<SlotRef> idle;
  {
    const std::lock_guard state(state_mutex_);
    for (const SlotRef& ref : listed)
      if (!writing_.contains({ref.slot, ref.shard, ref.generation})) idle.push_back(ref);
  }
  if (idle.empty()) return;
  Writer message(MessageType::settle);
  message.put_bytes(idle.data(), idle.size() * sizeof(SlotRef));
  message.set_counts(static_cast<uint32_t>(idle.size()));
  connection_.ask(message, MessageType::settled, deadline_ns);
}

void Client::forget(std::span<const SlotRef> refs) {
  for (const SlotRef& ref : refs) writing_.erase({ref.slot, ref.shard, ref.generation});
}

void Client::give_up(std::span<const SlotRef> refs) {
  const std::lock_guard state(state_mutex_);
  forget(refs);
  lost_ = true;
}

std::unique_lock<std::timed_mutex> Client::lock_socket(uint64_t deadline_ns) {
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

Connection::Reply Client::ask(Writer& message, MessageType expected, uint64_t deadline_ns) {
  const auto lock = lock_socket(deadline_ns);
  settle_lost(deadline_ns);
  return connection_.ask(message, expected, deadline_ns);
}

Connection::Reply Client::exchange(const View& view, Writer& message, std::span<const Seal> seals,
                                   size_t reserves, uint32_t shard, uint64_t deadline_ns) {
  std::vector<SlotRef> sealed;
  for (const Seal& seal : seals) sealed.push_back({seal.generation, seal.slot, seal.shard});
  try {
    const auto lock = lock_socket(deadline_ns);
    bool replaced = false;
    {
      const std::lock_guard state(state_mutex_);
      replaced = view_.get() != &view;
    }
    if (replaced)
      throw Error(ErrorKind::transport, "daemon_replaced",
                  "the daemon was replaced during this store; its unfinished pages are given up, "
                  "store them again");
    settle_lost(deadline_ns);
    Connection::Reply reply = connection_.ask(message, MessageType::exchanged, deadline_ns);
    Reader body = reply.body();
    body.take_array<SealAnswer>(seals.size());
    const auto* answers = body.take_array<ReserveAnswer>(reserves);
    if (!body.ok() || reply.head().first != seals.size() || reply.head().second != reserves) {
      connection_.close();
      throw Error(ErrorKind::transport, "daemon_gone", "the daemon's answer is malformed");
    }
    const std::lock_guard state(state_mutex_);
    forget(sealed);
    for (size_t i = 0; i < reserves; ++i)
      if (answers[i].answer == Answer::granted)
        writing_.insert({answers[i].slot, shard, answers[i].generation});
    return reply;
  } catch (...) {
    give_up(sealed);  // and what it may have granted
    throw;
  }
}

Client::Open Client::open(const Key& namespace_id, Prompt& prompt, bool need_daemon,
                          uint64_t deadline_ns) {
  refuse_forked();
  renew(need_daemon, deadline_ns);
  Open open;
  open.view = view();
  open.session = session();
  const auto row = open.view->space(namespace_id);
  if (!row)
    throw Error(ErrorKind::usage, "namespace_unknown",
                "the daemon does not know namespace " + to_hex(namespace_id) + "; open it again");
  open.row = *row;
  prompt.bind(Secret(open.view->control().secret, kSecretBytes), namespace_id,
              row->shape.page_tokens);
  return open;
}

void Client::use_device(int ordinal, const std::string& image) {
  refuse_forked();
  view();  // refuses a closed client
  gpus_.add(ordinal, image);
  hbm(gpus_.device(ordinal), system_clock().boot_ns() + options_.timeout_ns);
}

std::unique_ptr<DeviceStage> Client::device_stage(int ordinal, size_t bytes) {
  refuse_forked();
  view();  // refuses a closed client
  return std::make_unique<DeviceStage>(gpus_.device(ordinal), bytes);
}

bool Client::connected() {
  refuse_forked();
  const std::lock_guard lock(socket_mutex_);
  return !connection_.hung_up();
}

uint64_t Client::session_id() { return session()->id(); }

std::shared_ptr<const View> Client::view() {
  refuse_forked();
  const std::lock_guard lock(state_mutex_);
  refuse_closed();
  return view_;
}

std::shared_ptr<ClientSession> Client::session() {
  refuse_forked();
  const std::lock_guard lock(state_mutex_);
  refuse_closed();
  return session_;
}

bool Client::talks() {
  if (std::unique_lock(socket_mutex_, std::try_to_lock)) return false;
  return !reconnects_ && !view()->outdated();
}

bool Client::refresh(uint64_t timeout_ns) {
  refuse_forked();
  if (talks()) return true;
  try {
    renew(true, system_clock().boot_ns() + timeout_ns);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::transport) throw;
    return talks();  // its socket may have been another thread's, which says as much
  }
  return true;
}

bool Client::sees_namespace(const Key& id) { return view()->space(id).has_value(); }

bool Client::has_namespace(const Key& id) {
  refuse_forked();
  renew(true, system_clock().boot_ns() + options_.timeout_ns);
  return view()->space(id).has_value();
}

void Client::report_mismatch(const EntryView& entry, const View& view, uint32_t shard,
                             uint64_t deadline_ns) {
  Writer message(MessageType::report);
  const uint64_t generation = view.slots().load(entry.slot).generation;
  message.put(Report{entry.key, generation, entry.slot, shard});
  try {
    const auto lock = lock_socket(deadline_ns);
    connection_.tell(message);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
    // Nobody to tell; the next reader will see the same and miss too.
  }
}

}  // namespace kvw
