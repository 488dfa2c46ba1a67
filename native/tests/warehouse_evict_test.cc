// What leaves by construction: pins against reclaim, who goes first, how long an evicted page stays
// readable, and that no old entry ever names another page's bytes.
#include <algorithm>
#include <set>

#include "tests/check.h"
#include "tests/warehouse_world.h"
#include "warehouse/warehouse.h"

namespace kvw {
namespace {

constexpr uint64_t kBig = 60 * 1024;  // two shards of it: 120 KiB a slot, 17 a slab, 68 in all
constexpr uint64_t kGrace = 5 * kSecondNs;

// Stores one-page chains [first, first + count).
void fill(World& world, Peer& peer, uint64_t first, uint64_t count) {
  for (uint64_t chain = first; chain < first + count; ++chain) CHECK(peer.store(world.page(chain)));
}

// Stores enough that every slot that can be reused was reused twice.
void churn(World& world, Peer& peer, uint64_t first = 100000) {
  fill(world, peer, first, 2 * world.capacity());
}

uint64_t evict_all(World& world) {
  uint64_t left = 0;
  world->evict(-1, UINT64_MAX, "dram", left);
  return left;
}

// --- pins

TEST(pinned_page_is_never_reused) {
  World world(shape_of(kBig));
  world.start();
  Peer reader(world), writer(world);
  const TestPage page = world.page(1);
  CHECK(writer.store(page));
  const EntryView entry = *world.entry(page);
  const int place = reader.pin(page);
  CHECK(place >= 0);
  churn(world, writer);
  evict_all(world);
  world.pass(1);
  CHECK_EQ(world.word(entry.slot).state, SlotState::live);
  CHECK_EQ(reader.load_as(entry, page, 0), Got::right);
  CHECK_EQ(reader.load_as(entry, page, 1), Got::right);
  CHECK(world.stored(page));  // it went back to LIVE, with its entry
  reader.session().drop_pin(place);
  churn(world, writer, 200000);
  CHECK(reader.load_as(entry, page, 0) == Got::stale);
}

TEST(pinned_page_is_never_reused_after_a_restart) {
  World world(shape_of(kBig));
  world.start();
  Peer reader(world);
  const TestPage page = world.page(1);
  CHECK(reader.store(page));
  const EntryView entry = *world.entry(page);
  CHECK(reader.pin(page) >= 0);
  for (int round = 0; round < 3; ++round) {
    world.restart();  // the reader does not even say hello
    Peer writer(world);
    churn(world, writer, 100000 + static_cast<uint64_t>(round) * 1000);
    for (int i = 0; i < 5; ++i) world.pass(10 * kGrace);
    CHECK_EQ(reader.load_as(entry, page, 0), Got::right);  // through its old mapping and entry
  }
}

TEST(pinned_page_is_let_go_when_its_owner_is_dead_for_the_grace) {
  World world(shape_of(kBig));
  world.start();
  Peer writer(world);
  auto reader = std::make_unique<Peer>(world);
  const TestPage page = world.page(1);
  CHECK(writer.store(page));
  const EntryView entry = *world.entry(page);
  CHECK(reader->pin(page) >= 0);
  reader->die();
  world.pass(1);
  world.pass(kGrace - 1);
  churn(world, writer);
  CHECK_EQ(writer.load_as(entry, page, 0), Got::right);  // its DMA may still read
  world.pass(1);
  churn(world, writer, 200000);
  CHECK_EQ(writer.load_as(entry, page, 0), Got::stale);
}

TEST(pin_fails_when_it_comes_too_late) {
  World world(shape_of(kBig));
  world.start();
  Peer reader(world), writer(world);
  const TestPage page = world.page(1);
  CHECK(writer.store(page));
  const EntryView entry = *world.entry(page);
  CHECK_EQ(evict_all(world), 1);
  const int place = reader.store_pin(entry);  // found before, pinned after
  CHECK(!reader.confirm_pin(entry, place));
  churn(world, writer);
  const int again = reader.store_pin(entry);  // another generation is LIVE there now
  CHECK(!reader.confirm_pin(entry, again));
  CHECK_EQ(world->sessions().pins().size(), 0);
}

TEST(pin_holds_when_it_is_stored_before_the_scan_of_an_eviction) {
  // Stored and not yet checked: the reclaimer sees it all the same, and the check then succeeds.
  World world(shape_of(kBig));
  world.start();
  Peer reader(world), writer(world);
  const TestPage page = world.page(1);
  CHECK(writer.store(page));
  const EntryView entry = *world.entry(page);
  const int place = reader.store_pin(entry);
  CHECK_EQ(evict_all(world), 0);
  CHECK(reader.confirm_pin(entry, place));
  churn(world, writer);
  CHECK_EQ(reader.load_as(entry, page, 1), Got::right);
}

TEST(pin_through_an_old_index_holds_or_fails_but_never_names_another_page) {
  World world(shape_of(kBig));
  world.start();
  Peer reader(world);
  const TestPage kept = world.page(1), gone = world.page(2);
  CHECK(reader.store(kept));
  CHECK(reader.store(gone));
  const EntryView old_kept = *world.entry(kept), old_gone = *world.entry(gone);
  world.restart();
  Peer writer(world);
  uint64_t left = 0;
  CHECK(reader.pin(kept) >= 0);  // by the mapping of the index that is no more
  world->evict(-1, UINT64_MAX, "dram", left);
  CHECK_EQ(left, 1);
  churn(world, writer);
  CHECK_EQ(reader.pin(gone), -1);
  CHECK_EQ(reader.load_as(old_kept, kept, 0), Got::right);
  CHECK_EQ(reader.load_as(old_gone, gone, 0), Got::stale);
}

// What clients say of parents may be a ring: a page was given up, and came again below its own
// child.
TEST(pages_that_stand_above_each_other_make_room_for_others) {
  World world(shape_of(kBig, 1));
  world.start();
  Peer peer(world);
  for (uint64_t chain = 0; chain < world.capacity() / 2; ++chain) {
    TestPage above = world.page(chain, 0);
    const TestPage below = world.page(chain, 1);
    const ReserveAnswer first = peer.reserve(above), child = peer.reserve(below);
    peer.settle(first);
    above.parent = below.key;
    above.position = 2;
    CHECK(peer.store(above));
    CHECK_EQ(peer.seal(child, 0, peer.copy(child, below)), Reason::none);
  }
  churn(world, peer);
}

TEST(no_room_is_said_when_everything_is_pinned) {
  World world(shape_of(kBig));
  world.start();
  Peer reader(world), writer(world);
  const uint64_t slots = world.capacity();
  fill(world, writer, 0, slots);
  for (uint64_t chain = 0; chain < slots; ++chain) CHECK(reader.pin(world.page(chain)) >= 0);
  CHECK_EQ(writer.reserve(world.page(9000)).reason, Reason::no_room);
  for (uint64_t chain = 0; chain < slots; ++chain)
    CHECK_EQ(reader.load(world.page(chain)), Got::right);
  reader.session().drop_pin(0);
  CHECK(writer.store(world.page(9001)));
  world.check_settled();
}

TEST(pinned_page_is_not_found_but_readable_when_it_was_cleared) {
  World world(shape_of(kBig));
  world.start();
  Peer reader(world), writer(world);
  const TestPage page = world.page(1);
  CHECK(writer.store(page));
  const EntryView entry = *world.entry(page);
  const int place = reader.pin(page);
  CHECK_EQ(world->clear(0, 1), 1);
  CHECK(!world.stored(page));
  CHECK_EQ(world->status().zombie_slots, 1);
  churn(world, writer);
  CHECK_EQ(reader.load_as(entry, page, 0), Got::right);  // its holder may finish
  world.check_no_slot_leaks();
  world.clear_epoch = 1;  // as the ledger says
  world.restart();
  CHECK(!world.stored(page));
  CHECK_EQ(reader.load_as(entry, page, 0), Got::right);
  CHECK_EQ(world->status().zombie_slots, 1);
  reader.session().drop_pin(place);
  world.pass(1);
  CHECK_EQ(reader.load_as(entry, page, 0), Got::stale);
  world.check_settled();
}

// The clear of a large index goes stretch by stretch, and the daemon does its rounds in between.
TEST(clear_counts_the_pages_whose_parents_it_took_in_a_stretch_before) {
  World world(shape_of(kBig));
  world.start();
  Peer writer(world);
  CHECK(writer.store(world.page(1, 0)));
  CHECK(writer.store(world.page(1, 1)));
  *world.payload(world.slot_of(world.page(1, 0))) ^= std::byte{1};
  writer.report(*world.entry(world.page(1, 0)));  // the parent leaves
  CHECK_EQ(world->status().orphan_pages, 1);
  world->begin_clear(0, 1);
  world.pass(1);
  PageId cursor = 0;
  CHECK_EQ(world->clear_some(0, 1, cursor), 1);
  CHECK_EQ(world->status().left_dram[static_cast<size_t>(LeaveReason::cleared)], 1);
  world.check_no_slot_leaks();
}

TEST(sweep_takes_a_bounded_part_of_what_hangs_below_a_lost_page_and_leaves_what_is_pinned) {
  World world(shape_of(512, 1), 32 * kMiB);
  world.start();
  Peer peer(world);
  constexpr uint32_t kPages = 100;
  for (uint32_t at = 0; at < kPages; ++at) CHECK(peer.store(world.page(1, at)));
  CHECK(peer.pin(world.page(1, 50)) >= 0);
  *world.payload(world.slot_of(world.page(1, 0))) ^= std::byte{1};
  peer.report(*world.entry(world.page(1, 0)));
  CHECK_EQ(world->sweep(60), 59);
  CHECK_EQ(world->status().orphan_pages, 2);  // the pinned one, and the first behind the bound
  CHECK_EQ(world->sweep(60), kPages - 61);
  CHECK_EQ(world->sweep(60), 0);
  CHECK(world.stored(world.page(1, 50)));
  peer.session().drop_pin(0);
  CHECK_EQ(world->sweep(60), 1);
  world.pass(1);
  world.check_settled();
}

// --- who leaves, and when

TEST(descendants_leave_before_ancestors) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  auto random = check::random("descendants_leave_before_ancestors");
  constexpr uint32_t kDepth = 6;
  std::vector<uint32_t> depth(40, 0);  // pages stored of each chain
  for (int step = 0; step < 600; ++step) {
    const uint64_t chain = random() % depth.size();
    if (depth[chain] < kDepth && peer.store(world.page(chain, depth[chain]))) ++depth[chain];
    // A chain is now a prefix of what was stored of it, without a gap.
    for (uint64_t other = 0; other < depth.size(); ++other) {
      uint32_t prefix = 0;
      while (prefix < depth[other] && world.stored(world.page(other, prefix))) ++prefix;
      for (uint32_t at = prefix; at < depth[other]; ++at)
        CHECK(!world.stored(world.page(other, at)));
      depth[other] = prefix;
    }
    CHECK_EQ(world->status().orphan_pages, 0);
  }
  world.check_settled();
}

TEST(store_of_a_chain_evicts_none_of_its_own_pages) {
  // Incident: a store asks for a window of pages at once. Only the first of them had its parent
  // kept; for the others the chain was eaten from its last sealed page back to its first, and what
  // was sealed behind it could never be found.
  World world(shape_of(kBig, 1));
  world.start();
  Peer writer(world);
  constexpr uint32_t kWindow = 7;
  uint32_t sealed = 0;
  for (uint32_t begin = 0; begin < 2 * world.capacity(); begin += kWindow) {
    std::vector<std::pair<TestPage, ReserveAnswer>> granted;
    for (uint32_t at = begin; at < begin + kWindow; ++at) {
      TestPage page = world.page(1, at);
      const ReserveAnswer answer = writer.reserve(page);
      if (answer.answer != Answer::granted) break;
      granted.emplace_back(std::move(page), answer);
    }
    world.pass(1);  // it keeps some slots free by itself, and none of this chain's
    for (const auto& [page, answer] : granted)
      if (writer.seal(answer, 0, writer.copy(answer, page)) == Reason::none) ++sealed;
    if (granted.size() < kWindow) break;
  }
  CHECK(sealed > 0);
  for (uint32_t at = 0; at < sealed; ++at) CHECK_EQ(writer.load(world.page(1, at)), Got::right);
}

TEST(parent_is_not_evicted_for_its_own_child) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  const uint64_t slots = world.capacity();
  for (uint32_t at = 0; at < slots; ++at) CHECK(peer.store(world.page(1, at)));
  // The one chain fills the arena: its last page is the only leaf, and the parent of the next.
  const ReserveAnswer answer = peer.reserve(world.page(1, static_cast<uint32_t>(slots)));
  CHECK_EQ(answer.answer, Answer::dropped);
  CHECK_EQ(answer.reason, Reason::no_room);
  CHECK_EQ(world->status().dram_pages, slots);
}

