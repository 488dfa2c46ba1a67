// What an operation on the index costs, by how many entries it has: tables in memory of this
// process alone, without an arena, so that there may be more entries than pages fit this machine.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvw {

// Of one table, nanoseconds of one operation: a value a round.
struct IndexCost {
  uint64_t entries = 0;  // asked for
  uint64_t refused = 0;  // of them, for want of a place
  std::vector<double> hit_ns, miss_ns, replace_ns;
};

// A table for each of `counts`, at most half full as the warehouse's, all of them there at once;
// then `rounds` rounds over all tables in turns, after one to warm up. Probes go ahead of
// themselves as a lookup's do. Takes 128 to 256 bytes an entry. Throws Error: usage "bad_counts";
// storage where there is no memory.
std::vector<IndexCost> index_costs(std::span<const uint64_t> counts, uint32_t rounds);

}  // namespace kvw
