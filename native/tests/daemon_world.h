// A real daemon core (Server, with its threads and its socket) on a directory of its own, and what
// clients of it need. The daemon runs in this process, or as a child that can be killed and
// stopped.
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <array>
#include <memory>
#include <vector>

#include "client/client.h"
#include "remote/get_link.h"
#include "server/server.h"
#include "tests/warehouse_world.h"

namespace kvw {

class Daemon {
 public:
  explicit Daemon(NamespaceShape shape, uint64_t dram_bytes = 8 * kMiB) : shape_(shape) {
    options.arena_dir = directory.path() + "/arena";
    options.dram_bytes = dram_bytes;
    options.warehouse_id = kWarehouse;
    options.secret = test_secret();
  }
  ~Daemon() {
    if (child_ != 0 && owner_ == ::getpid()) kill(SIGKILL);
  }

  RecoverySummary start() {
    server_ = std::make_unique<Server>(options, socket());
    for (const NamespaceShape& shape : declared)
      server_->warehouse_before_start().add_namespace(kMaxNamespaces, shape, 0);
    server_->warehouse_before_start().add_namespace(kMaxNamespaces, shape_, 0);
    const RecoverySummary summary = server_->start();
    const auto growing = [](Warehouse& w) { return w.next_slab_to_populate().has_value(); };
    while (server_->call(growing, kPatienceMs)) std::this_thread::yield();
    return summary;
  }
  void stop() { server_.reset(); }
  Server& server() { return *server_; }  // of this process

