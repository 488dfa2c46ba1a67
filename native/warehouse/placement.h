// Where in the index the pages that an earlier daemon left shall stand.
//
// Taken in the order in which they are found, with the first empty place for each, pages that were
// in the index together need not fit it again: another order fills other windows, and a page
// without a place is lost with all that come after it in its prompt. So a key whose places are all
// taken makes others go on to places of theirs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"

namespace kvw {

// A position for each of `keys` that has no equal before it, one of its places in a table of so
// many `positions` (a power of two); kNoPage for the others. If there is any way to give every key
// one, every key gets one, unless that takes a look at more than thousands of others. Of more than
// `capacity` keys (at most half the positions) the first ones count.
std::vector<PageId> place(std::span<const Key> keys, uint64_t positions, uint64_t capacity);
// Memory that it takes for each key of a full table, with its answer.
inline constexpr uint64_t kPlaceBytes = 2 * sizeof(uint32_t) + sizeof(PageId);

}  // namespace kvw
