// A daemon core with a remote store, whose worker is a thread at the other end of the link for gets
// and ends each as the test says, and a client.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "presence/presence_file.h"
#include "remote/get_link.h"
#include "tests/check.h"
#include "tests/daemon_world.h"

namespace kvw {

using remote::GetEnd;
using remote::RunToGet;

inline constexpr uint64_t kShard = 5000;
inline constexpr uint32_t kRun = 16;  // pages of an object: 256 tokens
inline constexpr uint32_t kToday = 20785;
inline constexpr Key kFleet{11, 13};

template <class Done>
void eventually(const Done& done) {
  const uint64_t until = now_ns() + uint64_t{kPatienceMs} * kMillisecondNs;
  while (!done()) {
    CHECK(now_ns() < until);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

inline Fd link_with(Daemon& daemon) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
    throw storage_error("socketpair", errno);
  daemon.server().attach_remote_gets(Fd(ends[0]), kPatienceMs);
  return Fd(ends[1]);
}

// A daemon with a remote store, its worker as a thread, and a client.
class RemoteField {
 public:
  using Get = std::function<GetEnd(const RunToGet&)>;

  explicit RemoteField(uint64_t dram_bytes = 32 * kMiB, bool with_filter = true)
      : daemon(shape_of(kShard, 1), dram_bytes) {
    daemon.options.remote_read = true;
    daemon.options.remote_fleet = kFleet;
    daemon.start();
    if (with_filter) make_filter();
    link_ = std::make_unique<remote::WorkerGetLink>(link_with(daemon));
    filler_ = std::make_unique<Client>(daemon.client_options());
    thread_ = std::thread([this] { work(); });
    serve_epoch(0, 0);
    client = std::make_unique<Client>(daemon.client_options());
    eventually([this] { return serving(); });
  }
  ~RemoteField() { end_worker(); }

  void make_filter(uint64_t objects = 1000) {
    filter_ = std::make_unique<PresenceFile>(
        PresenceFile::Wanted{daemon.options.arena_dir + "/presence", kFleet, objects, 7, kToday});
  }
  void serve_epoch(uint64_t fleet_epoch, uint64_t clear_epoch) {
    CHECK(daemon.call(
        [=](Warehouse& w) { return w.set_remote_epoch(kSpace, fleet_epoch, clear_epoch); }));
  }
  bool serving() const { return client->view()->control().remote.serving.value == 1; }
  void end_worker() {
    ends_ = true;
    if (thread_.joinable()) thread_.join();
    link_.reset();
  }
  void serves(bool serves) {
    serves_ = serves;
    eventually([=, this] { return serving() == serves; });
  }

  // Gets end as `get` says, in the worker's thread, until what is returned goes, which waits for
  // the one under way: what `get` refers to may go after it. Before and after, gets fill pages.
  class Answers {
   public:
    Answers(RemoteField& field, Get get) : field_(field) { field_.set_get(std::move(get)); }
    ~Answers() { field_.set_get({}); }
    Answers(const Answers&) = delete;

   private:
    RemoteField& field_;
  };
  [[nodiscard]] Answers answers(Get get) { return {*this, std::move(get)}; }

  // The store has the whole runs of the chain from now on, and the filter says so.
  void put(const Chain& chain, uint64_t epoch = 0) {
    const auto kept = std::make_shared<const Chain>(chain);  // gets outlive the test's own
    const std::lock_guard lock(mutex_);
    for (size_t last = kRun - 1; last < chain.pages.size(); last += kRun) {
      store_.insert_or_assign(chain.pages[last].key.lo, kept);
      filter_->writer().put(chain.pages[last].key, epoch, kToday);
    }
  }
  void put(const Key& key) { filter_->writer().put(key, 0, kToday); }  // the filter alone
  void remove_from_filter(const Key& key) { filter_->writer().remove(key, 0, kToday); }

  uint64_t clear() {
    const uint64_t epoch = ++cleared_;
    daemon.call([epoch](Warehouse& w) { return w.clear(0, epoch); });
    return epoch;
  }
  void done(const RunToGet& run, GetEnd end) const { link_->done(run, end, 0); }
  void leave() {  // of the worker's thread
    ends_ = true;
    link_->close();
  }

  // What a worker makes of an object that is as it should be.
  GetEnd fill(const RunToGet& run) {
    std::shared_ptr<const Chain> chain;
    {
      const std::lock_guard lock(mutex_);
      const auto found = store_.find(run.key.lo);
      if (found == store_.end()) return GetEnd::missing;
      chain = found->second;
    }
    Rows rows(run.pages - run.from, kShard);
    const size_t first = run.first_position + run.from;
    std::vector<uint32_t> tokens(
        chain->tokens.begin(),
        chain->tokens.begin() + (run.first_position + run.pages) * chain->shape.page_tokens);
    for (size_t at = 0; at < rows.count(); ++at) {
      const auto bytes = bytes_of(chain->pages[first + at].key, 0, kShard);
      std::memcpy(rows.row(at), bytes.data(), bytes.size());
    }
    Prompt prompt = Prompt::of_tokens(tokens);
    const StoreReport report = filler_->store(
        kSpace, prompt, first, rows, 0, uint64_t{kPatienceMs} * kMillisecondNs, run.clear_epoch);
    if (report.dropped.contains("cleared")) return GetEnd::cleared;
    return report.stored + report.already == rows.count() ? GetEnd::filled : GetEnd::no_room;
  }

  uint64_t asked() { return daemon.status().fetches.asked; }
  uint64_t counted(Counter counter) { return client->session()->counter(counter); }
  LookupResult lookup(const Chain& chain) {
    Prompt prompt = chain.prompt();
    return client->lookup(kSpace, prompt);
  }
  // Why the first page that did not come did not.
  std::string load(const Chain& chain, uint64_t pages,
                   uint64_t timeout_ns = kPatienceMs * kMillisecondNs) {
    Rows rows(chain.pages.size(), kShard);
    Prompt prompt = chain.prompt();
    const LoadReport report = client->load(kSpace, prompt, 0, rows, 0, timeout_ns);
    if (report.pages != pages && !report.reasons.empty())
      CHECK_EQ(report.reasons.begin()->first, "");
    CHECK_EQ(report.pages, pages);
    for (size_t at = 0; at < report.pages; ++at) {
      const auto bytes = bytes_of(chain.pages[at].key, 0, kShard);
      CHECK(std::memcmp(rows.row(at), bytes.data(), bytes.size()) == 0);
    }
    return report.reasons.empty() ? "" : report.reasons.begin()->first;
  }

  Daemon daemon;
  std::unique_ptr<Client> client;

 private:
  void set_get(Get get) {
    const std::lock_guard lock(get_mutex_);
    get_ = std::move(get);
  }
  void work() {
    try {
      serve();
    } catch (const Error& error) {
      CHECK_EQ(error.code(), "link_closed");
    }
  }
  void serve() {
    link_->ready(8);
    for (uint64_t said_ns = 0; !ends_;) {
      if (now_ns() >= said_ns + 20 * kMillisecondNs) {
        link_->state(serves_ ? kForeverNs : 0, 1'000'000, 1'000);
        said_ns = now_ns();
      }
      while (const auto run = link_->next(kMillisecondNs)) {
        const std::lock_guard lock(get_mutex_);
        const GetEnd end = get_ ? get_(*run) : fill(*run);
        if (end != GetEnd::count) link_->done(*run, end, 0);
      }
    }
  }

  std::unique_ptr<PresenceFile> filter_;
  std::unique_ptr<remote::WorkerGetLink> link_;
  std::unique_ptr<Client> filler_;
  std::mutex mutex_;
  std::mutex get_mutex_;  // held while a get is under way
  Get get_;
  std::map<uint64_t, std::shared_ptr<const Chain>> store_;  // by the low word of the last key
  std::atomic<bool> ends_{false}, serves_{true};
  std::atomic<uint64_t> cleared_{0};
  std::thread thread_;
};

}  // namespace kvw