  // The daemon as a process of its own. Returns when it serves.
  void start_process() {
    std::array<int, 2> ready{};
    if (::pipe2(ready.data(), O_CLOEXEC) != 0) throw storage_error("pipe", errno);
    child_ = ::fork();
    if (child_ == 0) {
      start();
      if (when_up) when_up();
      char byte = 'r';
      if (::write(ready[1], &byte, 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    ::close(ready[1]);
    char byte = 0;
    const bool up = ::read(ready[0], &byte, 1) == 1;
    ::close(ready[0]);
    CHECK(up);
  }
  void kill(int signal) {
    ::kill(child_, signal);
    if (signal == SIGKILL) {
      ::waitpid(child_, nullptr, 0);
      child_ = 0;
    } else if (signal == SIGSTOP) {
      ::waitpid(child_, nullptr, WUNTRACED);
    }
  }

  template <class Work>
  auto call(Work work) {
    return server_->call(std::move(work), kPatienceMs);
  }
  WarehouseStatus status() {
    return call([](Warehouse& w) { return w.status(); });
  }
  void tick() {
    call([](Warehouse& w) {
      w.tick();
      return 0;
    });
  }
  FlushReport flush(int timeout_ms = kPatienceMs) { return server_->flush(timeout_ms); }
  std::string socket() const { return directory.path() + "/kvw.sock"; }
  const NamespaceShape& shape() const { return shape_; }
  ClientOptions client_options() const {
    ClientOptions client;
    client.socket_path = socket();
    client.timeout_ns = uint64_t{kPatienceMs} * kMillisecondNs;
    return client;
  }

  TempDir directory;
  WarehouseOptions options;
  std::vector<NamespaceShape> declared;
  std::function<void()> when_up;  // in the process of start_process(), before that returns

 private:
  NamespaceShape shape_;
  std::unique_ptr<Server> server_;
  pid_t child_ = 0, owner_ = ::getpid();
};

inline constexpr uint64_t kForeverNs = UINT64_MAX;

// A worker of the daemon's remote tier that serves, and stores nothing of what it is given.
class RemoteGets {
 public:
  explicit RemoteGets(Daemon& daemon) : link_(attach(daemon)) {
    CHECK(daemon.call(
        [id = daemon.shape().id](Warehouse& w) { return w.set_remote_epoch(id, 0, 0); }));
    link_.ready(remote::kMostGets);
    link_.state(kForeverNs, 0, 0);
  }
  // Whatever it was given, one way or the other.
  template <class Random>
  void end_all(Random& random) const {
    link_.state(kForeverNs, 0, 0);
    while (const auto run = link_.next(0)) {
      const auto end =
          static_cast<uint32_t>(random() % static_cast<uint32_t>(remote::GetEnd::count));
      link_.done(*run, remote::GetEnd(end), 0);
    }
  }

 private:
  static Fd attach(Daemon& daemon) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
      throw storage_error("socketpair", errno);
    daemon.server().attach_remote_gets(Fd(ends[0]), kPatienceMs);
    return Fd(ends[1]);
  }

  remote::WorkerGetLink link_;
};

// Rows of one buffer, a page of one shard each.
class Rows final : public Regions {
 public:
  Rows(size_t pages, size_t page_bytes)
      : page_bytes_(page_bytes), data_(pages * page_bytes, std::byte{0xcd}) {}
  size_t count() const override { return data_.size() / page_bytes_; }
  size_t page_bytes() const override { return page_bytes_; }
  bool writable() const override { return true; }
  void pieces(size_t page, std::vector<Piece>& out) const override {
    out.assign(1, {const_cast<std::byte*>(data_.data()) + page * page_bytes_, page_bytes_});
  }
  std::byte* row(size_t page) { return data_.data() + page * page_bytes_; }

 private:
  size_t page_bytes_;
  std::vector<std::byte> data_;
};

// The first `pages` pages of a chain, as one prompt.
struct Chain {
  Chain(const NamespaceShape& of, uint64_t chain, uint32_t count) : shape(of) {
    for (uint32_t at = 0; at < count; ++at) {
      pages.push_back(page_of(shape, chain, at));
      tokens.insert(tokens.end(), pages[at].tokens.begin(), pages[at].tokens.end());
    }
  }
  Prompt prompt() const { return Prompt::of_tokens(tokens); }

  StoreReport store(Client& client, uint32_t shard,
                    uint64_t timeout_ns = uint64_t{kPatienceMs} * kMillisecondNs,
                    std::optional<uint64_t> since = {}) const {
    Rows rows(pages.size(), shape.shard_bytes);
    for (size_t at = 0; at < pages.size(); ++at) {
      const auto bytes = bytes_of(pages[at].key, shard, shape.shard_bytes);
      std::memcpy(rows.row(at), bytes.data(), bytes.size());
    }
    Prompt asked = prompt();
    return client.store(shape.id, asked, 0, rows, shard, timeout_ns, since);
  }
  // All shards of a page.
  void store_page(Client& client, size_t at) const {
    Rows row(1, shape.shard_bytes);
    for (uint32_t shard = 0; shard < shape.shards; ++shard) {
      const auto bytes = bytes_of(pages[at].key, shard, shape.shard_bytes);
      std::memcpy(row.row(0), bytes.data(), bytes.size());
      Prompt asked = prompt();
      client.store(shape.id, asked, at, row, shard, uint64_t{kPatienceMs} * kMillisecondNs);
    }
  }
  // Page by page: one is unfinished, and in the way of others, until it has all its shards.
  void store_all(Client& client) const {
    for (size_t at = 0; at < pages.size(); ++at) store_page(client, at);
  }
  // Pages loaded; every one of them is compared. What is in DRAM takes none of the time, which ends
  // the wait for a daemon that has gone.
  uint64_t load(Client& client, uint32_t shard, LoadReport* report = nullptr) const {
    Rows rows(pages.size(), shape.shard_bytes);
    Prompt asked = prompt();
    const LoadReport got = client.load(shape.id, asked, 0, rows, shard, kSecondNs);
    for (size_t at = 0; at < got.pages; ++at) {
      const auto bytes = bytes_of(pages[at].key, shard, shape.shard_bytes);
      CHECK(std::memcmp(rows.row(at), bytes.data(), bytes.size()) == 0);
    }
    if (report != nullptr) *report = got;
    return got.pages;
  }
  uint64_t found(Client& client) const {
    Prompt asked = prompt();
    return client.lookup(shape.id, asked).pages();
  }

  NamespaceShape shape;
  std::vector<TestPage> pages;
  std::vector<uint32_t> tokens;
};

}  // namespace kvw
