// Loads and stores of pages in the memory of a GPU, against a real daemon core and the contract
// model of the driver: what is handed out is what was stored, whatever is late, refused, damaged or
// lost.
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <thread>

#include "client/client.h"
#include "tests/check.h"
#include "tests/daemon_world.h"
#include "tests/device_cache.h"

namespace kvw {
namespace {

// Any text that names the kernels is an image to the model.
constexpr const char* kImage = "kvw_gather kvw_scatter";
constexpr uint64_t kPatienceNs = uint64_t{kPatienceMs} * kMillisecondNs;

struct Rig {
  explicit Rig(uint64_t page_bytes, uint64_t dram_bytes = 32 * kMiB,
               const std::vector<NamespaceShape>& others = {})
      : daemon(shape_of(page_bytes, 1), dram_bytes) {
    daemon.declared = others;
    daemon.start();
  }
  std::unique_ptr<Client> connect(bool read_only = false) {
    ClientOptions options = daemon.client_options();
    options.read_only = read_only;
    auto client = std::make_unique<Client>(options);
    client->use_device(0, kImage);
    return client;
  }
  LoadReport load(Client& client, const Chain& chain, const Regions& to, size_t first = 0,
                  uint64_t timeout_ns = kPatienceNs) {
    Prompt prompt = chain.prompt();
    return client.load(chain.shape.id, prompt, first, to, 0, timeout_ns);
  }
  StoreReport store(Client& client, const Chain& chain, const Regions& from,
                    uint64_t timeout_ns = kPatienceNs) {
    Prompt prompt = chain.prompt();
    return client.store(daemon.shape().id, prompt, 0, from, 0, timeout_ns);
  }
  std::vector<std::byte> bytes(const Chain& chain, size_t page) const {
    return bytes_of(chain.pages[page].key, 0, chain.shape.shard_bytes);
  }
  void fill(const Chain& chain, const DeviceCache& cache) const {
    for (size_t page = 0; page < chain.pages.size(); ++page) cache.put(page, bytes(chain, page));
  }
  void check_loaded(const Chain& chain, const DeviceCache& cache, uint64_t pages) const {
    for (size_t page = 0; page < pages; ++page) CHECK(cache.page(page) == bytes(chain, page));
  }

