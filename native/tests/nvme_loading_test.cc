// Loads of pages that are still being read from NVMe, through a real daemon core and client. Pages
// become usable in order while the rest are read, and whatever happens in the middle (damage, a
// device that gives an error or stalls, an eviction, the end of the daemon), the client gets
// exactly the good prefix, and nothing stays behind: no slot, no pin, no promotion.
#include <fcntl.h>

#include <deque>
#include <filesystem>
#include <thread>

#include "io/faulty_engine.h"
#include "nvme/aligned_buffer.h"
#include "tests/check.h"
#include "tests/daemon_world.h"

namespace kvw {
namespace {

constexpr uint64_t kShard = 5000;
constexpr uint32_t kPages = 40;
constexpr uint64_t kLong = uint64_t{kPatienceMs} * kMillisecondNs;
constexpr uint64_t kShort = 50 * kMillisecondNs;  // of a load that is meant to run out of time

// How the records of a chain lie: one behind the other, so that they are read some at a time, or
// with those of another chain between them, so that each is a read of its own.
enum class Lie { together, apart };

// A chain of pages, all of them on NVMe alone.
struct Scene {
  explicit Scene(Lie lie, bool own_process = false)
      : daemon(shape_of(kShard)), chain(daemon.shape(), 1, kPages) {
    daemon.options.nvme_dir = daemon.directory.path() + "/nvme";
    std::filesystem::create_directory(daemon.options.nvme_dir);
    daemon.options.nvme_capacity_bytes = 32 * kMiB;
    daemon.options.nvme_segment_bytes = 4 * kMiB;
    daemon.options.grace_ns = kMillisecondNs;
    daemon.options.make_engine = [this] {
      return make_faulty_engine(make_io_engine("auto", 10), faults);
    };
    daemon.start();
    Client client(daemon.client_options());
    const Chain between(daemon.shape(), 2, kPages);
    for (uint32_t page = 0; page < kPages; ++page) {
      chain.store_page(client, page);
      if (lie == Lie::apart) between.store_page(client, page);
    }
    to_nvme();
    if (!own_process) return;
    daemon.stop();
    std::filesystem::remove_all(daemon.options.arena_dir);
  }
  ~Scene() {
    faults->clear();
    faults->stall_after(UINT64_MAX);
  }

