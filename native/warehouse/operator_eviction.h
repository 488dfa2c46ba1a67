// An operator's evict: the coldest pages of a namespace or of all, in steps of a bounded length, so
// that clients are served between them. First a look at the whole index, for as many of the coldest
// leaves as pages are asked for; then they leave, coldest first, and a page's turn comes when its
// children had theirs. It stays where one of them does, which may be pinned, so that no prefix gets
// a gap. Owned by the core thread.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "index/index.h"
#include "warehouse/quarantine.h"
#include "warehouse/removal.h"

namespace kvw {

struct PageNode;

class OperatorEviction {
 public:
  // `ordinal` -1: of all namespaces. Tiers "hbm", "dram", "nvme" or "all". Throws Error usage
  // "bad_tiers".
  OperatorEviction(WarehouseState& state, Removal& removal, Quarantine& quarantine, int ordinal,
                   uint64_t pages, std::string_view tiers);
  // False: that was all.
  bool step();

  uint64_t left() const { return left_; }  // pages so far
  // Key and log position of what left since the last call, and may be on NVMe, for tombstones.
  std::vector<Tombstone> take_tombstones() { return std::exchange(tombstones_, {}); }

 private:
  using Candidate = std::pair<uint64_t, PageId>;  // heat, page

  bool meant(PageId page) const;
  bool meant(const PageNode& node) const;
  // How many of its children it cannot leave before, up to `most`: of its last tier none at all.
  uint32_t holders(PageId page, uint32_t most) const;
  bool is_held(const EntryView& view) const;
  void look();
  void consider(const EntryView& view);
  void leave();
  void leave(const std::vector<EntryView>& views);

  WarehouseState& state_;
  Removal& removal_;
  Quarantine& quarantine_;
  int ordinal_;
  uint64_t pages_, left_ = 0;
  bool dram_ = false, nvme_ = false;
  PageId cursor_ = 0;
  std::vector<Candidate> leaves_;  // a heap: of the hottest while looking, then of the coldest
  std::vector<Tombstone> tombstones_;
};

}  // namespace kvw