TEST(evicted_page_stays_readable_until_its_slot_is_taken_again) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  const uint64_t slots = world.capacity();
  fill(world, peer, 0, slots);
  const TestPage page = world.page(0);
  const EntryView entry = *world.entry(page);
  CHECK_EQ(evict_all(world), slots);
  CHECK(!world.stored(page));
  // First in, first out: the first that left is the first to be taken, the last the last.
  std::vector<EntryView> entries;
  CHECK_EQ(peer.load_as(entry, page, 0), Got::right);
  std::set<SlotId> taken;
  for (uint64_t chain = 1000; chain < 1000 + slots; ++chain) {
    const bool reused = taken.contains(entry.slot);
    CHECK_EQ(peer.load_as(entry, page, 0), reused ? Got::stale : Got::right);
    const ReserveAnswer grant = peer.reserve(world.page(chain), 0);
    CHECK(taken.insert(grant.slot).second);  // no slot twice before each was taken once
    peer.settle(grant);
  }
  CHECK_EQ(taken.size(), slots);
}

TEST(generation_ends_for_readers_before_a_byte_of_the_next_is_written) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1), next = world.page(2);
  CHECK(peer.store(page));
  const EntryView entry = *world.entry(page);
  evict_all(world);
  ReserveAnswer grant;
  for (uint64_t chain = 100;; ++chain) {
    grant = peer.reserve(chain == 100 ? next : world.page(chain));
    if (grant.slot == entry.slot) break;
    peer.settle(grant);
  }
  // Granted, and nothing written yet: the bytes are still right, and no longer accepted.
  CHECK(std::memcmp(peer.place(entry.slot, 0), bytes_of(page.key, 0, kBig).data(), kBig) == 0);
  CHECK_EQ(peer.load_as(entry, page, 0), Got::stale);
}

