#include "warehouse/placement.h"

#include <cassert>
#include <unordered_set>

#include "index/index.h"

namespace kvw {
namespace {

constexpr uint32_t kNobody = UINT32_MAX;
constexpr size_t kNoStep = SIZE_MAX;
constexpr size_t kLooks = 4096;  // at keys that could go on, for one that has no place

class Placement {
 public:
  Placement(std::span<const Key> keys, uint64_t positions)
      : keys_(keys), mask_(positions - 1), owners_(positions, kNobody) {}

  // False: there is an equal key already, or no place.
  bool add(uint32_t which) {
    for (uint32_t place = 0; place < kIndexPlaces; ++place) {
      uint32_t& owner = owners_[index_place(keys_[which], place, mask_)];
      if (owner == kNobody) {  // nobody ever stands behind an empty place of its own
        owner = which;
        return true;
      }
      if (keys_[owner] == keys_[which]) return false;
    }
    return make_room(which);
  }

  void tell(std::vector<PageId>& places) const {
    for (uint64_t at = 0; at <= mask_; ++at)
      if (owners_[at] != kNobody) places[owners_[at]] = static_cast<PageId>(at);
  }

 private:
  struct Step {
    PageId page;
    size_t from;  // whose owner would go to this one; kNoStep: the new key
  };

  // The shortest way to an empty place: that of one who stands in a place of the new key, or of one
  // who stands in a place of that one's, and so on.
  bool make_room(uint32_t which) {
    std::vector<Step> steps;
    std::unordered_set<PageId> met;
    const auto finds_empty = [&](uint32_t key, size_t from) {
      for (uint32_t place = 0; place < kIndexPlaces; ++place) {
        const PageId page = index_place(keys_[key], place, mask_);
        if (!met.insert(page).second) continue;
        steps.push_back({page, from});
        if (owners_[page] == kNobody) return true;
      }
      return false;
    };
    bool found = finds_empty(which, kNoStep);
    for (size_t at = 0; !found && at < steps.size() && at < kLooks; ++at)
      found = finds_empty(owners_[steps[at].page], at);
    if (!found) return false;
    size_t at = steps.size() - 1;  // the empty one
    for (; steps[at].from != kNoStep; at = steps[at].from)
      owners_[steps[at].page] = owners_[steps[steps[at].from].page];
    owners_[steps[at].page] = which;
    return true;
  }

  std::span<const Key> keys_;
  uint64_t mask_;
  std::vector<uint32_t> owners_;  // of positions
};

}  // namespace

std::vector<PageId> place(std::span<const Key> keys, uint64_t positions, uint64_t capacity) {
  assert(capacity <= positions / 2);
  if (keys.empty()) return {};  // without a look at all positions
  Placement placement(keys, positions);
  uint64_t added = 0;
  for (uint32_t which = 0; which < keys.size() && added < capacity; ++which)
    added += placement.add(which) ? 1 : 0;
  std::vector<PageId> places(keys.size(), kNoPage);
  placement.tell(places);
  return places;
}

}  // namespace kvw
