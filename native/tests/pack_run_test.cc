// Objects of pages that a real daemon has: a reader of the object finds them as they were stored,
// and a page that is not in DRAM, damaged or cleared makes none.
#include "client/pack_run.h"

#include "nvme/aligned_buffer.h"
#include "tests/check.h"
#include "tests/daemon_world.h"

using namespace kvw;

namespace {

const Key kFleet{11, 13};
constexpr uint32_t kPages = 4;  // of a run

NamespaceShape shape_of_runs(uint32_t shards) {
  NamespaceShape shape = shape_of(5000, shards);
  shape.page_tokens = remote::kObjectTokens / kPages;
  return shape;
}

struct Scene {
  explicit Scene(uint32_t shards = 3)
      : daemon(shape_of_runs(shards)), chain(daemon.shape(), 1, 2 * kPages) {
    daemon.start();
    client = std::make_unique<Client>(daemon.client_options());
    chain.store_all(*client);
  }
  // The second run of the chain.
  remote::RunToPut run() const {
    remote::RunToPut run;
    run.namespace_id = daemon.shape().id;
    run.key = chain.pages.back().key;
    run.first_position = kPages;
    run.pages = kPages;
    run.record_bytes =
        remote::record_blocks(daemon.shape(), WitnessKind::tokens) * uint64_t{kBlockBytes};
    return run;
  }
  remote::ObjectSpec spec(const remote::RunToPut& run, WitnessKind kind) const {
    return {kFleet,
            Secret(daemon.options.secret.data(), kSecretBytes),
            daemon.shape(),
            kind,
            run.epoch,
            run.key,
            run.first_position,
            run.pages};
  }
  std::string reason(const remote::RunToPut& run) { return client->pack_run(run, kFleet).reason; }
  std::string reason() { return reason(run()); }
  // In the slot of a page.
  template <class Change>
  void change(size_t page, Change change) {
    daemon.call([&, key = chain.pages[page].key](Warehouse& w) {
      const auto entry = w.arena().index().find(key);
      const Slots& slots = w.arena().slots();
      const SlabLayout layout = slots.layout(slots.slab_of(entry->slot));
      change(slots.meta(entry->slot, layout), w.arena().payload(entry->slot, layout));
      return 0;
    });
  }
  void until_quarantined() {
    while (daemon.status().quarantined != 1) std::this_thread::yield();
  }

  Daemon daemon;
  Chain chain;
  std::unique_ptr<Client> client;
};

}  // namespace

TEST(object_has_the_pages_that_were_stored) {
  for (const uint32_t shards : {1u, 3u}) {
    Scene scene(shards);
    const remote::RunToPut run = scene.run();
    const PackedRun packed = scene.client->pack_run(run, kFleet);
    CHECK_EQ(packed.reason, "");
    CHECK_EQ(packed.object->bytes(), run.bytes());
    const auto read = read_object(scene.spec(run, WitnessKind::tokens), 0, packed.object->span());
    CHECK(read.fault == remote::ObjectFault::none);
    CHECK_EQ(read.pages.size(), kPages);
    const uint64_t stride = scene.daemon.shape().shard_stride();
    nvme::AlignedBuffer payload(scene.daemon.shape().slot_bytes());
    for (uint32_t page = 0; page < kPages; ++page) {
      const TestPage& stored = scene.chain.pages[kPages + page];
      CHECK(read.pages[page].facts.key == stored.key);
      CHECK(copy_payload(read.pages[page], payload.data()));
      for (uint32_t shard = 0; shard < shards; ++shard) {
        const auto bytes = bytes_of(stored.key, shard, 5000);
        CHECK(std::memcmp(payload.data() + shard * stride, bytes.data(), bytes.size()) == 0);
      }
    }
  }
}

TEST(object_has_pages_of_an_engines_keys) {
  Scene scene(1);
  std::vector<std::vector<std::byte>> hashes;
  std::vector<std::span<const std::byte>> keys;
  for (uint32_t page = 0; page < kPages; ++page)
    hashes.emplace_back(32, std::byte{static_cast<unsigned char>(page + 1)});
  for (const auto& hash : hashes) keys.emplace_back(hash);
  Prompt prompt = Prompt::of_keys(keys);
  const Rows rows(kPages, 5000);
  CHECK_EQ(scene.client
               ->store(scene.daemon.shape().id, prompt, 0, rows, 0,
                       uint64_t{kPatienceMs} * kMillisecondNs)
               .stored,
           kPages);
  remote::RunToPut run = scene.run();
  run.first_position = 0;
  run.key = prompt.key(kPages - 1);
  const PackedRun packed = scene.client->pack_run(run, kFleet);
  CHECK_EQ(packed.reason, "");
  const auto read = read_object(scene.spec(run, WitnessKind::engine_key), 0, packed.object->span());
  CHECK(read.fault == remote::ObjectFault::none);
  CHECK_EQ(read.pages.size(), kPages);
}

TEST(object_has_nothing_of_the_one_that_lay_in_its_memory_before) {
  Scene scene;
  const PackedRun fresh = scene.client->pack_run(scene.run(), kFleet);
  Client other(scene.daemon.client_options());
  {
    const PackedRun before = other.pack_run(scene.run(), kFleet);
    std::memset(before.object->data(), 0xee, before.object->bytes());
  }
  const PackedRun packed = other.pack_run(scene.run(), kFleet);
  CHECK(std::ranges::equal(packed.object->span(), fresh.object->span()));
}

// Whoever puts it may outlive the client.
TEST(object_outlives_its_client) {
  Scene scene;
  const remote::RunToPut run = scene.run();
  const PackedRun packed = scene.client->pack_run(run, kFleet);
  scene.client.reset();
  const auto read = read_object(scene.spec(run, WitnessKind::tokens), 0, packed.object->span());
  CHECK(read.fault == remote::ObjectFault::none);
}

