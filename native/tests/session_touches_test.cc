// Touches and releases in sessions' files: each is heard once, also of clients that have ended, and
// no client says so much that others are not heard.
#include "tests/check.h"
#include "tests/session_kit.h"

namespace kvw {
namespace {

TEST(session_touches_arrive_once_and_the_newest_win) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  ClientSession client = attach(created.descriptor);
  EntryView entry;
  entry.key.lo = 0x1122334455667788ull;
  const auto drained = [&] {
    std::vector<PageId> pages;
    desk.registry->drain_touches([&](PageId page, uint32_t tag) {
      CHECK_EQ(tag, 0x55667788u);
      pages.push_back(page);
    });
    return pages;
  };
  for (entry.page = 0; entry.page < 10; ++entry.page) client.touch(entry);
  CHECK_EQ(drained().size(), 10);
  CHECK(drained().empty());
  for (entry.page = 0; entry.page < 3 * kTouchCapacity; ++entry.page) client.touch(entry);
  const std::vector<PageId> pages = drained();
  CHECK(!pages.empty());
  CHECK_EQ(pages.back(), 3 * kTouchCapacity - 1);
}

TEST(what_clients_said_last_is_heard_though_they_have_ended) {
  constexpr uint64_t kMany = Registry::kEndedAtOnce;
  Desk desk;
  EntryView entry;
  for (uint64_t at = 0; at < kMany; ++at) {
    Registry::Created created = desk.registry->create(at + 1);
    ClientSession client = attach(created.descriptor);
    entry.page = static_cast<PageId>(at);
    client.touch(entry);
    client.release(entry);
    created.session->connected = false;
  }
  CHECK_EQ(desk.registry->reap().size(), kMany);
  std::vector<uint64_t> said(kMany);
  desk.registry->drain_touches([&](PageId word, uint32_t) { ++said[word & ~kReleasedPage]; });
  for (const uint64_t of_one : said) CHECK_EQ(of_one, 2);
  desk.registry->drain_touches([&](PageId, uint32_t) { ++said[0]; });
  CHECK_EQ(said[0], 2);
}

TEST(what_many_said_last_is_bounded) {
  Desk desk;
  EntryView entry;
  for (uint64_t at = 0; at < Registry::kEndedAtOnce; ++at) {
    Registry::Created created = desk.registry->create(at + 1);
    ClientSession client = attach(created.descriptor);
    for (uint32_t touch = 0; touch < kTouchCapacity; ++touch) client.touch(entry);
    created.session->connected = false;
  }
  CHECK_EQ(desk.registry->reap().size(), Registry::kEndedAtOnce);
  uint64_t said = 0;
  desk.registry->drain_touches([&](PageId, uint32_t) { ++said; });
  CHECK_EQ(said, Registry::kTouchesPerPass);
}

TEST(session_touches_of_all_in_a_pass_are_bounded_and_shared) {
  constexpr uint64_t kBusy = 8;
  Desk desk;
  std::vector<std::unique_ptr<ClientSession>> clients;
  for (uint64_t at = 0; at < 2 * kBusy; ++at)
    clients.push_back(std::make_unique<ClientSession>(
        ParentFd(desk.registry->create(at + 1).descriptor.release())));
  EntryView entry;
  for (uint64_t at = 0; at < kBusy; ++at) {  // the others say nothing, and take no part
    entry.page = static_cast<PageId>(at);
    for (uint64_t touch = 0; touch < 2 * Registry::kTouchesPerPass / kBusy; ++touch)
      clients[at]->touch(entry);
  }
  std::vector<uint64_t> drained(kBusy);
  desk.registry->drain_touches([&](PageId page, uint32_t) { ++drained[page]; });
  for (const uint64_t of_one : drained) CHECK_EQ(of_one, Registry::kTouchesPerPass / kBusy);
  CHECK_EQ(desk.registry->touches_lost(), Registry::kTouchesPerPass);
}

TEST(session_that_claims_touches_without_end_loses_none_to_speak_of) {
  Desk desk;
  Registry::Created created = desk.registry->create(1);
  const auto drained = [&] {
    uint64_t touches = 0;
    desk.registry->drain_touches([&](PageId, uint32_t) { ++touches; });
    return touches;
  };
  for (const uint64_t head : {uint64_t{5}, UINT64_MAX, uint64_t{7}, uint64_t{1} << 62}) {
    CHECK_EQ(
        ::pwrite(created.descriptor.get(), &head, sizeof head, offsetof(SessionFile, touch_head)),
        sizeof head);
    CHECK(drained() <= 8);
  }
  CHECK_EQ(desk.registry->touches_lost(), 0);
}

}  // namespace
}  // namespace kvw
