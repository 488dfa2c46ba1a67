// The free slots of a page size, by slabs that come and go.
#include "slots/free_slots.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <vector>

#include "tests/check.h"

namespace kvw {
namespace {

constexpr uint32_t kSlabs = 4;
constexpr uint32_t kPlaces = 8;

using Places = std::vector<std::pair<uint32_t, uint32_t>>;  // slab, place

FreeSlots filled(uint32_t slabs) {
  FreeSlots free(kSlabs, kPlaces);
  for (uint32_t slab = 0; slab < slabs; ++slab)
    for (uint32_t place = 0; place < kPlaces; ++place) free.push({slab, place});
  return free;
}

Places taken(FreeSlots& free, size_t count) {
  Places places;
  for (; count > 0; --count) {
    const auto [slab, place] = free.pop();
    places.emplace_back(slab, place);
  }
  return places;
}

TEST(free_slots_are_given_first_in_first_out_slab_after_slab) {
  FreeSlots free = filled(2);
  CHECK_EQ(free.size(), 2 * kPlaces);
  CHECK_EQ(taken(free, 2), (Places{{0, 0}, {0, 1}}));
  // What is freed now waits until the others had their turn.
  free.push({0, 1});
  free.push({0, 0});
  taken(free, kPlaces - 2);
  CHECK_EQ(taken(free, kPlaces).front(), (std::pair<uint32_t, uint32_t>{1, 0}));
  CHECK_EQ(taken(free, 2), (Places{{0, 1}, {0, 0}}));
  CHECK(free.empty());
}

TEST(free_slots_of_a_hidden_slab_are_not_given_until_it_is_shown) {
  FreeSlots free = filled(2);
  taken(free, 3);
  free.hide(0);
  CHECK_EQ(free.size(), kPlaces);
  CHECK_EQ(free.in(0), kPlaces - 3);
  free.push({0, 2});
  CHECK_EQ(free.size(), kPlaces);
  CHECK_EQ(taken(free, 1), (Places{{1, 0}}));
  free.show(0);
  CHECK_EQ(free.size(), 2 * kPlaces - 3);
  taken(free, kPlaces - 1);
  CHECK_EQ(taken(free, 1), (Places{{0, 3}}));
}

TEST(free_slots_of_a_slab_go_with_it) {
  FreeSlots free = filled(3);
  free.drop(0);
  free.hide(1);
  free.drop(1);
  CHECK_EQ(free.size(), kPlaces);
  CHECK_EQ(free.in(0), 0);
  free.push({1, 5});
  taken(free, kPlaces);
  CHECK_EQ(taken(free, 1), (Places{{1, 5}}));
}

TEST(free_slot_that_comes_after_others_is_known_before_it_is_given) {
  FreeSlots free = filled(1);
  for (uint32_t place = 0; place + 2 < kPlaces; ++place) {
    CHECK_EQ(free.after(2)->place, place + 2);
    CHECK_EQ(free.pop().place, place);
  }
  CHECK(!free.after(2));
}

// Each slab gives its own in order, all that are there are given, and none twice.
TEST(free_slots_are_those_of_a_queue_for_each_slab) {
  auto random = check::random("free slots");
  FreeSlots free(kSlabs, kPlaces);
  std::map<uint32_t, std::deque<uint32_t>> queues;
  std::set<uint32_t> hidden;
  std::set<std::pair<uint32_t, uint32_t>> out;
  for (uint32_t slab = 0; slab < kSlabs; ++slab)
    for (uint32_t place = 0; place < kPlaces; ++place) out.emplace(slab, place);
  const auto size = [&] {
    size_t count = 0;
    for (const auto& [slab, queue] : queues) count += hidden.contains(slab) ? 0 : queue.size();
    return count;
  };
  for (uint64_t round = 0; round < check::rounds(20000); ++round) {
    const uint32_t slab = static_cast<uint32_t>(random() % kSlabs);
    switch (random() % 8) {
      case 0:
      case 1:
      case 2:
        if (out.empty()) break;
        {
          auto at = out.begin();
          std::advance(at, random() % out.size());
          free.push({at->first, at->second});
          queues[at->first].push_back(at->second);
          out.erase(at);
        }
        break;
      case 3:
      case 4:
      case 5:
        if (free.empty()) break;
        {
          const auto [from, place] = free.pop();
          CHECK(!hidden.contains(from));
          CHECK_EQ(queues[from].front(), place);
          queues[from].pop_front();
          out.emplace(from, place);
        }
        break;
      case 6:
        if (hidden.erase(slab) != 0) {
          free.show(slab);
        } else {
          free.hide(slab);
          hidden.insert(slab);
        }
        break;
      default:
        if (random() % 4 != 0) break;
        free.drop(slab);
        for (const uint32_t place : queues[slab]) out.emplace(slab, place);
        queues[slab].clear();
        hidden.erase(slab);
    }
    CHECK_EQ(free.size(), size());
    CHECK_EQ(free.in(slab), queues[slab].size());
  }
}

}  // namespace
}  // namespace kvw
