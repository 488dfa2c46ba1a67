// What tests of eviction policies share.
#pragma once

#include <set>
#include <vector>

#include "eviction/policy.h"

namespace kvw {

using Pages = std::vector<PageId>;

class ExemptSet final : public Exempt {
 public:
  std::set<PageId> pages;
  mutable uint64_t asked = 0;

  bool operator()(PageId page) const override {
    ++asked;
    return pages.contains(page);
  }
};

// The next victims, which stay.
inline Pages take(EvictionPolicy& policy, size_t count, const Exempt& exempt = ExemptNone()) {
  Pages out(count);
  out.resize(policy.victims(out, exempt));
  return out;
}

inline void evict(EvictionPolicy& policy, size_t count) {
  for (const PageId page : take(policy, count)) policy.removed(page);
}

}  // namespace kvw
