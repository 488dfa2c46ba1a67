// Replies that come after their deadline, or never: what they granted comes back, whichever reply
// of whichever exchange it was. It stayed with the session for its life, and counted against all.
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
  Prompt prompt = Chain(field.daemon.shape(), 1, 3).prompt();
  CHECK_THROWS(field.client->store(kSpace, prompt, 0, rows, 0, kShortNs), "deadline");
  field.line->pass(SlowLine::kAll);
  CHECK(field.refresh());
  CHECK_EQ(field.reserved(), 0);
  CHECK_EQ(field.in_limbo(), 0);
}

// Stores chain after chain, each between the grants of the one before and their seals; then calls
// `then`. What becomes of the stores does not matter.
void store_nested(Field& field, uint64_t chains, uint32_t pages, const std::function<void()>& then) {
  if (chains == 0) return then();
  const Interrupted rows(pages, field.daemon.shape().shard_bytes,
                         [&] { store_nested(field, chains - 1, pages, then); });
  Prompt prompt = Chain(field.daemon.shape(), chains, pages).prompt();
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
    field.try_store(100, 5);
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

}  // namespace
}  // namespace kvw
