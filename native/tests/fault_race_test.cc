// Races on the real code, one interleaving after the other: one side stands at a named place of the
// protocol (base/sequence_point.h) while the other goes on, or the daemon ends there as by a kill.
// The models of this folder explore every order of a few stores; here is all the code and all the
// bytes.
#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include "base/sequence_point.h"
#include "tests/check.h"
#include "tests/daemon_world.h"
#include "tests/tally.h"
#include "tests/warehouse_world.h"

namespace kvw {
namespace {

constexpr uint64_t kShard = 24 * 1024;  // two of them a slot, 42 slots a slab, 168 in all
constexpr uint64_t kGrace = 5 * kSecondNs;
constexpr uint32_t kOthers = 8;  // page sizes, more than there are slabs

NamespaceShape other_shape(uint64_t number) {
  return shape_of((1 + number) * kBlockBytes, 1, {0x61, 1 + number});
}

// While it lives, this thread does `then` once, where it reaches `place` for the `nth` time. Not
// while it is doing it.
class At {
 public:
  At(std::string place, std::function<void()> then, uint64_t nth = 1)
      : place_(std::move(place)), left_(nth) {
    at_sequence_point = [this, then = std::move(then)](std::string_view reached) {
      if (reached_ || reached != place_ || --left_ != 0) return;
      reached_ = true;
      then();
    };
  }
  ~At() { at_sequence_point = nullptr; }
  At(const At&) = delete;
  At& operator=(const At&) = delete;
  bool reached() const { return reached_; }

 private:
  std::string place_;
  uint64_t left_;
  bool reached_ = false;
};

// Takes the slot for another page: reserved and full of other bytes, or sealed as well.
// Reservations that get other slots are given back, so this goes through the free list once.
void reuse(World& world, Peer& writer, SlotId slot, bool sealed) {
  static uint64_t chain = 1ull << 30;
  for (uint64_t tries = 0; tries < 2 * world.total_slots(); ++tries) {
    const TestPage page = world.page(++chain);
    const ReserveAnswer grant = writer.reserve(page);
    if (grant.answer != Answer::granted) return;  // its slab has another cut by now
    if (grant.slot != slot) {
      writer.settle(grant);
      continue;
    }
    const uint64_t digest = writer.copy(grant, page);
    if (!sealed) return;
    writer.seal(grant, 0, digest);
    const ReserveAnswer rest = writer.reserve(page, 1);
    if (rest.answer == Answer::granted) writer.seal(rest, 1, writer.copy(rest, page, 1));
    return;
  }
}

void evict_all(World& world) {
  uint64_t left = 0;
  world->evict(-1, UINT64_MAX, "dram", left);
}

enum class Move {
  nothing,
  evict,
  reserve_over_it,
  store_over_it,
  clear,
  quarantine,
  restart,
  restart_and_store_over_it,
  cut_anew,
  count
};

// A world in which pages come and go, and the epochs that clears have used.
struct Scene {
  explicit Scene(uint64_t index_pages = 0) : world(shape_of(kShard)) {
    for (uint64_t number = 0; number < kOthers; ++number)
      world.declared.push_back(other_shape(number));
    world.options.index_pages = index_pages;
    world.start();
    open();
  }
  void open() {
    reader = std::make_unique<Peer>(world);
    writer = std::make_unique<Peer>(world);
  }
  // As after a kill of the daemon; the writer comes again, the reader goes on with what it maps.
  void restart() {
    world.restart();
    writer->use(world.shape());  // it may have been in the middle of others
    settle(*writer);
  }
  static void settle(Peer& peer) {
    for (const SlotRef& ref : peer.hello()) {
      ReserveAnswer owed{};
      owed.slot = ref.slot;
      owed.generation = ref.generation;
      peer.settle(owed, ref.shard);
    }
  }

