// Sessions: who is alive is the kernel's word (a file lock), what they pin survives the daemon, and
// nothing that a client does to its own file harms anybody else.
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <filesystem>
#include <optional>
#include <set>

#include "tests/check.h"
#include "tests/descriptor_limit.h"
#include "tests/session_kit.h"

namespace kvw {
namespace {

TEST(session_is_locked_before_anybody_hears_of_it) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  Fd other(::open(desk.path(created.session->id).c_str(), O_RDWR | O_CLOEXEC));
  CHECK(other.valid());
  CHECK_EQ(::flock(other.get(), LOCK_EX | LOCK_NB), -1);
  struct stat info{};
  CHECK_EQ(::fstat(other.get(), &info), 0);
  CHECK_EQ(info.st_mode & 0777, 0600);
  CHECK_EQ(info.st_size, sizeof(SessionFile));
}

TEST(session_ids_are_not_given_twice) {
  Desk desk;
  std::set<SessionId> ids;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 20; ++i) CHECK(ids.insert(desk.registry->create(1).session->id).second);
    desk.open();  // a new daemon
  }
}

TEST(session_is_not_dead_when_only_its_socket_hung_up) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  const SessionId id = created.session->id;
  desk.registry->hung_up(id);
  for (int i = 0; i < 5; ++i) {
    desk.clock.advance_ns(kGrace * 10);
    CHECK(!desk.buries(id));
  }
  CHECK(!desk.registry->gone(id));
  CHECK(desk.registry->find(id, 1) != nullptr);  // and it may come back
}

TEST(session_is_gone_only_when_the_grace_after_its_death_is_over) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  const SessionId id = created.session->id;
  desk.writing.insert(id);
  created.descriptor.reset();
  desk.registry->hung_up(id);
  CHECK(!desk.buries(id));  // seen dead now
  desk.writing.clear();
  desk.clock.advance_ns(kGrace - 1);
  CHECK(!desk.buries(id));
  CHECK(!desk.registry->gone(id));
  desk.clock.advance_ns(1);
  CHECK(desk.buries(id));
  CHECK(desk.registry->gone(id));
  CHECK(!std::filesystem::exists(desk.path(id)));
}

TEST(session_that_held_nothing_is_reaped_at_once) {
  Desk desk;
  const auto dies = [&](bool pinning) {
    Registry::Created created = desk.registry->create(1);
    const SessionId id = created.session->id;
    ClientSession client = attach(created.descriptor);
    const int place = client.take_pin();
    client.store_pin(place, slot_pin(3, 1));
    if (!pinning) client.drop_pin(place);
    desk.registry->hung_up(id);
    return id;
  };
  CHECK(desk.buries(dies(false)));
  const SessionId pinning = dies(true);
  CHECK(!desk.buries(pinning));
  desk.clock.advance_ns(kGrace);
  CHECK(desk.buries(pinning));
}

TEST(sessions_that_held_nothing_keep_no_client_out) {
  Desk desk;
  for (size_t i = 0; i < 2 * Registry::kMaxSessions; ++i)  // no time passes
    desk.registry->hung_up(desk.registry->create(1).session->id);
  CHECK(desk.registry->size() <= Registry::kMaxSessions);
}

TEST(session_is_not_found_when_its_lock_is_free) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  const SessionId id = created.session->id;
  CHECK(desk.registry->find(id, 1) != nullptr);
  created.descriptor.reset();
  CHECK(desk.registry->find(id, 1) == nullptr);
  CHECK(desk.registry->find(id + 1, 1) == nullptr);
}

TEST(session_is_found_by_the_process_that_it_was_made_for_under_the_next_daemon_too) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  const SessionId id = created.session->id;
  for (int daemons = 0; daemons < 2; ++daemons, desk.open()) {
    CHECK(desk.registry->find(id, 2) == nullptr);
    CHECK(desk.registry->find(id, 1) != nullptr);
    CHECK(desk.registry->find(id, 0) != nullptr);  // it is not seen from here
  }
}

TEST(session_lives_on_when_a_forked_child_closes_its_copy) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  const SessionId id = created.session->id;
  const pid_t child = ::fork();
  if (child == 0) {
    created.descriptor.reset();  // closing, never unlocking: the lock is the parent's too
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  desk.registry->hung_up(id);
  desk.clock.advance_ns(kGrace * 2);
  CHECK(!desk.buries(id));
  CHECK(desk.registry->find(id, 1) != nullptr);
}