TEST(page_is_evicted_by_use_not_by_age) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  const uint64_t slots = world.capacity();
  fill(world, peer, 0, slots);
  peer.session().touch(*world.entry(world.page(0)));  // the oldest, loaded just now
  CHECK(peer.store(world.page(9000)));
  CHECK(world.stored(world.page(0)));
  CHECK(!world.stored(world.page(1)));
}

// --- what its users need no more

// As a client says it: the last page first.
void release(World& world, Peer& peer, uint64_t chain, uint32_t pages) {
  for (uint32_t at = pages; at-- > 0;) peer.session().release(*world.entry(world.page(chain, at)));
  world.pass(kSecondNs);
}

TEST(released_prompt_leaves_before_older_ones) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  const uint64_t half = world.capacity() / 2;
  fill(world, peer, 0, half);
  for (uint32_t at = 0; at < 3; ++at) CHECK(peer.store(world.page(7000, at)));
  release(world, peer, 7000, 3);
  CHECK_EQ(world->status().released_pages, 3);
  CHECK(world.stored(world.page(7000, 2)));  // as long as there is room
  for (uint64_t chain = 8000; world.stored(world.page(7000, 0)); ++chain) {
    CHECK(chain < 8000 + world.capacity());
    for (uint64_t older = 0; older < half; ++older) CHECK(world.stored(world.page(older)));
    CHECK(peer.store(world.page(chain)));
  }
  for (uint32_t at = 0; at < 3; ++at) CHECK(!world.stored(world.page(7000, at)));
}

