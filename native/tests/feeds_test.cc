// What a feed says, against what the warehouse has: a reader that applies it knows every page of
// every tier, whatever happened meanwhile, and never meets a child before its parent.
#include "warehouse/feeds.h"

#include <poll.h>

#include <filesystem>
#include <map>

#include "tests/arena_image.h"
#include "tests/check.h"
#include "tests/warehouse_world.h"

namespace kvw {
namespace {

constexpr uint64_t kSmall = 4096;

struct KeyOrder {
  bool operator()(const Key& a, const Key& b) const {
    return std::pair(a.hi, a.lo) < std::pair(b.hi, b.lo);
  }
};

// Applies what a feed says, and fails on what no reader should ever be told.
class Reader {
 public:
  explicit Reader(World& world, const FeedRequest& request = {},
                  uint64_t bytes = Feeds::kQueueBytes)
      : world_(&world), queue_(std::make_shared<FeedQueue>(bytes)) {
    id_ = world->feeds().open(request, queue_);
  }
  // All there is now, and all that is still to be told without a device.
  void read() {
    while (read_some()) continue;
  }
  bool read_some() {
    FeedBatch batch = queue_->take(std::chrono::milliseconds(0));
    lost |= batch.lost;
    size_t place = 0;
    for (const FeedItem& item : batch.items) {
      CHECK(place + item.witness_bytes <= batch.witnesses.size());
      apply(item, {batch.witnesses.data() + place, item.witness_bytes});
      place += item.witness_bytes;
    }
    if (batch.more) (*world_)->feeds().advance(id_);
    return batch.more || !batch.items.empty();
  }
  void restart() {
    lost = false;
    (*world_)->feeds().restart(id_);
  }
  void close() { queue_->close(); }

  std::map<Key, uint8_t, KeyOrder> pages;
  std::map<Key, std::vector<std::byte>, KeyOrder> witnesses;
  uint64_t said = 0, cleared = 0;
  bool synced = false, lost = false;

 private:
  void apply(const FeedItem& item, std::span<const std::byte> witness) {
    ++said;
    switch (item.kind) {
      case FeedKind::cleared:
        ++cleared;
        pages.clear();
        synced = false;
        return;
      case FeedKind::synced:
        synced = true;
        return;
      case FeedKind::stored:
        CHECK(item.tiers != 0);
        if (item.position > 0) CHECK(pages.contains(item.parent));
        pages[item.key] |= item.tiers;
        witnesses[item.key].assign(witness.begin(), witness.end());
        return;
      case FeedKind::removed:
        CHECK(pages.contains(item.key) && (pages[item.key] & item.tiers) == item.tiers);
        pages[item.key] = static_cast<uint8_t>(pages[item.key] & ~item.tiers);
        if (pages[item.key] == 0) pages.erase(item.key);
    }
  }