TEST(session_pins_count_again_when_a_new_daemon_finds_its_file) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  ClientSession client = attach(created.descriptor);
  const int place = client.take_pin();
  client.store_pin(place, slot_pin(17, 3));
  CHECK(desk.registry->pins().has_slot(17));
  desk.open();
  CHECK(desk.registry->pins().has_slot(17));
  client.drop_pin(place);
  CHECK(!desk.registry->pins().has_slot(17));
}

TEST(session_pins_count_until_the_grace_is_over_when_the_owner_died_with_the_daemon) {
  Desk desk;
  SessionId id = 0;
  {
    Registry::Created created = desk.registry->create(1);
    id = created.session->id;
    ClientSession client = attach(created.descriptor);
    client.store_pin(client.take_pin(), slot_pin(4, 1));
  }
  desk.open();
  CHECK(!desk.buries(id));
  CHECK(desk.registry->pins().has_slot(4));
  desk.clock.advance_ns(kGrace);
  CHECK(desk.buries(id));
  CHECK(!desk.registry->pins().has_slot(4));
}

TEST(session_pin_words_name_what_they_pin) {
  for (const SlotId slot : {0u, 1u, 12345u, 0x7ffffffdu}) {
    CHECK(!is_segment_pin(slot_pin(slot, UINT32_MAX)));
    CHECK_EQ(pinned_number(slot_pin(slot, UINT32_MAX)), slot);
    CHECK(is_segment_pin(segment_pin(slot, 0)));
    CHECK_EQ(pinned_number(segment_pin(slot, UINT32_MAX)), slot);
    CHECK(slot_pin(slot, 0) != 0);  // 0 is no pin
  }
}

TEST(session_pins_are_matched_by_slot_whatever_the_generation_says) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  ClientSession client = attach(created.descriptor);
  for (const uint32_t generation : {0u, 1u, UINT32_MAX})
    client.store_pin(client.take_pin(), slot_pin(generation & 0xff, generation));
  client.store_pin(client.take_pin(), segment_pin(9, 1));
  const PinSet& pins = desk.registry->pins();
  CHECK_EQ(pins.size(), 4);
  CHECK(pins.has_slot(0) && pins.has_slot(1) && pins.has_slot(255) && !pins.has_slot(9));
  CHECK(pins.has_segment(9) && !pins.has_segment(0));
}

TEST(session_has_no_pins_when_its_file_was_truncated) {
  Desk desk;
  Registry::Created broken = desk.registry->create(1);
  Registry::Created healthy = desk.registry->create(2);
  ClientSession client = attach(healthy.descriptor);
  client.store_pin(client.take_pin(), slot_pin(8, 1));
  client.count(Counter::loads, 3);
  for (const off_t bytes : {off_t{200}, off_t{140}, off_t{0}}) {
    CHECK_EQ(::ftruncate(broken.descriptor.get(), bytes), 0);
    CHECK_EQ(desk.registry->pins().size(), 1);
    desk.registry->drain_touches([](PageId, uint32_t) {});
    CHECK_EQ(desk.registry->totals()[static_cast<size_t>(Counter::loads)], 3);
  }
  desk.open();
  CHECK_EQ(desk.registry->size(), 2);
  CHECK_EQ(desk.registry->pins().size(), 1);
}

TEST(session_pins_everything_when_its_pins_cannot_be_read) {
  Desk desk;
  Registry::Created unreadable = desk.registry->create(1);
  CHECK(!desk.registry->pins().has_slot(8));
  // As reading a page does that cannot be swapped in.
  unreadable.session->file =
      Fd(::open(desk.path(unreadable.session->id).c_str(), O_WRONLY | O_CLOEXEC));
  CHECK(desk.registry->pins().has_slot(8));
  CHECK(desk.registry->pins().has_segment(2));
  unreadable.descriptor.reset();
  desk.registry->hung_up(unreadable.session->id);
  CHECK(!desk.buries(unreadable.session->id));
  desk.clock.advance_ns(kGrace);
  CHECK(desk.buries(unreadable.session->id));
  CHECK(!desk.registry->pins().has_slot(8));
}

