// What enters and leaves the tiers, told to those who watch: first all that is stored, then every
// change as it happens. Nobody watching costs the core one test of a pointer for each change.
//
// A feed goes by what it has told: one byte for each entry of the index. Invariants:
//  - What is said of one page is said in the order in which it happened.
//  - A page is told after its parent, so that who builds a tree never meets a child without one. A
//    page whose parent is not told waits for it; who is told anew tells its children anew.
//  - A page that left is told to have left exactly when it had been told to be there.
//
// Changes are told from inside the change. What was there before them, and what hangs below a page
// that was told late, is told by advance(), which the reader calls when it has taken what there
// was: so a snapshot goes at its reader's pace. A page that is on NVMe alone is told once its
// record's header was read, which has its tokens. Owned by the core thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "slots/slots.h"
#include "warehouse/catalog.h"
#include "warehouse/feed_queue.h"

namespace kvw::nvme {
struct RecordEnd;
}

namespace kvw {

class Feeds;
struct WarehouseState;

struct FeedRequest {
  int ordinal = -1;          // of a namespace; -1: of all
  bool tokens_only = false;  // pages that were stored by keys alone are left out
};

class Feed {
 public:
  Feed(WarehouseState& state, Feeds& feeds, uint64_t id, const FeedRequest& request,
       std::shared_ptr<FeedQueue> queue);

  void restart();
  void advance();
  void came(const EntryView& view);
  void left(const EntryView& view);

 private:
  bool follows(const EntryView& view) const {
    return (request_.ordinal < 0 || view.space == request_.ordinal) && !queue_->lost();
  }
  bool parent_told(PageId page) const;
  void visit(PageId page);
  void tell(const EntryView& view, uint8_t tiers);
  void say_stored(const EntryView& view, uint8_t tiers, const Key& parent, WitnessKind kind,
                  std::span<const std::byte> witness);
  void say_removed(const EntryView& view, uint8_t tiers);
  // The page and those linked behind it, one after the other, each when it was visited or leaves.
  void tell_with_siblings(PageId page);
  void go_on_behind(PageId page);
  bool scan_roots();
  bool read_next();
  void header_read(const Key& key, const nvme::Extent& extent, nvme::RecordEnd&& end);

  WarehouseState& state_;
  Feeds& feeds_;
  uint64_t id_;
  FeedRequest request_;
  std::shared_ptr<FeedQueue> queue_;
  std::vector<uint8_t> told_;  // tiers by page, kAgain and kSiblings
  std::vector<PageId> stack_;  // to be visited; what is not there any more is passed over
  std::deque<Key> unread_;     // on NVMe alone: their headers are to be read
  size_t reads_ = 0;
  uint64_t round_ = 0;  // rises with every restart: reads of an earlier one are not believed
  PageId cursor_ = 0;   // where the search for first pages of chains goes on
  uint64_t scan_left_ = 0;
  bool synced_ = false;

  friend class Feeds;
};

class Feeds final : public CatalogWatcher {
 public:
  static constexpr size_t kMaxFeeds = 16;
  static constexpr uint64_t kQueueBytes = 16ull << 20;

  explicit Feeds(WarehouseState& state) : state_(state) {}

  // Begins with `cleared` and all that is stored. Throws Error capacity "too_many_watchers".
  uint64_t open(const FeedRequest& request, std::shared_ptr<FeedQueue> queue);
  // Those whose reader has closed its queue. open() does it too; call it now and then.
  void drop_closed();
  // Says everything again from the beginning; what was not taken is dropped.
  void restart(uint64_t id);
  // A bounded stretch of what is still to be told; the queue says whether there is more.
  void advance(uint64_t id);
  size_t size() const { return feeds_.size(); }
  // Whether somebody reads one that is of this namespace alone.
  bool follow(uint32_t ordinal) const;

  void came(const EntryView& view) override;
  void left(const EntryView& view) override;

 private:
  friend class Feed;

  Feed* find(uint64_t id);

  WarehouseState& state_;
  std::unordered_map<uint64_t, std::unique_ptr<Feed>> feeds_;
  uint64_t next_id_ = 1;
};

}  // namespace kvw
