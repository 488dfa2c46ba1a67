// The client against a real daemon core, and loads against damage: what is handed out is what was
// stored, whatever happened to the bytes, the header, the daemon, or the process that forked.
#include "client/client.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "client/promotion_window.h"
#include "tests/check.h"
#include "tests/daemon_world.h"
#include "tests/descriptor_limit.h"
#include "tests/slow_line.h"

namespace kvw {
namespace {

constexpr uint64_t kShard = 5000;

// --- View::load, step by step

TEST(load_is_a_mismatch_when_any_byte_was_flipped) {
  World world(shape_of(kShard));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  CHECK(peer.store(page));
  auto random = check::random("load_is_a_mismatch_when_any_byte_was_flipped");
  std::byte* bytes = world.payload(world.slot_of(page));
  for (uint64_t round = 0; round < check::rounds(300); ++round) {
    const auto shard = static_cast<uint32_t>(random() % 2);
    const size_t at = shard * world.shape().shard_stride() +
                      (round < 2 ? round * (kShard - 1) : random() % kShard);
    const auto flip = static_cast<std::byte>(1u << random() % 8);
    bytes[at] ^= flip;
    CHECK_EQ(peer.load(page, shard), Got::mismatch);
    CHECK_EQ(peer.load(page, 1 - shard), Got::right);
    bytes[at] ^= flip;
    CHECK_EQ(peer.load(page, shard), Got::right);
  }
}

TEST(load_is_a_mismatch_when_two_pages_swapped_their_payloads_and_digests) {
  World world(shape_of(kShard));
  world.start();
  Peer peer(world);
  const TestPage a = world.page(1), b = world.page(2);
  CHECK(peer.store(a) && peer.store(b));
  SlotMeta *one = world.meta(world.slot_of(a)), *two = world.meta(world.slot_of(b));
  std::swap(digests_of(one)[0], digests_of(two)[0]);
  CHECK_EQ(peer.load(a, 0), Got::mismatch);
  CHECK_EQ(peer.load(b, 0), Got::mismatch);
  std::byte *first = world.payload(world.slot_of(a)), *second = world.payload(world.slot_of(b));
  std::swap_ranges(first, first + kShard, second);
  CHECK_EQ(peer.load(a, 0), Got::mismatch);  // the digest is of key and shard as well
  CHECK_EQ(peer.load(b, 0), Got::mismatch);
  // Shards of one page are no more interchangeable.
  std::swap(digests_of(one)[0], digests_of(one)[1]);
  CHECK_EQ(peer.load(a, 1), Got::mismatch);
}

TEST(load_is_not_accepted_when_the_witness_differs) {
  World world(shape_of(kShard));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  CHECK(peer.store(page));
  for (size_t i = 0; i < page.tokens.size(); ++i) {
    TestPage other = page;  // a collision: the same key from other tokens
    other.tokens[i] ^= 0x100;
    CHECK_EQ(peer.load(other), Got::stale);
  }
  TestPage other = page;
  other.tokens.pop_back();
  CHECK_EQ(peer.load(other), Got::stale);
  other = page;
  other.parent.hi ^= 1;
  CHECK_EQ(peer.load(other), Got::stale);
  other = page;
  other.position = 1;
  CHECK_EQ(peer.load(other), Got::stale);
  CHECK_EQ(peer.load(page), Got::right);
}

TEST(load_accepts_no_header_with_a_flipped_field_and_reads_nothing_outside) {
  World world(shape_of(kShard));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  CHECK(peer.store(page));
  auto* bytes = reinterpret_cast<std::byte*>(world.meta(world.slot_of(page)));
  const size_t size = meta_bytes_of(world.shape());
  uint64_t refused = 0;
  for (size_t bit = 0; bit < size * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    const Got got = peer.load(page, 0);
    CHECK(got != Got::wrong);
    refused += got == Got::right ? 0 : 1;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
  }
  // Namespace, key, parent, shard bytes, position, shards, kind and length; digest; tokens.
  CHECK_EQ(refused, (3 * 16 + 8 + 4 * 4 + 8 + 64) * 8);
  CHECK_EQ(peer.load(page, 0), Got::right);
}

TEST(load_refuses_an_entry_that_leads_nowhere) {
  World world(shape_of(kShard));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  CHECK(peer.store(page));
  const EntryView good = *world.entry(page);
  for (const SlotId slot : {good.slot + 1, SlotId{128}, SlotId{511}, SlotId{512}, SlotId{2048},
                            SlotId{1u << 30}, kNoSlot, kNoSlot - 1}) {
    EntryView entry = good;
    entry.slot = slot;
    CHECK_EQ(peer.load_as(entry, page, 0), Got::stale);
  }
  for (const uint32_t generation : {good.generation + 1, good.generation - 1, UINT32_MAX}) {
    EntryView entry = good;
    entry.generation = generation;
    CHECK_EQ(peer.load_as(entry, page, 0), Got::stale);
  }
}

TEST(load_accepts_no_slot_that_is_not_sealed) {
  World world(shape_of(kShard));
  world.start();
  Peer peer(world);
  const TestPage page = world.page(1);
  CHECK(peer.store(page));
  const EntryView entry = *world.entry(page);
  for (const SlotState state :
       {SlotState::reserved, SlotState::filling, SlotState::limbo, static_cast<SlotState>(9)}) {
    world.set_word(entry.slot, {entry.generation, state});
    CHECK_EQ(peer.load_as(entry, page, 0), Got::stale);
    CHECK(!peer.view().is_live(entry.slot, entry.generation));
  }
  for (const SlotState state : {SlotState::free, SlotState::closing, SlotState::live}) {
    world.set_word(entry.slot, {entry.generation, state});
    CHECK_EQ(peer.load_as(entry, page, 0), Got::right);
  }
}

// --- the whole client

TEST(damaged_page_is_reported_quarantined_and_never_data) {
  Daemon daemon(shape_of(kShard));
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 5);
  chain.store_all(client);
  CHECK_EQ(chain.found(client), 5);
  daemon.call([&](Warehouse& w) {
    const auto entry = w.arena().index().find(chain.pages[2].key);
    w.arena().payload(entry->slot, w.arena().slots().layout(0))[17] ^= std::byte{1};
    return 0;
  });
  LoadReport report;
  CHECK_EQ(chain.load(client, 0, &report), 2);
  CHECK_EQ(report.reasons["mismatch"], 3);
  while (daemon.status().quarantined == 0) std::this_thread::yield();  // the load did not wait
  CHECK_EQ(daemon.status().quarantined, 1);
  CHECK_EQ(client.session()->counter(Counter::load_mismatch), 1);
  CHECK_EQ(chain.found(client), 2);
  chain.store_all(client);  // stored anew, it is whole
  CHECK_EQ(chain.load(client, 0), 5);
}

TEST(false_report_quarantines_nothing) {
  Daemon daemon(shape_of(kShard));
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 1);
  chain.store_all(client);
  daemon.call([&](Warehouse& w) {
    const auto entry = w.arena().index().find(chain.pages[0].key);
    for (const uint64_t generation : {uint64_t{entry->generation}, uint64_t{99}})
      for (const SlotId slot : {entry->slot, entry->slot + 1, kNoSlot})
        w.report(1, {entry->key, generation, slot, 0});
    return 0;
  });
  CHECK_EQ(daemon.status().quarantined, 0);
  CHECK_EQ(chain.load(client, 0), 1);
}

