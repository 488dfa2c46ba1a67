// Client processes at full speed against a daemon of its own process, to be killed, stopped and
// continued at any moment: each stores, loads and pins chains of its choice, again and again, and
// compares every byte. They are forked from a test without threads.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <new>

#include "base/clock.h"
#include "tests/check.h"
#include "tests/daemon_world.h"

namespace kvw {

inline constexpr size_t kWorkers = 3;
inline constexpr uint64_t kChains = 40;

// Shared by all of them.
struct Board {
  struct alignas(128) Row {
    std::atomic<uint64_t> done;      // operations that ended, however
    std::atomic<uint64_t> answered;  // of them: stores that the daemon answered
    std::atomic<uint64_t> mismatches;
    std::atomic<uint64_t> session;  // of its client
  };
  std::array<Row, kWorkers> rows;
  std::array<std::atomic<uint64_t>, kChains> stored;  // chains that a store reported whole
  std::atomic<bool> stop;
};

class Swarm {
 public:
  // `chains`: how many there are to choose from. Of more than kChains nothing is promised to stay.
  explicit Swarm(Daemon& daemon, uint64_t timeout_ns = kSecondNs, uint64_t chains = kChains)
      : daemon_(daemon), timeout_ns_(timeout_ns), chains_(chains) {
    void* memory =
        ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    board_ = new (memory) Board();
  }
  ~Swarm() {
    for (const pid_t pid : pids_)
      if (pid > 0) {
        ::kill(pid, SIGKILL);
        ::waitpid(pid, nullptr, 0);
      }
    ::munmap(board_, sizeof(Board));
  }
  Swarm(const Swarm&) = delete;
  Swarm& operator=(const Swarm&) = delete;

  // Whether all pages of `number` are of a length of its own.
  static Chain chain(const NamespaceShape& shape, uint64_t number) {
    return {shape, number, static_cast<uint32_t>(1 + number % 6)};
  }
  Board& board() { return *board_; }
  pid_t pid(size_t worker) const { return pids_[worker]; }

  void start(size_t worker, uint64_t seed) {
    pids_[worker] = ::fork();
    CHECK(pids_[worker] >= 0);
    if (pids_[worker] != 0) return;
    try {
      work(board_->rows[worker], seed);
      ::_exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "worker %zu: %s\n", worker, error.what());
      ::_exit(4);
    }
  }
  void start_all(std::mt19937_64& random) {
    for (size_t worker = 0; worker < kWorkers; ++worker) start(worker, random());
  }
  void kill(size_t worker) {
    ::kill(pids_[worker], SIGKILL);
    int status = 0;
    ::waitpid(std::exchange(pids_[worker], 0), &status, 0);
    CHECK(WIFSIGNALED(status));  // else it had ended by itself
  }
  void pause(size_t worker) {
    ::kill(pids_[worker], SIGSTOP);
    int status = 0;
    ::waitpid(pids_[worker], &status, WUNTRACED);
    CHECK(WIFSTOPPED(status));
  }
  // Stops it at a moment when it has been granted what it has not sealed.
  void pause_in_a_store(size_t worker, const View& view) {
    for (pause(worker); !writes(board_->rows[worker].session, view); pause(worker)) {
      resume(worker);
      const uint64_t goal = board_->rows[worker].done + 1;
      until([&] { return board_->rows[worker].done >= goal; });
    }
  }
  void resume(size_t worker) { ::kill(pids_[worker], SIGCONT); }