  CudaModel model;
  Daemon daemon;
};

void until_registered(Client& client) {
  while (!client.registration().settled) std::this_thread::yield();
}

// The first use of a view begins to register it.
void start_registering(Rig& rig, Client& client) {
  const Chain none(rig.daemon.shape(), 999, 1);
  DeviceCache cache(rig.model, 1, rig.daemon.shape().shard_bytes, 4096);
  CHECK_EQ(rig.load(client, none, cache).pages, 0);
  until_registered(client);
}

TEST(pages_of_a_device_are_stored_and_loaded_whatever_their_pieces) {
  std::mt19937_64 random = check::random("device_round_trip");
  for (uint64_t round = 0; round < check::rounds(12); ++round) {
    const size_t bytes = std::vector<size_t>{1000, 4096, 12288, 70001, 300000}[random() % 5];
    const size_t piece = std::vector<size_t>{7, 512, 4096, 8192, 400000}[random() % 5];
    if (bytes / piece > 5000) continue;
    Rig rig(bytes);
    const auto client = rig.connect();
    if (random() % 2 == 0) start_registering(rig, *client);
    const Chain chain(rig.daemon.shape(), 1, 9);
    DeviceCache from(rig.model, 9, bytes, piece), to(rig.model, 9, bytes, 4096);
    rig.fill(chain, from);
    CHECK_EQ(rig.store(*client, chain, from).stored, 9);
    // What a device digested, a processor accepts; and the other way round.
    CHECK_EQ(chain.load(*client, 0), 9);
    CHECK_EQ(rig.load(*client, chain, to).pages, 9);
    rig.check_loaded(chain, to, 9);
    CHECK(to.gaps_hold() && from.gaps_hold());
    const Chain other(rig.daemon.shape(), 2, 9);
    other.store_all(*client);
    CHECK_EQ(rig.load(*client, other, from).pages, 9);
    rig.check_loaded(other, from, 9);
    CHECK_EQ(rig.daemon.status().pins, 0);
    CHECK_EQ(rig.model.count("unpinned_copies"), 0);
    CHECK_EQ(rig.model.count("violations"), 0);
  }
}

TEST(batches_overlap_and_pages_stay_in_order_when_there_are_many) {
  Rig rig(100000, 64 * kMiB);
  const auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, 400);  // three batches
  DeviceCache cache(rig.model, 400, 100000, 10000);
  rig.fill(chain, cache);
  CHECK_EQ(rig.store(*client, chain, cache).stored, 400);
  DeviceCache to(rig.model, 400, 100000, 30000);
  const uint64_t launches = rig.model.count("launches");
  CHECK_EQ(rig.load(*client, chain, to).pages, 400);
  CHECK_EQ(rig.model.count("launches") - launches, 3);
  rig.check_loaded(chain, to, 400);
  CHECK_EQ(rig.daemon.status().pins, 0);
}

TEST(batches_of_a_call_are_on_their_way_at_the_same_time) {
  Rig rig(100000, 64 * kMiB);
  const auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, 300);  // two batches
  DeviceCache from(rig.model, 300, 100000, 10000), to(rig.model, 300, 100000, 30000);
  rig.fill(chain, from);
  CHECK_EQ(rig.store(*client, chain, from).stored, 300);
  rig.model.set("hold", 1);
  const uint64_t launches = rig.model.count("launches");
  std::thread loading([&] { CHECK_EQ(rig.load(*client, chain, to).pages, 300); });
  while (rig.model.count("launches") < launches + 2) std::this_thread::yield();
  const uint64_t deadline = system_clock().boot_ns() + 5 * kSecondNs;
  while (rig.model.count("busy_streams") < 2 && system_clock().boot_ns() < deadline)
    std::this_thread::yield();
  const uint64_t busy = rig.model.count("busy_streams");
  rig.model.set("hold", 0);
  loading.join();
  CHECK_EQ(busy, 2);
  rig.check_loaded(chain, to, 300);
}

// cuMemFree may wait for the device, and so for the engine's step.
TEST(nothing_is_allocated_or_freed_once_both_batches_were_used) {
  const NamespaceShape large = shape_of(300000, 1, {0x61, 1});
  Rig rig(4096, 64 * kMiB, {large});
  rig.model.set("register_limit", 0);  // so that all go through pinned memory as well
  const auto client = rig.connect();
  const Chain first(rig.daemon.shape(), 1, 1100), many(rig.daemon.shape(), 2, 2200);
  const Chain few(large, 3, 60);
  DeviceCache one(rig.model, 1100, 4096, 512), all(rig.model, 2200, 4096, 64),
      larger(rig.model, 60, 300000, 100);
  first.store_all(*client);
  many.store_all(*client);
  few.store_all(*client);
  CHECK_EQ(rig.load(*client, first, one).pages, 1100);
  const uint64_t allocations = rig.model.count("allocations"), frees = rig.model.count("frees");
  CHECK_EQ(rig.load(*client, many, all).pages, 2200);
  CHECK_EQ(rig.load(*client, few, larger).pages, 60);
  CHECK_EQ(rig.store(*client, Chain(rig.daemon.shape(), 4, 2200), all).stored, 2200);
  CHECK_EQ(rig.model.count("allocations"), allocations);
  CHECK_EQ(rig.model.count("frees"), frees);
}

TEST(load_ends_before_the_first_page_that_is_missing_and_says_why) {
  Rig rig(5000);
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 6);
  DeviceCache cache(rig.model, 6, 5000, 512);
  rig.fill(chain, cache);
  Prompt half = Prompt::of_tokens(std::span(chain.tokens).first(4 * 16));
  DeviceCache four(rig.model, 4, 5000, 512);
  rig.fill(Chain(rig.daemon.shape(), 1, 4), four);
  CHECK_EQ(client->store(kSpace, half, 0, four, 0, kPatienceNs).stored, 4);
  const LoadReport report = rig.load(*client, chain, cache);
  CHECK_EQ(report.pages, 4);
  CHECK_EQ(report.reasons.at("missing"), 2);
  const LoadReport later = rig.load(*client, chain, cache, 2);
  CHECK_EQ(later.pages, 2);
  CHECK(cache.page(0) == rig.bytes(chain, 2));
}

