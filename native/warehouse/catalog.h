// The pages of the warehouse, whatever tier they are in: the index's writer, and the private links
// between parents and children that the shared table does not need. Owned by the core thread.
//
// The shared table is for readers: what the daemon itself goes by is a copy of its own, so that a
// table that was damaged costs readers a miss and the daemon nothing.
//
// Invariants:
//  - A page has an entry exactly while it is in some tier.
//  - Every page above position 0 is linked to its parent's entry, or it is an orphan: listed under
//    its parent's key until the parent appears or a sweep drops it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/types.h"
#include "index/index.h"

namespace kvw {

struct PageNode {
  PageId parent = kNoPage;
  PageId first_child = kNoPage;
  PageId next = kNoPage;  // sibling
  PageId previous = kNoPage;
  uint32_t position = 0;
  bool used = false;     // loaded since it was written to NVMe: reclaim relocates it
  bool orphan = false;   // its parent is in no tier
  uint16_t used_at = 0;  // when it was used last, in half seconds; 0: not since it came
};

struct SpaceCounts {
  uint64_t pages = 0, dram = 0, nvme = 0;
};

// Hears of every change of a page's tiers, on the core thread.
class CatalogWatcher {
 public:
  virtual ~CatalogWatcher() = default;
  virtual void came(const EntryView& view) = 0;  // inserted or rewritten: as it is now
  virtual void left(const EntryView& view) = 0;  // of its last tier; it is still in the catalog
};

class Catalog {
 public:
  // `capacity` pages at most: half the table, so that windows stay short.
  explicit Catalog(Index& index);

  std::optional<EntryView> find(const Key& key) const;
  std::optional<EntryView> at(PageId page) const {
    if (page >= index_.entries() || (entries_[page].flags & kEntryUsed) == 0) return std::nullopt;
    return entries_[page];
  }
  PageNode& node(PageId page) { return nodes_[page]; }
  const PageNode& node(PageId page) const { return nodes_[page]; }
  const Index& index() const { return index_; }
  // From now on; null: nobody. Not owned.
  void watch(CatalogWatcher* watcher) { watcher_ = watcher; }

  bool full() const { return pages_ >= capacity_; }
  // Could this key be inserted now? Window and capacity.
  bool has_room(const Key& key) const;
  // Adds a page. view.page is chosen here. Precondition: has_room(key), and the key is absent.
  // Links it to its parent and adopts the orphans that waited for it; their ids go to `adopted`.
  PageId insert(EntryView view, const Key& parent, uint32_t position, std::vector<PageId>& adopted);
  // Rewrites an entry (tiers, slot, extent). Precondition: same page and key; some tier remains.
  void update(const EntryView& view);
  // The page left its last tier. Its children become orphans.
  void remove(const EntryView& view);

  uint64_t pages() const { return pages_; }
  uint64_t capacity() const { return capacity_; }
  uint64_t dram_pages() const { return dram_; }
  uint64_t nvme_pages() const { return nvme_; }
  uint64_t orphans() const { return orphans_.size(); }
  const SpaceCounts& counts(uint16_t space) const { return spaces_[space]; }
  // Up to `limit` orphans whose parent key `awaited` does not claim.
  std::vector<PageId> orphans_to_drop(size_t limit,
                                      const std::function<bool(const Key&)>& awaited) const;

 private:
  struct Free {
    void operator()(EntryView* entries) const { std::free(entries); }
  };

  PageId empty_in_window(const Key& key) const;
  void write(const EntryView& view) {
    entries_[view.page] = view;
    index_.write(view);
  }
  void count(const EntryView& view, int sign);
  void link(PageId page, PageId parent);
  void unlink(PageId page);
  void make_orphan(PageId page, const Key& parent);

  Index& index_;
  uint64_t capacity_;
  // Zeros from the system, so that what is never used takes no memory. No flag: empty.
  std::unique_ptr<EntryView[], Free> entries_;
  std::vector<PageNode> nodes_;
  std::vector<SpaceCounts> spaces_;
  std::unordered_multimap<Key, PageId, KeyHash> orphans_;  // by the parent's key
  std::unordered_map<PageId, Key> orphan_parents_;
  uint64_t pages_ = 0, dram_ = 0, nvme_ = 0;
  CatalogWatcher* watcher_ = nullptr;
};

}  // namespace kvw