  // Waits for something that the workers or the daemon do.
  template <class Done>
  void until(Done&& done) {
    const uint64_t deadline = system_clock().boot_ns() + uint64_t{kPatienceMs} * kMillisecondNs;
    while (!done()) {
      check_all_run();
      CHECK(system_clock().boot_ns() < deadline);
      ::sched_yield();
    }
  }
  // Until every worker but `stopped` has ended `more` operations.
  void advance(uint64_t more, size_t stopped = kWorkers) {
    for (size_t worker = 0; worker < kWorkers; ++worker) {
      const uint64_t goal = board_->rows[worker].done + more;
      if (worker != stopped) until([&] { return board_->rows[worker].done >= goal; });
    }
  }
  // Until the daemon has answered each of them.
  void be_answered(size_t stopped = kWorkers) {
    for (size_t worker = 0; worker < kWorkers; ++worker) {
      const uint64_t goal = board_->rows[worker].answered + 1;
      if (worker != stopped) until([&] { return board_->rows[worker].answered >= goal; });
    }
  }
  // Whatever is there now has the bytes that were sealed.
  void check_nothing_spoilt() {
    Client client(daemon_.client_options());
    for (uint64_t number = 0; number < chains_; ++number) {
      const Chain chain = Swarm::chain(daemon_.shape(), number);
      if (chain.found(client) == 0) continue;
      for (uint32_t shard = 0; shard < chain.shape.shards; ++shard) {
        LoadReport report;
        chain.load(client, shard, &report);
        CHECK(!report.reasons.contains("mismatch"));
      }
    }
  }
  // Every chain that was reported stored is there, every byte of it.
  void check_nothing_lost() {
    Client client(daemon_.client_options());
    for (uint64_t number = 0; number < kChains; ++number) {
      if (board_->stored[number] == 0) continue;
      const Chain chain = Swarm::chain(daemon_.shape(), number);
      for (uint32_t shard = 0; shard < chain.shape.shards; ++shard)
        CHECK_EQ(chain.load(client, shard), chain.pages.size());
    }
    for (const Board::Row& row : board_->rows) CHECK_EQ(row.mismatches.load(), 0);
  }
  // All of them end by themselves; what they and those before them had reserved comes back.
  void end() {
    board_->stop = true;
    for (pid_t& pid : pids_) {
      int status = -1;
      ::waitpid(std::exchange(pid, 0), &status, 0);
      CHECK(WIFEXITED(status));
      CHECK_EQ(WEXITSTATUS(status), 0);
    }
    check_nothing_lost();
    daemon_.kill(SIGKILL);
    daemon_.start();
    const auto settled = [&] {
      daemon_.tick();
      const WarehouseStatus status = daemon_.status();
      return status.reserved_slots + status.limbo_slots + status.zombie_slots + status.pins == 0;
    };
    const uint64_t deadline = system_clock().boot_ns() + uint64_t{kPatienceMs} * kMillisecondNs;
    while (!settled()) CHECK(system_clock().boot_ns() < deadline);
    CHECK_EQ(daemon_.status().quarantined, 0);
    daemon_.stop();
  }

 private:
  void check_all_run() {
    for (pid_t& pid : pids_) {
      int status = 0;
      if (pid > 0 && ::waitpid(pid, &status, WNOHANG) == pid) {
        pid = 0;
        check::fail(__FILE__, __LINE__, "a worker ended with " + std::to_string(status));
      }
    }
  }

  static bool writes(uint64_t session, const View& view) {
    const Slots& slots = view.slots();
    for (uint32_t slab = 0; slab < slots.header().slab_max; ++slab) {
      const SlabLayout layout = slots.layout(slab);
      for (uint32_t place = 0; place < slots.slots_in(layout); ++place) {
        const SlotId slot = slots.slot_id(slab, place);
        if (slots.load(slot).state != SlotState::reserved) continue;
        const SlotMeta* meta = slots.meta(slot, layout);
        const uint64_t open = meta->granted.load() & ~meta->settled.load();
        for (uint32_t shard = 0; shard < 2; ++shard)
          if ((open >> shard & 1) != 0 && owners_of(meta)[shard] == session) return true;
      }
    }
    return false;
  }

  void work(Board::Row& row, uint64_t seed) {
    std::mt19937_64 random(seed);
    ClientOptions options = daemon_.client_options();
    options.timeout_ns = timeout_ns_;
    std::unique_ptr<Client> client;
    while (!board_->stop) {
      try {
        if (client == nullptr) client = std::make_unique<Client>(options);
        row.session = client->session_id();
        step(*client, row, random);
      } catch (const Error& error) {
        const bool foreseen = error.kind() == ErrorKind::transport ||
                              error.kind() == ErrorKind::pin || error.code() == "namespace_unknown";
        if (!foreseen) throw;
      }
      row.done.fetch_add(1);
    }
  }

  void step(Client& client, Board::Row& row, std::mt19937_64& random) {
    const uint64_t number = random() % chains_;
    const Chain chain = Swarm::chain(daemon_.shape(), number);
    const auto shard = static_cast<uint32_t>(random() % chain.shape.shards);
    Prompt prompt = chain.prompt();
    switch (random() % 4) {
      case 0: {
        LoadReport report;
        chain.load(client, shard, &report);
        if (report.reasons.contains("mismatch")) row.mismatches.fetch_add(1);
        return;
      }
      case 1: {
        const auto pins = client.pin(chain.shape.id, prompt, 0, timeout_ns_);
        CHECK(chain.load(client, shard) >= pins->pages());
        return;
      }
      default: {
        bool whole = true;
        for (uint32_t each = 0; each < chain.shape.shards; ++each) {
          const uint32_t turn = (each + shard) % chain.shape.shards;
          const StoreReport report = chain.store(client, turn, timeout_ns_);
          whole = whole && report.stored + report.already == chain.pages.size();
        }
        // A page that is there already, in one of its shards, may still wait for the others.
        if (chains_ == kChains && whole &&
            client.lookup(chain.shape.id, prompt).pages() == chain.pages.size())
          board_->stored[number] = 1;
        row.answered.fetch_add(1);
      }
    }
  }

  Daemon& daemon_;
  uint64_t timeout_ns_, chains_;
  Board* board_ = nullptr;
  std::array<pid_t, kWorkers> pids_{};
};

}  // namespace kvw
