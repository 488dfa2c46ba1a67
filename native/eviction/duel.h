// Which hold times would have hit most lately: a small cache for each row of them, all of which see
// the uses of the same sample of pages, and remember what they would keep, not pages. (Set dueling:
// Qureshi, Jaleel, Patt, Steely, Emer: "Adaptive insertion policies for high performance caching",
// ISCA 2007. Samples by hash: SHARDS, see miss_ratio.h.)
//
// A row's cache takes the ripest page of its sample when it is full, without looks at parents. So
// of each class it keeps those that were used last, and a row is no more than where it has come to
// in each class. What no row keeps is forgotten.
//
// A use of a page that is followed is O(rows * classes). About 80 bytes a page that is followed, of
// which there are at most as many as all rows together keep. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "eviction/leaves.h"

namespace kvw {

class Duel {
 public:
  static constexpr uint32_t kRows = 7;
  static constexpr uint32_t kClasses = LeavesFirst::kClasses;
  using HoldTimes = LeavesFirst::HoldTimes;

  explicit Duel(std::span<const HoldTimes, kRows> rows);

  // Memory for a cache of so many pages: a table that doubles moves, and all wait.
  void reserve(size_t pages);
  // What the cache that it is for has room for. The sample is a 4th of the pages of a small one, a
  // 64th of a large one.
  void resize(size_t pages);
  // Whether that cache has to evict for what comes. Until it does, no row does.
  void fill(bool full) { full_ = full; }
  // As LeavesFirst::hold has it; 0 at first.
  void grace(float ticks) { grace_ = ticks; }
  bool follows(uint64_t identity) const { return (identity >> 32 & (rate_ - 1)) == 0; }

  // Of a page that it follows: it was used at `now`, and is of that class from then on.
  void used(uint64_t identity, uint32_t cls, uint64_t now);
  // It is of another class, without a use.
  void became(uint64_t identity, uint32_t cls, uint64_t now);

  // The row that leads. It changes here alone, when another is a fiftieth and more ahead; what was
  // long ago counts less at each call.
  size_t decide();
  size_t leader() const { return leader_; }
  // Of the uses for which not all rows had the page, how many this one had it for.
  double score(size_t row) const { return rows_[row].score; }
  size_t followed() const { return pages_.size() - kClasses - free_.size(); }

 private:
  // A place in pages_: the heads of the classes' lists, then the pages.
  using Place = uint32_t;
  static constexpr Place kNone = UINT32_MAX;

  struct Page {
    uint64_t identity = 0;
    uint64_t used_at = 0;
    uint64_t order = 0;                    // in which pages came to the hot ends
    Place colder = kNone, hotter = kNone;  // rings.h
    uint32_t cls = 0;
  };
  struct Row {
    HoldTimes hold;
    std::array<Place, kClasses> coldest;  // of those that it keeps; a head: none
    size_t kept = 0;
    double score = 0;
  };

  bool keeps(const Row& row, Place place) const;
  Place add(uint64_t identity);
  // Of its list, and of all rows. Returns which kept it, a bit each.
  uint32_t take_out(Place place);
  void push_hot(Place place, uint32_t cls, uint64_t now);
  uint32_t shrink(Row& row, uint64_t now);  // returns of which class
  void forget(Place place);                 // it is in no list
  void forget_what_nobody_keeps(uint32_t cls);

  std::array<Row, kRows> rows_;
  std::vector<Page> pages_;
  std::vector<Place> free_;
  std::unordered_map<uint64_t, Place> places_;  // by identity
  uint64_t rate_ = 4;                           // one page of so many is followed
  size_t room_ = 1;                             // of each row's cache
  bool full_ = false;
  float grace_ = 0;
  uint64_t orders_ = 0;
  size_t leader_ = 0;
};

}  // namespace kvw