// A client looks first where it last found one that shares a part of its id.
TEST(namespaces_are_told_apart_by_their_whole_ids) {
  Daemon daemon(shape_of(kShard));
  for (uint64_t number = 1; number <= 3; ++number) {
    NamespaceShape shape = daemon.shape();
    shape.id.hi += number;
    shape.page_tokens += static_cast<uint32_t>(number);
    daemon.declared.push_back(shape);
  }
  daemon.start();
  Client client(daemon.client_options());
  for (int round = 0; round < 2; ++round)
    for (const NamespaceShape& shape : daemon.declared) {
      const auto row = client.view()->space(shape.id);
      CHECK(row && row->shape == shape);
      CHECK(!client.sees_namespace({shape.id.lo, shape.id.hi + 100}));
    }
}

// Incident: somebody cut the arena's file, and every engine that loaded ended by SIGBUS.
TEST(load_is_a_miss_and_store_an_error_when_the_arena_was_cut) {
  for (const bool verify : {true, false}) {
    Daemon daemon(shape_of(kShard));
    daemon.start();
    ClientOptions options = daemon.client_options();
    options.verify_always = verify;
    Client client(options);
    const Chain chain(daemon.shape(), 1, 5), other(daemon.shape(), 2, 5);
    chain.store_all(client);
    CHECK_EQ(chain.load(client, 0), 5);
    CHECK_EQ(::truncate((daemon.options.arena_dir + "/arena").c_str(), 0), 0);
    CHECK_EQ(chain.load(client, 0), 0);
    CHECK_THROWS(other.store(client, 0), "memory_lost");
    daemon.tick();
    const auto events = daemon.call([](Warehouse& w) { return w.take_events(); });
    CHECK(std::ranges::count(events, std::pair<std::string, std::string>(
                                         "memory_lost", "file=arena reason=cut")) == 1);
    CHECK_EQ(other.found(client), 0);
  }
}