TEST(damaged_page_is_a_miss_for_a_device_too_and_reported) {
  Rig rig(70000);
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 5);
  chain.store_all(*client);
  rig.daemon.call([&](Warehouse& w) {
    const auto entry = w.arena().index().find(chain.pages[3].key);
    w.arena().payload(entry->slot, w.arena().slots().cut(0))[69999] ^= std::byte{1};
    return 0;
  });
  DeviceCache cache(rig.model, 5, 70000, 1000);
  const LoadReport report = rig.load(*client, chain, cache);
  CHECK_EQ(report.pages, 3);
  rig.check_loaded(chain, cache, 3);
  CHECK_EQ(client->session()->counter(Counter::load_mismatch), 1);
  CHECK_EQ(rig.daemon.status().quarantined, 1);
  CHECK_EQ(rig.daemon.status().pins, 0);
}

TEST(load_writes_nothing_before_the_engines_event) {
  Rig rig(60000);
  const auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, 8);
  chain.store_all(*client);
  DeviceCache cache(rig.model, 8, 60000, 6000);
  for (int round = 0; round < 10; ++round) {
    // The engine still writes what these blocks were for; its bytes must not land after ours.
    const std::vector<std::byte> old(60000, static_cast<std::byte>(round));
    for (size_t page = 0; page < 8; ++page) cache.queue_put(page, old);
    CHECK_EQ(rig.load(*client, chain, cache).pages, 8);
    cache.free_staged();
    rig.check_loaded(chain, cache, 8);
  }
}

TEST(store_reads_nothing_before_the_engines_event) {
  Rig rig(60000);
  const auto client = rig.connect();
  start_registering(rig, *client);
  DeviceCache cache(rig.model, 4, 60000, 6000);
  for (uint64_t round = 0; round < 10; ++round) {
    const Chain chain(rig.daemon.shape(), round + 1, 4);
    for (size_t page = 0; page < 4; ++page) cache.queue_put(page, rig.bytes(chain, page));
    CHECK_EQ(rig.store(*client, chain, cache).stored, 4);
    cache.free_staged();
    CHECK_EQ(chain.load(*client, 0), 4);
  }
}

TEST(call_whose_event_does_not_come_ends_with_its_time_and_touches_nothing) {
  Rig rig(5000);
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 2), other(rig.daemon.shape(), 2, 2);
  chain.store_all(*client);
  DeviceCache cache(rig.model, 2, 5000, 1000);
  rig.model.set("hold", 1);
  cache.queue_put(0, std::vector<std::byte>(5000, std::byte{7}));
  const uint64_t copies = rig.model.count("copies");
  const LoadReport loaded = rig.load(*client, chain, cache, 0, 20 * kMillisecondNs);
  CHECK_EQ(loaded.pages, 0);
  CHECK_EQ(loaded.reasons.at("timeout"), 2);
  const StoreReport stored = rig.store(*client, other, cache, 20 * kMillisecondNs);
  CHECK_EQ(stored.stored, 0);
  CHECK_EQ(stored.dropped.at("timeout") + stored.dropped.at("refused_tail"), 2);
  CHECK_EQ(rig.model.count("copies"), copies);
  CHECK_EQ(rig.daemon.status().pins, 0);
  CHECK_EQ(rig.daemon.status().reserved_slots, 0);
  rig.model.set("hold", 0);
  cache.free_staged();
}

