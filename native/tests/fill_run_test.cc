// Objects of the remote tier become pages of a real daemon: those that a reader would have from the
// engine that stored them, or none. Nothing that was reserved for them stays.
#include "client/fill_run.h"

#include <atomic>
#include <thread>

#include "digest/digest.h"
#include "nvme/aligned_buffer.h"
#include "tests/check.h"
#include "tests/daemon_world.h"

using namespace kvw;

namespace {

using remote::GetEnd;
using remote::ObjectFault;

const Key kFleet{11, 13};
constexpr uint32_t kPages = 4;  // of a run
constexpr uint64_t kLong = uint64_t{kPatienceMs} * kMillisecondNs;
constexpr uint64_t kShort = 20 * kMillisecondNs;  // of a fill that is meant to run out of time

NamespaceShape shape_of_runs(uint32_t shards, uint64_t shard_bytes = 5000) {
  NamespaceShape shape = shape_of(shard_bytes, shards);
  shape.page_tokens = remote::kObjectTokens / kPages;
  return shape;
}

// The object that another host has made of a run of these pages.
nvme::AlignedBuffer object_of(const NamespaceShape& shape, std::span<const TestPage> pages) {
  const std::vector<std::byte> secret = test_secret();
  std::vector<nvme::AlignedBuffer> payloads;
  std::vector<remote::ObjectPage> packed;
  for (const TestPage& page : pages) {
    remote::ObjectPage& made = packed.emplace_back();
    made.facts.key = page.key;
    made.facts.parent = page.parent;
    made.facts.namespace_id = shape.id;
    made.facts.position = page.position;
    made.facts.shards = shape.shards;
    made.facts.page_tokens = shape.page_tokens;
    made.facts.shard_bytes = shape.shard_bytes;
    made.facts.witness.assign(page.witness().begin(), page.witness().end());
    nvme::AlignedBuffer& payload = payloads.emplace_back(shape.slot_bytes());
    for (uint32_t shard = 0; shard < shape.shards; ++shard) {
      const auto bytes = bytes_of(page.key, shard, shape.shard_bytes);
      std::memcpy(payload.data() + shard * shape.shard_stride(), bytes.data(), bytes.size());
      made.facts.digests.push_back(page_digest(bytes.data(), bytes.size(), page.key, shard));
    }
    made.payload = payload.data();
  }
  const remote::ObjectSpec spec{kFleet,
                                Secret(secret.data(), kSecretBytes),
                                shape,
                                WitnessKind::tokens,
                                0,
                                pages.back().key,
                                pages.front().position,
                                static_cast<uint32_t>(pages.size())};
  nvme::AlignedBuffer object(spec.bytes());
  const remote::ObjectPacked made = pack_object(spec, packed, object.span());
  CHECK(made.fault == ObjectFault::none);
  return object;
}

struct Scene {
  explicit Scene(uint32_t shards = 3, uint64_t shard_bytes = 5000, uint64_t dram_bytes = 8 * kMiB)
      : daemon(shape_of_runs(shards, shard_bytes), dram_bytes),
        chain(daemon.shape(), 1, 2 * kPages) {
    daemon.start();
    client = std::make_unique<Client>(daemon.client_options());
    for (uint32_t run = 0; run < 2; ++run) objects.push_back(object_of(daemon.shape(), pages(run)));
  }
  std::span<const TestPage> pages(uint32_t run) const {
    return std::span(chain.pages).subspan(size_t{run} * kPages, kPages);
  }
  remote::RunToGet run(uint32_t number = 0, uint32_t from = 0) const {
    remote::RunToGet run;
    run.namespace_id = daemon.shape().id;
    run.key = pages(number).back().key;
    run.first_position = number * kPages;
    run.pages = kPages;
    run.from = from;
    run.record_bytes =
        remote::record_blocks(daemon.shape(), WitnessKind::tokens) * uint64_t{kBlockBytes};
    return run;
  }
  std::span<const std::byte> body(uint32_t number = 0, uint32_t from = 0) {
    return objects[number].span().subspan(run(number).record_bytes * from);
  }
  FilledRun fill(const remote::RunToGet& run, std::span<const std::byte> body,
                 uint64_t within_ns = kLong) {
    return client->fill_run(run, body, kFleet, within_ns);
  }
  FilledRun fill(uint32_t number = 0, uint32_t from = 0) {
    return fill(run(number, from), body(number, from));
  }
  // One that runs out of time, once the daemon has said what it waits for: on a busy machine that
  // comes later than kShort.
  FilledRun fill_late() {
    const uint64_t until_ns = now_ns() + kLong;
    for (uint64_t within_ns = kShort;; within_ns = std::min(2 * within_ns, kLong)) {
      const FilledRun filled = fill(run(), body(), within_ns);
      CHECK(filled.end == GetEnd::late);
      if (filled.fault != "timeout" && filled.fault != "unreachable") return filled;
      CHECK(now_ns() < until_ns);
    }
  }
  void check_pages(uint64_t pages) {
    for (uint32_t shard = 0; shard < daemon.shape().shards; ++shard)
      CHECK_EQ(chain.load(*client, shard), pages);
  }
  void check_nothing_left() {
    const WarehouseStatus status = daemon.status();
    CHECK_EQ(status.reserved_slots + status.limbo_slots, 0);
  }

