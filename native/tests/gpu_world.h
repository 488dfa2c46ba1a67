// A real daemon core, clients of it that load and store pages in the memory of a GPU, and the
// contract model of the driver under them.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "client/client.h"
#include "tests/check.h"
#include "tests/daemon_world.h"
#include "tests/device_cache.h"

namespace kvw {

// Any text that names the kernels is an image to the model.
inline constexpr const char* kImage = "kvw_gather kvw_scatter";
inline constexpr uint64_t kPatienceNs = uint64_t{kPatienceMs} * kMillisecondNs;

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

inline void until_registered(Client& client) {
  while (!client.registration().settled) std::this_thread::yield();
}

// The first use of a view begins to register it.
inline void start_registering(Rig& rig, Client& client) {
  const Chain none(rig.daemon.shape(), 999, 1);
  DeviceCache cache(rig.model, 1, rig.daemon.shape().shard_bytes, 4096);
  CHECK_EQ(rig.load(client, none, cache).pages, 0);
  until_registered(client);
}

}  // namespace kvw