  void to_nvme() {
    CHECK_EQ(daemon.flush().pending, 0);
    daemon.call([](Warehouse& w) {
      uint64_t left = 0;
      w.evict(-1, UINT64_MAX, "dram", left);
      return left;
    });
    CHECK_EQ(daemon.status().dram_pages, 0);
  }
  // Pages loaded within that time; every one of them is compared.
  uint64_t load(Client& client, uint64_t timeout_ns, LoadReport* report = nullptr,
                uint32_t pages = kPages) {
    Rows rows(pages, kShard);
    Prompt prompt = chain.prompt();
    const LoadReport got = client.load(daemon.shape().id, prompt, 0, rows, 1, timeout_ns);
    for (size_t at = 0; at < got.pages; ++at) {
      const auto bytes = bytes_of(chain.pages[at].key, 1, kShard);
      CHECK(std::memcmp(rows.row(at), bytes.data(), bytes.size()) == 0);
    }
    if (report != nullptr) *report = got;
    return got.pages;
  }
  // Nothing is on its way any more, and no slot is lost.
  void check_settled() {
    WarehouseStatus status = daemon.status();
    while (status.promotions_in_flight != 0) status = daemon.status();
    CHECK_EQ(status.reserved_slots + status.limbo_slots + status.zombie_slots, 0);
    CHECK_EQ(status.pins, 0);
    CHECK_EQ(status.free_slots + status.dram_pages, total_slots());
  }
  uint64_t total_slots() {
    return daemon.call([](Warehouse& w) {
      const Slots& slots = w.arena().slots();
      uint64_t total = 0;
      for (uint32_t slab = 0; slab < w.arena().slab_count(); ++slab)
        total += slots.slots_in(slots.layout(slab));
      return total;
    });
  }
  EntryView entry(uint32_t page) {
    return *daemon.call(
        [key = chain.pages[page].key](Warehouse& w) { return w.arena().index().find(key); });
  }
  // One bit of a page's record on the disk.
  void flip(uint32_t page, uint64_t at_in_record) {
    const nvme::Extent extent = entry(page).extent;
    char name[32];
    std::snprintf(name, sizeof name, "/segments/%08u.seg", extent.segment);
    const Fd fd(::open((daemon.options.nvme_dir + name).c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
    const nvme::AlignedBuffer block(kBlockBytes);
    const auto at = static_cast<off_t>(uint64_t{extent.offset_blocks} * kBlockBytes +
                                       at_in_record / kBlockBytes * kBlockBytes);
    CHECK_EQ(::pread(fd.get(), block.data(), kBlockBytes, at), kBlockBytes);
    block.data()[at_in_record % kBlockBytes] ^= std::byte{1};
    CHECK_EQ(::pwrite(fd.get(), block.data(), kBlockBytes, at), kBlockBytes);
  }

  std::shared_ptr<Faults> faults = std::make_shared<Faults>();
  Daemon daemon;
  Chain chain;
};

TEST(first_pages_are_usable_while_the_device_has_not_given_the_rest) {
  Scene scene(Lie::together);
  auto random = check::random("first_pages_are_usable_while_the_device_has_not_given_the_rest");
  Client client(scene.daemon.client_options());
  for (uint64_t round = 0; round < check::rounds(8); ++round) {
    const auto given = static_cast<uint32_t>(random() % kPages);
    scene.faults->stall_after(given);
    // A load that asks for no more than was given ends without waiting for the rest, though all of
    // it was asked for.
    check::Thread all([&] {
      Client other(scene.daemon.client_options());
      CHECK_EQ(scene.load(other, kLong), kPages);
    });
    if (given > 0) CHECK_EQ(scene.load(client, kLong, nullptr, given), given);
    scene.faults->stall_after(UINT64_MAX);
    all.join();
    scene.check_settled();
    scene.to_nvme();
  }
}

TEST(load_that_runs_out_of_time_keeps_what_was_read_and_leaves_nothing_behind) {
  Scene scene(Lie::apart);
  auto random = check::random("load_that_runs_out_of_time_keeps_what_was_read");
  Client client(scene.daemon.client_options());
  for (uint64_t round = 0; round < check::rounds(8); ++round) {
    const uint64_t given = random() % kPages;
    scene.faults->stall_after(given);
    LoadReport report;
    uint64_t loaded = 0;
    do {  // on a busy machine, until what was given has come and the daemon reads on
      loaded = scene.load(client, kShort, &report);
    } while (loaded < given || scene.daemon.status().promotions_in_flight == 0);
    CHECK_EQ(loaded, given);
    CHECK_EQ(report.reasons.at("timeout"), kPages - given);
    scene.faults->stall_after(UINT64_MAX);
    scene.check_settled();
    CHECK_EQ(scene.load(client, kLong), kPages);
    scene.to_nvme();
  }
}

TEST(page_damaged_on_the_disk_ends_the_prefix_before_it_and_is_never_data) {
  auto random = check::random("page_damaged_on_the_disk_ends_the_prefix_before_it");
  for (uint64_t round = 0; round < check::rounds(8); ++round) {
    Scene scene(Lie::together);
    Client client(scene.daemon.client_options());
    const auto damaged = static_cast<uint32_t>(random() % kPages);
    // Header, witness or payload of either shard: a page's record has a block of header here.
    const uint64_t shard_at = kBlockBytes + scene.daemon.shape().shard_stride() * (random() % 2);
    scene.flip(damaged, random() % 4 == 0 ? random() % 160 : shard_at + random() % kShard);
    LoadReport report;
    CHECK_EQ(scene.load(client, kLong, &report), damaged);
    CHECK_EQ(report.reasons.at("missing"), kPages - damaged);
    scene.check_settled();
    CHECK_EQ(scene.daemon.status().quarantined, 1);
    CHECK_EQ(scene.load(client, kLong), damaged);
    // Stored again it is there again, and so is all behind it.
    scene.chain.store_all(client);
    CHECK_EQ(scene.load(client, kLong), kPages);
  }
}

TEST(read_error_in_the_middle_ends_the_prefix_before_it_and_the_page_stays_for_later) {
  auto random = check::random("read_error_in_the_middle_ends_the_prefix_before_it");
  Scene scene(Lie::apart);
  Client client(scene.daemon.client_options());
  for (uint64_t round = 0; round < check::rounds(4); ++round) {
    const uint64_t failing = random() % kPages;
    scene.faults->add({IoKind::read, "", failing, 1, EIO, -1});
    LoadReport report;
    CHECK_EQ(scene.load(client, kLong, &report), failing);
    CHECK_EQ(report.reasons.at("io_error"), kPages - failing);
    scene.faults->clear();
    scene.check_settled();
    // The device has recovered; after a second the daemon tries again.
    while (scene.load(client, kLong) < kPages) scene.daemon.tick();
    scene.to_nvme();
  }
}

// One bad sector under a shared prompt disabled every prompt behind it: the page was there for
// those who stored it, and for nobody who loaded it.
TEST(page_that_the_device_does_not_give_is_stored_anew_and_keeps_its_children) {
  Scene scene(Lie::apart);
  Client client(scene.daemon.client_options());
  const uint32_t failing = kPages / 2;
  const nvme::Extent bad = scene.entry(failing).extent;
  scene.faults->add({IoKind::read, "", failing, 1, EIO, -1});
  CHECK_EQ(scene.load(client, kLong), failing);
  for (uint32_t shard = 0; shard < scene.daemon.shape().shards; ++shard) {
    const StoreReport report = scene.chain.store(client, shard);
    CHECK_EQ(report.stored, 1u);
    CHECK_EQ(report.already, kPages - 1);
  }
  scene.to_nvme();
  CHECK(scene.entry(failing).extent.position() > bad.position());
  CHECK_EQ(scene.load(client, kLong), kPages);
  scene.check_settled();
  CHECK_EQ(scene.chain.store(client, 0).stored, 0u);
}

TEST(load_of_pages_that_are_evicted_again_and_again_is_right_or_short) {
  Scene scene(Lie::together);
  Client client(scene.daemon.client_options());
  std::atomic<bool> over{false};
  std::thread evicting([&] {
    while (!over)
      scene.daemon.call([](Warehouse& w) {
        uint64_t left = 0;
        w.evict(-1, 3, "dram", left);
        return left;
      });
  });
  uint64_t most = 0;
  for (uint64_t round = 0; round < check::rounds(20); ++round) {
    most = std::max(most, scene.load(client, kLong));
  }
  over = true;
  evicting.join();
  CHECK_EQ(most, kPages);  // they come as fast as they go
  scene.check_settled();
}

// Together they want three times of what the daemon reads at a time, and more than DRAM holds.
TEST(loads_that_share_the_places_for_promotions_all_get_every_page) {
  Scene scene(Lie::together);
  constexpr uint64_t kLoaders = 3;
  constexpr uint32_t kMany = 190;
  Client client(scene.daemon.client_options());
  std::vector<std::unique_ptr<Chain>> chains;
  for (uint64_t number = 0; number < kLoaders; ++number) {
    chains.push_back(std::make_unique<Chain>(scene.daemon.shape(), 10 + number, kMany));
    chains.back()->store_all(client);
    scene.to_nvme();
  }
  CHECK(kLoaders * kMany * scene.daemon.shape().slot_bytes() > scene.daemon.options.dram_bytes);
  std::deque<check::Thread> loaders;
  for (const auto& chain : chains)
    loaders.emplace_back([&] {
      Client other(scene.daemon.client_options());
      Rows rows(kMany, kShard);
      for (uint64_t round = 0; round < check::rounds(3); ++round) {
        Prompt prompt = chain->prompt();
        const LoadReport got = other.load(scene.daemon.shape().id, prompt, 0, rows, 0, kLong);
        CHECK_EQ(got.pages, kMany);
        for (size_t at = 0; at < got.pages; ++at) {
          const auto bytes = bytes_of(chain->pages[at].key, 0, kShard);
          CHECK(std::memcmp(rows.row(at), bytes.data(), bytes.size()) == 0);
        }
      }
    });
  for (check::Thread& loader : loaders) loader.join();
  scene.check_settled();
}

TEST(pin_of_pages_that_are_being_read_holds_what_has_come_and_lets_go_of_it) {
  Scene scene(Lie::apart);
  Client client(scene.daemon.client_options());
  scene.faults->stall_after(7);
  Prompt prompt = scene.chain.prompt();
  std::unique_ptr<Pins> pins;
  do {  // on a busy machine, until what was given has come
    pins = client.pin(scene.daemon.shape().id, prompt, 0, kShort);
  } while (pins->pages() < 7);
  CHECK_EQ(pins->pages(), 7);
  CHECK_EQ(scene.daemon.status().pins, 7);
  scene.faults->stall_after(UINT64_MAX);
  while (scene.daemon.status().promotions_in_flight != 0) std::this_thread::yield();
  scene.daemon.call([](Warehouse& w) {
    uint64_t left = 0;
    w.evict(-1, UINT64_MAX, "dram", left);
    return left;
  });
  CHECK_EQ(scene.daemon.status().dram_pages, 7);  // those that are pinned, and no more
  pins.reset();
  scene.check_settled();
}

TEST(daemon_killed_in_the_middle_of_a_load_leaves_its_good_prefix_and_loses_no_page) {
  auto random = check::random("daemon_killed_in_the_middle_of_a_load");
  Scene scene(Lie::apart, true);
  for (uint64_t round = 0; round < check::rounds(4); ++round) {
    const auto given = static_cast<uint32_t>(1 + random() % (kPages - 1));
    scene.daemon.when_up = [&] { scene.faults->stall_after(given); };
    scene.daemon.start_process();
    Client client(scene.daemon.client_options());
    check::Thread killer([&] {
      Client watching(scene.daemon.client_options());
      CHECK_EQ(scene.load(watching, kLong, nullptr, given), given);
      scene.daemon.kill(SIGKILL);
    });
    // It waits for a daemon until its time is up, and keeps what had come.
    CHECK(scene.load(client, kSecondNs) <= given);
    killer.join();
    CHECK_EQ(scene.load(client, kShort), given);
    scene.daemon.when_up = nullptr;
    scene.daemon.start_process();
    Client next(scene.daemon.client_options());
    CHECK_EQ(scene.load(next, kLong), kPages);
    scene.daemon.kill(SIGKILL);
    std::filesystem::remove_all(scene.daemon.options.arena_dir);
  }
}

}  // namespace
}  // namespace kvw
