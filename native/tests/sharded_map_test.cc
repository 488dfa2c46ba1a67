#include "base/sharded_map.h"

#include <algorithm>

#include "base/types.h"
#include "tests/check.h"

namespace kvw {
namespace {

// Incident: a clear of half a million pages moved its table of lost parents at once, and a store of
// another client waited for that for 7 ms.
TEST(sharded_map_moves_a_small_part_of_its_entries_at_a_time) {
  constexpr uint64_t kKeys = 1 << 18;
  auto random = check::random("keys of a sharded map");
  ShardedMap<uint32_t, uint32_t> numbers;  // of pages: one after another
  ShardedMap<Key, uint32_t, KeyHash> keys;
  const auto grow = [](auto& shard, const auto& key) {
    const size_t buckets = shard.bucket_count(), before = shard.size();
    shard.insert_or_assign(key, 0);
    return shard.bucket_count() == buckets ? 0 : before;
  };
  size_t moved = 0;
  for (uint32_t number = 0; number < kKeys; ++number) {
    moved = std::max<size_t>(moved, grow(numbers.of(number), number));
    const Key key{random(), random()};
    moved = std::max<size_t>(moved, grow(keys.of(key), key));
    CHECK_EQ(numbers.of(number).count(number) + keys.of(key).count(key), 2);
  }
  CHECK(moved > 0);
  constexpr size_t kShards = decltype(numbers)::kShards;
  CHECK(moved <= 2 * kKeys / kShards);
}

}  // namespace
}  // namespace kvw
