// What a start is told of the core's own memory is enough, and not much more than that.
#include <malloc.h>
#include <poll.h>

#include <atomic>
#include <bit>
#include <cstdlib>
#include <fstream>
#include <new>

#include "nvme/segment.h"
#include "tests/check.h"
#include "tests/warehouse_world.h"

namespace kvw {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kTold = false;  // the sanitizer's own memory is more than what is measured
constexpr uint64_t kPages = 1 << 14;
#else
constexpr bool kTold = true;
constexpr uint64_t kPages = 1 << 20;
#endif

std::atomic<uint64_t> live_bytes = 0, peak_bytes = 0;  // of operator new

// Of this process, but for shared memory and files.
uint64_t own_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (uint64_t kibibytes = 0; word == "RssAnon:" && status >> kibibytes) return kibibytes * 1024;
  throw check::Failure("the kernel does not say what memory is this process's own");
}

// Page `number` of a tree in which every page has two children: of those who count their children
// there cannot be more.
TestPage page_of_tree(uint64_t number) {
  TestPage page;
  page.key = {mixed(number), mixed(~number)};
  if (const uint64_t above = (number - 1) / 2; number != 0) {
    page.parent = {mixed(above), mixed(~above)};
    page.position = static_cast<uint32_t>(std::bit_width(number + 1)) - 1;
  }
  page.tokens.assign(16, 0);
  return page;
}

// As a client's store of one shard each, but for the copy.
void store_blank(World& world, Peer& peer, std::span<const TestPage> pages) {
  std::vector<Reserve> fields;
  std::vector<ReserveRequest> requests;
  fields.reserve(pages.size());
  for (const TestPage& page : pages) {
    fields.push_back({page.key, page.parent, page.position, 0,
                      static_cast<uint32_t>(WitnessKind::tokens),
                      static_cast<uint32_t>(page.witness().size())});
    requests.push_back({&fields.back(), page.witness().data()});
  }
  std::vector<SealAnswer> sealed;
  std::vector<ReserveAnswer> answers;
  world->exchange(peer.id(), kSpace, {}, requests, sealed, answers);
  std::vector<Seal> seals;
  for (const ReserveAnswer& answer : answers)
    if (answer.answer == Answer::granted) seals.push_back({answer.generation, 0, answer.slot, 0});
  world->exchange(peer.id(), kSpace, seals, {}, sealed, answers);
}

// Incident: a daemon was ready, and killed for its memory when its tables had filled.
TEST(tables_take_what_a_start_is_told_at_most_and_not_much_less_when_they_are_full) {
  World world(shape_of(4096, 1), kPages * 4096);
  world.options.index_pages = kPages;
  world.options.nvme_dir = world.directory.path() + "/nvme";
  world.options.nvme_capacity_bytes = 32 * kMiB;
  world.options.io_engine = "pread";
  world.start_without_slabs();
  // Memory for payloads is not taken, nor are they written: the daemon looks at none of them.
  while (const auto slab = world->next_slab_to_populate()) world->slab_populated(*slab, 0);
  Peer peer(world);
  const uint64_t before = own_bytes();
  constexpr uint64_t kStep = 256;
  for (uint64_t first = 0; first < kPages; first += kStep) {
    std::vector<TestPage> pages;
    for (uint64_t number = first; number < first + kStep; ++number)
      pages.push_back(page_of_tree(number));
    store_blank(world, peer, pages);
  }
  const uint64_t taken = own_bytes() - before;
  const WarehouseStatus status = world->status();
  const uint64_t told = table_bytes("lru", status.index_capacity, world.total_slots(), true);
  CHECK(status.dram_pages > kPages / 8 * 7);
  CHECK(world->flush_report().not_admitted > kPages / 4 * 3);
  if (!kTold) return;
  CHECK(taken <= told);
  CHECK(told <= taken + taken / 2);
}

// The log keeps a word of each record for as long as the daemon runs; a start was not told of it.
TEST(start_is_told_of_what_the_log_keeps_of_each_record) {
  World world(shape_of(4096, 1), 32 * kMiB);
  WarehouseOptions options = world.options;
  options.index_pages = 1 << 20;
  options.nvme_dir.clear();
  const uint64_t without = table_bytes_for(options);
  options.nvme_dir = world.directory.path() + "/nvme";
  const uint64_t of_record = sizeof(nvme::RecordRef) + kRecoveredRecordBytes;
  CHECK(table_bytes_for(options) - without >= options.index_pages * of_record);
}

// Incident: recovery held each record with all that is known of it, thrice what the figure had.
TEST(recovery_takes_what_a_start_is_told_beside_the_tables) {
  constexpr uint32_t kRecords = 1 << 14, kStep = 256;
  constexpr uint64_t kElse = kMiB;  // that does not grow with the pages
  World world(shape_of(4096, 1), 32 * kMiB);
  world.options.index_pages = kRecords;
  world.options.nvme_dir = world.directory.path() + "/nvme";
  world.options.nvme_capacity_bytes = 256 * kMiB;
  world.options.io_engine = "pread";
  world.start();
  {
    Peer peer(world);
    for (uint64_t chain = 0; chain < kRecords; chain += kStep) {
      std::vector<TestPage> pages;
      for (uint64_t at = chain; at < chain + kStep; ++at) pages.push_back(world.page(at));
      CHECK(peer.store_all(pages));
      const uint64_t ticket = world->request_flush();
      while (!world->flushed(ticket)) {
        pollfd ready{world->log_fd(), POLLIN, 0};
        CHECK(::poll(&ready, 1, 60'000) == 1);
        world->poll_log();
        world->tick();
      }
    }
  }
  world.kill();
  world.before_recover = [&] { peak_bytes = live_bytes.load(); };
  const uint64_t recovered = world.start_without_slabs().pages_nvme;
  CHECK(recovered > kRecords / 8 * 7);
  const uint64_t slots = world->status().dram_pages;
  if (kTold)
    CHECK(peak_bytes - live_bytes <=
          recovered * kRecoveredRecordBytes + slots * kRecoveredSlotBytes + kElse);
}

}  // namespace
}  // namespace kvw

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void* operator new(size_t bytes) {
  void* made = std::malloc(bytes);
  if (made == nullptr) throw std::bad_alloc();
  const uint64_t live = kvw::live_bytes += ::malloc_usable_size(made);
  if (live > kvw::peak_bytes) kvw::peak_bytes = live;
  return made;
}
void operator delete(void* made) noexcept {
  kvw::live_bytes -= ::malloc_usable_size(made);
  std::free(made);
}
void operator delete(void* made, size_t) noexcept { ::operator delete(made); }
#endif
