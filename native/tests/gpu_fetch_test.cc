// Loads into the memory of a GPU of what only the remote store has.
#include "tests/gpu_world.h"
#include "tests/remote_field.h"

namespace kvw {
namespace {

LoadReport load(RemoteField& field, const Chain& chain, const DeviceCache& to) {
  field.client->use_device(0, kImage);
  Prompt prompt = chain.prompt();
  return field.client->load(kSpace, prompt, 0, to, 0, kPatienceNs);
}

void check_loaded(const Chain& chain, const DeviceCache& cache, size_t pages) {
  for (size_t page = 0; page < pages; ++page)
    CHECK(cache.page(page) == bytes_of(chain.pages[page].key, 0, kShard));
}

TEST(load_into_a_device_brings_what_the_store_has_and_counts_it) {
  CudaModel model;
  RemoteField field;
  const Chain chain(field.daemon.shape(), 1, 6 * kRun + 4);
  field.put(chain);
  const Chain begun(field.daemon.shape(), 1, kRun + 3);
  begun.store_all(*field.client);
  const DeviceCache cache(model, chain.pages.size(), kShard, 4096);
  const LoadReport report = load(field, chain, cache);
  CHECK_EQ(report.pages, 6 * kRun);
  CHECK_EQ(report.reasons.at("missing"), 4);
  CHECK_EQ(field.counted(Counter::pages_loaded_remote), 5 * kRun - 3);
  check_loaded(chain, cache, report.pages);
  CHECK_EQ(field.daemon.status().pins, 0);
}

TEST(load_into_a_device_ends_where_a_get_does_with_its_reason) {
  CudaModel model;
  RemoteField field;
  const Chain chain(field.daemon.shape(), 1, 3 * kRun);
  field.put(chain);
  const auto answers = field.answers([&](const RunToGet& run) {
    return run.first_position == kRun ? GetEnd::damaged : field.fill(run);
  });
  const DeviceCache cache(model, chain.pages.size(), kShard, 4096);
  const LoadReport report = load(field, chain, cache);
  CHECK_EQ(report.pages, kRun);
  CHECK_EQ(report.reasons.at("remote_damaged"), 2 * kRun);
  check_loaded(chain, cache, report.pages);
  CHECK_EQ(field.daemon.status().pins, 0);
}

}  // namespace
}  // namespace kvw