TEST(pages_are_pinned_for_as_long_as_the_device_may_read_them) {
  Rig rig(60000);
  const auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, 8);
  chain.store_all(*client);
  DeviceCache cache(rig.model, 8, 60000, 6000);
  rig.model.set("hold", 1);
  const uint64_t launches = rig.model.count("launches");
  LoadReport report;
  std::thread loading([&] { report = rig.load(*client, chain, cache); });
  while (rig.model.count("launches") == launches) std::this_thread::yield();
  // Others fill the arena; what the device has yet to read stays.
  const auto others = rig.connect();
  for (uint64_t number = 2; number < 12; ++number)
    Chain(rig.daemon.shape(), number, 100).store(*others, 0);
  const uint64_t pins = rig.daemon.status().pins;
  rig.model.set("hold", 0);
  loading.join();
  CHECK_EQ(pins, 8);
  CHECK_EQ(report.pages, 8);
  rig.check_loaded(chain, cache, 8);
  CHECK_EQ(rig.daemon.status().pins, 0);
}

TEST(arena_is_registered_once_and_undone_before_it_is_unmapped) {
  Rig rig(5000);
  const uint64_t before = rig.model.count("registered_bytes");
  const uint64_t contexts = rig.model.count("contexts");
  {
    const auto client = rig.connect();
    start_registering(rig, *client);
    CHECK_EQ(client->registration().bytes, client->view()->arena()->bytes());
    CHECK_EQ(rig.model.count("registered_bytes"), before + client->view()->arena()->bytes());
    client->close();
    CHECK_EQ(rig.model.count("registered_bytes"), before);
  }
  {
    const auto client = rig.connect();  // without close
    start_registering(rig, *client);
  }
  CHECK_EQ(rig.model.count("registered_bytes"), before);
  CHECK_EQ(rig.model.count("violations"), 0);
  CHECK_EQ(rig.model.count("contexts"), contexts);
  for (const char* name : {"events", "modules", "device_bytes", "host_bytes"})
    CHECK_EQ(rig.model.count(name), 0);
}

// A store beside close() once registered the mapping anew, and nobody undid that.
TEST(nothing_begins_on_a_device_while_the_client_closes) {
  Rig rig(5000);
  const uint64_t contexts = rig.model.count("contexts");
  const auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, 1);
  auto cache = std::make_unique<DeviceCache>(rig.model, 1, 5000, 1000);
  const auto view = client->view();
  rig.model.set("hold_unregister", 1);
  std::thread closing([&] { client->close(); });
  while (client->has_device(0)) std::this_thread::yield();
  CHECK_THROWS(client->use_device(0, kImage), "closed");
  CHECK_THROWS(rig.store(*client, chain, *cache), "closed");
  rig.model.set("hold_unregister", 0);
  closing.join();
  cache.reset();
  CHECK_EQ(rig.model.count("registered_bytes"), 0);
  CHECK_EQ(rig.model.count("contexts"), contexts);
  // A call that had come past the client's own look.
  Gpus gpus;
  gpus.add(0, kImage);
  gpus.close();
  CHECK_THROWS(gpus.add(0, kImage), "closed");
  CHECK_THROWS(gpus.device(0), "closed");
  CHECK_THROWS(gpus.use(0, *view), "closed");
}

TEST(arena_that_cannot_be_registered_is_copied_through_pinned_memory) {
  Rig rig(30000);
  rig.model.set("register_limit", 0);
  const auto client = rig.connect();
  start_registering(rig, *client);
  CHECK_EQ(client->registration().bytes, 0);
  CHECK(client->registration().refusal.find("cuMemHostRegister") != std::string::npos);
  const Chain chain(rig.daemon.shape(), 1, 7);
  DeviceCache from(rig.model, 7, 30000, 3000), to(rig.model, 7, 30000, 30000);
  rig.fill(chain, from);
  CHECK_EQ(rig.store(*client, chain, from).stored, 7);
  CHECK_EQ(chain.load(*client, 0), 7);
  CHECK_EQ(rig.load(*client, chain, to).pages, 7);
  rig.check_loaded(chain, to, 7);
  CHECK_EQ(rig.model.count("unpinned_copies"), 0);
  rig.model.set("register_limit", UINT64_MAX);
}

