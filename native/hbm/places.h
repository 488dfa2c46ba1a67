// Places in the pool of the HBM tier: slabs, each cut into places of one size. A slab of which no
// place is taken is nobody's, so that memory goes to the sizes that are wanted. Plain bookkeeping,
// without a device. Owned by the core thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace kvw {

class HbmPlaces {
 public:
  // The largest slab is the largest place. A 64th of the pool, so that several sizes have several.
  static uint64_t slab_bytes_for(uint64_t pool_bytes, uint64_t largest_place_bytes);

  HbmPlaces(uint64_t pool_bytes, uint64_t slab_bytes);

  uint64_t slab_bytes() const { return slab_bytes_; }
  // A place of so many bytes, which are whole blocks: its offset in the pool.
  std::optional<uint64_t> take(uint64_t bytes);
  void give_back(uint64_t offset);
  uint64_t used_bytes() const { return used_bytes_; }
  // Slabs that are cut into places of this size.
  uint64_t slabs_of(uint64_t bytes) const;
  // For a size that has no slab: from the size that has the most, at least two, the slab with the
  // fewest places taken, of those that of the highest places: pages that came late. Of it nothing
  // is given out until it is nobody's. Nothing: no size has two.
  std::optional<uint32_t> close_one();
  bool closing(uint64_t offset) const { return slabs_[slab_of(offset)].closing; }
  uint32_t slab_of(uint64_t offset) const { return static_cast<uint32_t>(offset / slab_bytes_); }

 private:
  struct Slab {
    uint64_t place_bytes = 0;  // 0: nobody's
    std::vector<uint64_t> free;
    uint64_t taken = 0;
    bool closing = false;
  };
  void cut(uint32_t slab, uint64_t bytes);

  uint64_t slab_bytes_;
  uint64_t used_bytes_ = 0;
  std::vector<Slab> slabs_;
};

}  // namespace kvw