TEST(released_prompt_that_is_used_again_is_as_any_other) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  fill(world, peer, 0, world.capacity() / 2);
  release(world, peer, 9, 1);
  peer.session().touch(*world.entry(world.page(9)));
  world.pass(kSecondNs);
  for (uint64_t chain = 8000; world.stored(world.page(10)); ++chain) {
    CHECK(chain < 8000 + world.capacity());
    CHECK(peer.store(world.page(chain)));
  }
  CHECK(world.stored(world.page(9)));
}

TEST(what_another_prompt_goes_on_from_is_not_released) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  const TestPage shared = world.page(1, 0), own = world.page(1, 1);
  TestPage other = world.page(2, 1);
  other.parent = shared.key;
  for (const TestPage& page : {shared, own, other}) CHECK(peer.store(page));
  release(world, peer, 1, 2);
  CHECK_EQ(world->status().released_pages, 1);
  // With the last of them, whoever says it.
  Peer second(world);
  second.session().release(*world.entry(other));
  second.session().release(*world.entry(shared));
  world.pass(kSecondNs);
  CHECK_EQ(world->status().released_pages, 2);
  evict_all(world);
  world.check_settled();
}

TEST(releases_that_come_too_fast_release_no_page_before_those_behind_it) {
  World world(shape_of(kBig));
  world.start();
  Peer peer(world);
  for (uint32_t at = 0; at < 3; ++at) CHECK(peer.store(world.page(1, at)));
  peer.session().release(*world.entry(world.page(1, 2)));
  const EntryView middle = *world.entry(world.page(1, 1));
  for (uint32_t i = 0; i < kTouchCapacity; ++i) peer.session().release(middle);
  world.pass(kSecondNs);
  CHECK_EQ(world->status().released_pages, 0);
}

