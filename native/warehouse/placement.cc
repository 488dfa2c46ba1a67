#include "warehouse/placement.h"

#include <algorithm>
#include <cassert>
#include <tuple>

#include "index/index.h"

namespace kvw {
namespace {

struct Claim {
  PageId home;
  uint32_t which;  // of the keys
};

static_assert(sizeof(Claim) + sizeof(PageId) == kPlaceBytes);

class Claims {
 public:
  Claims(std::span<const Key> keys, uint64_t positions) : keys_(keys), mask_(positions - 1) {
    claims_.reserve(keys.size());
    for (size_t i = 0; i < keys.size(); ++i)
      claims_.push_back({static_cast<PageId>(keys[i].lo & mask_), static_cast<uint32_t>(i)});
    sort();
  }

  // Equal keys are neighbours, the first of them in front.
  void keep_distinct(uint64_t most) {
    const auto equal = [this](const Claim& a, const Claim& b) {
      return keys_[a.which] == keys_[b.which];
    };
    claims_.erase(std::unique(claims_.begin(), claims_.end(), equal), claims_.end());
    if (claims_.size() <= most) return;
    const auto end = claims_.begin() + static_cast<ptrdiff_t>(most);
    const auto sooner = [](const Claim& a, const Claim& b) { return a.which < b.which; };
    std::nth_element(claims_.begin(), end, claims_.end(), sooner);
    claims_.erase(end, claims_.end());
    sort();
  }

  // A window is a time to come and a deadline that is the same for all after it: who came first is
  // served first, which meets all deadlines if they can be met.
  void settle(std::vector<PageId>& places) const {
    const size_t first = behind_a_gap();
    uint64_t next = 0;  // positions are counted from the first one's home
    for (size_t i = 0; i < claims_.size(); ++i) {
      const Claim& claim = claims_[(first + i) % claims_.size()];
      const uint64_t home = (claim.home - claims_[first].home) & mask_;
      const uint64_t at = std::max(next, home);
      if (at - home >= kIndexWindow) continue;
      next = at + 1;
      places[claim.which] = static_cast<PageId>((at + claims_[first].home) & mask_);
    }
  }

 private:
  void sort() {
    std::sort(claims_.begin(), claims_.end(), [this](const Claim& a, const Claim& b) {
      if (a.home != b.home) return a.home < b.home;
      const Key &left = keys_[a.which], &right = keys_[b.which];
      return std::tie(left.lo, left.hi, a.which) < std::tie(right.lo, right.hi, b.which);
    });
  }

  // The table is a ring: whom to begin with, so that nobody from before needs a place behind.
  size_t behind_a_gap() const {
    uint64_t next = 0;
    for (const Claim& claim : claims_) next = std::max<uint64_t>(next, claim.home) + 1;
    if (next <= mask_ + 1) return 0;
    next -= mask_ + 1;  // so many of the end go on at the beginning
    for (size_t i = 0; i < claims_.size(); ++i, ++next)
      if (claims_[i].home > next) return i;
    return 0;
  }

  std::span<const Key> keys_;
  uint64_t mask_;
  std::vector<Claim> claims_;
};

}  // namespace

std::vector<PageId> place(std::span<const Key> keys, uint64_t positions, uint64_t capacity) {
  assert(capacity <= positions / 2);
  std::vector<PageId> places(keys.size(), kNoPage);
  Claims claims(keys, positions);
  claims.keep_distinct(capacity);
  claims.settle(places);
  return places;
}

}  // namespace kvw
