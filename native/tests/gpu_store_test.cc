// Stores of pages in the memory of a GPU whose windows overlap: the next one is reserved while the
// copies of the last are under way, against a real daemon core and the contract model of the
// driver.
#include <array>
#include <memory>
#include <thread>

#include "gpu/batch.h"
#include "tests/gpu_world.h"

namespace kvw {
namespace {

constexpr uint64_t kPageBytes = 50000, kDramBytes = 64 * kMiB;
// Pages of a store into so much DRAM: a client alone may leave 8 MiB unfinished, a window from a
// device is an eighth of that and the first one a quarter of it; each is twice the one before.
constexpr uint64_t kFirst = 4, kSecond = 8;
constexpr uint32_t kPages = 40;

uint64_t total(const StoreReport& report) {
  uint64_t pages = report.stored + report.already;
  for (const auto& [reason, dropped] : report.dropped) pages += dropped;
  return pages;
}

template <class Condition>
bool comes(Condition condition, uint64_t within_ns = kPatienceNs / 2) {
  const uint64_t deadline = system_clock().boot_ns() + within_ns;
  while (!condition() && system_clock().boot_ns() < deadline) std::this_thread::yield();
  return condition();
}

// A store on a thread of its own, whose device begins nothing for now.
class HeldStore {
 public:
  HeldStore(const CudaModel& model, Client& client, const Chain& chain, const Regions& from,
            uint64_t timeout_ns = kPatienceNs)
      : model_(model), launches_(model.count("launches")) {
    model_.set("hold", 1);
    thread_ = std::thread([this, &client, &chain, &from, timeout_ns] {
      Prompt prompt = chain.prompt();
      try {
        report = client.store(chain.shape.id, prompt, 0, from, 0, timeout_ns);
      } catch (const Error& error) {
        code = error.code();
      }
    });
  }
  ~HeldStore() { end(); }
  HeldStore(const HeldStore&) = delete;
  HeldStore& operator=(const HeldStore&) = delete;

  // Each window is one batch.
  bool has_launched(uint64_t windows, uint64_t within_ns = kPatienceNs / 2) const {
    return comes([&] { return model_.count("launches") == launches_ + windows; }, within_ns);
  }
  void join() {
    if (thread_.joinable()) thread_.join();
  }
  void end() {
    model_.set("hold", 0);
    join();
  }

  StoreReport report;
  std::string code;

 private:
  const CudaModel& model_;
  uint64_t launches_;
  std::thread thread_;
};

// What a store of a whole chain out of the device needs.
struct Setting {
  Setting() {
    start_registering(rig, *client);
    rig.fill(chain, cache);
  }