// Incident: its zeros were taken for another version's format, and all calls said to use the same
// version on both sides.
TEST(calls_say_that_memory_is_lost_when_the_control_page_was_cut) {
  Daemon daemon(shape_of(kShard));
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 5), other(daemon.shape(), 2, 5);
  chain.store_all(client);
  CHECK_EQ(::truncate((daemon.options.arena_dir + "/control").c_str(), 0), 0);
  for (int round = 0; round < 2; ++round) {
    CHECK_THROWS(chain.found(client), "memory_lost");
    CHECK_THROWS(chain.load(client, 0), "memory_lost");
    CHECK_THROWS(other.store(client, 0), "memory_lost");
    CHECK_THROWS(client.has_namespace(kSpace), "memory_lost");
    CHECK(!client.refresh(daemon.client_options().timeout_ns));
  }
  daemon.stop();
  CHECK_THROWS(chain.found(client), "memory_lost");
  daemon.start();  // which makes the file anew
  CHECK(client.refresh(daemon.client_options().timeout_ns));
  CHECK_EQ(chain.load(client, 0), 5);
  CHECK_EQ(other.store(client, 0).stored, 5);
}

// A call that began before the cut, and asks the control page whether the namespace was cleared.
TEST(call_takes_no_page_of_another_epoch_when_the_control_page_was_cut) {
  Daemon daemon(shape_of(kShard));
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 1);
  chain.store_all(client);
  DaemonLink link(daemon.client_options());
  Prompt prompt = chain.prompt();
  const auto call =
      ClientCall::open(link, kSpace, prompt, false, now_ns() + kPatienceMs * kMillisecondNs);
  CHECK(!call.cleared());
  CHECK_EQ(::truncate((daemon.options.arena_dir + "/control").c_str(), 0), 0);
  CHECK(call.cleared());
}

TEST(new_client_is_told_that_memory_is_lost_when_a_file_was_cut) {
  for (const std::string name : {"arena", "slots", "index.1", "control"})
    for (const uint64_t left : {0, 8192}) {
      Daemon daemon(shape_of(kShard));
      daemon.start();
      const std::string path = daemon.options.arena_dir + "/" + name;
      CHECK(left < std::filesystem::file_size(path));
      CHECK_EQ(::truncate(path.c_str(), static_cast<off_t>(left)), 0);
      CHECK_THROWS(Client(daemon.client_options()), "memory_lost");
    }
}