TEST(read_only_client_loads_registered_or_not) {
  for (const uint64_t supported : {1, 0}) {
    Rig rig(30000);
    rig.model.set("read_only_register", supported);
    const auto writer = rig.connect();
    const Chain chain(rig.daemon.shape(), 1, 7);
    chain.store_all(*writer);
    const auto client = rig.connect(true);
    start_registering(rig, *client);
    CHECK_EQ(client->registration().bytes, supported * client->view()->arena()->bytes());
    CHECK_EQ(client->registration().refusal.empty(), supported == 1);
    DeviceCache to(rig.model, 7, 30000, 3000);
    CHECK_EQ(rig.load(*client, chain, to).pages, 7);
    rig.check_loaded(chain, to, 7);
  }
}

TEST(arena_stays_registered_when_the_next_daemon_serves_it) {
  Rig rig(30000);
  const auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, 4);
  chain.store_all(*client);
  const uint64_t registrations = rig.model.count("registrations");
  const auto before = client->view();
  for (int round = 0; round < 3; ++round) {
    rig.daemon.stop();
    rig.daemon.start();
    CHECK(client->refresh(kPatienceNs));
    CHECK(client->view() != before && client->view()->arena() == before->arena());
    DeviceCache to(rig.model, 4, 30000, 3000);
    CHECK_EQ(rig.load(*client, chain, to).pages, 4);
    rig.check_loaded(chain, to, 4);
    CHECK_EQ(client->registration().bytes, client->view()->arena()->bytes());
  }
  CHECK_EQ(rig.model.count("registrations"), registrations);
  CHECK_EQ(rig.model.count("violations"), 0);
}

// A registration is undone as slowly as it is made, whatever time the call has that finds that its
// arena is another.
TEST(registration_of_an_arena_that_is_gone_holds_up_no_call) {
  Rig rig(30000);
  const auto client = rig.connect();
  start_registering(rig, *client);
  rig.daemon.stop();
  rig.daemon.options.arena_dir += ".other";
  rig.daemon.start();
  CHECK(client->refresh(kPatienceNs));
  rig.model.set("hold_unregister", 1);
  const Chain chain(rig.daemon.shape(), 1, 4);
  DeviceCache from(rig.model, 4, 30000, 3000), to(rig.model, 4, 30000, 3000);
  rig.fill(chain, from);
  CHECK_EQ(rig.store(*client, chain, from).stored, 4);
  CHECK_EQ(rig.load(*client, chain, to).pages, 4);
  rig.check_loaded(chain, to, 4);
  rig.model.set("hold_unregister", 0);
  until_registered(*client);
  while (rig.model.count("registered_bytes") != client->view()->arena()->bytes())
    std::this_thread::yield();
  client->close();
  CHECK_EQ(rig.model.count("registered_bytes"), 0);
  CHECK_EQ(rig.model.count("violations"), 0);
}

// vLLM captures its graphs right after it has registered its caches, while the arena is being
// registered and loads are under way.
TEST(graph_that_the_engine_captures_is_not_broken_by_anything_of_ours) {
  Rig rig(30000);
  const Chain chain(rig.daemon.shape(), 1, 7);
  DeviceCache from(rig.model, 7, 30000, 3000), to(rig.model, 7, 30000, 10000);
  rig.fill(chain, from);
  const uint64_t before = rig.model.count("broken_captures");
  rig.model.set("capture", 1);
  const auto client = rig.connect();
  CHECK_EQ(rig.store(*client, chain, from).stored, 7);
  CHECK_EQ(rig.load(*client, chain, to).pages, 7);
  CHECK_EQ(gpu::device_of(from.address()), 0);
  until_registered(*client);
  CHECK_EQ(client->registration().refusal, "");
  CHECK_EQ(client->registration().bytes, client->view()->arena()->bytes());
  client->close();
  rig.model.set("capture", 0);
  CHECK_EQ(rig.model.count("broken_captures"), before);
  CHECK_EQ(rig.model.count("registered_bytes"), 0);
  rig.check_loaded(chain, to, 7);
}

