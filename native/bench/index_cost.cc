#include "bench/index_cost.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <string>
#include <unordered_set>

#include "base/error.h"
#include "base/fd.h"
#include "index/index.h"

namespace kvw {

namespace {

constexpr uint64_t kMostEntries = 1ull << 28;
constexpr size_t kProbes = 32768;
constexpr size_t kPrefetchAhead = 16;
constexpr uint64_t kAbsent = 1ull << 40;  // numbers from here on are in no table

// SplitMix64 (Steele et al. 2014): as random as digests, and made again without being kept.
uint64_t mixed(uint64_t number) {
  uint64_t z = (number + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

Key key_of(uint64_t number) { return {mixed(2 * number), mixed(2 * number + 1)}; }

class Table {
 public:
  explicit Table(uint64_t count)
      : fd_(::memfd_create("kvw-index-cost", MFD_CLOEXEC)), count_(count) {
    const uint64_t entries = std::bit_ceil(2 * count);
    const IndexHeader header{kIndexMagic, kIndexVersion, 0, {}, 1, entries};
    const auto bytes = static_cast<off_t>(index_bytes(entries));
    if (!fd_.valid() || ::ftruncate(fd_.get(), bytes) != 0 ||
        ::pwrite(fd_.get(), &header, sizeof header, 0) != sizeof header)
      throw storage_error("cannot make a table of " + std::to_string(entries) + " entries", errno);
    // Allocated rather than touched: where there is no room, that is an error and no signal.
    if (const int err = ::posix_fallocate(fd_.get(), 0, bytes); err != 0)
      throw storage_error("no memory for a table of " + std::to_string(entries) + " entries", err);
    mapping_ = Mapping(fd_.get(), static_cast<size_t>(bytes), true);
    index_ = Index(mapping_);
    for (uint64_t number = 0; number < count; ++number)
      if (!insert(key_of(number))) refused_.insert(number);
  }

  uint64_t refused() const { return refused_.size(); }

  // Finds keys of this table, others than the round before, or keys that it does not have.
  double find_ns(uint64_t round, bool present) {
    const std::vector<Key> keys = probes(round, present);
    uint64_t found = 0;
    const double ns = timed_ns([&] {
      for (size_t i = 0; i < keys.size(); ++i) {
        if (i + kPrefetchAhead < keys.size()) index_.prefetch(keys[i + kPrefetchAhead]);
        found += index_.find(keys[i]).has_value() ? 1 : 0;
      }
    });
    if (found != (present ? keys.size() : 0))
      throw Error(ErrorKind::internal, "index_cost",
                  std::to_string(found) + " of " + std::to_string(keys.size()) +
                      " keys were found in a table of " + std::to_string(count_));
    return ns;
  }

  // Takes an entry out and writes it again.
  double replace_ns(uint64_t round) {
    const std::vector<Key> keys = probes(round, true);
    return timed_ns([&] {
      for (const Key& key : keys) {
        index_.erase(index_.find(key)->page);
        insert(key);
      }
    });
  }

 private:
  bool insert(const Key& key) {
    EntryView view;
    view.page = index_.empty_place(key);
    if (view.page == kNoPage) return false;
    view.key = key;
    view.flags = kEntryUsed | kEntryDram;
    index_.write(view);
    return true;
  }

  std::vector<Key> probes(uint64_t round, bool present) const {
    std::vector<Key> keys(kProbes);
    for (size_t i = 0; i < keys.size(); ++i) {
      const uint64_t random = mixed(round * kProbes + i);
      uint64_t number = present ? random % count_ : kAbsent + (random >> 24);
      while (refused_.contains(number)) number = (number + 1) % count_;  // the first one is there
      keys[i] = key_of(number);
    }
    return keys;
  }

  template <class Work>
  static double timed_ns(Work&& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
    return taken.count() / kProbes;
  }

  Fd fd_;
  Mapping mapping_;
  Index index_;
  uint64_t count_;
  std::unordered_set<uint64_t> refused_;
};

}  // namespace

std::vector<IndexCost> index_costs(std::span<const uint64_t> counts, uint32_t rounds) {
  std::vector<Table> tables;
  std::vector<IndexCost> costs;
  for (const uint64_t count : counts) {
    if (count == 0 || count > kMostEntries)
      throw Error(ErrorKind::usage, "bad_counts",
                  "a table of " + std::to_string(count) + " entries; use 1 to " +
                      std::to_string(kMostEntries));
    tables.emplace_back(count);
    costs.push_back({count, tables.back().refused(), {}, {}, {}});
  }
  for (uint64_t round = 0; round <= rounds; ++round) {
    for (size_t at = 0; at < tables.size(); ++at) {
      const size_t turn = (at + round) % tables.size();
      const double hit = tables[turn].find_ns(round, true);
      const double miss = tables[turn].find_ns(round, false);
      const double replace = tables[turn].replace_ns(round);
      if (round == 0) continue;  // to warm up
      costs[turn].hit_ns.push_back(hit);
      costs[turn].miss_ns.push_back(miss);
      costs[turn].replace_ns.push_back(replace);
    }
  }
  return costs;
}

}  // namespace kvw
