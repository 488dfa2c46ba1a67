// Loads and stores of pages in the memory of a GPU, against a real daemon core and the contract
// model of the driver: what is handed out is what was stored, and when it is moved.
#include <atomic>
#include <thread>

#include "tests/gpu_world.h"

namespace kvw {
namespace {

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
  check::Thread loading([&] { CHECK_EQ(rig.load(*client, chain, to).pages, 300); });
  while (rig.model.count("launches") < launches + 2) std::this_thread::yield();
  const uint64_t deadline = system_clock().boot_ns() + kPatienceNs / 2;
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

// An engine serves by then, and allocating waits for its step.
TEST(first_load_allocates_nothing_once_the_client_has_the_device) {
  Rig rig(5000);
  rig.model.set("register_limit", 0);  // so that all go through pinned memory as well
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 20);
  chain.store_all(*client);
  const DeviceCache cache(rig.model, 20, 5000, 512);
  const uint64_t allocations = rig.model.count("allocations");
  CHECK_EQ(rig.load(*client, chain, cache).pages, 20);
  CHECK_EQ(rig.model.count("allocations"), allocations);
}

TEST(client_has_the_device_also_where_there_is_no_memory_yet) {
  Rig rig(5000);
  rig.model.set("alloc_limit", 1 << 20);
  const auto client = rig.connect();
  rig.model.set("alloc_limit", UINT64_MAX);
  const Chain chain(rig.daemon.shape(), 1, 20);
  chain.store_all(*client);
  const DeviceCache cache(rig.model, 20, 5000, 512);
  CHECK_EQ(rig.load(*client, chain, cache).pages, 20);
  rig.check_loaded(chain, cache, 20);
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
    w.arena().payload(entry->slot, w.arena().slots().layout(0))[69999] ^= std::byte{1};
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

TEST(pages_go_in_few_calls_where_the_driver_takes_many_and_one_by_one_where_not) {
  for (const gpu::CUresult result : {gpu::kCudaSuccess, gpu::kCudaNotSupported}) {
    Rig rig(30000);
    const auto client = rig.connect();
    start_registering(rig, *client);
    rig.model.set("batch_result", result);
    const Chain chain(rig.daemon.shape(), 1, 150);
    DeviceCache from(rig.model, 150, 30000, 3000), to(rig.model, 150, 30000, 30000);
    rig.fill(chain, from);
    const uint64_t batches = rig.model.count("batches");
    CHECK_EQ(rig.store(*client, chain, from).stored, 150);
    CHECK_EQ(chain.load(*client, 0), 150);
    CHECK_EQ(rig.load(*client, chain, to).pages, 150);
    rig.check_loaded(chain, to, 150);
    const uint64_t calls = rig.model.count("batches") - batches;
    if (result == gpu::kCudaSuccess)
      CHECK(calls >= 4 && calls <= 75);  // of 300 copies: 64 at most, or those of a store's window
    else
      CHECK_EQ(calls, 0);
    CHECK_EQ(rig.model.count("unpinned_copies"), 0);
  }
}

TEST(read_only_client_loads_registered_or_not) {
  for (const char* by : {"read_only_register", "host_page_tables", ""}) {
    const bool supported = *by != 0;
    Rig rig(30000);
    if (supported) rig.model.set(by, 1);
    const auto writer = rig.connect();
    const Chain chain(rig.daemon.shape(), 1, 7);
    chain.store_all(*writer);
    const auto client = rig.connect(true);
    start_registering(rig, *client);
    CHECK_EQ(client->registration().bytes, supported ? client->view()->arena()->bytes() : 0);
    CHECK_EQ(client->registration().refusal.empty(), supported);
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

// Streams and events are made by the driver, which may wait for the device, and so for the engine.
TEST(load_gets_the_mover_that_is_idle_while_another_is_being_made) {
  Rig rig(5000);
  const auto client = rig.connect();
  const Chain chain(rig.daemon.shape(), 1, 2);
  chain.store_all(*client);
  DeviceCache first(rig.model, 2, 5000, 1000), second(rig.model, 2, 5000, 1000),
      third(rig.model, 2, 5000, 1000);
  uint64_t pages = 0, others = 0;
  const uint64_t launches = rig.model.count("launches");
  rig.model.set("hold", 1);
  std::thread lending([&] { others += rig.load(*client, chain, first).pages; });
  while (rig.model.count("launches") == launches) std::this_thread::yield();
  const uint64_t asked = rig.model.count("streams_asked");
  rig.model.set("hold_stream_create", 1);
  std::thread making([&] { pages = rig.load(*client, chain, second).pages; });
  while (rig.model.count("streams_asked") == asked) std::this_thread::yield();
  rig.model.set("hold", 0);
  std::atomic<bool> ended{false};
  std::thread loading([&] {
    lending.join();  // its mover is back
    others += rig.load(*client, chain, third).pages;
    ended = true;
  });
  const uint64_t deadline = system_clock().boot_ns() + kPatienceNs / 2;
  while (!ended && system_clock().boot_ns() < deadline) std::this_thread::yield();
  const bool beside = ended;
  rig.model.set("hold_stream_create", 0);
  loading.join();
  making.join();
  CHECK(beside);
  CHECK_EQ(others, 4);
  CHECK_EQ(pages, 2);
  rig.check_loaded(chain, second, 2);
  rig.check_loaded(chain, third, 2);
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

}  // namespace
}  // namespace kvw