TEST(touches_of_what_is_gone_are_ignored) {
  World world(shape_of(5000));
  world.start();
  Peer peer(world);
  CHECK(peer.store(world.page(1)));
  EntryView entry = *world.entry(world.page(1));
  evict_all(world);
  for (const PageId page : {entry.page, PageId{0}, kNoPage, PageId{4095}, PageId{1u << 30}}) {
    entry.page = page;
    peer.session().touch(entry);
    peer.session().release(entry);
  }
  world.pass(1);
  world.check_settled();
}

TEST(operator_evicts_the_coldest_first_and_says_how_many) {
  World world(shape_of(5000));
  world.start();
  Peer peer(world);
  for (uint32_t at = 0; at < 4; ++at) CHECK(peer.store(world.page(1, at)));
  for (uint32_t at = 0; at < 4; ++at) CHECK(peer.store(world.page(2, at)));
  uint64_t left = 0;
  world->evict(0, 3, "dram", left);
  CHECK_EQ(left, 3);
  for (uint32_t at = 0; at < 4; ++at) {
    CHECK_EQ(world.stored(world.page(1, at)), at == 0);
    CHECK(world.stored(world.page(2, at)));
  }
  CHECK_THROWS(world->evict(0, 1, "hbm", left), "bad_tiers");
}

TEST(index_that_is_full_gives_its_coldest_page) {
  World world(shape_of(5000, 1));
  world.options.index_pages = 1;  // the smallest table there is
  world.start();
  Peer peer(world);
  const uint64_t entries = world->arena().index().entries();
  // More pages than it has room for: every one is stored, and the table stays a table.
  for (uint64_t chain = 0; chain < 2 * entries; ++chain) CHECK(peer.store(world.page(chain)));
  const WarehouseStatus status = world->status();
  CHECK(status.index_pages <= status.index_capacity);
  CHECK_EQ(status.index_pages, status.dram_pages);
  uint64_t found = 0;
  for (uint64_t chain = 0; chain < 2 * entries; ++chain)
    if (world.stored(world.page(chain))) {
      CHECK_EQ(peer.load(world.page(chain)), Got::right);
      ++found;
    }
  CHECK_EQ(found, status.dram_pages);
  world.check_settled();
}

