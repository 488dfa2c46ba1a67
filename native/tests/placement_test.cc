// Where recovered pages stand: whatever fits the index in some way, fits.
#include "warehouse/placement.h"

#include <algorithm>
#include <set>

#include "index/index.h"
#include "tests/check.h"

namespace kvw {
namespace {

constexpr uint64_t kPositions = 64;

bool is_place_of(const Key& key, PageId page, uint64_t positions) {
  for (uint32_t place = 0; place < kIndexPlaces; ++place)
    if (index_place(key, place, positions - 1) == page) return true;
  return false;
}

void check_sound(std::span<const Key> keys, std::span<const PageId> places, uint64_t positions) {
  CHECK_EQ(keys.size(), places.size());
  std::set<PageId> taken;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (places[i] == kNoPage) continue;
    CHECK(places[i] < positions);
    CHECK(is_place_of(keys[i], places[i], positions));
    CHECK(taken.insert(places[i]).second);
  }
}

uint64_t placed(std::span<const PageId> places) {
  return places.size() - static_cast<uint64_t>(std::ranges::count(places, kNoPage));
}

// Every key its place by moving others, as long as that goes on anywhere: a maximum matching.
class Matching {
 public:
  explicit Matching(std::span<const Key> keys) : keys_(keys), owner_(kPositions, kNobody) {}
  bool all() {
    for (size_t i = 0; i < keys_.size(); ++i) {
      tried_.assign(kPositions, false);
      if (!give(i)) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kNobody = SIZE_MAX;
  bool give(size_t key) {  // NOLINT(misc-no-recursion): as deep as the table is small
    for (uint32_t place = 0; place < kIndexPlaces; ++place) {
      const size_t at = index_place(keys_[key], place, kPositions - 1);
      if (tried_[at]) continue;
      tried_[at] = true;
      if (owner_[at] != kNobody && !give(owner_[at])) continue;
      owner_[at] = key;
      return true;
    }
    return false;
  }
  std::span<const Key> keys_;
  std::vector<size_t> owner_;
  std::vector<bool> tried_;
};

TEST(placement_gives_every_key_a_place_exactly_when_there_is_a_way_to) {
  std::mt19937_64 random = check::random("placement");
  uint64_t possible = 0, impossible = 0;
  for (uint64_t round = 0; round < check::rounds(4000); ++round) {
    // Half of the table's places at most, crowded around one home and near it a second, so that
    // some rounds fail; the table's end is one of the homes.
    const uint64_t count = 1 + random() % (kPositions / 2), spread = 1 + random() % 24;
    const uint64_t crowd = random() % kPositions, second = crowd + random() % 16;
    const auto home = [&](uint64_t from) {
      return (from + random() % spread) % kPositions + kPositions * (random() % 4096);
    };
    std::vector<Key> keys;
    for (uint64_t i = 0; i < count; ++i) keys.push_back({home(crowd), home(second) + (i << 32)});
    const auto places = place(keys, kPositions, kPositions / 2);
    check_sound(keys, places, kPositions);
    const bool way = Matching(keys).all();
    CHECK_EQ(placed(places) == count, way);
    ++(way ? possible : impossible);
  }
  CHECK(possible > 100);
  CHECK(impossible > 100);
}

TEST(placement_fits_a_crowd_that_the_first_empty_places_do_not) {
  constexpr uint64_t kMany = 1 << 14, kHomes = kMany / 2 + kMany / 64;
  std::mt19937_64 random = check::random("placement");
  std::vector<Key> keys(kMany / 2);
  for (Key& key : keys)
    key = {random() % kHomes + kMany * (random() % 4096), random() % kHomes + (random() << 32)};
  std::vector<bool> taken(kMany);
  uint64_t without = 0;
  for (const Key& key : keys) {
    uint32_t place = 0;
    while (place < kIndexPlaces && taken[index_place(key, place, kMany - 1)]) ++place;
    if (place == kIndexPlaces)
      ++without;
    else
      taken[index_place(key, place, kMany - 1)] = true;
  }
  CHECK(without > 0);
  const auto places = place(keys, kMany, kMany / 2);
  check_sound(keys, places, kMany);
  CHECK_EQ(placed(places), keys.size());
}

TEST(placement_prefers_the_first_of_too_many_and_of_equal_keys) {
  std::mt19937_64 random = check::random("placement");
  std::vector<Key> keys;
  for (uint64_t i = 0; i < kPositions; ++i) keys.push_back({i, random()});
  keys.insert(keys.begin() + 3, {keys[0], keys[1], keys[0]});
  const auto places = place(keys, kPositions, kPositions / 2);
  check_sound(keys, places, kPositions);
  for (size_t i = 0; i < keys.size(); ++i)
    CHECK_EQ(places[i] != kNoPage, i < 3 || (i >= 6 && i < kPositions / 2 + 3));
}

TEST(placement_of_nothing_is_nothing) { CHECK(place({}, kPositions, kPositions / 2).empty()); }

}  // namespace
}  // namespace kvw