TEST(ranks_that_store_the_same_prompt_at_once_make_each_page_once) {
  Daemon daemon(shape_of(kShard, 4), 16 * kMiB);
  daemon.start();
  constexpr uint32_t kPages = 60;
  std::vector<std::unique_ptr<Chain>> chains;
  for (uint64_t number = 0; number < 3; ++number)
    chains.push_back(std::make_unique<Chain>(daemon.shape(), number, kPages));
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 4; ++i) clients.push_back(std::make_unique<Client>(daemon.client_options()));
  std::vector<std::string> failures(4);
  std::vector<std::thread> ranks;
  for (uint32_t shard = 0; shard < 4; ++shard)
    ranks.emplace_back([&, shard] {
      try {
        for (const auto& chain : chains) {
          const StoreReport report = chain->store(*clients[shard], shard);
          for (const auto& [reason, pages] : report.dropped)
            failures[shard] += reason + " " + std::to_string(pages) + " ";
        }
      } catch (const std::exception& error) {
        failures[shard] = error.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& failure : failures) CHECK_EQ(failure, "");
  for (const auto& chain : chains)
    for (uint32_t shard = 0; shard < 4; ++shard)
      CHECK_EQ(chain->load(*clients[3 - shard], shard), kPages);
  CHECK_EQ(daemon.status().dram_pages, 3 * kPages);
  CHECK_EQ(daemon.status().pages_sealed, 3 * kPages);
}

TEST(pins_are_refused_beyond_the_budget_and_given_back) {
  Daemon daemon(shape_of(60 * 1024));  // 120 KiB a page; half of 8 MiB is 34 of them
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 50);
  chain.store_all(client);
  CHECK_EQ(chain.found(client), 50);
  Prompt all = chain.prompt();
  CHECK_THROWS(client.pin(kSpace, all, 0, kSecondNs), "pin_budget");
  CHECK_EQ(daemon.status().pins, 0);  // nothing is held by what failed
  Prompt half = Prompt::of_tokens(std::span(chain.tokens).first(30 * 16));
  {
    const auto pins = client.pin(kSpace, half, 0, kSecondNs);
    CHECK_EQ(pins->pages(), 30);
    CHECK_EQ(daemon.status().pins, 30);
    CHECK_THROWS(client.pin(kSpace, half, 0, kSecondNs), "pin_budget");
    for (uint64_t other = 100; other < 200; ++other)
      Chain(daemon.shape(), other, 1).store_all(client);
    Chain front(daemon.shape(), 1, 30);
    CHECK_EQ(front.load(client, 1), 30);
  }
  CHECK_EQ(daemon.status().pins, 0);
  CHECK(client.pin(kSpace, half, 0, kSecondNs)->pages() <= 30);
}

TEST(no_daemon_is_said_at_once) {
  Daemon daemon(shape_of(kShard));
  CHECK_THROWS(Client(daemon.client_options()), "no_daemon");
}

// A socket at which one may wait to be accepted, and does.
struct FullLine {
  explicit FullLine(const std::string& path)
      : listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    CHECK_EQ(::bind(listener.get(), generic, sizeof address), 0);
    CHECK_EQ(::listen(listener.get(), 1), 0);
    for (;;) {
      Fd caller(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (::connect(caller.get(), generic, sizeof address) != 0) break;
      callers.push_back(std::move(caller));
    }
    CHECK_EQ(errno, EAGAIN);
  }
  sockaddr_un address{};
  const sockaddr* generic = reinterpret_cast<const sockaddr*>(&address);
  Fd listener;
  std::vector<Fd> callers;
};

