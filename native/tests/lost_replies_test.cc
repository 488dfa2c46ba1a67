// Replies that come after their deadline, or never: what they granted comes back, whichever reply
// of whichever exchange it was. It stayed with the session for its life, and counted against all.
// And a load of a damaged page took four of the client's timeouts where the daemon was stopped.
#include "tests/check.h"
#include "tests/daemon_world.h"
#include "tests/slow_line.h"

namespace kvw {
namespace {

constexpr uint64_t kShard = 12 * 1024;
constexpr uint64_t kShortNs = 200 * kMillisecondNs;

// A daemon, and a client at the other end of a slow line.
struct Field {
  explicit Field(NamespaceShape shape, uint64_t dram_bytes = 8 * kMiB) : daemon(shape, dram_bytes) {
    daemon.start();
    line = std::make_unique<SlowLine>(daemon.socket());
    ClientOptions options = daemon.client_options();
    options.socket_path = line->socket();
    client = std::make_unique<Client>(options);
  }
  // A store that may meet its deadline at any reply.
  void try_store(uint64_t chain, uint32_t pages) {
    try {
      Chain(daemon.shape(), chain, pages).store(*client, 0, kShortNs);
    } catch (const Error& error) {
      CHECK_EQ(error.code(), "deadline");
    }
  }
  uint64_t reserved() { return daemon.status().reserved_slots; }
  uint64_t in_limbo() { return daemon.status().limbo_slots; }
  bool refresh() { return client->refresh(kPatienceMs * kMillisecondNs); }

  Daemon daemon;
  std::unique_ptr<SlowLine> line;
  std::unique_ptr<Client> client;
};

// Calls somebody when the first page is copied, that is, after its grant and before its seal.
class Interrupted final : public Regions {
 public:
  Interrupted(size_t pages, size_t page_bytes, std::function<void()> then)
      : rows_(pages, page_bytes), then_(std::move(then)) {}
  size_t count() const override { return rows_.count(); }
  size_t page_bytes() const override { return rows_.page_bytes(); }
  bool writable() const override { return true; }
  void pieces(size_t page, std::vector<Piece>& out) const override {
    if (then_) std::exchange(then_, nullptr)();
    rows_.pieces(page, out);
  }

 private:
  Rows rows_;
  mutable std::function<void()> then_;
};

TEST(grants_come_back_whichever_reply_came_too_late) {
  for (uint64_t passed = 0; passed < 6; ++passed) {
    Field field(shape_of(kShard, 1));
    field.line->pass(0);
    field.try_store(1, 4);
    field.line->pass(passed);
    field.try_store(2, 4);
    field.line->pass(SlowLine::kAll);
    CHECK(field.refresh());  // an engine that stores nothing any more gives them back as well
    CHECK_EQ(field.reserved(), 0);
    CHECK_EQ(field.in_limbo(), 0);
    const Chain chain(field.daemon.shape(), 1, 4);
    const StoreReport report = chain.store(*field.client, 0);
    CHECK_EQ(report.stored + report.already, 4);
    CHECK_EQ(chain.load(*field.client, 0), 4);
  }
}

TEST(seals_that_were_never_sent_are_given_up) {
  Field field(shape_of(kShard, 1));
  const Interrupted rows(3, kShard, [&] {
    field.line->pass(0);
    field.try_store(2, 4);  // what is to be said before anything else has no answer from here on
  });
  const Chain chain(field.daemon.shape(), 1, 3);
  Prompt prompt = chain.prompt();
  CHECK_THROWS(field.client->store(kSpace, prompt, 0, rows, 0, kShortNs), "deadline");
  field.line->pass(SlowLine::kAll);
  CHECK(field.refresh());
  CHECK_EQ(field.reserved(), 0);
  CHECK_EQ(field.in_limbo(), 0);
}

// Stores chain after chain, each between the grants of the one before and their seals; then calls
// `then`. What becomes of the stores does not matter.
void store_nested(Field& field, uint64_t chains, uint32_t pages,
                  const std::function<void()>& then) {
  if (chains == 0) return then();
  const Interrupted rows(pages, field.daemon.shape().shard_bytes,
                         [&] { store_nested(field, chains - 1, pages, then); });
  const Chain chain(field.daemon.shape(), chains, pages);
  Prompt prompt = chain.prompt();
  try {
    field.client->store(kSpace, prompt, 0, rows, 0, kPatienceMs * kMillisecondNs);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), "daemon_replaced");
  }
}

