// A hash map that grows in short steps: it is many small ones, and each of them moves its entries
// to a larger table by itself. One of 125,000 keys takes 5 ms for that at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>

namespace kvw {

template <class K, class Value, class Hash = std::hash<K>>
class ShardedMap {
 public:
  using Shard = std::unordered_map<K, Value, Hash>;
  static constexpr size_t kShards = 256;

  // Where the key is, or belongs. Iterators are of this one: look for its end() here.
  Shard& of(const K& key) { return shards_[number_of(key)]; }
  const Shard& of(const K& key) const { return shards_[number_of(key)]; }

 private:
  // By other bits than those that tell its places apart: numbers of pages lie close together.
  static size_t number_of(const K& key) {
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;  // 2^64 over the golden ratio, odd
    return static_cast<size_t>(uint64_t{Hash{}(key)} * kGolden >> 56);
  }

  std::array<Shard, kShards> shards_;
};

}  // namespace kvw