  Daemon daemon;
  Chain chain;
  std::unique_ptr<Client> client;
  std::vector<nvme::AlignedBuffer> objects;
};

void check_end(const FilledRun& filled, GetEnd end, uint32_t pages, const std::string& fault) {
  CHECK(filled.end == end);
  CHECK_EQ(filled.pages, pages);
  CHECK_EQ(filled.fault, fault);
}

// Another session, which has reserved shards of pages and does not seal them.
struct OtherWriter {
  explicit OtherWriter(Daemon& of) : daemon(of), client(of.client_options()) {}

  bool reserve(const TestPage& page, uint32_t shard = 0) {
    const Reserve fields{page.key,
                         page.parent,
                         page.position,
                         shard,
                         static_cast<uint32_t>(WitnessKind::tokens),
                         static_cast<uint32_t>(page.witness().size())};
    const ReserveAnswer answer = daemon.call([&](Warehouse& w) {
      const std::array<ReserveRequest, 1> requests{{{&fields, page.witness().data()}}};
      std::vector<SealAnswer> sealed;
      std::vector<ReserveAnswer> answers;
      w.exchange(client.session_id(), daemon.shape().id, {}, requests, sealed, answers);
      return answers.at(0);
    });
    if (answer.answer == Answer::granted) held.push_back({answer.generation, answer.slot, shard});
    return answer.answer == Answer::granted;
  }
  void settle() {
    daemon.call([&](Warehouse& w) {
      w.settle(client.session_id(), held);
      return 0;
    });
  }

  Daemon& daemon;
  Client client;
  std::vector<SlotRef> held;
};

}  // namespace

TEST(pages_of_an_object_are_loaded_as_they_were_stored) {
  for (const uint32_t shards : {1u, 3u}) {
    Scene scene(shards);
    for (uint32_t run = 0; run < 2; ++run) {
      check_end(scene.fill(run), GetEnd::filled, kPages, "");
      scene.check_pages((run + 1) * kPages);
    }
    scene.check_nothing_left();
  }
}

TEST(records_from_a_page_on_are_pages_too) {
  Scene scene;
  check_end(scene.fill(), GetEnd::filled, kPages, "");
  scene.daemon.call([&](Warehouse& w) {
    uint64_t left = 0;
    w.evict(-1, 2, "all", left);
    return 0;
  });
  const uint64_t there = scene.chain.found(*scene.client);
  CHECK(there >= 1 && there < kPages);
  const auto from = static_cast<uint32_t>(there);
  check_end(scene.fill(0, from), GetEnd::filled, kPages - from, "");
  scene.check_pages(kPages);
}

TEST(pages_that_are_there_are_filled_already) {
  Scene scene;
  scene.chain.store_all(*scene.client);
  const uint64_t sealed = scene.daemon.status().pages_sealed;
  check_end(scene.fill(1), GetEnd::filled, kPages, "");
  CHECK_EQ(scene.daemon.status().pages_sealed, sealed);
}

TEST(object_without_the_page_before_it_begins_nothing_and_says_which) {
  Scene scene;
  const FilledRun filled = scene.fill(1);
  check_end(filled, GetEnd::no_room, 0, "parent_missing");
  CHECK(filled.parent == scene.pages(0).back().key);
  scene.check_nothing_left();
  check_end(scene.fill(0), GetEnd::filled, kPages, "");
  check_end(scene.fill(1), GetEnd::filled, kPages, "");
  scene.check_pages(2 * kPages);
}

