// The most hits that a cache of some size can have: Belady's MIN (1966), which knows the future. It
// keeps the pages that are asked for soonest, and does not take in one that is asked for later than
// all that it has, or never again.
//
// A page is never asked for without those before it in its chain, so each of them is asked for
// sooner, or in the same request: where that is so, the later in the chain leaves first. So what is
// kept has no gaps, every page that is there is hit, and no policy hits more pages in prefix order.
#pragma once

#include <cstdint>
#include <span>

#include "base/types.h"
#include "replay/replay.h"

namespace kvw {

// Request i asks for the chain pages[ends[i - 1]..ends[i]), root first, of ids below `ids`; `hits`
// has a place for each request. kEndless: no bound. O(n log n) for n pages asked for; 4 bytes for
// each of them, 16 for each page kept and 8 for each id. Throws Error (usage "bad_trace").
TierCounts optimal_hits(std::span<const PageId> pages, std::span<const uint64_t> ends, size_t ids,
                        uint64_t capacity, std::span<uint32_t> hits);

}  // namespace kvw