TEST(pin_set_has_what_was_added_in_its_pass_and_nothing_else) {
  auto random = check::random("pin_set_has_what_was_added_in_its_pass");
  PinSet pins(40000);
  for (uint64_t pass = 0; pass < 20; ++pass) {
    pins.begin();
    std::set<uint32_t> slots, segments;
    for (uint64_t i = random() % 20000; i > 0; --i) {
      const auto number = static_cast<uint32_t>(random() % 40000);
      const bool slot = random() % 8 != 0;
      (slot ? slots : segments).insert(number);
      pins.add(slot ? slot_pin(number, static_cast<uint32_t>(random()))
                    : segment_pin(number, static_cast<uint32_t>(random())));
    }
    CHECK_EQ(pins.size(), slots.size() + segments.size());
    for (uint32_t number = 0; number < 40000; ++number) {
      CHECK_EQ(pins.has_slot(number), slots.contains(number));
      CHECK_EQ(pins.has_segment(number), segments.contains(number));
    }
  }
}

TEST(pin_set_stays_as_small_as_what_there_is_to_pin) {
  PinSet pins(1000);
  pins.begin();
  constexpr uint32_t kScattered = 1000003;
  for (uint32_t i = 0; i < 2 * 64 * PinSet::kSegmentBlocks; ++i) {
    pins.add(slot_pin(i * kScattered >> 1, i));
    pins.add(slot_pin(i % 1000, i));
    pins.add(uint64_t{i});  // names nothing
  }
  CHECK(pins.has_slot(0) && pins.has_slot(999) && !pins.has_slot(1000));
  CHECK_EQ(pins.size(), 1000);
  CHECK(pins.blocks() <= 1000 / 64 + 2);
  for (uint32_t i = 0; i < PinSet::kSegmentBlocks; ++i) pins.add(segment_pin(64 * i, 1));
  CHECK(pins.has_segment(64) && !pins.has_segment(65));
  for (uint32_t i = 0; i < 8 * PinSet::kSegmentBlocks; ++i) pins.add(segment_pin(i << 6, 1));
  CHECK(pins.has_segment(65));  // beyond what it keeps it says so of all
  CHECK(!pins.has_slot(1000));
  CHECK(pins.blocks() <= 1000 / 64 + 2 + PinSet::kSegmentBlocks);
  pins.begin();
  CHECK(!pins.has_segment(64) && !pins.has_segment(65) && !pins.has_slot(0));
}

TEST(session_that_dropped_all_its_pins_has_none_to_read) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  const Fd file(::open(desk.path(created.session->id).c_str(), O_RDONLY | O_CLOEXEC));
  ClientSession client = attach(created.descriptor);
  const auto high = [&] {
    uint64_t word = UINT64_MAX;
    CHECK_EQ(::pread(file.get(), &word, 8, offsetof(SessionFile, pins_high)), 8);
    return word;
  };
  for (int i = 0; i < 10; ++i) client.store_pin(client.take_pin(), slot_pin(5, 1));
  for (int place = 0; place < 9; ++place) client.drop_pin(place);
  CHECK_EQ(high(), 10);
  CHECK(desk.registry->pins().has_slot(5));
  client.drop_pin(9);
  CHECK_EQ(high(), 0);
  client.store_pin(client.take_pin(), slot_pin(6, 1));
  CHECK(desk.registry->pins().has_slot(6));
}

TEST(session_pins_stay_bounded_when_the_file_claims_more) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  const uint64_t absurd = UINT64_MAX;
  CHECK_EQ(::pwrite(created.descriptor.get(), &absurd, 8, offsetof(SessionFile, pins_high)), 8);
  CHECK_EQ(::pwrite(created.descriptor.get(), &absurd, 8, offsetof(SessionFile, touch_head)), 8);
  CHECK(desk.registry->pins().size() == 0);
  uint64_t visited = 0;
  desk.registry->drain_touches([&](PageId, uint32_t) { ++visited; });
  CHECK(visited <= kTouchCapacity);
}

TEST(session_refuses_a_pin_when_all_words_are_taken) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  ClientSession client = attach(created.descriptor);
  for (uint32_t i = 0; i < kPinCapacity; ++i) CHECK_EQ(client.take_pin(), i);
  CHECK_EQ(client.take_pin(), -1);
  client.drop_pin(77);
  CHECK_EQ(client.take_pin(), 77);
  CHECK_EQ(client.take_pin(), -1);
}