TEST(page_whose_bytes_changed_ends_the_run_and_those_before_it_stay) {
  for (uint32_t page = 0; page < kPages; ++page) {
    Scene scene;
    const uint64_t record = scene.run().record_bytes;
    // In the last shard.
    scene.objects[0].data()[(page + 1) * record - kBlockBytes + 1] ^= std::byte{1};
    check_end(scene.fill(), GetEnd::damaged, page, "digest");
    scene.check_pages(page);
    scene.check_nothing_left();
  }
}

TEST(any_damage_costs_pages_and_never_gives_a_wrong_byte) {
  auto random = check::random("any_damage_costs_pages_and_never_gives_a_wrong_byte");
  for (uint64_t round = 0; round < check::rounds(60); ++round) {
    Scene scene(2, 5000);
    const auto bytes = scene.objects[0].span();
    std::byte& changed = bytes[random() % bytes.size()];
    changed ^= static_cast<std::byte>(1u << random() % 8);
    const FilledRun filled = scene.fill();
    CHECK(filled.end == (filled.pages == kPages ? GetEnd::filled : GetEnd::damaged));
    CHECK_EQ(filled.fault.empty(), filled.pages == kPages);
    scene.check_pages(filled.pages);
    scene.check_nothing_left();
  }
}

TEST(object_that_is_not_the_one_that_was_asked_for_stores_nothing) {
  Scene scene;
  const auto body = scene.body();
  const auto fault = [&](auto change) {
    remote::RunToGet run = scene.run();
    change(run);
    const FilledRun filled = scene.fill(run, body);
    CHECK(filled.end == GetEnd::damaged);
    CHECK_EQ(filled.pages, 0);
    return filled.fault;
  };
  CHECK_EQ(fault([](remote::RunToGet& run) { run.epoch = 1; }), "epoch");
  CHECK_EQ(fault([](remote::RunToGet& run) { run.key.lo ^= 1; }), "chain");
  CHECK_EQ(fault([](remote::RunToGet& run) { run.pages = 2; }), "shape");
  CHECK_EQ(fault([](remote::RunToGet& run) { run.from = kPages; }), "size");
  CHECK_EQ(fault([](remote::RunToGet& run) { run.from = 1; }), "size");
  CHECK_EQ(scene.fill(scene.run(), body.first(body.size() - 1)).fault, "size");
  CHECK_EQ(scene.client->fill_run(scene.run(), body, Key{1, 2}, kLong).fault, "place");
  CHECK_EQ(scene.fill(scene.run(), scene.body(1)).fault, "shape");
  remote::RunToGet run = scene.run();
  run.namespace_id.lo ^= 1;
  check_end(scene.fill(run, body), GetEnd::cleared, 0, "unknown_namespace");
  scene.check_pages(0);
  scene.check_nothing_left();
}

TEST(what_is_older_than_a_clear_is_dropped) {
  Scene scene;
  scene.daemon.call([](Warehouse& w) {
    w.begin_clear(0, 5);
    return 0;
  });
  check_end(scene.fill(), GetEnd::cleared, 0, "cleared");
  remote::RunToGet run = scene.run();
  run.clear_epoch = 5;
  check_end(scene.fill(run, scene.body()), GetEnd::filled, kPages, "");
  scene.check_nothing_left();
}

TEST(shard_that_an_engine_has_stored_is_left_as_it_is) {
  Scene scene;
  scene.chain.store(*scene.client, 1);
  check_end(scene.fill(0), GetEnd::filled, kPages, "");
  check_end(scene.fill(1), GetEnd::filled, kPages, "");
  scene.check_pages(2 * kPages);
}

TEST(page_that_another_is_writing_is_waited_for) {
  for (const uint32_t shard : {0u, 2u}) {
    Scene scene;
    OtherWriter writer(scene.daemon);
    CHECK(writer.reserve(scene.chain.pages[0], shard));
    check_end(scene.fill_late(), GetEnd::late, 0, "busy");
    FilledRun filled;
    std::thread waits([&] { filled = scene.fill(); });
    writer.settle();
    waits.join();
    check_end(filled, GetEnd::filled, kPages, "");
    scene.check_pages(kPages);
    scene.check_nothing_left();
  }
}

