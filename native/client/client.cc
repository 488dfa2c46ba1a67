#include "client/client.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"

namespace kvw {

namespace {

constexpr uint64_t kRetryNs = 50 * kMillisecondNs;  // between attempts to find a new daemon

// Forks counted by the child itself; every client alive at the fork closes its copies there.
std::atomic<uint64_t> g_forks{0};
std::mutex g_clients_mutex;
std::set<Client*> g_clients;

void before_fork() { g_clients_mutex.lock(); }
void after_fork_parent() { g_clients_mutex.unlock(); }
void after_fork_child() {
  ++g_forks;
  for (Client* client : g_clients) client->abandon();
  g_clients_mutex.unlock();
}

void enlist(Client* client) {
  static const bool registered =
      ::pthread_atfork(before_fork, after_fork_parent, after_fork_child) == 0;
  (void)registered;
  const std::lock_guard lock(g_clients_mutex);
  g_clients.insert(client);
}

}  // namespace

void Pins::release() {
  if (session_ == nullptr) return;
  for (const int place : places_) session_->drop_pin(place);
  pinned_bytes_ -= places_.size() * bytes_each_;
  places_.clear();
  session_.reset();
}

Client::Client(ClientOptions options) : options_(std::move(options)), forks_(g_forks) {
  copy_path();  // an impossible KVW_COPY_PATH is refused here, not by the first copy
  {
    const std::lock_guard lock(mutex_);
    reconnect(system_clock().boot_ns() + options_.timeout_ns);
  }
  enlist(this);
}

Client::~Client() {
  const std::lock_guard lock(g_clients_mutex);
  g_clients.erase(this);
}

void Client::abandon() {
  // Only descriptors: the child has one thread, and no lock of the parent's means anything here.
  connection_.close();
  if (session_) session_->abandon();
}

void Client::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  connection_.close();
  view_.reset();
  session_.reset();
}

void Client::refuse_forked() const {
  if (g_forks.load(std::memory_order_relaxed) != forks_)
    throw Error(ErrorKind::transport, "forked",
                "this client was connected before the process forked; connect again in the child");
}

void Client::reconnect(uint64_t deadline_ns) {
  connection_.close();
  Connection fresh(options_.socket_path);
  Writer hello(MessageType::hello, next_request());
  hello.put(Hello{session_ ? session_->id() : 0, static_cast<uint64_t>(::getpid())});
  hello.set_counts(0, 0, options_.read_only ? kHelloReadOnly : 0);
  Connection::Reply reply = fresh.ask(hello.finish(), MessageType::welcome, deadline_ns);
  Reader body = reply.body();
  body.take<Welcome>();
  const SlotRef* refs = body.take_array<SlotRef>(reply.head().first);
  if (!body.ok() || reply.descriptors.size() != reply.head().second || reply.descriptors.size() < 4)
    throw Error(ErrorKind::transport, "daemon_gone", "the daemon's welcome is malformed");
  auto& fds = reply.descriptors;
  auto view = std::make_shared<const View>(std::move(fds[0]), std::move(fds[1]), std::move(fds[2]),
                                           std::move(fds[3]), !options_.read_only);
  if (fds.size() == 5) {
    session_ = std::make_shared<ClientSession>(std::move(fds[4]));
    writing_.clear();  // another session's reservations are nothing to this one
  }
  view_ = std::move(view);
  connection_ = std::move(fresh);
  // What this session was granted and is not writing now, it never will.
  std::vector<SlotRef> idle;
  for (uint32_t i = 0; i < reply.head().first; ++i)
    if (!writing_.contains({refs[i].slot, refs[i].shard})) idle.push_back(refs[i]);
  settle(std::move(idle), deadline_ns);
}

void Client::settle(std::vector<SlotRef> refs, uint64_t deadline_ns) {
  if (refs.empty()) return;
  Writer message(MessageType::settle, next_request());
  message.put_bytes(refs.data(), refs.size() * sizeof(SlotRef));
  message.set_counts(static_cast<uint32_t>(refs.size()));
  connection_.ask(message.finish(), MessageType::settled, deadline_ns);
}

Connection::Reply Client::ask(Writer& message, MessageType expected, uint64_t deadline_ns) {
  const std::lock_guard lock(mutex_);
  return connection_.ask(message.finish(), expected, deadline_ns);
}

