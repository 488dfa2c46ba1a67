// Where in the index the pages that an earlier daemon left shall stand.
//
// Taken in the order in which they are found, with the first empty position for each, pages that
// were in the index together need not fit it again: another order fills other windows, and a page
// without a place is lost with all that come after it in its prompt. So all are placed at once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"

namespace kvw {

// A position for each of `keys` that has no equal before it, in its window of a table of so many
// `positions` (a power of two); kNoPage for the others. If there is any way to give every key one,
// every key gets one. Of more than `capacity` keys (at most half the positions) the first ones
// count.
std::vector<PageId> place(std::span<const Key> keys, uint64_t positions, uint64_t capacity);
// Memory that it takes for each key, with its answer.
inline constexpr uint64_t kPlaceBytes = 8 + sizeof(PageId);

}  // namespace kvw
