// Damage to slots that clients are writing: their words and metadata lie in shared memory, and no
// checksum vouches for them yet. What must hold: the daemon goes on, what it said was sealed is
// there and right, nothing else is, and each slot is free again when its writers are through.
#include "tests/check.h"
#include "tests/tally.h"
#include "tests/warehouse_world.h"

using namespace kvw;

namespace {

constexpr uint64_t kShard = 5000;
constexpr uint32_t kPages = 4;

// Writers of one shard each, as the ranks of an engine, with pages that neither has ended.
struct Scene {
  explicit Scene(World& world) : world(world), ranks{Peer(world), Peer(world)} {
    for (uint32_t at = 0; at < kPages; ++at) {
      pages.push_back(world.page(world.clock.boot_ns(), at));
      grants.push_back({ranks[0].reserve(pages[at], 0), ranks[1].reserve(pages[at], 1)});
      for (const ReserveAnswer& grant : grants[at]) CHECK_EQ(grant.answer, Answer::granted);
    }
  }

  ~Scene() {
    for (Peer& rank : ranks) rank.die();
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  // The shard's seal was taken.
  bool seal(size_t page, uint32_t shard) {
    const ReserveAnswer& grant = grants[page][shard];
    return ranks[shard].seal(grant, shard, ranks[shard].copy(grant, pages[page], shard)) ==
           Reason::none;
  }

  // `taken`: the last seal was. No page that was not is there, unless it has no damage to show.
  void check_page(size_t page, bool taken) {
    for (uint32_t shard = 0; shard < 2; ++shard) {
      const Got got = ranks[0].load(pages[page], shard);
      CHECK(got == (taken ? Got::right : Got::missing));
    }
  }

  World& world;
  std::array<Peer, 2> ranks;
  std::vector<TestPage> pages;
  std::vector<std::array<ReserveAnswer, 2>> grants;
};

const char* damage(World& world, SlotId slot, std::mt19937_64& random) {
  if (random() % 4 == 0) {
    world.slots().word(slot).fetch_xor(1ull << random() % 64);
    return "word of an unfinished slot flipped";
  }
  auto* bytes = reinterpret_cast<std::byte*>(world.meta(slot));
  bytes[random() % meta_bytes_of(world.shape())] ^= std::byte{1} << random() % 8;
  return "metadata of an unfinished slot flipped";
}

void end_scene(World& world) {  // its writers are gone
  for (int i = 0; i < 40; ++i) world.pass(2 * kSecondNs);
  world.check_settled();
}

}  // namespace

TEST(damage_of_an_unfinished_slot_is_never_sealed_in_and_never_ends_the_daemon) {
  auto random = check::random("damage of unfinished slots");
  World world(shape_of(kShard));
  world.start();
  for (uint64_t round = 0; round < check::rounds(200); ++round) {
    {
      Scene scene(world);
      const size_t hit = random() % kPages;
      bool whole = random() % 2 == 0 && scene.seal(hit, 0);
      const char* name = damage(world, scene.grants[hit][0].slot, random);
      // A hello lists what is unfinished; the next one of the prompt builds on it.
      world->unsettled(scene.ranks[random() % 2].id());
      if (!whole) whole = scene.seal(hit, 0);
      whole = whole && scene.seal(hit, 1);
      scene.check_page(hit, whole);
      for (size_t page = 0; page < kPages; ++page) {
        if (page == hit) continue;
        // Without the page before it, nothing can be found; else what was not damaged is taken.
        CHECK(scene.seal(page, 0) && scene.seal(page, 1));
        if (page < hit) scene.check_page(page, true);
      }
      check::tally(name);
    }
    end_scene(world);
  }
}

TEST(damage_of_an_unfinished_slot_costs_the_next_daemon_no_slot) {
  auto random = check::random("damage of unfinished slots, restarts");
  World world(shape_of(kShard));
  world.start();
  for (uint64_t round = 0; round < check::rounds(100); ++round) {
    {
      Scene scene(world);
      const size_t hit = random() % kPages;
      if (random() % 2 == 0) scene.seal(hit, 0);
      const char* name = damage(world, scene.grants[hit][0].slot, random);
      for (int start = 0; start < 2; ++start) {  // what one start made of it, the next one reads
        world.restart();
        for (Peer& rank : scene.ranks) {
          const std::vector<SlotRef> refs = rank.hello();
          if (random() % 2 == 0) world->settle(rank.id(), refs);
        }
        for (size_t page = 0; page < kPages; ++page) scene.check_page(page, false);
      }
      check::tally(name);
    }
    end_scene(world);
  }
}