TEST(memory_of_an_object_is_the_next_ones) {
  constexpr size_t kBytes = 64 * kBlockBytes;
  const auto memory = std::make_shared<ObjectMemory>();
  const auto mark = [&] { return memory->lend(kBytes)->data()[kBytes - 1]; };
  CHECK(mark() == std::byte{0});
  memory->lend(kBytes)->data()[kBytes - 1] = std::byte{7};
  CHECK_EQ(memory->kept_bytes(), kBytes);
  CHECK(memory->lend(kBytes + kBlockBytes)->data()[kBytes - 1] == std::byte{0});  // of another size
  CHECK(mark() == std::byte{7});
  const auto lent = memory->lend(kBytes);
  CHECK(mark() == std::byte{0});  // it is somebody's
}

TEST(memory_that_is_kept_is_bounded) {
  const auto memory = std::make_shared<ObjectMemory>();
  const auto lend_at_once = [&](size_t bytes, size_t count) {
    std::vector<std::shared_ptr<nvme::AlignedBuffer>> lent;
    for (size_t i = 0; i < count; ++i) lent.push_back(memory->lend(bytes));
  };
  lend_at_once(ObjectMemory::kKeptBytes / 4, 6);
  CHECK_EQ(memory->kept_bytes(), ObjectMemory::kKeptBytes);
  memory->lend(ObjectMemory::kKeptBytes + kBlockBytes);  // larger than all that is kept
  CHECK_EQ(memory->kept_bytes(), ObjectMemory::kKeptBytes);
  lend_at_once(kBlockBytes, 2 * ObjectMemory::kKept);  // the older ones go
  CHECK_EQ(memory->kept_bytes(), ObjectMemory::kKept * kBlockBytes);
}

TEST(nothing_stays_pinned_and_packing_is_no_use) {
  Scene scene;
  const auto before = scene.daemon.call([](Warehouse& w) { return w.miss_ratio(-1).curve.uses; });
  for (int i = 0; i < 3; ++i) CHECK_EQ(scene.reason(), "");
  scene.daemon.tick();
  CHECK_EQ(scene.daemon.status().pins, 0);
  CHECK_EQ(scene.daemon.call([](Warehouse& w) { return w.miss_ratio(-1).curve.uses; }), before);
}

TEST(page_that_is_not_in_dram_makes_no_object) {
  Scene scene;
  remote::RunToPut run = scene.run();
  run.key.lo ^= 1;
  CHECK_EQ(scene.reason(run), "not_in_dram");
  scene.daemon.call([](Warehouse& w) {
    uint64_t left = 0;
    w.evict(-1, 1, "all", left);
    CHECK_EQ(left, 1);
    return 0;
  });
  CHECK_EQ(scene.reason(), "not_in_dram");
  scene.daemon.tick();
  CHECK_EQ(scene.daemon.status().pins, 0);
}

TEST(page_whose_bytes_changed_makes_no_object_and_is_taken_out) {
  for (const size_t page : {size_t{kPages}, size_t{2 * kPages - 1}}) {
    Scene scene;
    scene.change(page, [&](SlotMeta*, std::byte* payload) {
      payload[2 * scene.daemon.shape().shard_stride() + 4999] ^= std::byte{1};
    });
    CHECK_EQ(scene.reason(), "damaged");
    scene.until_quarantined();
    CHECK_EQ(scene.reason(), "not_in_dram");
  }
}

TEST(page_whose_header_changed_makes_no_object_and_is_taken_out) {
  Scene scene;
  scene.change(kPages + 1, [](SlotMeta* meta, std::byte*) { meta->parent.hi ^= 1; });
  CHECK_EQ(scene.reason(), "damaged");
  scene.until_quarantined();
}

TEST(header_with_any_field_changed_makes_no_object) {
  auto random = check::random("header_with_any_field_changed_makes_no_object");
  for (uint64_t round = 0; round < check::rounds(30); ++round) {
    Scene fresh(1);
    fresh.change(kPages + random() % kPages, [&](SlotMeta* meta, std::byte*) {
      auto* bytes = reinterpret_cast<std::byte*>(meta);
      const size_t fixed = offsetof(SlotMeta, granted);
      bytes[random() % fixed] ^= static_cast<std::byte>(1u << random() % 8);
    });
    CHECK_EQ(fresh.reason(), "damaged");
  }
}

TEST(pages_that_were_cleared_make_no_object) {
  Scene scene;
  scene.daemon.call([](Warehouse& w) {
    w.begin_clear(0, 5);
    return 0;
  });
  CHECK_EQ(scene.reason(), "cleared");
}

TEST(run_that_is_none_of_the_namespace_makes_no_object) {
  Scene scene;
  remote::RunToPut run = scene.run();
  run.namespace_id.lo ^= 1;
  CHECK_EQ(scene.reason(run), "unknown_namespace");
  run = scene.run();
  run.pages = 2;
  CHECK_EQ(scene.reason(run), "shape");
  run = scene.run();
  run.first_position += kPages;
  CHECK_EQ(scene.reason(run), "shape");
}

// Pages of a run are bound to what a process may pin, as all pins are.
TEST(process_that_may_pin_no_more_makes_no_object) {
  Scene scene;
  const uint64_t all = scene.daemon.status().dram_capacity_bytes;
  CHECK(scene.client->session()->pinned_bytes().take(all, all));
  CHECK_EQ(scene.reason(), "pin_budget");
  scene.client->session()->pinned_bytes().give_back(all);
  CHECK_EQ(scene.reason(), "");
}
