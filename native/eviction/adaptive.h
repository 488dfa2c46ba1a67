// Leaves first (leaves.h), by age as a part of how long pages of a kind are worth holding. Kinds
// are how often a page was used, also before it left and came back, and the ends of chains that
// were used once. How long each is worth holding nobody knows in advance: seven answers, the first
// of which is LRU's, play against each other on a sample of the pages (duel.h), and the one that
// hits most is followed. So it stays near LRU where LRU is good, and holds what comes back where it
// is not.
//
// Uses that follow each other closely are one: a lookup, a load and a store of the same prompt of
// less than a 32nd of the pages here, and requests that come together.
//
// What left is remembered by the identity that announced() gave. A page that was not announced is
// held by its uses here alone, and is in no sample; where none is, as in the HBM tier, LRU leads.
//
// Beside the node of leaves.h 8 bytes a page, 12 to 24 of what left, and about 3 of the duel's.
// docs/policies.md has what it gains and loses. Not thread-safe.
#pragma once

#include <array>
#include <vector>

#include "eviction/duel.h"
#include "eviction/leaves.h"
#include "eviction/use_memory.h"

namespace kvw {

class AdaptivePolicy final : public LeavesFirst {
 public:
  static constexpr uint64_t kPageBytes =
      2 * (kNodeBytes + sizeof(uint64_t)) + 2 * 3 * UseMemory::kEntryBytes + 4;

  explicit AdaptivePolicy(size_t capacity);

  void announced(PageId page, uint64_t identity) override;

 private:
  static constexpr size_t kRemembered = 3;  // pages that left, for each that is here

  Kind used(PageId page, Kind kind, Use use) override;
  Kind bore(PageId page, Kind kind) override;
  void left(PageId page, Kind kind) override;

  // A hash of it, not 0; 0: it was not announced.
  uint64_t identity_of(PageId page) const {
    return page < identities_.size() ? identities_[page] : 0;
  }
  bool is_new(Use use) const;  // not one with the use before it
  void grow();
  void count_use();
  void follow(const HoldTimes& row);

  std::vector<uint64_t> identities_;
  UseMemory memory_;
  Duel duel_;
  size_t room_ = 0;  // pages
  uint64_t uses_ = 0, decides_at_ = 0;
  uint64_t decided_at_ = 0, uses_decided_ = 0;  // when, a tick, and after how many uses
  float ticks_per_use_ = 1;                     // above 1: other policies have the clock, too
  std::array<size_t, Duel::kClasses> pages_{};  // by class
};

}  // namespace kvw