  void make(Move move, const TestPage& page, const EntryView& entry) {
    switch (move) {
      case Move::evict:
        return evict_all(world);
      case Move::restart_and_store_over_it:
        restart();
        [[fallthrough]];
      case Move::reserve_over_it:
      case Move::store_over_it:
        evict_all(world);
        return reuse(world, *writer, entry.slot, move != Move::reserve_over_it);
      case Move::clear: {
        world->clear(kOthers, ++epoch);  // ordinals are given in the order of declaration
        return;
      }
      case Move::quarantine:
        world.payload(entry.slot)[7] ^= std::byte{0x10};
        return writer->report(entry);
      case Move::restart:
        return restart();
      case Move::cut_anew:
        return cut_anew();
      default:
        (void)page;
    }
  }
  // A page size that lost its last slab to others takes one: where the coldest pages are.
  void cut_anew() {
    static uint64_t chain = 1ull << 40;
    for (int i = 0; i < 4; ++i) {
      const NamespaceShape shape = other_shape(++chain % kOthers);
      writer->use(shape);
      writer->store(page_of(shape, chain, 0));
    }
    writer->use(world.shape());
  }

  World world;
  std::unique_ptr<Peer> reader, writer;
  uint64_t epoch = 0;
};

TEST(load_that_is_held_between_two_steps_returns_its_page_or_a_miss) {
  auto random = check::random("load_that_is_held_between_two_steps");
  const std::vector<std::string> places{"load: word read", "load: metadata read", "load: copied"};
  Scene scene;
  World& world = scene.world;
  std::set<std::pair<size_t, Move>> seen;
  for (uint64_t round = 0; round < check::rounds(700); ++round) {
    const size_t place = random() % places.size();
    const auto move = static_cast<Move>(random() % static_cast<uint64_t>(Move::count));
    const TestPage page = world.page(round);
    CHECK(scene.writer->store(page));
    const EntryView entry = *world.entry(page);
    const auto shard = static_cast<uint32_t>(random() % 2);
    Got got = Got::missing;
    {
      const At at(places[place], [&] { scene.make(move, page, entry); });
      got = scene.reader->load_as(entry, page, shard);
      CHECK(at.reached());
    }
    const SlotWord now = world.word(entry.slot);
    const bool moved = static_cast<uint32_t>(now.generation) != entry.generation;
    if (moved)
      CHECK_EQ(got, Got::stale);
    else if (move == Move::quarantine && shard == 0 && places[place] != "load: copied")
      CHECK_EQ(got, Got::mismatch);  // one byte of its first shard
    else
      CHECK_EQ(got, Got::right);
    seen.insert({place, move});
    Scene::settle(*scene.writer);
    if (random() % 8 == 0) Scene::settle(*scene.reader);  // to the newest index
    check::tally("reader held between two steps of a load");
  }
  CHECK(seen.size() >= 24);  // of 27
  world.pass(kGrace);
  world.check_no_slot_leaks();
}

TEST(pin_that_meets_an_eviction_at_any_step_holds_or_fails) {
  auto random = check::random("pin_that_meets_an_eviction_at_any_step");
  const std::vector<std::string> places{"evict: closed", "evict: pins read", "evict: entry out"};
  Scene scene;
  World& world = scene.world;
  for (uint64_t round = 0; round < check::rounds(600); ++round) {
    const size_t place = random() % places.size();
    const bool at_once = random() % 2 == 0;
    const TestPage page = world.page(round);
    evict_all(world);
    CHECK(scene.writer->store(page));
    const EntryView entry = *world.entry(page);
    int pin = -1;
    bool held = false;
    {
      const At at(places[place], [&] {
        pin = scene.reader->store_pin(entry);
        if (at_once) held = scene.reader->confirm_pin(entry, pin);
        // Whatever becomes of it, its bytes are there until it is reused.
        CHECK_EQ(scene.reader->load_as(entry, page, 1), Got::right);
      });
      evict_all(world);
      CHECK(at.reached());
    }
    if (!at_once) held = scene.reader->confirm_pin(entry, pin);
    // Seen by the scan, and then back to LIVE; or too late for both.
    CHECK_EQ(held, place == 0 && !at_once);
    evict_all(world);
    reuse(world, *scene.writer, entry.slot, random() % 2 == 0);
    CHECK_EQ(scene.reader->load_as(entry, page, 0), held ? Got::right : Got::stale);
    if (held) scene.reader->session().drop_pin(pin);
    Scene::settle(*scene.writer);
    check::tally("pin stored between two steps of an eviction");
  }
}

TEST(load_at_any_step_of_reuse_and_of_a_new_cut_is_right_or_a_miss) {
  auto random = check::random("load_at_any_step_of_reuse");
  const std::vector<std::string> places{
      "reuse: generation raised", "reserve: slot taken",      "reserve: metadata stored",
      "publish: digests stored",  "publish: checksum stored", "publish: live",
      "publish: in the index",    "evict: entry out",         "retire: generations raised",
      "grow: metadata cleared",   "rebalance: pages out"};
  Scene scene(1024);  // small enough to become full
  World& world = scene.world;
  std::vector<std::pair<TestPage, EntryView>> old;
  std::set<std::string> seen;
  for (uint64_t round = 0; round < check::rounds(250); ++round) {
    const std::string& place = places[random() % places.size()];
    const TestPage page = world.page(round);
    if (scene.writer->store(page)) old.emplace_back(page, *world.entry(page));
    if (old.size() > 400) old.erase(old.begin());
    {
      const At at(place, [&] {
        for (const auto& [each, entry] : old) {
          const Got got = scene.reader->load_as(entry, each, 0);
          CHECK(got == Got::right || got == Got::stale);
        }
      });
      if (random() % 2 == 0) {
        scene.cut_anew();
      } else {
        for (uint64_t i = 0; i < 8 && !at.reached(); ++i)
          scene.writer->store(world.page((1ull << 20) + round * 8 + i));
      }
      if (!at.reached()) continue;
    }
    seen.insert(place);
    check::tally("daemon held between two steps, read meanwhile");
  }
  std::string never;
  for (const std::string& place : places)
    if (!seen.contains(place)) never += " " + place;
  CHECK_EQ(never, "");
}

struct Ended {};

TEST(daemon_that_ends_at_any_step_loses_nothing_sealed_and_serves_nothing_wrong) {
  auto random = check::random("daemon_that_ends_at_any_step");
  for (const bool full : {false, true}) {
    Scene scene(1024);
    World& world = scene.world;
    std::set<uint64_t> stored;
    uint64_t chain = 0;
    for (uint64_t round = 0; round < check::rounds(full ? 60 : 120); ++round) {
      // Without room for all nothing is promised to stay; with it, everything is.
      if (!full && stored.size() > 120) {
        evict_all(world);
        stored.clear();
      }
      uint64_t left = random() % (full ? 200 : 30);
      uint64_t said = 0;
      try {
        at_sequence_point = [&](std::string_view place) {
          if (place.starts_with("load:") || left-- > 0) return;
          at_sequence_point = nullptr;
          throw Ended{};
        };
        for (;; ++chain) {
          said = chain;
          if (scene.writer->store(world.page(chain)) && !full) stored.insert(chain);
          if (full && chain % 16 == 0) scene.cut_anew();
        }
      } catch (const Ended&) {
        ++chain;
      }
      scene.restart();
      Scene::settle(*scene.reader);
      for (const uint64_t each : stored)
        CHECK_EQ(scene.reader->load(world.page(each), 1), Got::right);
      for (uint64_t each = said > 300 ? said - 300 : 0; each <= said; ++each) {
        const Got got = scene.reader->load(world.page(each), 0);
        if (got != Got::missing) CHECK_EQ(got, Got::right);
      }
      world.pass(1);
      world.pass(kGrace);
      world.check_settled();
      check::tally("daemon ended at a step of reserve, seal, evict or reuse");
    }
  }
}

// --- the client's own steps, against a daemon with its threads

std::vector<std::byte> version_of(const TestPage& page, uint64_t version, size_t bytes) {
  return bytes_of(Key{page.key.lo + version, page.key.hi}, 0, bytes);
}

// Stores the chain with bytes of a version; how many pages were taken.
uint64_t store_version(Client& client, const Chain& chain, uint64_t version) {
  Rows rows(chain.pages.size(), chain.shape.shard_bytes);
  for (size_t at = 0; at < chain.pages.size(); ++at) {
    const auto bytes = version_of(chain.pages[at], version, chain.shape.shard_bytes);
    std::memcpy(rows.row(at), bytes.data(), bytes.size());
  }
  Prompt asked = chain.prompt();
  return client.store(chain.shape.id, asked, 0, rows, 0, uint64_t{kPatienceMs} * kMillisecondNs)
      .stored;
}

// How many pages are there; each is of one of the versions, whole. Said: of which.
uint64_t load_version(Client& client, const Chain& chain, std::set<uint64_t>& versions,
                      LoadReport* report = nullptr) {
  Rows rows(chain.pages.size(), chain.shape.shard_bytes);
  Prompt asked = chain.prompt();
  const LoadReport got = client.load(chain.shape.id, asked, 0, rows, 0, kSecondNs);
  if (report != nullptr) *report = got;
  for (size_t at = 0; at < got.pages; ++at) {
    uint64_t found = 0;
    for (const uint64_t version : {1, 2}) {
      const auto bytes = version_of(chain.pages[at], version, chain.shape.shard_bytes);
      if (std::memcmp(rows.row(at), bytes.data(), bytes.size()) == 0) found = version;
    }
    CHECK(found != 0);
    versions.insert(found);
  }
  return got.pages;
}

TEST(writer_held_between_grant_and_seal_never_lands_in_a_page_that_another_sealed) {
  auto random = check::random("writer_held_between_grant_and_seal");
  Daemon daemon(shape_of(kShard, 1));
  daemon.options.limbo_after_ns = 20 * kMillisecondNs;
  daemon.start();
  Client late(daemon.client_options()), other(daemon.client_options());
  for (uint64_t round = 0; round < check::rounds(60); ++round) {
    const Chain chain(daemon.shape(), round, 1 + random() % 4);
    const bool replaced = random() % 4 == 0;
    uint64_t by_late = 0;
    {
      const At at(random() % 2 == 0 ? "store: granted" : "store: copied", [&] {
        if (replaced) {
          daemon.stop();
          daemon.start();
        }
        while (daemon.status().reserved_slots != 0) daemon.tick();  // until its time is over
        // On a busy machine the other's own time may be over too: then once more.
        for (std::set<uint64_t> found; load_version(other, chain, found) < chain.pages.size();)
          store_version(other, chain, 2);
      });
      try {
        by_late = store_version(late, chain, 1);
      } catch (const Error& error) {
        CHECK(replaced);
        CHECK_EQ(error.kind(), ErrorKind::transport);
      }
      CHECK(at.reached());
    }
    CHECK_EQ(by_late, 0);
    std::set<uint64_t> versions;
    CHECK_EQ(load_version(other, chain, versions), chain.pages.size());
    CHECK(versions == std::set<uint64_t>{2});
    check::tally("writer held between grant and seal");
  }
  daemon.tick();
}

TEST(client_held_between_lookup_and_load_or_pin_gets_its_pages_or_a_miss) {
  auto random = check::random("client_held_between_lookup_and_load_or_pin");
  Daemon daemon(shape_of(kShard, 1));
  daemon.start();
  Client client(daemon.client_options()), other(daemon.client_options());
  uint64_t fresh = 1ull << 32;
  const auto disturb = [&](uint64_t how) {
    if (how % 3 == 0) {
      daemon.stop();
      daemon.start();
    }
    daemon.call([](Warehouse& w) {
      uint64_t left = 0;
      w.evict(-1, UINT64_MAX, "dram", left);
      return left;
    });
    if (how % 2 == 0) return;
    for (int i = 0; i < 200; ++i) Chain(daemon.shape(), ++fresh, 2).store(other, 0);
  };
  for (uint64_t round = 0; round < check::rounds(40); ++round) {
    const Chain chain(daemon.shape(), round, 6);
    const uint64_t how = random();
    CHECK_EQ(chain.store(client, 0).stored, 6);
    if (random() % 2 == 0) {
      const At at(random() % 2 == 0 ? "load: entry found" : "load: copied", [&] { disturb(how); });
      chain.load(client, 0);  // compares every page
      CHECK(at.reached());
      check::tally("client held between lookup and load");
      continue;
    }
    const bool stored = random() % 2 == 0;
    Prompt prompt = chain.prompt();
    std::unique_ptr<Pins> pins;
    {
      const At at(stored ? "pin: stored" : "pin: entry found", [&] { disturb(how); });
      pins = client.pin(kSpace, prompt, 0, kSecondNs);
      CHECK(at.reached());
    }
    // Pins that were in the session's file before the scan hold; later ones may find nothing.
    if (stored) CHECK_EQ(pins->pages(), 6);
    disturb(1);
    CHECK(chain.load(client, 0) >= pins->pages());
    check::tally("client held between lookup and pin");
  }
}

constexpr uint32_t kBeside = 0, kCleared = 1;  // ordinals of two namespaces

// A daemon with a namespace beside that of `shape()`.
struct TwoSpaces : Daemon {
  TwoSpaces() : Daemon(shape_of(kShard, 1)) {
    declared.push_back(other_shape(0));
    start();
  }
  void clear(uint32_t ordinal) {
    call([&](Warehouse& w) { return w.clear(ordinal, ++epoch); });
  }