TEST(grants_come_back_behind_a_whole_welcome_of_slots_that_are_being_written) {
  Field field(shape_of(kBlockBytes, 1), 192 * kMiB);
  bool looked = false;
  store_nested(field, 12, 384, [&] {
    const uint64_t written = field.reserved();
    CHECK(written > kUnsettledPerWelcome);
    field.line->pass(0);
    do field.try_store(100, 5);  // on a busy machine, until the daemon has heard of it
    while (field.reserved() == written);
    CHECK_EQ(field.reserved(), written + 5);
    field.line->cut();
    field.line->pass(SlowLine::kAll);
    CHECK(field.refresh());
    CHECK_EQ(field.reserved(), written);
    CHECK_EQ(field.in_limbo(), 0);
    looked = true;
  });
  CHECK(looked);
}

// --- a damaged page is reported, and nobody waits for the answer

// Of the client's own hand, as it may be of anything that writes to its memory.
void damage(Client& client, const Key& key) {
  const auto view = client.view();
  const auto entry = view->index().find(key);
  CHECK(entry && entry->in_dram());
  view->payload(entry->slot, view->slots().layout(view->slots().slab_of(entry->slot)))[17] ^=
      std::byte{1};
}

TEST(load_of_a_damaged_page_waits_for_no_daemon) {
  Daemon daemon(shape_of(kShard, 1));
  daemon.start_process();
  SlowLine line(daemon.socket());
  ClientOptions options = daemon.client_options();
  options.socket_path = line.socket();
  options.timeout_ns = 3600 * kSecondNs;  // of no load
  Client client(options);
  const Chain chain(daemon.shape(), 1, 5), other(daemon.shape(), 2, 1);
  CHECK_EQ(chain.store(client, 0).stored, 5);
  damage(client, chain.pages[2].key);
  const uint64_t before = line.requests();
  daemon.kill(SIGSTOP);
  for (int i = 0; i < 100; ++i) {
    LoadReport report;
    CHECK_EQ(chain.load(client, 0, &report), 2);
    CHECK_EQ(report.reasons["mismatch"], 3);
  }
  CHECK_EQ(client.session()->counter(Counter::load_mismatch), 100);
  daemon.kill(SIGCONT);
  CHECK_EQ(other.store(client, 0).stored, 1);  // on the same connection, behind all answers
  CHECK_EQ(line.requests() - before, 64 + 2);
  LoadReport report;
  CHECK_EQ(chain.load(client, 0, &report), 2);
  CHECK_EQ(report.reasons["missing"], 3);
}

TEST(load_of_a_damaged_page_goes_on_with_its_copy_on_nvme) {
  Daemon daemon(shape_of(kShard, 1));
  daemon.options.nvme_dir = daemon.directory.path() + "/nvme";
  daemon.options.nvme_capacity_bytes = 8 * kMiB;
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 5);
  CHECK_EQ(chain.store(client, 0).stored, 5);
  CHECK_EQ(daemon.flush().flushed, 5);
  damage(client, chain.pages[2].key);
  CHECK_EQ(chain.load(client, 0), 5);
  CHECK_EQ(client.session()->counter(Counter::load_mismatch), 1);
  CHECK_EQ(daemon.status().quarantined, 1);
}

// Incident: the load waited a fifth of a second, and ended before the page where the daemon did not
// get a processor in it.
TEST(load_of_a_damaged_page_waits_for_a_busy_daemon_where_a_copy_is_on_nvme) {
  Daemon daemon(shape_of(kShard, 1));
  daemon.options.nvme_dir = daemon.directory.path() + "/nvme";
  daemon.options.nvme_capacity_bytes = 8 * kMiB;
  daemon.start_process();
  SlowLine line(daemon.socket());
  ClientOptions options = daemon.client_options();
  options.socket_path = line.socket();
  Client client(options);
  const Chain chain(daemon.shape(), 1, 5);
  CHECK_EQ(chain.store(client, 0).stored, 5);
  for (const auto& page : chain.pages)
    while (!client.view()->index().find(page.key)->in_nvme()) std::this_thread::yield();
  damage(client, chain.pages[2].key);
  const uint64_t before = line.requests();
  daemon.kill(SIGSTOP);
  std::atomic<bool> ended = false;
  check::Thread load([&] {
    const size_t loaded = chain.load(client, 0);
    ended = true;
    CHECK_EQ(loaded, 5);
  });
  // The report, and what is asked for behind it.
  while (line.requests() < before + 2 && !ended) std::this_thread::yield();
  daemon.kill(SIGCONT);
  load.join();
}

}  // namespace
}  // namespace kvw