// Incident: two sessions of one process pinned all of the arena, half of it each.
TEST(sessions_of_a_process_share_what_they_may_hold_and_a_forked_child_begins_anew) {
  Desk desk;
  std::vector<Registry::Created> made;
  for (int i = 0; i < 4; ++i) made.push_back(desk.registry->create(1));
  std::optional<ClientSession> first(std::in_place, ParentFd(made[0].descriptor.release()));
  ClientSession second = attach(made[1].descriptor);
  CHECK(first->pinned_bytes().take(60, 100));
  CHECK(!second.pinned_bytes().take(60, 100));
  CHECK(second.pinned_bytes().take(40, 100));
  CHECK(second.segments_held().take(1, 1));
  CHECK(!first->segments_held().take(1, 1));
  const pid_t child = ::fork();
  if (child == 0) {
    ClientSession own = attach(made[2].descriptor);
    ::_exit(own.pinned_bytes().take(100, 100) && !own.pinned_bytes().take(1, 100) ? 0 : 1);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  first->pinned_bytes().give_back(60);
  first.reset();
  ClientSession last = attach(made[3].descriptor);
  CHECK(last.pinned_bytes().take(60, 100));
  CHECK(!last.pinned_bytes().take(1, 100));
}

uint32_t granted(const Desk& desk, SessionId id) {
  const Fd file(::open(desk.path(id).c_str(), O_RDONLY | O_CLOEXEC));
  uint32_t words = 0;
  CHECK_EQ(::pread(file.get(), &words, 4, offsetof(SessionFile, pin_capacity)), 4);
  return words;
}

// Incident: a process with 512 sessions had the core read 16 million pin words for each eviction.
TEST(sessions_share_the_pin_words_that_the_core_reads) {
  Desk desk;
  std::vector<Registry::Created> made;
  uint64_t words = 0, bytes = 0;
  for (size_t i = 0; i < Registry::kMaxSessions; ++i) {
    made.push_back(desk.registry->create(0));
    words += granted(desk, made.back().session->id);
    struct stat info{};
    CHECK_EQ(::fstat(made.back().descriptor.get(), &info), 0);
    bytes += static_cast<uint64_t>(info.st_blocks) * 512;
    if (i == 15) CHECK_EQ(words, 16 * kPinCapacity);  // a rank on each GPU, and a few more
  }
  CHECK(words <= Registry::kPinsOfAll + Registry::kMaxSessions * Registry::kPinsLeast);
  CHECK(bytes <= Registry::kFilesBytes);
  ClientSession first = attach(made.front().descriptor);
  for (uint32_t i = 0; i < kPinCapacity; ++i)
    first.store_pin(first.take_pin(), slot_pin(7000 + i, 1));
  // The last one may still pin something; words beyond its share pin nothing, whatever it writes.
  const Fd file(::open(desk.path(made.back().session->id).c_str(), O_RDWR | O_CLOEXEC));
  ClientSession client = attach(made.back().descriptor);
  CHECK_EQ(client.pin_capacity(), Registry::kPinsLeast);
  for (uint32_t i = 0; i < Registry::kPinsLeast; ++i)
    client.store_pin(client.take_pin(), slot_pin(i, 1));
  CHECK_EQ(client.take_pin(), -1);
  const uint64_t beyond = slot_pin(5000, 1), high = kPinCapacity;
  CHECK_EQ(::pwrite(file.get(), &beyond, 8,
                    offsetof(SessionFile, pins) + uint64_t{Registry::kPinsLeast} * 8),
           8);
  CHECK_EQ(::pwrite(file.get(), &high, 8, offsetof(SessionFile, pins_high)), 8);
  for (const bool restarted : {false, true}) {
    if (restarted) desk.open();
    CHECK(desk.registry->pins().has_slot(Registry::kPinsLeast - 1));
    CHECK(!desk.registry->pins().has_slot(5000));
    CHECK(desk.registry->pins().has_slot(7000 + kPinCapacity - 1));  // in whatever order they come
  }
  // Each has what it was granted by the daemon that it knew, and what is given back is there again.
  made.clear();
  desk.buries_all();
  CHECK_EQ(granted(desk, desk.registry->create(0).session->id), kPinCapacity);
}

TEST(process_has_half_of_the_pin_words) {
  Desk desk;
  std::vector<Registry::Created> made;
  for (size_t i = 0; i < Registry::kMaxSessionsOfProcess; ++i)
    made.push_back(desk.registry->create(7));
  CHECK_EQ(granted(desk, made.back().session->id), Registry::kPinsLeast);
  for (int i = 0; i < 3; ++i) {
    made.push_back(desk.registry->create(8));
    CHECK(granted(desk, made.back().session->id) >= kPinCapacity / 2);
  }
}

TEST(sessions_of_an_earlier_daemon_keep_their_pins_within_the_same_bound) {
  Desk desk;
  std::vector<Fd> locks;
  uint64_t pinned = 0;
  for (uint64_t id = 1; id < 100; ++id) {  // all of version 1, where each had all its words
    Registry::Created created = desk.registry->create(id);
    const uint32_t head[] = {1, kPinCapacity};
    CHECK_EQ(::pwrite(created.descriptor.get(), head, 8, offsetof(SessionFile, version)), 8);
    const uint64_t high = kPinCapacity, pin = slot_pin(static_cast<SlotId>(id), 1);
    const bool last = id % 2 == 0;  // or the first word
    CHECK_EQ(::pwrite(created.descriptor.get(), &pin, 8,
                      offsetof(SessionFile, pins) + (last ? (kPinCapacity - 1) * 8 : 0)),
             8);
    CHECK_EQ(::pwrite(created.descriptor.get(), &high, 8, offsetof(SessionFile, pins_high)), 8);
    locks.push_back(std::move(created.descriptor));
  }
  desk.open();
  const PinSet& pins = desk.registry->pins();
  for (SlotId slot = 1; slot < 100; slot += 2) CHECK(pins.has_slot(slot));
  for (SlotId slot = 2; slot < 100; slot += 2) pinned += pins.has_slot(slot) ? 1 : 0;
  CHECK(pinned <= Registry::kGrantedOfAll / kPinCapacity);
  CHECK_EQ(granted(desk, desk.registry->create(100).session->id), Registry::kPinsLeast);
}

TEST(sessions_that_end_together_go_some_at_a_time_with_one_look_at_what_is_written) {
  constexpr size_t kMany = Registry::kEndedAtOnce + 6;
  Desk desk;
  std::vector<Fd> locks;
  for (uint64_t at = 0; at < kMany; ++at) {
    Registry::Created created = desk.registry->create(at + 1);
    desk.registry->hung_up(created.session->id);
    locks.push_back(std::move(created.descriptor));
  }
  CHECK(desk.registry->reap().empty());
  CHECK_EQ(desk.looks, 0);  // nobody died
  locks.clear();
  CHECK_EQ(desk.registry->reap().size(), Registry::kEndedAtOnce);
  CHECK_EQ(desk.looks, 1);
  CHECK_EQ(desk.registry->reap().size(), 6);
}

TEST(session_counters_stay_in_the_totals_when_it_is_reaped) {
  Desk desk;
  SessionId id = 0;
  {
    Registry::Created created = desk.registry->create(1);
    id = created.session->id;
    ClientSession client = attach(created.descriptor);
    client.count(Counter::pages_loaded, 41);
    client.count(Counter::pages_loaded);
  }
  desk.registry->hung_up(id);
  CHECK(desk.buries(id));
  CHECK_EQ(desk.registry->totals()[static_cast<size_t>(Counter::pages_loaded)], 42);
}

TEST(session_counts_what_a_client_can_have_done_and_no_more) {
  Desk desk;
  Registry::Created honest = desk.registry->create(1), liar = desk.registry->create(2);
  ClientSession client = attach(honest.descriptor);
  const auto total = [&] { return desk.registry->totals()[static_cast<size_t>(Counter::loads)]; };
  const auto claim = [&](uint64_t loads) {
    const auto at = static_cast<off_t>(offsetof(SessionFile, counters) +
                                       static_cast<size_t>(Counter::loads) * 8);
    CHECK_EQ(::pwrite(liar.descriptor.get(), &loads, sizeof loads, at), sizeof loads);
  };
  client.count(Counter::loads, 3);
  claim(4);
  CHECK_EQ(total(), 7);
  claim(UINT64_MAX / 2);
  CHECK_EQ(total(), 7);
  claim(2);
  CHECK_EQ(total(), 7);
  claim(3);
  client.count(Counter::loads, 2);
  CHECK_EQ(total(), 10);
  // A second's worth is believed in a second.
  claim(3 + 10 * Registry::kCountsPerSecond);
  CHECK_EQ(total(), 10);
  desk.clock.advance_ns(10 * kSecondNs);
  claim(3 + 20 * Registry::kCountsPerSecond);
  CHECK_EQ(total(), 10 + 10 * Registry::kCountsPerSecond);
  claim(UINT64_MAX / 2);
  desk.registry->hung_up(liar.session->id);
  liar.descriptor.reset();
  desk.registry->reap();
  client.count(Counter::loads);
  CHECK_EQ(total(), 11 + 10 * Registry::kCountsPerSecond);
}

TEST(session_totals_end_at_a_bound_and_never_wrap) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  ClientSession client = attach(created.descriptor);
  uint64_t before = 0;
  for (int day = 0; day < 8; ++day) {
    desk.clock.advance_ns(86400 * kSecondNs);
    client.count(Counter::bytes_loaded, 65536 * Registry::kCountsPerSecond);
    const uint64_t now = desk.registry->totals()[static_cast<size_t>(Counter::bytes_loaded)];
    CHECK(now >= before);
    before = now;
  }
  CHECK_EQ(before, Registry::kCountMost);
}

