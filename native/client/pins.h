// Pages held in DRAM: a pin word for each in the session's file, one fence for many, and then the
// slots' words (docs/protocol.md).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "client/promotion_window.h"
#include "client/session.h"

namespace kvw {

// A page that is pinned, until its place is dropped.
struct PinnedPage {
  int place;
  EntryView entry;
};

// Pins that are stored one after the other and hold from one fence on. What was read before that
// fence out of a slot that is held was its page's, because the slot was never reused since. Those
// that are not taken are dropped in the end.
class PinBatch {
 public:
  // `bytes_each` of the session's share for each page, none where that is 0.
  PinBatch(const View& view, ClientSession& session, uint64_t bytes_each);
  ~PinBatch() { drop(0); }
  PinBatch(const PinBatch&) = delete;
  PinBatch& operator=(const PinBatch&) = delete;

  // False: beside all that is pinned there is no room for another.
  bool add(const EntryView& entry);
  // The fence. The first page that is not held, and what was added after it, are dropped. How many
  // are held.
  size_t hold();
  // Whoever takes them drops them.
  std::vector<PinnedPage> take() { return std::exchange(pages_, {}); }
  size_t size() const { return pages_.size(); }
  uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  void drop(size_t from);

  const View& view_;
  ClientSession& session_;
  const uint64_t bytes_each_, limit_bytes_;
  std::vector<PinnedPage> pages_;
};

// Pins pages from `page` to `end`, promoting them if it must; `bytes_each` of the session's share
// for each, none where that is 0. Fewer: the next one is not to be had, and `why` says so, or none,
// where its slot was reused meanwhile. Throws Error pin "pin_budget".
std::vector<PinnedPage> pin_pages(PromotionWindow& promotions, size_t page, size_t end,
                                  uint64_t bytes_each, Reason& why);

// Released on destruction; a forked child's copy holds nothing.
class Pins {
 public:
  explicit Pins(const ClientCall& call)
      : session_(call.daemon->session), bytes_each_(call.shape().slot_bytes()) {}
  ~Pins() { release(); }
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  // The stored pages from `first` on. Throws as pin_pages(). Once.
  void take(const ClientCall& call, size_t first);
  void release();
  size_t pages() const { return places_.size(); }

 private:
  std::shared_ptr<ClientSession> session_;
  std::vector<int> places_;
  uint64_t bytes_each_;
  uint64_t forks_ = fork_count();
};

}  // namespace kvw