TEST(client_waits_for_its_turn_where_many_others_called_the_daemon) {
  const Daemon daemon(shape_of(kShard));
  const FullLine line(daemon.socket());
  Connection connection;
  check::Thread connects([&] {
    const uint64_t deadline_ns = system_clock().boot_ns() + kPatienceMs * kMillisecondNs;
    connection = Connection(daemon.socket(), {}, deadline_ns);
  });
  connects.until_it_waits();
  std::vector<Fd> accepted;
  for (size_t i = 0; i < line.callers.size(); ++i)
    accepted.emplace_back(::accept4(line.listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  connects.join();
  CHECK(!connection.hung_up());
}

TEST(client_says_of_a_daemon_that_accepts_nobody_that_it_is_late) {
  Daemon daemon(shape_of(kShard));
  const FullLine line(daemon.socket());
  ClientOptions options = daemon.client_options();
  options.timeout_ns = kMillisecondNs;
  CHECK_THROWS(Client(options), "deadline");
  options.timeout_ns = 0;
  CHECK_THROWS(Client(options), "deadline");
  CHECK_THROWS(daemon.start(), "socket_in_use");
}

TEST(daemon_lets_more_wait_than_connect_at_once) {
  uint64_t most = 0;
  std::ifstream("/proc/sys/net/core/somaxconn") >> most;
  Daemon daemon(shape_of(kShard));
  daemon.start_process();
  daemon.kill(SIGSTOP);
  std::vector<Connection> waiting;
  for (uint64_t i = 0; i < std::min<uint64_t>(most, 400); ++i)
    waiting.emplace_back(daemon.socket(), std::nullopt, 0);
}

// Incident: it was told that the daemon's welcome was malformed.
TEST(client_without_descriptors_left_is_told_so) {
  Daemon daemon(shape_of(4096, 1));
  daemon.start_process();
  {
    const DescriptorLimit tight(DescriptorLimit::at_present(3));
    CHECK_THROWS(Client(daemon.client_options()), "no_file_handles");
  }
  const Client client(daemon.client_options());
}

TEST(closed_client_refuses_calls) {
  Daemon daemon(shape_of(kShard));
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 2);
  client.close();
  CHECK_THROWS(chain.found(client), "closed");
  CHECK_THROWS(chain.store(client, 0), "closed");
  CHECK_THROWS(client.view(), "closed");
  CHECK(!client.connected());
}

TEST(bad_arguments_are_refused_by_name) {
  Daemon daemon(shape_of(kShard));
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 2);
  CHECK_THROWS(chain.store(client, 2), "bad_shard");
  CHECK_THROWS(chain.load(client, 7), "bad_shard");
  Prompt prompt = chain.prompt();
  Rows narrow(2, kShard - 1);
  CHECK_THROWS(client.store(kSpace, prompt, 0, narrow, 0, kSecondNs), "bad_page_bytes");
  CHECK_THROWS(client.load(kSpace, prompt, 0, narrow, 0, kSecondNs), "bad_page_bytes");
  CHECK_THROWS(client.lookup(Key{4, 4}, prompt), "namespace_unknown");
  ClientOptions reading = daemon.client_options();
  reading.read_only = true;
  Client reader(reading);
  CHECK_THROWS(chain.store(reader, 0), "read_only");
  chain.store_all(client);
  CHECK_EQ(chain.load(reader, 1), 2);
}

TEST(client_keeps_its_session_and_pins_across_a_daemon) {
  Daemon daemon(shape_of(60 * 1024));
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 10);
  chain.store_all(client);
  const uint64_t session = client.session_id();
  Prompt prompt = chain.prompt();
  const auto pins = client.pin(kSpace, prompt, 0, kSecondNs);
  CHECK_EQ(pins->pages(), 10);
  for (int round = 0; round < 3; ++round) {
    daemon.stop();
    CHECK_EQ(chain.found(client), 10);  // there is nobody, and it goes on
    CHECK_EQ(chain.load(client, 0), 10);
    CHECK_THROWS(chain.store(client, 0), "no_daemon");
    daemon.start();
    for (uint64_t other = 100; other < 250; ++other)
      Chain(daemon.shape(), other, 1).store_all(client);
    CHECK_EQ(client.session_id(), session);
    CHECK_EQ(daemon.status().pins, 10);
    CHECK_EQ(chain.load(client, 1), 10);
  }
}