// Incident: it was told as filled, with parts that were there no more, and was missing. So ended
// the test above where the fill came before the other's end.
TEST(page_that_another_gives_up_while_it_is_waited_for_is_stored_whole) {
  for (const uint32_t shard : {0u, 2u}) {
    Scene scene;
    OtherWriter writer(scene.daemon);
    CHECK(writer.reserve(scene.chain.pages[0], shard));
    FilledRun filled;
    std::thread waits([&] { filled = scene.fill(); });
    // By then it has sealed its parts of the first page too.
    while (scene.daemon.status().pages_sealed < kPages - 1) std::this_thread::yield();
    writer.settle();
    waits.join();
    check_end(filled, GetEnd::filled, kPages, "");
    scene.check_pages(kPages);
    scene.check_nothing_left();
  }
}

TEST(time_that_is_over_begins_nothing) {
  Scene scene;
  check_end(scene.fill(scene.run(), scene.body(), 0), GetEnd::late, 0, "timeout");
  CHECK_EQ(scene.daemon.status().pages_sealed, 0);
  scene.check_nothing_left();
}

TEST(object_that_is_larger_than_what_a_session_may_reserve_is_stored_window_by_window) {
  Scene scene(2, 256 << 10);  // 2 MiB of which 1 MiB may be unfinished
  check_end(scene.fill(0), GetEnd::filled, kPages, "");
  check_end(scene.fill(1), GetEnd::filled, kPages, "");
  scene.check_pages(2 * kPages);
  scene.check_nothing_left();
}

TEST(room_that_others_hold_is_waited_for) {
  Scene scene(1, 256 << 10);
  const Chain other(scene.daemon.shape(), 2, 64);
  std::vector<std::unique_ptr<OtherWriter>> writers;
  size_t next = 0;
  do {
    writers.push_back(std::make_unique<OtherWriter>(scene.daemon));
    while (writers.back()->reserve(other.pages[next])) ++next;
  } while (!writers.back()->held.empty());
  check_end(scene.fill_late(), GetEnd::late, 0, "reserve_limit");
  FilledRun filled;
  std::thread waits([&] { filled = scene.fill(); });
  for (const auto& writer : writers) writer->settle();
  waits.join();
  check_end(filled, GetEnd::filled, kPages, "");
  scene.check_pages(kPages);
  scene.check_nothing_left();
}

TEST(daemon_that_drains_takes_no_page) {
  Scene scene;
  scene.daemon.call([](Warehouse& w) {
    w.drain();
    return 0;
  });
  check_end(scene.fill(), GetEnd::no_room, 0, "draining");
}

TEST(daemon_that_went_ends_the_run) {
  Scene scene;
  scene.daemon.stop();
  check_end(scene.fill(), GetEnd::no_room, 0, "unreachable");
}

// As the worker's threads do; engines store some of the same pages meanwhile.
TEST(runs_of_many_threads_and_pages_of_engines_go_side_by_side) {
  constexpr uint32_t kThreads = 8;
  Scene scene(3, 5000, 32 * kMiB);
  std::vector<Chain> chains;
  for (uint32_t at = 0; at < kThreads; ++at)
    chains.emplace_back(scene.daemon.shape(), at + 10, kPages);
  Client engine(scene.daemon.client_options());
  std::atomic<uint32_t> whole{0};
  std::vector<std::thread> threads;
  for (const Chain& chain : chains)
    threads.emplace_back([&] {
      const nvme::AlignedBuffer object = object_of(chain.shape, chain.pages);
      remote::RunToGet run = scene.run();
      run.key = chain.pages.back().key;
      for (int round = 0; round < 3; ++round) {
        const FilledRun filled = scene.client->fill_run(run, object.span(), kFleet, kLong);
        whole += filled.end == GetEnd::filled && filled.pages == kPages;
      }
    });
  threads.emplace_back([&] {
    for (const Chain& chain : chains) chain.store_all(engine);
  });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(whole.load(), 3 * kThreads);
  for (const Chain& chain : chains)
    for (uint32_t shard = 0; shard < 3; ++shard) CHECK_EQ(chain.load(engine, shard), kPages);
  scene.check_nothing_left();
}
