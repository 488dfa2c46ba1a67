// How much a tier may write, so that a drive lasts: so much a day. What is not written is carried
// over, a day's worth at most; so in any n days no more than n + 1 of them are written.
//
// The choice of what is worth it needs no forecast: while more than half of a day's worth is left
// anything is, below it what was asked for again alone. So where the budget is enough for all, all
// is written; where it is enough for what is used again, that is, with the rest for some of what is
// new; and where it is not even that, the balance stays near nothing, and what is used again is
// written as it comes in. Core thread only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace kvw::nvme {

class WriteBudget {
 public:
  static constexpr uint64_t kDayNs = 86'400 * kSecondNs;

  // Of `per_day`, in whatever unit; 0: no bound. `left`: of a day's worth, at the start; less than
  // nothing where more was written than there was.
  WriteBudget(uint64_t per_day, double left)
      : per_day_(static_cast<double>(per_day)), left_(std::min(left, per_day_)) {}

  bool bounded() const { return per_day_ != 0; }
  double per_day() const { return per_day_; }
  double left() const { return left_; }

  // What has come in since the last call. Time may stand still; it does not go back.
  void earn(uint64_t now_ns) {
    if (earned_ns_ != kNever)
      left_ = std::min(per_day_, left_ + per_day_ * static_cast<double>(now_ns - earned_ns_) /
                                             static_cast<double>(kDayNs));
    earned_ns_ = now_ns;
  }
  void spend(uint64_t written) { left_ -= static_cast<double>(written); }

  // Whether one more is worth writing, behind `queued` that are not spent yet.
  bool allows(bool reused, uint64_t queued) const {
    return !bounded() || left_ - static_cast<double>(queued) > (reused ? 0 : per_day_ / 2);
  }

 private:
  static constexpr uint64_t kNever = UINT64_MAX;

  double per_day_, left_;
  uint64_t earned_ns_ = kNever;
};

}  // namespace kvw::nvme
