// Pages held in DRAM: a pin word for each in the session's file, one fence for many, and then the
// slots' words (docs/protocol.md).
#pragma once

#include <cstdint>
#include <memory>
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