TEST(index_full_is_said_when_every_page_of_its_places_is_pinned) {
  World world(shape_of(5000, 1));
  world.options.index_pages = 1;
  world.start();
  Peer reader(world), writer(world);
  uint64_t refused = 0;
  for (uint64_t chain = 0; chain < world->arena().index().entries(); ++chain) {
    const TestPage page = world.page(chain);
    const ReserveAnswer answer = writer.reserve(page);
    if (answer.answer == Answer::granted) {
      CHECK_EQ(writer.seal(answer, 0, writer.copy(answer, page, 0)), Reason::none);
      CHECK(reader.pin(page) >= 0);
    } else {
      CHECK(answer.reason == Reason::index_full || answer.reason == Reason::no_room);
      ++refused;
    }
  }
  CHECK(refused != 0);
  world.check_settled();
}

// --- slabs that go to another page size

// A warehouse of one page size was cleared and used for another: the new pages took the place of
// each other while most of the arena lay free.
TEST(cleared_slabs_go_to_another_page_size_before_any_of_its_pages_is_evicted) {
  World world(shape_of(kBig));
  const NamespaceShape small = shape_of(4096, 1, {8, 8});
  world.declared.push_back(small);
  world.start();
  Peer peer(world), other(world);
  other.use(small);
  const uint64_t slots = world.capacity();
  fill(world, peer, 0, slots);
  CHECK_EQ(world->clear(1, 1), slots);
  // Three of the arena's slabs, in chains of one: each of them could be evicted.
  const uint64_t pages = 3 * world.slots().header().slots_per_slab;
  for (uint64_t chain = 0; chain < pages; ++chain) {
    CHECK(other.store(page_of(small, chain, 0)));
    if (chain % 64 == 0) world.pass(100 * kMillisecondNs);
  }
  const WarehouseStatus status = world->status();
  CHECK_EQ(status.left_dram[static_cast<size_t>(LeaveReason::evicted)], 0);
  CHECK_EQ(status.dram_pages, pages);
  for (uint64_t chain = 0; chain < pages; ++chain)
    CHECK_EQ(other.load(page_of(small, chain, 0)), Got::right);
  // And back.
  CHECK_EQ(world->clear(0, 2), pages);
  fill(world, peer, 1000, slots * 3 / 4);
  CHECK_EQ(world->status().left_dram[static_cast<size_t>(LeaveReason::evicted)], 0);
  CHECK_EQ(world->status().dram_pages, slots * 3 / 4);
  world.check_settled();
}

TEST(free_slots_that_a_page_size_keeps_for_itself_are_not_taken_by_another_that_can_evict) {
  World world(shape_of(12 * 1024, 1));  // 170 a slab: enough that a fiftieth is something
  const NamespaceShape small = shape_of(4096, 1, {8, 8});
  world.declared.push_back(small);
  world.start();
  Peer peer(world), other(world);
  other.use(small);
  const auto slabs_of_big = [&] {
    uint32_t count = 0;
    for (uint32_t slab = 0; slab < world->arena().slab_count(); ++slab)
      count += world.slots().layout(slab).slot_blocks == world.shape().slot_bytes() / kBlockBytes;
    return count;
  };
  fill(world, peer, 0, world.capacity());
  uint64_t chain = 0;
  while (world->status().left_dram[static_cast<size_t>(LeaveReason::evicted)] == 0)
    CHECK(other.store(page_of(small, chain++, 0)));  // until its one slab is full
  const uint32_t slabs = slabs_of_big();
  CHECK_EQ(slabs, 3);
  uint64_t left = 0;  // a whole slab, and nothing beyond it
  world->evict(1, world.capacity() / 4, "dram", left);
  for (uint64_t more = 0; more < 100; ++more) CHECK(other.store(page_of(small, chain++, 0)));
  CHECK_EQ(slabs_of_big(), slabs);
  world.check_settled();
}