TEST(arena_that_cannot_be_registered_for_now_is_registered_later) {
  for (const gpu::CUresult result :
       {gpu::kCudaCaptureUnsupported, gpu::kCudaHostMemoryAlreadyRegistered}) {
    Rig rig(30000);
    const auto client = rig.connect();
    const Chain none(rig.daemon.shape(), 999, 1);
    DeviceCache cache(rig.model, 1, 30000, 4096);
    rig.model.set("register_result", result);
    rig.load(*client, none, cache);
    const uint64_t asked = rig.model.count("registers_asked");
    while (rig.model.count("registers_asked") < asked + 20) std::this_thread::yield();
    CHECK(!client->registration().settled);
    CHECK_EQ(client->registration().refusal, "");
    rig.model.set("register_result", gpu::kCudaSuccess);
    until_registered(*client);
    CHECK_EQ(client->registration().bytes, client->view()->arena()->bytes());
  }
}

TEST(device_that_is_not_given_or_not_there_is_refused_with_what_to_do) {
  Rig rig(5000);
  Client client(rig.daemon.client_options());
  const Chain chain(rig.daemon.shape(), 1, 1);
  DeviceCache cache(rig.model, 1, 5000, 1000);
  CHECK_THROWS(rig.load(client, chain, cache), "gpu_not_ready");
  CHECK_THROWS(rig.store(client, chain, cache), "gpu_not_ready");
  CHECK_THROWS(client.use_device(7, kImage), "gpu_error");
  CHECK_THROWS(client.use_device(0, "no kernels"), "gpu_error");
  CHECK(!client.has_device(0));
  client.use_device(0, kImage);
  CHECK_EQ(rig.load(client, chain, cache).pages, 0);
}

TEST(pages_stay_pinned_when_a_lost_device_cannot_say_that_it_is_done) {
  Rig rig(60000);
  auto client = rig.connect();
  start_registering(rig, *client);
  const Chain chain(rig.daemon.shape(), 1, 4), other(rig.daemon.shape(), 2, 4);
  chain.store_all(*client);
  auto cache = std::make_unique<DeviceCache>(rig.model, 4, 60000, 6000);
  std::string loading_error, storing_error;
  const auto fail = [&](auto call, std::string& code) {
    rig.model.set("hold", 1);
    const uint64_t launches = rig.model.count("launches");
    std::thread calling([&] {
      try {
        call();
      } catch (const Error& error) {
        code = error.code();
      }
    });
    while (rig.model.count("launches") == launches) std::this_thread::yield();
    rig.model.set("lost", 1);
    calling.join();
    rig.model.set("lost", 0);
    rig.model.set("hold", 0);
  };
  fail([&] { rig.load(*client, chain, *cache); }, loading_error);
  CHECK_EQ(loading_error, "gpu_error");
  CHECK_EQ(rig.daemon.status().pins, 4);
  fail([&] { rig.store(*client, other, *cache); }, storing_error);
  CHECK_EQ(storing_error, "gpu_error");
  // Its slots are still this session's, and stay so: nothing says that nobody writes to them.
  CHECK_EQ(rig.daemon.status().reserved_slots, 4);
  CHECK_EQ(Chain(rig.daemon.shape(), 3, 1).store(*client, 0).stored, 1);  // settles what is owed
  CHECK_EQ(rig.daemon.status().reserved_slots, 4);
}