TEST(session_of_an_earlier_daemon_is_counted_whole) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  ClientSession client = attach(created.descriptor);
  client.count(Counter::dropped_unreachable, 9);
  desk.open();
  CHECK_EQ(desk.registry->totals()[static_cast<size_t>(Counter::dropped_unreachable)], 9);
}

TEST(session_is_refused_when_there_are_too_many) {
  Desk desk;
  // Files of an earlier daemon count, however small: their owners may be writing.
  for (uint64_t id = 1; id < Registry::kMaxSessions; ++id) {
    const Fd file(::open(desk.path(id).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    CHECK(file.valid());
    desk.writing.insert(id);
  }
  desk.open();
  CHECK_EQ(desk.registry->size(), Registry::kMaxSessions - 1);
  desk.registry->create(1);
  CHECK_THROWS(desk.registry->create(1), "too_many_sessions");
  desk.registry->reap();
  desk.clock.advance_ns(kGrace);
  CHECK_EQ(desk.buries_all(), Registry::kMaxSessions - 1);
  desk.registry->create(1);
}

TEST(process_has_half_of_the_sessions_where_it_is_seen) {
  Desk desk;
  for (size_t i = 0; i < Registry::kMaxSessionsOfProcess; ++i) desk.registry->create(7);
  CHECK_THROWS(desk.registry->create(7), "too_many_sessions");
  desk.registry->create(8);
  while (desk.registry->size() < Registry::kMaxSessions) desk.registry->create(0);
  CHECK_THROWS(desk.registry->create(8), "too_many_sessions");
}

TEST(registry_ignores_files_that_are_no_sessions) {
  Desk desk;
  for (const char* name : {"/README", "/12345g", "/0", "/00000000000000000000"})
    Fd(::open((desk.directory.path() + name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  desk.open();
  CHECK_EQ(desk.registry->size(), 0);
  CHECK(std::filesystem::exists(desk.directory.path() + "/README"));
}

// A session that the daemon cannot look into may pin and write: it must not count as gone.
TEST(registry_refuses_to_start_when_a_session_cannot_be_opened) {
  Desk desk;
  for (const uint64_t id : {0xabc, 0xdef})
    Fd(::open(desk.path(id).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  // Descriptors for the listing, and then for the first file, but not for the second.
  const DescriptorLimit tight(DescriptorLimit::at_present(1));
  CHECK_THROWS(desk.open(), "EMFILE");
}

// Incident: a daemon without clients was to be rid of some.
TEST(session_without_descriptors_is_refused_with_the_limit_and_clients_only_if_there_are_any) {
  Desk desk;
  const auto refusal = [&] {
    const DescriptorLimit tight(DescriptorLimit::at_present(1));
    try {
      desk.registry->create(1);
    } catch (const Error& error) {
      CHECK(error.code() == "no_file_handles");
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(refusal().ends_with("(ulimit -n, LimitNOFILE)"));
  const Registry::Created there = desk.registry->create(1);
  CHECK(refusal().ends_with(", or close clients that are not used"));
}

TEST(client_session_is_refused_when_the_file_is_not_one) {
  Desk desk;
  const auto spoilt = [&](uint64_t value, off_t at, size_t bytes) {
    Registry::Created created = desk.registry->create(1);
    CHECK_EQ(::pwrite(created.descriptor.get(), &value, bytes, at), bytes);
    return std::move(created.descriptor);
  };
  CHECK_THROWS(attach(spoilt(1, 0, 8)), "bad_files");
  CHECK_THROWS(attach(spoilt(kSessionVersion + 1, 8, 4)), "bad_files");
  Registry::Created cut = desk.registry->create(1);
  CHECK_EQ(::ftruncate(cut.descriptor.get(), 4096), 0);
  CHECK_THROWS(attach(std::move(cut.descriptor)), "bad_files");
  // A second opening of the file, while the first holds the lock.
  Registry::Created held = desk.registry->create(1);
  CHECK_THROWS(attach(Fd(::open(desk.path(held.session->id).c_str(), O_RDWR | O_CLOEXEC))),
               "bad_files");
}

}  // namespace
}  // namespace kvw
