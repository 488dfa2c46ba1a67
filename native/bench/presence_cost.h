// What a lookup costs whose pages are in the presence filter, beside one whose pages are in the
// index: tables in memory of this process alone. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace kvw {

// Nanoseconds of a lookup of kPresencePromptPages pages of 16 tokens, keys included: a value a
// round.
struct PresenceCost {
  uint64_t objects = 0;        // in the filter
  std::vector<double> index;   // all pages are in an index of a million
  std::vector<double> pages;   // none is, and each is an object of its own
  std::vector<double> runs;    // none is, and 16 of them are an object
  std::vector<double> absent;  // of a prompt that is nowhere
};

inline constexpr uint32_t kPresencePromptPages = 2048;

// A filter for `objects`, full; then `rounds` rounds over prompts in turns, after one to warm up.
// Throws Error: usage "bad_counts"; storage where there is no memory.
PresenceCost presence_costs(uint64_t objects, uint32_t rounds);

}  // namespace kvw
