// Slot words, metadata and the pool of slots: which generation names which bytes, and when a slot
// may be handed out again.
#include "slots/slots.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "slots/pool.h"
#include "tests/check.h"
#include "tests/huge_memory.h"
#include "tests/warehouse_world.h"

namespace kvw {
namespace {

struct Bench {
  Bench() : secret(test_secret()), arena(options()), pool(arena, "lru") {}
  ArenaOptions options() const {
    return {directory.path() + "/arena",
            kWarehouse,
            std::span<const std::byte, kSecretBytes>(secret.data(), kSecretBytes),
            8 * kMiB,
            1024,
            0};
  }
  SlotClass& grown(const NamespaceShape& shape, uint32_t slabs = 1) {
    SlotClass& cls = pool.class_of(shape);
    for (uint32_t i = 0; i < slabs; ++i) {
      CHECK_EQ(arena.populate_slab(next), 0);
      pool.slab_ready(next++);
      CHECK(pool.grow(cls));
    }
    return cls;
  }

  TempDir directory;
  std::vector<std::byte> secret;
  Arena arena;
  Pool pool;
  uint32_t next = 0;
};

constexpr uint64_t kShard = 60000;  // a stride of 60 KiB, not a power of two

// A record with every field set, as the daemon would seal it.
struct Record {
  alignas(64) std::byte bytes[1024] = {};
  SlotMeta* meta() { return reinterpret_cast<SlotMeta*>(bytes); }
  Record() {
    SlotMeta* record = meta();
    record->namespace_id = kSpace;
    record->key = {3, 4};
    record->parent = {5, 6};
    record->clear_epoch = 7;
    record->stored_at_ns = 8;
    record->shard_bytes = 9;
    record->position = 10;
    record->shards = 2;
    record->page_tokens = 16;
    record->witness_kind = 1;
    record->witness_bytes = 64;
    for (uint32_t shard = 0; shard < 2; ++shard) digests_of(record)[shard] = 100 + shard;
    for (size_t i = 0; i < 64; ++i) witness_of(record)[i] = static_cast<std::byte>(i);
  }
};

TEST(arena_lies_in_huge_pages_for_the_daemon_and_for_its_clients) {
  Bench bench;
  if (!kernel_gives_huge_pages(bench.directory.path())) {
    std::printf("(skipped: this kernel gives no huge pages to files on tmpfs) ");
    return;
  }
  const std::string file = bench.directory.path() + "/arena/arena";
  CHECK_EQ(bench.arena.populate_slab(0), 0);
  CHECK_EQ(mapped_huge_bytes(file), bench.arena.slab_bytes());
  const Mapping client(bench.arena.arena_read_fd(), bench.arena.slab_bytes(), false);
  CHECK(std::ranges::all_of(std::span(client.data(), bench.arena.slab_bytes()),
                            [](std::byte byte) { return byte == std::byte{0}; }));
  CHECK_EQ(mapped_huge_bytes(file), 2 * bench.arena.slab_bytes());
}

TEST(slot_word_keeps_generation_and_state_when_packed) {
  for (const uint64_t generation : {0ull, 1ull, 0xffffffffull, 0x123456789abcull, (1ull << 48) - 1})
    for (uint16_t state = 0; state <= 5; ++state) {
      const SlotWord word{generation, static_cast<SlotState>(state)};
      const SlotWord back = SlotWord::unpack(word.pack());
      CHECK_EQ(back.generation, generation);
      CHECK_EQ(back.state, word.state);
    }
}

TEST(slot_word_is_readable_only_while_its_bytes_are_sealed) {
  for (const SlotState state : {SlotState::live, SlotState::closing, SlotState::free})
    CHECK((SlotWord{1, state}.readable()));
  for (const SlotState state : {SlotState::reserved, SlotState::filling, SlotState::limbo})
    CHECK(!(SlotWord{1, state}.readable()));
}

TEST(slab_layout_keeps_all_fields_when_packed) {
  const SlabLayout layout{0xffffffff, 0xfffe, 1};
  const SlabLayout back = SlabLayout::unpack(layout.pack());
  CHECK_EQ(back.slot_blocks, layout.slot_blocks);
  CHECK_EQ(back.meta_units, layout.meta_units);
  CHECK_EQ(back.populated, 1);
}

TEST(slots_header_is_refused_when_it_is_not_ours) {
  const SlotsHeader good = slots_layout(kWarehouse, 2 * kMiB, 32);
  check_slots_header(good, kWarehouse);
  CHECK_THROWS(check_slots_header(good, Key{1, 1}), "arena_foreign");
  SlotsHeader bad = good;
  bad.magic ^= 1;
  CHECK_THROWS(check_slots_header(bad, kWarehouse), "arena_foreign");
  bad = good;
  bad.version += 1;
  CHECK_THROWS(check_slots_header(bad, kWarehouse), "arena_foreign");
  // Any damaged geometry would be followed into nowhere: the checksum covers all of it.
  for (size_t at = 0; at < offsetof(SlotsHeader, checksum); at += 4) {
    bad = good;
    reinterpret_cast<uint32_t*>(&bad)[at / 4] ^= 0x10000;
    CHECK_THROWS(check_slots_header(bad, kWarehouse), "arena_foreign");
  }
}

TEST(slots_regions_do_not_overlap) {
  for (const uint64_t slab : {2 * kMiB, 8 * kMiB, 256 * kMiB})
    for (const uint32_t count : {1u, 7u, 32u}) {
      const SlotsHeader header = slots_layout(kWarehouse, slab, count);
      CHECK(header.words_offset >= kBlockBytes + count * 8);
      CHECK(header.metas_offset >= header.words_offset + count * header.slots_per_slab * 8);
      CHECK_EQ(header.bytes, header.metas_offset + count * header.meta_region_bytes);
    }
}

TEST(meta_checksum_moves_with_everything_fixed_at_live) {
  Record record;
  const uint64_t whole = meta_checksum(*record.meta(), 5);
  CHECK(whole != meta_checksum(*record.meta(), 6));
  const auto flipped = [&](size_t at) {
    record.bytes[at] ^= std::byte{1};
    const uint64_t sum = meta_checksum(*record.meta(), 5);
    record.bytes[at] ^= std::byte{1};
    return sum;
  };
  for (size_t at = offsetof(SlotMeta, namespace_id); at < offsetof(SlotMeta, granted); ++at) {
    // The counts say how far to read: meta_fits() is asked first, so they are not flipped here.
    if (at >= offsetof(SlotMeta, shards) && at < offsetof(SlotMeta, page_tokens)) continue;
    if (at >= offsetof(SlotMeta, witness_bytes) && at < offsetof(SlotMeta, spare)) continue;
    CHECK(flipped(at) != whole);
  }
  const size_t digests = sizeof(SlotMeta), owners = digests + 16, witness = owners + 16;
  for (size_t at = digests; at < owners; ++at) CHECK(flipped(at) != whole);
  for (size_t at = witness; at < witness + 64; ++at) CHECK(flipped(at) != whole);
  // Masks and owners may change after LIVE.
  for (size_t at = offsetof(SlotMeta, granted); at < sizeof(SlotMeta); ++at)
    CHECK_EQ(flipped(at), whole);
  for (size_t at = owners; at < witness; ++at) CHECK_EQ(flipped(at), whole);
}

TEST(meta_fits_is_false_when_a_count_leads_outside) {
  Record record;
  SlotMeta* meta = record.meta();
  meta->shard_bytes = 4096;
  const auto fits = [&] { return meta_fits(*meta, 256, 8192); };
  CHECK(fits());
  const auto refuses = [&](auto& field, auto value) {
    const auto old = field;
    field = static_cast<std::remove_reference_t<decltype(field)>>(value);
    const bool refused = !fits();
    field = old;
    return refused;
  };
  CHECK(refuses(meta->shards, 0));
  CHECK(refuses(meta->shards, kMaxShards + 1));
  CHECK(refuses(meta->shards, UINT32_MAX));
  CHECK(refuses(meta->shards, 3));  // two shards' payload is all the slot has
  CHECK(refuses(meta->page_tokens, 0));
  CHECK(refuses(meta->page_tokens, kMaxPageTokens + 1));
  CHECK(refuses(meta->witness_bytes, 97));
  CHECK(refuses(meta->witness_bytes, UINT32_MAX));
  CHECK(refuses(meta->shard_bytes, 0));
  CHECK(refuses(meta->shard_bytes, 4097));
  CHECK(refuses(meta->shard_bytes, UINT64_MAX));
  CHECK(refuses(meta->shard_bytes, UINT64_MAX - 4095));
  CHECK(fits());
}

TEST(pool_refuses_a_page_when_it_fits_no_slab) {
  Bench bench;
  CHECK_THROWS(bench.pool.class_of(shape_of(3 * kMiB, 1)), "page_too_large");
  CHECK_THROWS(bench.pool.class_of(shape_of(kMiB, 3)), "page_too_large");
  bench.pool.class_of(shape_of(kMiB, 2));  // a slab exactly
}

TEST(pool_takes_nothing_when_no_slab_is_there) {
  Bench bench;
  SlotClass& cls = bench.pool.class_of(shape_of(kShard));
  CHECK(!bench.pool.grow(cls));
  CHECK_EQ(bench.pool.take(cls, SlotState::reserved), kNoSlot);
}

TEST(pool_raises_the_generation_when_a_slot_is_taken) {
  Bench bench;
  SlotClass& cls = bench.grown(shape_of(kShard));
  std::vector<uint64_t> last(cls.total(), 0);
  for (size_t round = 0; round < 3 * cls.total(); ++round) {
    const SlotId slot = bench.pool.take(cls, SlotState::reserved);
    const SlotWord word = bench.pool.load(slot);
    CHECK_EQ(word.state, SlotState::reserved);
    CHECK_EQ(word.generation, last.at(slot) + 1);
    last[slot] = word.generation;
    bench.pool.publish(slot, bench.pool.load(slot).generation);
    bench.pool.close(slot);
    bench.pool.release(slot);
    CHECK_EQ(bench.pool.load(slot).generation, word.generation);  // still readable as itself
    CHECK_EQ(bench.pool.load(slot).state, SlotState::free);
  }
}

TEST(pool_hands_out_the_slot_freed_longest_ago) {
  Bench bench;
  SlotClass& cls = bench.grown(shape_of(kShard));
  std::vector<SlotId> order;
  while (!cls.free.empty()) {
    order.push_back(bench.pool.take(cls, SlotState::reserved));
    bench.pool.publish(order.back(), bench.pool.load(order.back()).generation);
  }
  auto random = check::random("pool_hands_out_the_slot_freed_longest_ago");
  std::shuffle(order.begin(), order.end(), random);
  for (const SlotId slot : order) {
    bench.pool.close(slot);
    bench.pool.release(slot);
  }
  for (const SlotId slot : order) CHECK_EQ(bench.pool.take(cls, SlotState::reserved), slot);
}

TEST(pool_ends_the_generation_when_a_slot_leaves_limbo) {
  Bench bench;
  SlotClass& cls = bench.grown(shape_of(kShard));
  const SlotId slot = bench.pool.take(cls, SlotState::reserved);
  const uint64_t generation = bench.pool.load(slot).generation;
  CHECK(bench.pool.unfinished_bytes() != 0);
  bench.pool.to_limbo(slot, generation);
  CHECK_EQ(bench.pool.load(slot).state, SlotState::limbo);
  CHECK_EQ(bench.pool.load(slot).generation, generation);
  CHECK(bench.pool.unfinished_bytes() != 0);  // limbo counts: it cannot be used either
  bench.pool.end_limbo(slot, generation);
  CHECK_EQ(bench.pool.load(slot).generation, generation + 1);  // torn bytes never validate
  CHECK_EQ(bench.pool.unfinished_bytes(), 0);
}

TEST(pool_ends_the_generation_when_a_slot_is_discarded) {
  Bench bench;
  SlotClass& cls = bench.grown(shape_of(kShard));
  const SlotId slot = bench.pool.take(cls, SlotState::reserved);
  bench.pool.publish(slot, bench.pool.load(slot).generation);
  const uint64_t generation = bench.pool.load(slot).generation;
  bench.pool.close(slot);
  bench.pool.discard(slot);
  CHECK_EQ(bench.pool.load(slot).generation, generation + 1);
}

TEST(pool_ends_every_generation_when_a_slab_is_retired) {
  Bench bench;
  const NamespaceShape big = shape_of(kShard), small = shape_of(4096, 1, {9, 9});
  SlotClass& cls = bench.grown(big);
  std::vector<SlotId> used;
  for (int i = 0; i < 3; ++i) used.push_back(bench.pool.take(cls, SlotState::reserved));
  for (const SlotId slot : used) {
    bench.pool.publish(slot, bench.pool.load(slot).generation);
    bench.pool.close(slot);
    bench.pool.release(slot);
  }
  std::vector<uint64_t> before;
  const uint32_t count = cls.slots_per_slab;
  for (uint32_t place = 0; place < count; ++place)
    before.push_back(bench.pool.load(place).generation);
  bench.pool.retire(0);
  CHECK_EQ(cls.total(), 0);
  CHECK(cls.free.empty());
  SlotClass& other = bench.pool.class_of(small);
  CHECK(bench.pool.grow(other));
  CHECK(other.slots_per_slab > count);
  for (uint32_t place = 0; place < count; ++place)
    CHECK(bench.pool.load(place).generation > before[place]);
  // And back again: words of places that the first layout did not have rise as well.
  const SlotId taken = bench.pool.take(other, SlotState::reserved);
  const uint64_t generation = bench.pool.load(taken).generation;
  bench.pool.to_limbo(taken, generation);
  bench.pool.end_limbo(taken, generation);
  bench.pool.retire(0);
  CHECK(bench.pool.grow(cls));
  CHECK(bench.pool.load(taken).generation > generation);
}

TEST(pool_shows_no_old_metadata_when_a_slab_is_cut_anew) {
  Bench bench;
  SlotClass& cls = bench.grown(shape_of(kShard));
  for (uint32_t place = 0; place < cls.slots_per_slab; ++place)
    std::memset(static_cast<void*>(bench.pool.meta(place)), 0xff, cls.layout.meta_bytes());
  bench.pool.retire(0);
  SlotClass& other = bench.pool.class_of(shape_of(4096, 1, {9, 9}));
  CHECK(bench.pool.grow(other));
  for (uint32_t place = 0; place < other.slots_per_slab; ++place) {
    const auto* bytes = reinterpret_cast<const std::byte*>(bench.pool.meta(place));
    for (size_t i = 0; i < other.layout.meta_bytes(); ++i) CHECK_EQ(static_cast<int>(bytes[i]), 0);
  }
}

// Metadata of 16 KiB a slot: more in a slab than is cleared at a time.
NamespaceShape shape_of_many_tokens() {
  NamespaceShape shape = shape_of(4096, 1, {9, 9});
  shape.page_tokens = 4096;
  return shape;
}

// Incident: a store that began a slab of 65,536 slots kept all others waiting for 15 ms.
TEST(pool_adds_the_slots_of_a_slab_a_part_at_a_time_and_in_order) {
  Bench bench;
  SlotClass& cls = bench.grown(shape_of_many_tokens());
  size_t parts = 1;
  CHECK_EQ(bench.pool.free_slots(), cls.slots_per_slab);
  for (uint32_t place = 0; place < cls.slots_per_slab; ++place) {
    if (cls.free.empty()) {
      CHECK(bench.pool.grow(cls));
      ++parts;
    }
    CHECK_EQ(bench.pool.take(cls, SlotState::reserved), place);
    CHECK_EQ(bench.pool.free_slots(), cls.slots_per_slab - place - 1);
  }
  CHECK(parts > 2);
  CHECK(cls.free.empty());
  CHECK(!bench.pool.grow(cls));
}

TEST(pool_gives_away_a_slab_of_which_slots_were_never_added) {
  Bench bench;
  SlotClass& cls = bench.grown(shape_of_many_tokens());
  SlotClass& other = bench.pool.class_of(shape_of(kShard));
  const SlotId slot = bench.pool.take(cls, SlotState::reserved);
  CHECK(!bench.pool.all_free(0));
  CHECK(!bench.pool.spare_slab(other, 50, 0));
  bench.pool.publish(slot, bench.pool.load(slot).generation);
  bench.pool.close(slot);
  bench.pool.release(slot);
  CHECK(bench.pool.all_free(0));
  CHECK_EQ(bench.pool.spare_slab(other, 50, 0), 0);
  bench.pool.set_aside(0);
  CHECK_EQ(bench.pool.free_slots(), cls.slots_per_slab);
  CHECK(!bench.pool.grow(cls));
  bench.pool.put_back(0);
  CHECK_EQ(bench.pool.free_slots(), cls.slots_per_slab);
  CHECK(bench.pool.grow(cls));
  bench.pool.retire(0);
  CHECK_EQ(bench.pool.free_slots(), 0);
  CHECK(cls.free.empty() && cls.uncut.empty());
  CHECK(bench.pool.grow(other));
  CHECK_EQ(bench.pool.free_slots(), other.slots_per_slab);
}

TEST(pool_adds_what_an_earlier_daemon_did_not_use) {
  Bench bench;
  SlotClass& cls = bench.grown(shape_of_many_tokens());
  for (int i = 0; i < 3; ++i) bench.pool.take(cls, SlotState::reserved);
  bench.pool.to_limbo(1, bench.pool.load(1).generation);
  bench.pool.end_limbo(1, bench.pool.load(1).generation);
  Pool next(bench.arena, "lru");
  CHECK_EQ(next.attach(0, cls.layout), 3);
  next.restore(0, SlotState::limbo);
  next.adopt_free(1);
  next.restore(2, SlotState::limbo);
  SlotClass& again = next.class_of(shape_of_many_tokens());
  CHECK_EQ(again.free.size(), 1);
  CHECK_EQ(next.free_slots(), again.slots_per_slab - 2);
  CHECK(next.grow(again));
  CHECK_EQ(next.take(again, SlotState::reserved), 1);
  CHECK_EQ(next.take(again, SlotState::reserved), 3);
  // Nothing of it is used: all of it is added anew.
  Bench other;
  CHECK_EQ(Pool(other.arena, "lru").attach(0, cls.layout), 0);
}

// Namespaces come and go for as long as a daemon runs, and their sizes with them.
TEST(pool_gives_the_place_of_a_size_that_nobody_has_to_the_next) {
  Bench bench;
  SlotClass& cut = bench.grown(shape_of(kShard));
  const SlotId slot = 0;  // of its slab
  cut.unused = true;      // and has a slab still
  for (uint64_t blocks = 20; blocks < 120; ++blocks)
    bench.pool.class_of(shape_of(blocks * kBlockBytes, 1)).unused = true;
  CHECK_EQ(bench.pool.classes().size(), 2);
  CHECK_EQ(&bench.pool.class_of(slot), &cut);
  SlotClass& last = bench.pool.class_of(shape_of(119 * kBlockBytes, 1));
  CHECK(!last.unused);
  CHECK(&bench.pool.class_of(shape_of(20 * kBlockBytes, 1)) != &last);
  CHECK_EQ(bench.pool.classes().size(), 3);
  bench.pool.retire(0);
  CHECK(bench.pool.grow(last));
  CHECK_EQ(&bench.pool.class_of(slot), &last);
  CHECK_EQ(last.free.size(), last.slots_per_slab);
}

TEST(pool_numbers_residents_densely_and_back) {
  Bench bench;
  SlotClass& cls = bench.grown(shape_of(kShard), 3);
  std::vector<bool> seen(cls.total());
  while (!cls.free.empty()) {
    const SlotId slot = bench.pool.take(cls, SlotState::reserved);
    const uint32_t resident = bench.pool.resident(slot);
    CHECK(resident < seen.size());
    CHECK(!seen[resident]);
    seen[resident] = true;
    CHECK_EQ(bench.pool.slot_of(cls, resident), slot);
  }
}

// Of this process, in bytes.
uint64_t address_space() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

TEST(mapping_that_has_gone_leaves_no_address_space_behind) {
  constexpr size_t kBytes = (2 << 20) + kBlockBytes;  // large enough for a huge page, and not even
  const Fd file(::memfd_create("mapping", MFD_CLOEXEC));
  CHECK_EQ(::ftruncate(file.get(), kBytes), 0);
  const uint64_t before = address_space();
  for (int round = 0; round < 100; ++round) Mapping(file.get(), kBytes, true);
  CHECK(address_space() < before + kBytes);
}

// Incident: somebody cut the arena's file, and every process that had it mapped ended by SIGBUS.
TEST(mapping_reads_zeros_and_says_so_where_its_file_was_cut) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE)), bytes = 64 * page;
  const Fd file(::memfd_create("mapping", MFD_CLOEXEC));
  CHECK_EQ(::ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
  const Mapping writer(file.get(), bytes, true), reader(file.get(), bytes, false);
  std::memset(writer.data(), 1, bytes);
  CHECK_EQ(::ftruncate(file.get(), static_cast<off_t>(10 * page)), 0);
  CHECK_EQ(static_cast<int>(reader.data()[10 * page - 1]), 1);
  CHECK(!reader.lost());
  CHECK_EQ(static_cast<int>(reader.data()[bytes - 1]), 0);
  CHECK_EQ(static_cast<int>(reader.data()[10 * page]), 0);
  CHECK(reader.lost() && !writer.lost());
  std::memset(writer.data(), 2, bytes);
  CHECK(writer.lost());
  CHECK_EQ(static_cast<int>(reader.data()[9 * page]), 2);  // what the file has is still shared
}

TEST(bus_error_elsewhere_ends_the_process_as_before) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const Fd file(::memfd_create("mapping", MFD_CLOEXEC));
  CHECK_EQ(::ftruncate(file.get(), static_cast<off_t>(page)), 0);
  const Mapping ours(file.get(), page, true);
  auto* theirs =
      static_cast<volatile char*>(::mmap(nullptr, page, PROT_READ, MAP_SHARED, file.get(), 0));
  CHECK_EQ(::ftruncate(file.get(), 0), 0);
  int status = 0;
  for (const bool sent : {false, true}) {
    const pid_t child = ::fork();
    if (child == 0) {
      if (sent)
        ::raise(SIGBUS);
      else
        static_cast<void>(*theirs);
      ::_exit(0);
    }
    ::waitpid(child, &status, 0);
#ifdef __SANITIZE_ADDRESS__
    CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) != 0);  // its own handler says so, and exits
#else
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
#endif
  }
}

}  // namespace
}  // namespace kvw