  uint64_t epoch = 0;
};

TEST(load_beside_a_clear_takes_no_page_that_was_stored_after_it) {
  TwoSpaces daemon;
  Client client(daemon.client_options()), other(daemon.client_options());
  for (uint64_t nth = 2; nth <= 6; ++nth) {
    const Chain chain(daemon.shape(), nth, 6);
    CHECK_EQ(store_version(other, chain, 1), 6);
    const At at(
        "load: entry found",
        [&] {
          daemon.clear(kCleared);
          CHECK_EQ(store_version(other, chain, 2), 6);
        },
        nth);
    LoadReport report;
    std::set<uint64_t> versions;
    CHECK_EQ(load_version(client, chain, versions, &report), nth - 1);
    CHECK(at.reached());
    CHECK(versions == std::set<uint64_t>{1});
    CHECK_EQ(report.reasons.at("cleared"), 7 - nth);
    CHECK_EQ(load_version(client, chain, versions), 6);
  }
}

TEST(store_beside_a_clear_stores_nothing_after_it) {
  TwoSpaces daemon;
  Client client(daemon.client_options()), other(daemon.client_options());
  for (uint64_t nth = 1; nth <= 30; ++nth) {
    const Chain chain(daemon.shape(), nth, 30);
    const Chain begin(daemon.shape(), nth, 4);
    const At at(
        "store: copied",
        [&] {
          daemon.clear(kCleared);
          CHECK_EQ(store_version(other, begin, 2), 4);
        },
        nth);
    CHECK(store_version(client, chain, 1) < nth);
    CHECK(at.reached());
    std::set<uint64_t> versions;
    CHECK_EQ(load_version(other, chain, versions), 4);
    CHECK(versions == std::set<uint64_t>{2});
  }
}

TEST(load_beside_a_clear_of_another_namespace_takes_all_pages) {
  TwoSpaces daemon;
  Client client(daemon.client_options()), other(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 6);
  for (size_t page = 0; page < 3; ++page) chain.store_page(other, page);
  const At at("load: entry found", [&] {
    daemon.clear(kBeside);
    for (size_t page = 3; page < 6; ++page) chain.store_page(other, page);
  });
  CHECK_EQ(chain.load(client, 0), 6);
  CHECK(at.reached());
}

TEST(pins_of_two_calls_at_once_stay_within_the_budget) {
  Daemon daemon(shape_of(60 * 1024));  // 120 KiB a page; half of 8 MiB is 34 of them
  daemon.start();
  Client client(daemon.client_options());
  const Chain one(daemon.shape(), 1, 20), two(daemon.shape(), 2, 20);
  for (const Chain* chain : {&one, &two}) chain->store_all(client);
  Prompt first = one.prompt(), second = two.prompt();
  std::unique_ptr<Pins> pins;
  {
    const At at("pin: stored",
                [&] { CHECK_THROWS(client.pin(kSpace, second, 0, kSecondNs), "pin_budget"); });
    pins = client.pin(kSpace, first, 0, kSecondNs);
    CHECK(at.reached());
  }
  CHECK_EQ(daemon.status().pins, pins->pages());
  pins.reset();
  CHECK_EQ(client.pin(kSpace, second, 0, kSecondNs)->pages(), 20);
}

// The row goes to other namespaces, of other shapes, while a client reads it; the last time to its
// own again.
TEST(client_never_sees_half_of_a_namespace_that_was_forgotten_beside_it) {
  for (const int moves : {1, 2}) {
    World world(shape_of(kShard));
    world.start();
    Peer reader(world);
    const auto forget_and_add = [&](const NamespaceShape& shape) {
      CHECK(world->forget_namespace(0).has_value());
      CHECK_EQ(world->add_namespace(0, shape, 0), 0);
    };
    const At at("space: row read", [&] {
      forget_and_add(other_shape(1));
      if (moves == 2) forget_and_add(world.shape());
    });
    CHECK(!reader.view().space(kSpace));
    CHECK(at.reached());
    CHECK_EQ(reader.view().space(kSpace).has_value(), moves == 2);
    CHECK_EQ(reader.view().space(other_shape(1).id).has_value(), moves == 1);
  }
}

// Incident: metadata of a slot that the last daemon had freed was cleared under its old generation,
// and who still read it met a digest of zeros and reported damage.
TEST(reader_held_while_the_next_daemon_adds_its_freed_slot_sees_no_damage) {
  World world(shape_of(64 * 1024, 1));
  world.start();
  Peer reader(world);
  TestPage page = world.page(1);
  page.tokens.assign(page.tokens.size(), 0);  // as cleared metadata has it
  CHECK(reader.store(world.page(0)));
  CHECK(reader.store(page));
  const EntryView entry = *world.entry(page);
  uint64_t left = 0;
  world->evict(-1, 2, "dram", left);
  CHECK_EQ(reader.load_as(entry, page, 0), Got::right);
  const At at("load: metadata read", [&] {
    world.restart();
    CHECK(Peer(world).store(world.page(2)));
  });
  CHECK_EQ(reader.load_as(entry, page, 0), Got::stale);
  CHECK(world.word(entry.slot).state == SlotState::free);
}

// The object of a remote store, while its pages leave or are cleared: it is whole, or there is
// none.
TEST(run_whose_pages_leave_while_it_is_packed_makes_a_whole_object_or_none) {
  const std::map<std::string, std::string> reasons{{"evict pack: entry found", "not_in_dram"},
                                                   {"evict pack: pin stored", ""},
                                                   {"evict pack: packed", ""},
                                                   {"evict one pack: entry found", "not_in_dram"},
                                                   {"clear pack: entry found", "cleared"},
                                                   {"clear pack: pin stored", "cleared"},
                                                   {"clear pack: packed", "cleared"}};
  NamespaceShape shape = shape_of(kShard, 1);
  shape.page_tokens = 64;
  const uint32_t pages = remote::object_pages(shape);
  for (const auto& [name, expected] : reasons) {
    Daemon daemon(shape);
    daemon.start();
    Client client(daemon.client_options());
    const Chain chain(shape, 1, pages);
    chain.store_all(client);
    remote::RunToPut run;
    run.namespace_id = shape.id;
    run.key = chain.pages.back().key;
    run.pages = pages;
    const bool clears = name.starts_with("clear"), one = name.starts_with("evict one");
    const At at(name.substr(name.find("pack")), [&] {
      daemon.call([&](Warehouse& warehouse) {
        uint64_t left = 0;
        if (clears)
          warehouse.clear(0, 5);
        else
          warehouse.evict(-1, one ? 1 : UINT64_MAX, "dram", left);
        return 0;
      });
      // Into what they left; a single page's header stays as it was.
      if (!one) Chain(shape, 2, 2 * pages).store_all(client);
    });
    const PackedRun packed = client.pack_run(run, kWarehouse);
    CHECK(at.reached());
    if (packed.reason != expected) check::fail(__FILE__, __LINE__, name + ": " + packed.reason);
    if (!packed.reason.empty()) continue;
    const remote::ObjectSpec spec{kWarehouse, Secret(daemon.options.secret.data(), kSecretBytes),
                                  shape,      WitnessKind::tokens,
                                  0,          run.key,
                                  0,          pages};
    const auto read = read_object(spec, 0, packed.object->span());
    CHECK_EQ(read.pages.size(), pages);
    for (const remote::ObjectPage& page : read.pages) {
      const auto bytes = bytes_of(page.facts.key, 0, kShard);
      CHECK(std::memcmp(page.payload, bytes.data(), bytes.size()) == 0);
    }
  }
}

// The other way: an object's pages, while their namespace is cleared or their daemon replaced.
// Nothing of before the clear is there afterwards, and nothing that was reserved stays.
TEST(run_that_is_cleared_or_loses_its_daemon_while_it_is_filled_stores_nothing) {
  NamespaceShape shape = shape_of(kShard, 2);
  shape.page_tokens = 64;
  const uint32_t pages = remote::object_pages(shape);
  const Chain chain(shape, 1, pages);
  remote::RunToPut put;
  put.namespace_id = shape.id;
  put.key = chain.pages.back().key;
  put.pages = pages;
  Daemon source(shape);
  source.start();
  Client packer(source.client_options());
  chain.store_all(packer);
  const PackedRun packed = packer.pack_run(put, kWarehouse);
  CHECK_EQ(packed.reason, "");
  for (const char* place : {"fill: granted", "fill: copied"})
    for (const bool clears : {true, false}) {
      Daemon daemon(shape);
      daemon.start();
      Client client(daemon.client_options());
      remote::RunToGet get;
      get.namespace_id = shape.id;
      get.key = put.key;
      get.pages = pages;
      const auto fill = [&] {
        const uint64_t patience_ns = uint64_t{kPatienceMs} * kMillisecondNs;
        return client.fill_run(get, packed.object->span(), kWarehouse, patience_ns);
      };
      {
        const At at(place, [&] {
          if (!clears) {
            daemon.stop();
            daemon.start();
            return;
          }
          daemon.call([](Warehouse& warehouse) {
            warehouse.clear(0, 5);
            return 0;
          });
        });
        const FilledRun filled = fill();
        CHECK(at.reached());
        CHECK(filled.end == (clears ? remote::GetEnd::cleared : remote::GetEnd::no_room));
        CHECK_EQ(filled.fault, clears ? "cleared" : "unreachable");
        CHECK_EQ(filled.pages, 0);
      }
      CHECK_EQ(chain.found(client), 0);
      const WarehouseStatus status = daemon.status();
      CHECK_EQ(status.reserved_slots + status.limbo_slots, 0);
      if (clears) CHECK(fill().end == remote::GetEnd::cleared);
      get.clear_epoch = clears ? 5 : 0;
      CHECK(fill().end == remote::GetEnd::filled);
      for (uint32_t shard = 0; shard < shape.shards; ++shard)
        CHECK_EQ(chain.load(client, shard), pages);
    }
}

}  // namespace
}  // namespace kvw
