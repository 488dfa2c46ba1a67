#include "hbm/places.h"

#include <algorithm>
#include <bit>
#include <map>

namespace kvw {

namespace {

constexpr uint64_t kLeastSlabBytes = 2ull << 20;

}  // namespace

uint64_t HbmPlaces::slab_bytes_for(uint64_t pool_bytes, uint64_t largest_place_bytes) {
  const uint64_t part = std::bit_floor(std::max<uint64_t>(pool_bytes / 64, 1));
  return std::min(std::max(part, kLeastSlabBytes), largest_place_bytes);
}

HbmPlaces::HbmPlaces(uint64_t pool_bytes, uint64_t slab_bytes)
    : slab_bytes_(slab_bytes), slabs_(pool_bytes / slab_bytes) {}

void HbmPlaces::cut(uint32_t slab, uint64_t bytes) {
  Slab& own = slabs_[slab];
  own.place_bytes = bytes;
  own.free.clear();
  // From the back of the list, lower places first.
  for (uint64_t place = slab_bytes_ / bytes; place-- > 0;)
    own.free.push_back(slab * slab_bytes_ + place * bytes);
}

std::optional<uint64_t> HbmPlaces::take(uint64_t bytes) {
  if (bytes == 0 || bytes > slab_bytes_) return std::nullopt;
  std::optional<uint32_t> found, fresh;
  for (uint32_t slab = 0; slab < slabs_.size() && !found; ++slab) {
    const Slab& own = slabs_[slab];
    if (own.place_bytes == bytes && !own.closing && !own.free.empty()) found = slab;
    if (own.place_bytes == 0 && !fresh) fresh = slab;
  }
  if (!found && fresh) {
    cut(*fresh, bytes);
    found = fresh;
  }
  if (!found) return std::nullopt;
  Slab& own = slabs_[*found];
  const uint64_t offset = own.free.back();
  own.free.pop_back();
  ++own.taken;
  used_bytes_ += bytes;
  return offset;
}

void HbmPlaces::give_back(uint64_t offset) {
  Slab& own = slabs_[slab_of(offset)];
  own.free.push_back(offset);
  used_bytes_ -= own.place_bytes;
  if (--own.taken == 0) own = Slab{};
}

uint64_t HbmPlaces::slabs_of(uint64_t bytes) const {
  return static_cast<uint64_t>(std::ranges::count_if(
      slabs_, [bytes](const Slab& own) { return own.place_bytes == bytes && !own.closing; }));
}

std::optional<uint32_t> HbmPlaces::close_one() {
  std::map<uint64_t, uint64_t> slabs;  // by size
  for (const Slab& own : slabs_)
    if (own.place_bytes != 0 && !own.closing) ++slabs[own.place_bytes];
  const auto most =
      std::ranges::max_element(slabs, {}, [](const auto& each) { return each.second; });
  if (most == slabs.end() || most->second < 2) return std::nullopt;
  std::optional<uint32_t> emptiest;
  for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
    const Slab& own = slabs_[slab];
    if (own.place_bytes != most->first || own.closing) continue;
    if (!emptiest || own.taken <= slabs_[*emptiest].taken) emptiest = slab;
  }
  slabs_[*emptiest].closing = true;
  return emptiest;
}

}  // namespace kvw