  Rig rig{kPageBytes, kDramBytes};
  std::unique_ptr<Client> client = rig.connect();
  Chain chain{rig.daemon.shape(), 1, kPages};
  DeviceCache cache{rig.model, kPages, kPageBytes, 10000};
};

TEST(next_window_is_reserved_while_the_copies_of_the_last_are_under_way) {
  Setting setting;
  auto& [rig, client, chain, cache] = setting;
  HeldStore store(rig.model, *client, chain, cache);
  const bool both = store.has_launched(2);
  const uint64_t reserved = rig.daemon.status().reserved_slots;
  const uint64_t found = chain.found(*client);
  store.end();
  CHECK(both);
  CHECK_EQ(reserved, kFirst + kSecond);
  CHECK_EQ(found, 0);
  CHECK_EQ(store.report.stored, kPages);
  CHECK_EQ(rig.daemon.status().reserved_slots, 0);
  CHECK_EQ(chain.load(*client, 0), kPages);
  CHECK_EQ(rig.model.count("violations"), 0);
}

TEST(slots_of_both_windows_come_back_when_the_second_fails_on_the_device) {
  Setting setting;
  auto& [rig, client, chain, cache] = setting;
  rig.model.set("batch_limit", rig.model.count("batches") + 1);  // the first window's
  HeldStore store(rig.model, *client, chain, cache);
  const bool both = comes([&] { return rig.daemon.status().reserved_slots == kFirst + kSecond; });
  store.end();
  rig.model.set("batch_limit", UINT64_MAX);
  CHECK(both);
  CHECK_EQ(store.code, "gpu_memory");
  CHECK_EQ(Chain(rig.daemon.shape(), 2, 1).store(*client, 0).stored, 1);  // settles what is owed
  CHECK_EQ(rig.daemon.status().reserved_slots, 0);
  CHECK_EQ(rig.store(*client, chain, cache).stored, kPages);
  CHECK_EQ(chain.load(*client, 0), kPages);
}

TEST(slots_of_both_windows_stay_reserved_when_a_lost_device_cannot_say_that_it_is_done) {
  Setting setting;  // its memory is the device's still, when the store has failed
  auto& [rig, client, chain, cache] = setting;
  HeldStore store(rig.model, *client, chain, cache);
  const bool both = store.has_launched(2);
  rig.model.set("lost", 1);
  store.join();
  rig.model.set("lost", 0);
  store.end();
  CHECK(both);
  CHECK_EQ(store.code, "gpu_error");
  CHECK_EQ(Chain(rig.daemon.shape(), 2, 1).store(*client, 0).stored, 1);  // settles what is owed
  CHECK_EQ(rig.daemon.status().reserved_slots, kFirst + kSecond);
}

TEST(store_from_a_device_whose_daemon_dies_between_windows_counts_each_page) {
  Daemon daemon(shape_of(kPageBytes, 1), kDramBytes);
  daemon.start_process();
  const CudaModel model;
  Client client(daemon.client_options());
  client.use_device(0, kImage);
  CHECK_EQ(Chain(daemon.shape(), 1, 2).store(client, 0).stored, 2);
  const Chain chain(daemon.shape(), 1, kPages);
  DeviceCache cache(model, kPages, kPageBytes, 10000);
  for (size_t page = 0; page < kPages; ++page)
    cache.put(page, bytes_of(chain.pages[page].key, 0, kPageBytes));
  HeldStore store(model, client, chain, cache);
  const bool both = store.has_launched(2);
  daemon.kill(SIGKILL);
  store.end();
  CHECK(both);
  CHECK_EQ(store.code, "");
  CHECK_EQ(store.report.already, 2);
  CHECK_EQ(store.report.stored, 0);
  // Both windows, and the page that follows them, which is what ends the rest.
  CHECK_EQ(store.report.dropped.at("unreachable"), kFirst - 2 + kSecond + 1);
  CHECK_EQ(total(store.report), kPages);
  daemon.start_process();
  Prompt prompt = chain.prompt();
  CHECK_EQ(client.store(kSpace, prompt, 0, cache, 0, kPatienceNs).stored, kPages - 2);
  CHECK_EQ(chain.load(client, 0), kPages);
}

// False: the time ended before both windows were under way.
bool seals_both_windows_when_late(uint64_t timeout_ns) {
  Setting setting;
  auto& [rig, client, chain, cache] = setting;
  HeldStore store(rig.model, *client, chain, cache, timeout_ns);
  const bool both = store.has_launched(2, timeout_ns);
  comes([] { return false; }, timeout_ns);
  store.end();
  if (!both) return false;
  CHECK_EQ(store.report.stored, kFirst + kSecond);
  CHECK_EQ(store.report.dropped.at("timeout"), 1);
  CHECK_EQ(total(store.report), kPages);
  CHECK_EQ(rig.daemon.status().reserved_slots, 0);
  CHECK_EQ(chain.load(*client, 0), kFirst + kSecond);
  return true;
}

TEST(store_from_a_device_whose_time_ends_seals_what_is_under_way) {
  uint64_t timeout_ns = 100 * kMillisecondNs;
  while (!seals_both_windows_when_late(timeout_ns)) {
    timeout_ns *= 2;
    CHECK(timeout_ns < kPatienceNs);
  }
}

// Windows of ten pages, of one, and of one beside which there is room for no other: it is refused
// until the one before is sealed.
TEST(stores_of_several_times_what_may_be_unfinished_store_everything) {
  for (const uint64_t page_bytes : {100000, 3000000, 5000000}) {
    Rig rig(page_bytes, kDramBytes);
    const auto pages = static_cast<uint32_t>(24000000 / page_bytes);
    const std::array chains{Chain(rig.daemon.shape(), 1, pages),
                            Chain(rig.daemon.shape(), 2, pages)};
    std::array<StoreReport, 2> reports;
    const auto store = [&](size_t number) {
      DeviceCache cache(rig.model, pages, page_bytes, 200000);
      rig.fill(chains[number], cache);
      reports[number] = rig.store(*rig.connect(), chains[number], cache);
    };
    std::thread beside([&] { store(1); });
    store(0);
    beside.join();
    const auto client = rig.connect();
    for (size_t number = 0; number < 2; ++number) {
      CHECK_EQ(reports[number].stored, pages);
      CHECK_EQ(chains[number].load(*client, 0), pages);
    }
    CHECK_EQ(rig.daemon.status().reserved_slots, 0);
  }
}

}  // namespace
}  // namespace kvw