TEST(slots_of_a_store_that_failed_come_back_when_the_device_is_done) {
  Rig rig(60000);
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 4);
  DeviceCache cache(rig.model, 4, 60000, 60);
  // Device memory that is used up: the batch cannot begin.
  const gpu::Driver& cuda = gpu::driver();
  gpu::CUcontext context = nullptr;
  CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), gpu::kCudaSuccess);
  CHECK_EQ(cuda.cuCtxPushCurrent(context), gpu::kCudaSuccess);
  std::vector<gpu::CUdeviceptr> taken;
  for (size_t bytes = size_t{1} << 30; bytes >= 4096;) {
    gpu::CUdeviceptr made = 0;
    if (cuda.cuMemAlloc(&made, bytes) == gpu::kCudaSuccess)
      taken.push_back(made);
    else
      bytes /= 2;
  }
  CHECK_THROWS(rig.store(*client, chain, cache), "gpu_memory");
  for (const gpu::CUdeviceptr each : taken) cuda.cuMemFree(each);
  cuda.cuCtxPopCurrent(nullptr);
  cuda.cuDevicePrimaryCtxRelease(0);
  rig.fill(chain, cache);
  CHECK_EQ(rig.store(*client, chain, cache).stored, 4);  // settles what is owed, and is granted
  CHECK_EQ(rig.daemon.status().reserved_slots, 0);
  CHECK_EQ(chain.load(*client, 0), 4);
}

TEST(forked_child_leaves_the_driver_alone) {
  Rig rig(5000);
  auto client = rig.connect();
  start_registering(rig, *client);
  const uint64_t registered = rig.model.count("registered_bytes");
  const pid_t child = ::fork();
  if (child == 0) {
    client.reset();  // as an interpreter that ends does
    ::_exit(rig.model.count("registered_bytes") == registered && rig.model.count("modules") > 0
                ? 0
                : 1);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  const Chain chain(rig.daemon.shape(), 1, 2);
  DeviceCache cache(rig.model, 2, 5000, 1000);
  rig.fill(chain, cache);
  CHECK_EQ(rig.store(*client, chain, cache).stored, 2);
}

TEST(forked_child_does_not_wait_for_the_thread_that_registers) {
  const CudaModel model;
  std::atomic<int> looks{0};
  std::array<std::byte, 4096> slab{};
  gpu::Registrable arena;
  arena.data = slab.data();
  arena.bytes = arena.slab_bytes = slab.size();
  arena.populated = [&looks](size_t) { return ++looks < 0; };
  auto registration =
      std::make_unique<gpu::Registration>(std::make_shared<gpu::Device>(0, ""), arena);
  while (looks == 0) std::this_thread::yield();
  const timespec moment{0, 10'000'000};  // until it rests; what follows is true of any moment
  ::nanosleep(&moment, nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    registration.reset();
    ::_exit(0);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(calls_of_several_threads_share_the_movers) {
  Rig rig(40000, 64 * kMiB);
  const auto client = rig.connect();
  constexpr int kThreads = 7;  // more than there are movers
  std::vector<std::string> failures(kThreads);
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number)
    threads.emplace_back([&, number] {
      try {
        const Chain chain(rig.daemon.shape(), 10 + number, 12);
        DeviceCache from(rig.model, 12, 40000, 4000), to(rig.model, 12, 40000, 8000);
        rig.fill(chain, from);
        if (rig.store(*client, chain, from).stored != 12) failures[number] = "stored too few";
        if (rig.load(*client, chain, to).pages != 12) failures[number] = "loaded too few";
        for (size_t page = 0; page < 12; ++page)
          if (to.page(page) != rig.bytes(chain, page)) failures[number] = "wrong bytes";
      } catch (const std::exception& error) {
        failures[number] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) CHECK_EQ(failure, "");
  CHECK_EQ(rig.model.count("violations"), 0);
}

// The last one: what it leaves registered stays so in the model.
TEST(client_that_stops_registering_undoes_nothing_and_begins_nothing) {
  Rig rig(5000);
  auto client = rig.connect();
  start_registering(rig, *client);
  const uint64_t registered = rig.model.count("registered_bytes");
  const uint64_t undone = rig.model.count("unregisters_asked");
  CHECK(client->stop_registering(60 * kSecondNs));
  const Chain chain(rig.daemon.shape(), 1, 1);
  DeviceCache cache(rig.model, 1, 5000, 1000);
  CHECK_THROWS(rig.store(*client, chain, cache), "closed");
  client.reset();
  CHECK_EQ(rig.model.count("registered_bytes"), registered);
  CHECK_EQ(rig.model.count("unregisters_asked"), undone);
}

}  // namespace
}  // namespace kvw