TEST(stale_entry_never_validates_when_its_slab_was_cut_anew) {
  World world(shape_of(kBig));
  const NamespaceShape small = shape_of(4096, 1, {8, 8});
  world.declared.push_back(small);
  world.start();
  Peer peer(world), other(world);
  other.use(small);
  const uint64_t slots = world.capacity();
  fill(world, peer, 0, slots);
  std::vector<EntryView> old;
  for (uint64_t chain = 0; chain < slots; ++chain) old.push_back(*world.entry(world.page(chain)));
  for (uint64_t chain = 0; chain < 600; ++chain) CHECK(other.store(page_of(small, chain, 0)));
  CHECK(world->status().left_dram[static_cast<size_t>(LeaveReason::rebalanced)] != 0);
  uint64_t stale = 0;
  for (uint64_t chain = 0; chain < slots; ++chain) {
    const Got got = peer.load_as(old[chain], world.page(chain), 1);
    CHECK(got == Got::right || got == Got::stale);
    CHECK(got == Got::right || !world.stored(world.page(chain)));
    stale += got == Got::stale ? 1 : 0;
  }
  CHECK(stale != 0);
  for (uint64_t chain = 0; chain < 600; ++chain)
    if (world.stored(page_of(small, chain, 0)))
      CHECK_EQ(other.load(page_of(small, chain, 0)), Got::right);
  // And back: the small pages' entries meet words of the old layout, raised.
  std::vector<std::pair<TestPage, EntryView>> smalls;
  for (uint64_t chain = 0; chain < 600; ++chain)
    if (const auto entry = world.entry(page_of(small, chain, 0)))
      smalls.emplace_back(page_of(small, chain, 0), *entry);
  evict_all(world);
  churn(world, peer, 300000);
  for (const auto& [page, entry] : smalls) {
    const Got got = other.load_as(entry, page, 0);
    CHECK(got == Got::right || got == Got::stale);
  }
  world.check_settled();
}

TEST(slab_is_not_given_away_while_somebody_reads_or_writes_there) {
  World world(shape_of(kBig));
  const NamespaceShape small = shape_of(4096, 1, {8, 8});
  world.declared.push_back(small);
  world.start();
  Peer reader(world), writer(world), other(world);
  other.use(small);
  const uint64_t slots = world.capacity();
  const uint64_t per_slab = slots / world->arena().slab_count();
  fill(world, writer, 0, slots - 1);
  const ReserveAnswer grant = writer.reserve(world.page(7777));  // one being written, in the last
  std::vector<EntryView> pinned;
  for (uint64_t slab = 0; slab + 1 < world->arena().slab_count(); ++slab) {
    const TestPage page = world.page(slab * per_slab + 3);
    CHECK(reader.pin(page) >= 0);
    pinned.push_back(*world.entry(page));
  }
  CHECK_EQ(other.store(page_of(small, 1, 0)), false);
  for (uint64_t slab = 0; slab < pinned.size(); ++slab)
    CHECK_EQ(reader.load_as(pinned[slab], world.page(slab * per_slab + 3), 0), Got::right);
  writer.settle(grant);
  world.pass(20 * kMillisecondNs);  // it looks again
  CHECK(other.store(page_of(small, 1, 0)));
  world.check_settled();
}

TEST(recovered_arena_keeps_its_cuts) {
  World world(shape_of(kBig));
  const NamespaceShape small = shape_of(4096, 1, {8, 8});
  world.declared.push_back(small);
  world.start();
  Peer peer(world), other(world);
  other.use(small);
  fill(world, peer, 0, world.capacity());
  for (uint64_t chain = 0; chain < 300; ++chain) CHECK(other.store(page_of(small, chain, 0)));
  const uint64_t pages = world->status().dram_pages, total = world.total_slots();
  CHECK_EQ(world.restart().pages_dram, pages);
  CHECK_EQ(world.total_slots(), total);
  other.map();
  for (uint64_t chain = 0; chain < 300; ++chain)
    CHECK_EQ(other.load(page_of(small, chain, 0)), Got::right);
  world.check_settled();
}

}  // namespace
}  // namespace kvw
