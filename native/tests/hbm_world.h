// A real daemon core with an HBM tier on the contract model's device, and clients that load from
// it.
#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include "tests/daemon_world.h"
#include "tests/device_cache.h"

namespace kvw {

// Any text that names the kernels is an image to the model.
inline constexpr const char* kKernelImage = "kvw_gather kvw_scatter";

struct HbmRig {
  static constexpr uint64_t kPatience = uint64_t{kPatienceMs} * kMillisecondNs;

  HbmRig(NamespaceShape shape, uint64_t hbm_bytes, uint64_t dram_bytes = 32 * kMiB)
      : daemon(shape, dram_bytes) {
    daemon.options.hbm.bytes = hbm_bytes;
    daemon.options.hbm.retry_ns = 10 * kMillisecondNs;
    daemon.options.hbm_at_first_use = true;
    daemon.options.grace_ns = 50 * kMillisecondNs;
  }
  void start() {
    daemon.start();
    until([this] { return status().health == "ok"; });
  }
  std::unique_ptr<Client> connect(int ordinal = 0, bool read_only = false) {
    ClientOptions options = daemon.client_options();
    options.read_only = read_only;
    auto client = std::make_unique<Client>(options);
    client->use_device(ordinal, kKernelImage);
    return client;
  }
  HbmStatus status() { return daemon.status().hbm; }
  // Waits for it, and returns false where it does not come true.
  template <class Condition>
  bool became(Condition condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
    while (!condition()) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
  // Ends the test where it does not come true.
  template <class Condition>
  void until(Condition condition) {
    CHECK(became(condition));
  }
  // What was used is in HBM, as far as it will be.
  void settle() {
    daemon.tick();
    until([this] { return status().queued == 0; });
  }
  LoadReport load(Client& client, const Chain& chain, const Regions& to, uint32_t shard = 0) {
    Prompt prompt = chain.prompt();
    return client.load(chain.shape.id, prompt, 0, to, shard, kPatience);
  }
  // All pages of the chain, compared; how many of them came from HBM.
  uint64_t check_load(Client& client, const Chain& chain, size_t piece_bytes, uint32_t shard = 0) {
    DeviceCache cache(model, chain.pages.size(), chain.shape.shard_bytes, piece_bytes);
    const uint64_t before = from_hbm(client);
    CHECK_EQ(load(client, chain, cache, shard).pages, chain.pages.size());
    check(chain, cache, shard);
    CHECK(cache.gaps_hold());
    return from_hbm(client) - before;
  }
  // A new chain of so many pages, stored and used again: in HBM, as far as it will be.
  Chain promoted(Client& client, uint64_t number, uint32_t pages, size_t piece_bytes) {
    Chain chain(daemon.shape(), number, pages);
    chain.store_all(client);
    check_load(client, chain, piece_bytes);
    settle();
    return chain;
  }
  static void check(const Chain& chain, const DeviceCache& cache, uint32_t shard = 0) {
    for (size_t page = 0; page < chain.pages.size(); ++page)
      CHECK(cache.page(page) == bytes_of(chain.pages[page].key, shard, chain.shape.shard_bytes));
  }
  static uint64_t from_hbm(Client& client) {
    return client.session()->counter(Counter::pages_loaded_hbm);
  }
  // How many pages of the chain are in HBM; they are its first.
  uint64_t prefix(const Chain& chain) {
    const std::vector<bool> there = daemon.call([&](Warehouse& w) {
      std::vector<bool> found;
      for (const TestPage& page : chain.pages) {
        const auto entry = w.arena().index().find(page.key);
        found.push_back(entry && entry->in_dram() && w.hbm()->has(entry->slot));
      }
      return found;
    });
    uint64_t pages = 0;
    while (pages < there.size() && there[pages]) ++pages;
    for (uint64_t page = pages; page < there.size(); ++page) CHECK(!there[page]);
    return pages;
  }
  // Where a page's copy is, in the pool.
  uint64_t address(const TestPage& page) {
    return daemon.call([&](Warehouse& w) {
      return w.hbm()->pool_address() +
             w.hbm()->offset_of(w.arena().index().find(page.key)->slot).value();
    });
  }
  uint64_t evict(const char* tier) {
    return daemon.call([&](Warehouse& w) {
      uint64_t left = 0;
      w.evict(-1, UINT64_MAX, tier, left);
      return left;
    });
  }

  CudaModel model;
  Daemon daemon;
};

}  // namespace kvw
