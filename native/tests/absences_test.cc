// What is remembered of pages that are not there: the last of each, the latest of all, and no more
// than there is room for.
#include "warehouse/absences.h"

#include <map>

#include "tests/check.h"

namespace kvw {
namespace {

constexpr uint64_t kSets = 2048;  // of the smallest table

Absence left(const Key& key, uint32_t at_s, LeaveReason reason = LeaveReason::evicted) {
  return {.key = key, .at_s = at_s, .why = static_cast<uint8_t>(reason)};
}

TEST(last_time_that_a_page_left_and_that_it_was_refused_are_told_apart) {
  Absences absences(1);
  const Key key{5, 6};
  CHECK(!absences.left(key) && !absences.refused(key));
  CHECK(!absences.left({}) && !absences.refused({}));  // as an empty place has
  CHECK_EQ(absences.remembers_since_s(key), 0);
  absences.add(left(key, 10));
  absences.add(
      {.key = key, .at_s = 11, .refused = true, .why = static_cast<uint8_t>(Reason::stale)});
  CHECK_EQ(absences.left(key)->at_s, 10);
  CHECK_EQ(absences.refused(key)->at_s, 11);
  CHECK_EQ(absences.refused(key)->name(), std::string("stale"));
  absences.add(left(key, 12, LeaveReason::operator_));
  CHECK_EQ(absences.left(key)->name(), std::string("operator"));
  CHECK(!absences.left({5, 7}));
  CHECK(!absences.left({5, ~key.hi}) && !absences.refused({5, ~key.hi}));
  CHECK_EQ(absences.remembers_since_s(key), 0);  // its set has room: nothing is forgotten
}

TEST(oldest_of_a_set_gives_way_and_says_how_far_back_the_set_goes) {
  Absences absences(1);
  for (uint32_t at = 1; at <= 4; ++at) absences.add(left({7 + at * kSets, at}, 100 + at));
  CHECK_EQ(absences.remembers_since_s({7, 0}), 101);
  absences.add(left({7, 9}, 105));
  CHECK(!absences.left({7 + kSets, 1}));
  CHECK(absences.left({7 + 2 * kSets, 2}) && absences.left({7, 9}));
  CHECK_EQ(absences.remembers_since_s({7, 0}), 102);
  // A page that is absent again takes its own place, not another's.
  absences.add(left({7 + 4 * kSets, 4}, 106));
  CHECK(absences.left({7 + 2 * kSets, 2}) && absences.left({7 + 3 * kSets, 3}));
  CHECK_EQ(absences.remembers_since_s({8, 0}), 0);
}

// Whatever is not found was before what its set remembers.
TEST(what_is_forgotten_is_said_to_be_forgotten) {
  std::mt19937_64 random(20261130);
  Absences absences(1);
  std::map<uint64_t, uint32_t> last;
  for (uint32_t at_s = 1; at_s < 40000; ++at_s) {
    const uint64_t number = random() % 12000;
    absences.add(left({number, number}, at_s));
    last[number] = at_s;
  }
  size_t found = 0;
  for (const auto& [number, at_s] : last) {
    const auto absence = absences.left({number, number});
    found += absence ? 1 : 0;
    if (absence)
      CHECK_EQ(absence->at_s, at_s);
    else
      CHECK(at_s < absences.remembers_since_s({number, number}));
  }
  CHECK(found > 4 * kSets * 9 / 10);
}

// A table of a million has room for twelve bits of each.
TEST(times_are_remembered_to_one_part_in_a_hundred) {
  Absences absences(1);
  for (uint64_t age = 0; age < uint64_t{1} << 31; age = age + 1 + age / 3) {
    const auto at_s = static_cast<uint32_t>((uint64_t{1} << 31) + 5);
    const auto before_s = static_cast<uint32_t>(at_s - age);
    absences.add({.key = {1, 1},
                  .at_s = at_s,
                  .stored_at_s = before_s,
                  .used_at_s = before_s,
                  .perhaps_earlier = true});
    const Absence found = *absences.left({1, 1});
    const double error = static_cast<double>(found.stored_at_s) - static_cast<double>(before_s);
    CHECK(error >= 0 && error <= static_cast<double>(age) / 64);
    CHECK_EQ(found.used_at_s, found.stored_at_s);
    CHECK(found.perhaps_earlier && found.at_s == at_s);
    if (age < 120) CHECK_EQ(found.stored_at_s, before_s);
  }
  absences.add({.key = {1, 1}, .at_s = 9});
  CHECK(absences.left({1, 1})->stored_at_s == 0 && absences.left({1, 1})->used_at_s == 0);
}

TEST(memory_is_bounded_and_was_told) {
  CHECK_EQ(Absences::bytes(0), 4 * kSets * 16);
  CHECK_EQ(Absences::bytes(9000), 16384 * 16);
  CHECK_EQ(Absences::bytes(uint64_t{1} << 40), 16 << 20);
}

}  // namespace
}  // namespace kvw