Connection::Reply Client::exchange(Writer& message, size_t seals, size_t reserves, uint32_t shard,
                                   uint64_t deadline_ns) {
  const std::lock_guard lock(mutex_);
  Connection::Reply reply = connection_.ask(message.finish(), MessageType::exchanged, deadline_ns);
  Reader body = reply.body();
  body.take_array<SealAnswer>(seals);
  const auto* answers = body.take_array<ReserveAnswer>(reserves);
  if (!body.ok() || reply.head().first != seals || reply.head().second != reserves) {
    connection_.close();
    throw Error(ErrorKind::transport, "daemon_gone", "the daemon's answer is malformed");
  }
  for (size_t i = 0; i < reserves; ++i)
    if (answers[i].answer == Answer::granted) writing_.insert({answers[i].slot, shard});
  return reply;
}

Client::Open Client::open(const Key& namespace_id, Prompt& prompt, bool need_daemon,
                          uint64_t deadline_ns) {
  refuse_forked();
  Open open;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(ErrorKind::usage, "closed", "this client is closed; connect again");
    const uint64_t now = system_clock().boot_ns();
    if (connection_.hung_up() || view_->outdated()) {
      if (need_daemon) {
        reconnect(deadline_ns);
      } else if (now >= retry_at_ns_) {
        retry_at_ns_ = now + kRetryNs;
        try {
          reconnect(std::min(deadline_ns, now + options_.timeout_ns));
        } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
          // No daemon: what it left in shared memory is still good.
        }
      }
    }
    open.view = view_;
    open.session = session_;
  }
  const auto row = open.view->space(namespace_id);
  if (!row)
    throw Error(ErrorKind::usage, "namespace_unknown",
                "the daemon does not know namespace " + to_hex(namespace_id) + "; open it again");
  open.row = *row;
  prompt.bind(Secret(open.view->control().secret, kSecretBytes), namespace_id,
              row->shape.page_tokens);
  return open;
}

bool Client::connected() {
  const std::lock_guard lock(mutex_);
  return connection_.alive() && !connection_.hung_up();
}

uint64_t Client::session_id() { return session()->id(); }

std::shared_ptr<const View> Client::view() {
  refuse_forked();
  const std::lock_guard lock(mutex_);
  if (view_ == nullptr)
    throw Error(ErrorKind::usage, "closed", "this client is closed; connect again");
  return view_;
}

std::shared_ptr<ClientSession> Client::session() {
  refuse_forked();
  const std::lock_guard lock(mutex_);
  if (session_ == nullptr)
    throw Error(ErrorKind::usage, "closed", "this client is closed; connect again");
  return session_;
}

bool Client::has_namespace(const Key& id) {
  refuse_forked();
  {
    const std::lock_guard lock(mutex_);
    if (view_ != nullptr && (view_->outdated() || connection_.hung_up()))
      reconnect(system_clock().boot_ns() + options_.timeout_ns);
  }
  return view()->space(id).has_value();
}

LookupResult Client::lookup(const Key& namespace_id, Prompt& prompt) {
  const Open call =
      open(namespace_id, prompt, false, system_clock().boot_ns() + options_.timeout_ns);
  constexpr size_t kPrefetchAhead = 16;
  const Index& index = call.view->index();
  const uint64_t epoch = call.view->clear_epoch(call.row.ordinal);
  LookupResult result;
  const size_t pages = prompt.pages();
  size_t prefetched = 0;
  for (size_t page = 0; page < pages; ++page) {
    for (; prefetched < std::min(pages, page + kPrefetchAhead); ++prefetched)
      index.prefetch(prompt.key(prefetched));
    const auto entry = index.find(prompt.key(page));
    if (!entry || entry->space != call.row.ordinal || entry->clear_epoch < epoch) break;
    ++result.pages;
    ++(entry->in_dram() ? result.dram : result.nvme);
  }
  ClientSession& session = *call.session;
  session.count(Counter::lookups);
  session.count(Counter::lookup_hit_dram, result.dram);
  session.count(Counter::lookup_hit_nvme, result.nvme);
  session.count(Counter::lookup_missed, pages - result.pages);
  return result;
}

void Client::report_mismatch(const EntryView& entry, const View& view, uint32_t shard) {
  Writer message(MessageType::report, next_request());
  const uint64_t generation = view.slots().load(entry.slot).generation;
  message.put(Report{entry.key, generation, entry.slot, shard});
  try {
    ask(message, MessageType::reported, system_clock().boot_ns() + options_.timeout_ns);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
    // Nobody to tell; the next reader will see the same and miss too.
  }
}

}  // namespace kvw