TEST(killed_daemon_loses_nothing_sealed_for_a_client_that_goes_on) {
  auto random = check::random("killed_daemon_loses_nothing_sealed_for_a_client_that_goes_on");
  Daemon daemon(shape_of(kShard));
  daemon.start_process();
  Client client(daemon.client_options());
  std::vector<std::unique_ptr<Chain>> stored;
  for (uint64_t round = 0; round < check::rounds(6); ++round) {
    for (uint64_t i = random() % 6; i > 0; --i) {
      stored.push_back(std::make_unique<Chain>(daemon.shape(), stored.size(), 1 + random() % 4));
      stored.back()->store_all(client);
    }
    daemon.kill(SIGKILL);
    for (const auto& chain : stored) CHECK_EQ(chain->load(client, 0), chain->pages.size());
    daemon.start_process();
    for (const auto& chain : stored)
      for (uint32_t shard = 0; shard < 2; ++shard)
        CHECK_EQ(chain->load(client, shard), chain->pages.size());
  }
}

TEST(stopped_daemon_stalls_no_lookup_and_no_load) {
  Daemon daemon(shape_of(kShard));
  daemon.start_process();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 8), other(daemon.shape(), 2, 2);
  chain.store_all(client);
  daemon.kill(SIGSTOP);
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(chain.found(client), 8);
    CHECK_EQ(chain.load(client, 1), 8);
  }
  CHECK_THROWS(other.store(client, 0, 50 * kMillisecondNs), "deadline");
  daemon.kill(SIGCONT);
  // What the late answers granted is settled; the same pages can be stored now.
  other.store_all(client);
  CHECK_EQ(other.load(client, 0), 2);
  CHECK_EQ(chain.load(client, 0), 8);
}

TEST(reads_do_not_wait_while_refresh_waits_for_a_new_daemon) {
  Daemon daemon(shape_of(kShard));
  daemon.start_process();
  ClientOptions options = daemon.client_options();
  options.patience_ns = 0;
  Client client(options);
  const Chain chain(daemon.shape(), 1, 8);
  chain.store_all(client);
  CHECK(client.refresh(0));
  daemon.kill(SIGKILL);
  CHECK(!client.refresh(options.timeout_ns));
  daemon.start_process();
  daemon.kill(SIGSTOP);
  std::atomic<bool> ended{false};
  bool refreshed = false;
  std::thread waiting([&] {
    refreshed = client.refresh(options.timeout_ns);
    ended = true;
  });
  for (int i = 0; i < 1000; ++i) {
    CHECK_EQ(chain.found(client), 8);
    Prompt prompt = chain.prompt();
    CHECK_EQ(client.tiers(kSpace, prompt).size(), 8);
    CHECK_EQ(client.pin(kSpace, prompt, 0, 0)->pages(), 8);
  }
  CHECK_EQ(chain.load(client, 0), 8);
  CHECK(!ended);
  daemon.kill(SIGCONT);
  waiting.join();
  CHECK(refreshed);
  CHECK_EQ(chain.load(client, 1), 8);
}

// Incident: another thread found the new daemon while a load had just begun. The load asked that
// one for its pages, looked for them in the index of the old one, and did so until its time was
// over.
TEST(call_that_began_with_a_daemon_does_not_wait_for_what_the_next_one_promotes) {
  Daemon daemon(shape_of(kShard));
  daemon.options.nvme_dir = daemon.directory.path() + "/nvme";
  std::filesystem::create_directory(daemon.options.nvme_dir);
  daemon.options.nvme_capacity_bytes = 16 * kMiB;
  daemon.options.nvme_segment_bytes = kMiB;
  daemon.start();
  const Chain chain(daemon.shape(), 1, 8);
  DaemonLink link(daemon.client_options());
  Client client(daemon.client_options());
  chain.store_all(client);
  CHECK_EQ(daemon.flush().pending, 0);
  daemon.call([](Warehouse& w) {
    uint64_t left = 0;
    return w.evict(-1, UINT64_MAX, "dram", left).size();
  });
  Prompt prompt = chain.prompt();
  const auto call =
      ClientCall::open(link, kSpace, prompt, false, now_ns() + kPatienceMs * kMillisecondNs);
  daemon.stop();
  daemon.start();
  CHECK(link.refresh(kPatienceMs * kMillisecondNs));
  PromotionWindow promotions(call);
  Reason why = Reason::none;
  CHECK(!promotions.in_dram(0, 8, why));
  CHECK(why == Reason::unreachable);
  CHECK_EQ(chain.load(client, 0), 8);
}

