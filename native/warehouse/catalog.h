// The pages of the warehouse, whatever tier they are in: the index's writer, and the private links
// between parents and children that the shared table does not need. Owned by the core thread.
//
// The shared table is for readers: what the daemon itself goes by is a copy of its own, so that a
// table that was damaged costs readers a miss and the daemon nothing.
//
// Invariants:
//  - A page has an entry exactly while it is in some tier.
//  - Every page above position 0 is linked to its parent, by number. While that is in no tier the
//    page is an orphan, until the parent appears or a sweep drops the page. So a page comes and
//    goes without a look at its children or siblings, however many there are.
//  - A parent's position is one less than its children's: a page at another position is not the
//    parent that they wait for. So links are no ring, whatever clients say of parents.
//  - Parents that are in no tier stand in one ring, through the links that siblings have.
//  - The shared entry's digest stays as long as the page does; the copy has none.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/sharded_map.h"
#include "base/types.h"
#include "index/index.h"
#include "warehouse/page_table.h"

namespace kvw {

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

  std::optional<EntryView> find(const Key& key) const { return at(table_.find(key)); }
  PageId page_of(const Key& key) const { return table_.find(key); }
  bool has(PageId page) const { return table_.has(page); }
  bool contains(const Key& key) const { return page_of(key) != kNoPage; }
  std::optional<EntryView> at(PageId page) const {
    if (!table_.has(page)) return std::nullopt;
    return table_.view(page);
  }
  // For a find() that follows a little later, or an insert().
  void prefetch(const Key& key) const { table_.prefetch(key); }
  void prefetch_write(const Key& key) const {
    table_.prefetch(key);
    index_.prefetch_write(index_.home(key));
  }
  // For an update() or remove() of a page that is there, one step after the other.
  void prefetch_write(PageId page) const {
    index_.prefetch_write(page);
    table_.prefetch_place(page);
  }
  void prefetch_page(PageId page) const { table_.prefetch_page(page); }
  // Of a page that is there.
  const Key& key(PageId page) const { return table_.key(table_.number_at(page)); }
  // Of a page that is there.
  PageNode& node(PageId page) { return table_.node(page); }
  const PageNode& node(PageId page) const { return table_.node(page); }
  const Index& index() const { return index_; }
  // From now on; null: nobody. Not owned.
  void watch(CatalogWatcher* watcher) { watcher_ = watcher; }

  // A position for a page that an insert() is to come with: nobody else gets it until then, or
  // until unclaim(). kNoPage: its places are taken, or the catalog is full.
  PageId claim(const Key& key);
  void unclaim(PageId page);
  // Adds a page at view.page, one of its places that is empty or was claimed for it; at the
  // first one if that is kNoPage. Precondition: there is one, and the key is absent. Orphans that
  // waited for it are its children from now on.
  PageId insert(EntryView view, const Key& parent, uint32_t position);
  // Rewrites an entry (tiers, slot, extent). Precondition: same page and key; some
  // tier remains.
  void update(const EntryView& view);
  // The page left its last tier. Its children become orphans.
  void remove(const EntryView& view);

  // Of pages that are there. kNoPage: there is none, or the parent is in no tier.
  PageId parent(PageId page) const { return page_at(node(page).parent); }
  PageId first_child(PageId page) const { return page_at(node(page).first_child); }
  PageId next_sibling(PageId page) const { return page_at(node(page).next); }
  bool has_children(PageId page) const { return node(page).first_child != kNoNumber; }
  // Its parent is in no tier.
  bool is_orphan(PageId page) const {
    const PageNumber parent = node(page).parent;
    return parent != kNoNumber && table_.has_left(parent);
  }
  // How many of its children `meant` is true for, up to `most`. O(children), but neighbours in
  // memory where they were stored one after the other.
  template <class Meant>
  uint32_t count_children(PageId page, const Meant& meant, uint32_t most = UINT32_MAX) const {
    uint32_t count = 0;
    for (PageNumber child = node(page).first_child; child != kNoNumber && count < most;
         child = table_.numbered(child).next)
      count += meant(table_.numbered(child)) ? 1 : 0;
    return count;
  }

  // Takes `page` and those above it out of `others`, which are in the order of their positions, the
  // largest first, from the `first`-th on. O(position of `page`), but neighbours in memory where
  // they were stored one after the other.
  void remove_those_above(PageId page, std::vector<PageId>& others, size_t first = 0) const;

  uint64_t pages() const { return pages_; }
  uint64_t claimed() const { return claimed_; }
  uint64_t capacity() const { return table_.capacity(); }
  uint64_t dram_pages() const { return dram_; }
  uint64_t nvme_pages() const { return nvme_; }
  uint64_t orphans() const { return orphans_; }
  const SpaceCounts& counts(uint16_t space) const { return spaces_[space]; }
  // Of the next `limit` orphans those whose parent key `awaited` does not claim. Each call goes on
  // where the last one ended, so that what cannot be dropped now keeps nobody else from its turn.
  std::vector<PageId> orphans_to_drop(size_t limit, const std::function<bool(const Key&)>& awaited);

 private:
  void count(const EntryView& view, int sign);
  // The copy, and the counts that go with it.
  void change(const EntryView& view);
  PageId page_at(PageNumber number) const {
    return number == kNoNumber || table_.has_left(number) ? kNoPage
                                                          : table_.find(table_.key(number));
  }
  PageNumber number_of(const Key& key, uint32_t position);
  // kNoNumber: no page waits for one of this key at this position.
  PageNumber lost_at(const Key& key, uint32_t position) const;
  uint64_t children_of(PageNumber parent) const;
  void link(PageNumber page, PageNumber parent);
  void unlink(PageNumber page);
  // Of a parent that is in no tier.
  void lose(PageNumber parent);
  void find_again(PageNumber parent);

  Index& index_;
  PageTable table_;
  std::vector<SpaceCounts> spaces_;
  ShardedMap<Key, PageNumber, KeyHash> lost_;             // parents in no tier, the last of a key
  ShardedMap<PageNumber, uint32_t> many_;                 // children, of those who have several
  PageNumber turn_ = kNoNumber, turn_child_ = kNoNumber;  // in the ring; none: the next one's first
  uint64_t orphans_ = 0;
  uint64_t pages_ = 0, claimed_ = 0, dram_ = 0, nvme_ = 0;
  CatalogWatcher* watcher_ = nullptr;
};

}  // namespace kvw