  World* world_;
  std::shared_ptr<FeedQueue> queue_;
  uint64_t id_;
};

std::map<Key, uint8_t, KeyOrder> stored_pages(World& world, int ordinal = -1) {
  std::map<Key, uint8_t, KeyOrder> pages;
  for (PageId cursor = 0; cursor != kNoPage;)
    for (const PageInfo& page : world->pages(ordinal, cursor, SIZE_MAX))
      pages[page.key] =
          static_cast<uint8_t>((page.dram ? kFeedDram : 0) | (page.nvme ? kFeedNvme : 0));
  return pages;
}

// A warehouse with an NVMe tier, and its device's end of the loop.
struct TwoTiers {
  explicit TwoTiers(uint64_t shard_bytes = kSmall) : world(shape_of(shard_bytes, 1)) {
    world.options.nvme_dir = world.directory.path() + "/nvme";
    std::filesystem::create_directory(world.options.nvme_dir);
    world.options.nvme_capacity_bytes = 8 * kMiB;
    world.start();
  }
  void until(const std::function<bool()>& done) {
    for (int round = 0; round < 20000; ++round) {
      world->poll_log();
      world->tick();
      if (done()) return;
      pollfd ready{world->log_fd(), POLLIN, 0};
      ::poll(&ready, 1, 5);
    }
    CHECK(!"the warehouse never got there");
  }
  void sync(Reader& reader) {
    until([&] {
      reader.read();
      return reader.synced;
    });
  }
  World world;
};

void store_chain(World& world, Peer& peer, uint64_t chain, uint32_t pages) {
  for (uint32_t at = 0; at < pages; ++at) CHECK(peer.store(world.page(chain, at)));
}

void check_equal(World& world, const Reader& reader) {
  const auto stored = stored_pages(world);
  CHECK_EQ(reader.pages.size(), stored.size());
  CHECK(reader.pages == stored);
}

uint64_t evict(World& world, uint64_t pages, const char* tiers) {
  uint64_t left = 0;
  world->evict(-1, pages, tiers, left);
  return left;
}

// --- what it says

TEST(feed_begins_with_all_that_is_stored_parents_first) {
  World world(shape_of(kSmall, 1));
  world.start();
  Peer peer(world);
  for (uint64_t chain = 0; chain < 50; ++chain) store_chain(world, peer, chain, 5);
  Reader reader(world);
  reader.read();
  CHECK(reader.synced);
  CHECK_EQ(reader.cleared, 1);
  CHECK_EQ(reader.pages.size(), 250);
  check_equal(world, reader);
  const TestPage page = world.page(7, 3);
  CHECK(std::ranges::equal(reader.witnesses.at(page.key), page.witness()));
}

TEST(feed_tells_each_change_when_it_happens) {
  World world(shape_of(kSmall, 1));
  world.start();
  Peer peer(world);
  Reader reader(world);
  reader.read();
  CHECK(reader.synced && reader.pages.empty());
  store_chain(world, peer, 1, 3);
  reader.read();
  CHECK_EQ(reader.pages.size(), 3);
  CHECK_EQ(evict(world, 1, "dram"), 1);
  reader.read();
  CHECK_EQ(reader.pages.size(), 2);
  world->clear(0, 1);
  reader.read();
  CHECK(reader.pages.empty());
  CHECK_EQ(reader.said, 2 + 3 + 1 + 2);  // nothing twice
}

TEST(feed_tells_a_page_that_changed_before_the_snapshot_reached_it_as_it_is) {
  World world(shape_of(kSmall, 1));
  world.start();
  Peer peer(world);
  for (uint64_t chain = 0; chain < 20; ++chain) store_chain(world, peer, chain, 4);
  Reader reader(world);  // nothing was read, so nothing but `cleared` was said yet
  CHECK_EQ(evict(world, 30, "dram"), 30);
  store_chain(world, peer, 100, 4);
  reader.read();
  CHECK_EQ(reader.pages.size(), 54);
  check_equal(world, reader);
}

TEST(feed_waits_with_a_child_until_its_parent_is_sealed) {
  World world(shape_of(kSmall, 1));
  world.start();
  Peer peer(world);
  Reader reader(world);
  const TestPage root = world.page(1, 0), child = world.page(1, 1), grandchild = world.page(1, 2);
  const ReserveAnswer first = peer.reserve(root), second = peer.reserve(child),
                      third = peer.reserve(grandchild);
  CHECK(peer.seal(third, 0, peer.copy(third, grandchild)) == Reason::none);
  CHECK(peer.seal(second, 0, peer.copy(second, child)) == Reason::none);
  reader.read();
  CHECK(reader.pages.empty());
  CHECK(peer.seal(first, 0, peer.copy(first, root)) == Reason::none);
  reader.read();
  CHECK_EQ(reader.pages.size(), 3);
}

TEST(feed_tells_children_again_when_their_parent_comes_back) {
  // A router may have forgotten what hangs below a block that it was told to forget.
  World world(shape_of(kSmall, 1));
  world.start();
  Peer peer(world);
  Reader reader(world);
  store_chain(world, peer, 1, 3);
  reader.read();
  const TestPage root = world.page(1, 0);
  const EntryView entry = *world.entry(root);
  *world.payload(entry.slot) ^= std::byte{1};
  peer.report(entry);
  reader.read();
  CHECK_EQ(reader.pages.size(), 2);
  CHECK(peer.store(root));
  const uint64_t said = reader.said;
  reader.read();
  CHECK_EQ(reader.said, said + 3);
  CHECK_EQ(reader.pages.size(), 3);
}

TEST(feed_tells_all_siblings_whichever_of_them_leave_and_come_meanwhile) {
  constexpr uint64_t kChildren = 3000;
  auto random = check::random("siblings of a feed");
  World world(shape_of(kSmall, 1), 32 * kMiB);
  world.start();
  Peer peer(world);
  const TestPage root = world.page(1, 0);
  const auto child = [&](uint64_t number) {
    TestPage page = root;
    page.parent = root.key;
    page.position = 1;
    page.key = {root.key.lo ^ (number + 1) * 0x9e3779b97f4a7c15ull, number};
    return page;
  };
  const auto damage = [&](const TestPage& page) {
    if (!world.stored(page)) return;
    *world.payload(world.slot_of(page)) ^= std::byte{1};
    peer.report(*world.entry(page));
  };
  CHECK(peer.store(root));
  for (uint64_t number = 0; number < kChildren; ++number) CHECK(peer.store(child(number)));
  Reader reader(world);
  for (int step = 0; step < 5; ++step) {
    reader.read_some();
    CHECK(!reader.synced);
    for (int change = 0; change < 40; ++change) damage(child(random() % kChildren));
    if (step == 2) damage(root);
    CHECK(peer.store(root));
    for (int change = 0; change < 20; ++change) CHECK(peer.store(child(random() % kChildren)));
  }
  reader.read();
  CHECK(reader.synced && !reader.lost);
  check_equal(world, reader);
}

TEST(feed_says_nothing_of_a_page_that_a_clear_has_hidden) {
  World world(shape_of(kSmall, 1));
  world.start();
  Peer peer(world);
  store_chain(world, peer, 1, 3);
  world->begin_clear(0, 1);
  Reader reader(world);
  reader.read();
  CHECK(reader.synced && reader.pages.empty());
  PageId cursor = 0;
  CHECK_EQ(world->clear_some(0, 1, cursor), 3);
  reader.read();
  CHECK(reader.pages.empty());
}

TEST(feed_leaves_out_pages_by_keys_and_other_namespaces_where_it_is_told_to) {
  World world(shape_of(kSmall, 1));
  NamespaceShape other = shape_of(kSmall, 1, {0x61, 0x62});
  world.declared.push_back(other);  // ordinal 0; the world's own has 1
  world.start();
  Peer peer(world);
  store_chain(world, peer, 1, 2);
  const std::string engine_key = "an engine's own block hash, 32 b";
  const Reserve fields{{1, 2}, {3, 4}, 0, 0, static_cast<uint32_t>(WitnessKind::engine_key), 32};
  const std::array<ReserveRequest, 1> requests{
      {{&fields, reinterpret_cast<const std::byte*>(engine_key.data())}}};
  std::vector<SealAnswer> sealed;
  std::vector<ReserveAnswer> answers;
  world->exchange(peer.id(), other.id, {}, requests, sealed, answers);
  TestPage keyed;
  keyed.key = {1, 2};
  const std::array<Seal, 1> seals{
      {{answers[0].generation, peer.copy(answers[0], keyed), answers[0].slot, 0}}};
  world->exchange(peer.id(), other.id, seals, {}, sealed, answers);
  Reader all(world), tokens(world, {-1, true}), first(world, {0, false}), second(world, {1, false});
  for (Reader* reader : {&all, &tokens, &first, &second}) reader->read();
  CHECK_EQ(all.pages.size(), 3);
  CHECK_EQ(tokens.pages.size(), 2);
  CHECK_EQ(first.pages.size(), 1);
  CHECK(std::ranges::equal(first.witnesses.at({1, 2}), std::as_bytes(std::span(engine_key))));
  CHECK_EQ(second.pages.size(), 2);
  world->clear(0, 1);
  tokens.read();  // what it was never told of does not leave it
  CHECK_EQ(tokens.pages.size(), 2);
}

TEST(feed_names_the_namespace_of_what_left_also_after_another_took_its_number) {
  World world(shape_of(kSmall, 1));
  world.start();
  Peer peer(world);
  const auto queue = std::make_shared<FeedQueue>(Feeds::kQueueBytes);
  world->feeds().open({}, queue);
  store_chain(world, peer, 1, 1);
  CHECK_EQ(world->clear(0, 1), 1);
  CHECK(world->forget_namespace(0) == kSpace);
  const Key next{0x61, 0x62};
  CHECK_EQ(world->add_namespace(0, shape_of(kSmall, 1, next), 1), 0);
  peer.use(shape_of(kSmall, 1, next));
  CHECK(peer.store(page_of(shape_of(kSmall, 1, next), 1, 0)));
  std::vector<Key> said;
  for (const FeedItem& item : queue->take(std::chrono::milliseconds(0)).items)
    if (item.kind != FeedKind::cleared) said.push_back(item.namespace_id);
  CHECK_EQ(said.size(), 3);
  CHECK(said[0] == kSpace && said[1] == kSpace && said[2] == next);
}

TEST(namespace_that_is_watched_is_not_forgotten) {
  World world(shape_of(kSmall, 1));
  world.start();
  Reader of_all(world), watcher(world, {0, false});
  CHECK(!world->forget_namespace(0));
  watcher.close();
  CHECK(world->forget_namespace(0) == kSpace);
}

// --- two tiers

TEST(feed_tells_of_each_tier_by_itself) {
  TwoTiers both;
  World& world = both.world;
  Peer peer(world);
  Reader reader(world);
  store_chain(world, peer, 1, 3);
  both.until([&] { return world->status().nvme_pages == 3; });
  reader.read();
  for (const auto& [key, tiers] : reader.pages) CHECK_EQ(tiers, kFeedDram | kFeedNvme);
  CHECK_EQ(evict(world, 3, "dram"), 3);
  reader.read();
  for (const auto& [key, tiers] : reader.pages) CHECK_EQ(tiers, kFeedNvme);
  CHECK_EQ(reader.pages.size(), 3);
  std::vector<PromoteAnswer> answers;
  const std::array<Key, 1> keys{world.page(1, 1).key};
  world->promote(keys, answers);
  both.until([&] { return world->status().pages_promoted == 1; });
  reader.read();
  CHECK_EQ(reader.pages.at(keys[0]), kFeedDram | kFeedNvme);
  CHECK_EQ(evict(world, 3, "nvme"), 2);
  reader.read();
  CHECK_EQ(reader.pages.at(keys[0]), kFeedDram);
  CHECK_EQ(reader.pages.at(world.page(1, 0).key), kFeedNvme);  // what is left hangs on it
  CHECK_EQ(reader.pages.size(), 2);
  check_equal(world, reader);
}

TEST(feed_reads_the_tokens_of_pages_that_only_nvme_has_after_a_restart) {
  TwoTiers both;
  World& world = both.world;
  {
    Peer peer(world);
    for (uint64_t chain = 0; chain < 30; ++chain) store_chain(world, peer, chain, 4);
    both.until([&] { return world->status().nvme_pages == 120; });
    CHECK(world->request_flush() != 0);
    world->stop();
  }
  world.kill();
  std::filesystem::remove_all(world.options.arena_dir);
  world.start();
  CHECK_EQ(world->status().dram_pages, 0);
  Reader reader(world);
  reader.read();
  CHECK(!reader.synced);  // nobody waited for the device
  both.sync(reader);
  CHECK_EQ(reader.pages.size(), 120);
  check_equal(world, reader);
  const TestPage page = world.page(29, 3);
  CHECK(std::ranges::equal(reader.witnesses.at(page.key), page.witness()));
}

TEST(feed_survives_its_end_while_headers_are_being_read) {
  TwoTiers both;
  World& world = both.world;
  Peer peer(world);
  store_chain(world, peer, 1, 4);
  both.until([&] { return world->status().nvme_pages == 4; });
  CHECK_EQ(evict(world, 4, "dram"), 4);
  Reader closed(world), restarted(world);
  closed.read();
  restarted.read();
  closed.close();
  restarted.restart();
  both.sync(restarted);
  CHECK_EQ(restarted.pages.size(), 4);
  CHECK_EQ(restarted.cleared, 2);
}

// --- bounds

TEST(feed_that_is_not_read_loses_all_and_begins_anew_when_told) {
  World world(shape_of(kSmall, 1));
  world.start();
  Peer peer(world);
  Reader reader(world, {}, 4096);
  for (uint64_t chain = 0; chain < 100; ++chain) store_chain(world, peer, chain, 1);
  reader.read();
  CHECK(reader.lost);
  const uint64_t said = reader.said;
  store_chain(world, peer, 200, 1);
  reader.read();
  CHECK_EQ(reader.said, said);  // silent until it is told to begin anew
  reader.restart();
  reader.read();
  CHECK(reader.synced && !reader.lost);
  check_equal(world, reader);
}

TEST(feeds_are_bounded_and_cost_nothing_once_they_are_closed) {
  World world(shape_of(kSmall, 1));
  world.start();
  std::vector<Reader> readers;
  for (size_t i = 0; i < Feeds::kMaxFeeds; ++i) readers.emplace_back(world);
  CHECK_THROWS(Reader(world, {}), "too_many_watchers");
  readers[0].close();
  readers[0] = Reader(world);  // there is room at once
  for (Reader& reader : readers) reader.close();
  world->tick();
  CHECK_EQ(world->feeds().size(), 0);
  Peer peer(world);
  store_chain(world, peer, 1, 1);
  readers[0].read();
  CHECK(readers[0].pages.empty());
}

// --- everything at once

TEST(feed_agrees_with_the_warehouse_whatever_happens) {
  auto random = check::random("feed_agrees_with_the_warehouse_whatever_happens");
  TwoTiers both(60 * 1024);  // of both tiers there is less than of pages
  World& world = both.world;
  auto peer = std::make_unique<Peer>(world);
  auto early = std::make_unique<Reader>(world);
  auto late = std::make_unique<Reader>(world);
  uint64_t epoch = 0;
  for (uint64_t step = 0; step < check::rounds(600); ++step) {
    const uint64_t chain = random() % 60;
    switch (random() % 12) {
      case 0:
        evict(world, random() % 20, "dram");
        break;
      case 1:
        evict(world, random() % 20, "nvme");
        break;
      case 2:
        evict(world, random() % 10, "all");
        break;
      case 3:
        if (random() % 8 == 0) world->clear(0, ++epoch);
        break;
      case 4: {
        std::vector<PromoteAnswer> answers;
        const std::array<Key, 2> keys{world.page(chain, 0).key, world.page(chain, 1).key};
        world->promote(keys, answers);
        break;
      }
      case 5:
        if (const auto entry = world.entry(world.page(chain, 1)); entry && entry->in_dram()) {
          *world.payload(entry->slot) ^= std::byte{1};
          peer->report(*entry);  // a parent goes, and its children are orphans for a while
        }
        break;
      case 6:
        early->read();
        break;
      case 7:
        if (random() % 16 == 0) late->restart();
        break;
      case 8:
        if (random() % 32 == 0) {
          world.restart();
          peer = std::make_unique<Peer>(world);
          early = std::make_unique<Reader>(world);
          late = std::make_unique<Reader>(world);
        }
        break;
      default:
        for (uint32_t at = 0; at < 1 + random() % 6; ++at)
          if (!peer->store(world.page(chain, at))) break;
    }
    world.pass(kMillisecondNs);
    world->poll_log();
  }
  world->sweep(SIZE_MAX);
  CHECK(peer->store(world.page(1000)));
  both.until([&] { return world->status().log.queued_records == 0; });
  both.sync(*early);
  both.sync(*late);
  CHECK(!early->lost && !late->lost);
  CHECK(world->status().index_pages > 0);
  check_equal(world, *early);
  check_equal(world, *late);
}

}  // namespace
}  // namespace kvw