TEST(refresh_does_not_wait_for_a_store_that_waits_for_the_daemon) {
  Daemon daemon(shape_of(kShard));
  daemon.start_process();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 2);
  daemon.kill(SIGSTOP);
  StoreReport report;
  check::Thread storing([&] { report = chain.store(client, 0, kPatienceMs * kMillisecondNs); });
  storing.until_it_waits();  // with the socket
  // It is the daemon that is mapped; a wait for the socket would end in "none answered".
  for (int i = 0; i < 100; ++i) CHECK(client.refresh(kMillisecondNs));
  daemon.kill(SIGCONT);
  storing.join();
  CHECK_EQ(report.stored, 2);
  CHECK(client.refresh(kPatienceMs * kMillisecondNs));
}

TEST(forked_child_refuses_calls_and_harms_neither_its_parent_nor_its_own_memory) {
  Daemon daemon(shape_of(60 * 1024));
  daemon.start_process();
  auto client = std::make_unique<Client>(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 10);
  chain.store_all(*client);
  Prompt prompt = chain.prompt();
  auto pins = client->pin(kSpace, prompt, 0, kSecondNs);
  const View* view = client->view().get();
  void* where = const_cast<ControlPage*>(&view->control());
  const pid_t child = ::fork();
  if (child == 0) {
    int trouble = 0;
    try {
      chain.found(*client);
      trouble |= 1;
    } catch (const Error& error) {
      if (error.code() != "forked") trouble |= 2;
    }
    // The child's own memory, where the parent's mapping was.
    auto* mine =
        static_cast<char*>(::mmap(where, kBlockBytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
    if (mine != where) ::_exit(64);
    mine[0] = 'm';
    pins.reset();
    client->close();
    client.reset();
    if (mine[0] != 'm') trouble |= 4;
    ::_exit(trouble);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK_EQ(pins->pages(), 10);
  for (uint64_t other = 100; other < 250; ++other)
    Chain(daemon.shape(), other, 1).store_all(*client);
  CHECK_EQ(chain.load(*client, 0), 10);  // still pinned
}

// --- stores of bytes that may be older than a clear

StoreReport store_since(Client& client, const Chain& chain, uint64_t since) {
  return chain.store(client, 0, uint64_t{kPatienceMs} * kMillisecondNs, since);
}

TEST(store_of_bytes_that_are_older_than_a_clear_is_dropped_whole) {
  Daemon daemon(shape_of(kShard, 1));
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 300);
  CHECK_EQ(store_since(client, chain, 0).stored, 300);
  daemon.call([](Warehouse& w) { return w.clear(0, 7); });
  const StoreReport late = store_since(client, chain, 6);
  CHECK_EQ(late.stored + late.already, 0);
  CHECK_EQ(late.dropped.at("cleared"), 1);
  CHECK_EQ(late.dropped.at("refused_tail"), 299);
  CHECK_EQ(chain.found(client), 0);
  CHECK_EQ(store_since(client, chain, 7).stored, 300);
  CHECK_EQ(chain.load(client, 0), 300);
}

TEST(older_daemon_is_not_asked_to_compare_with_clears) {
  Daemon daemon(shape_of(kShard, 1));
  daemon.start();
  SlowLine line(daemon.socket());
  line.hide(kWelcomeSince);
  ClientOptions options = daemon.client_options();
  options.socket_path = line.socket();
  Client client(options);
  const Chain chain(daemon.shape(), 1, 4);
  const uint64_t asked = line.requests();
  CHECK_THROWS(store_since(client, chain, 0), "since_unknown");
  CHECK_EQ(line.requests(), asked);
  CHECK_EQ(chain.store(client, 0).stored, 4);
}

}  // namespace
}  // namespace kvw
