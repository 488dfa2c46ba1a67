// Finding the pages of one load or pin in DRAM: those that are only on NVMe are asked for, window
// by window, so that the first are usable while the rest are read; those that no tier here has may
// come from the remote store (fetch_window.h). Belongs to one call.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "client/call.h"
#include "client/fetch_window.h"

namespace kvw {

// How often a load looks a page up again that was reused, or damaged, while it was being read.
inline constexpr int kStaleTries = 4;

class PromotionWindow {
 public:
  explicit PromotionWindow(const ClientCall& call);

  const ClientCall& call() const { return call_; }
  // The entry of a page that is in DRAM now, promoting or fetching it if it must. Nothing: `why`
  // says.
  std::optional<EntryView> in_dram(size_t page, size_t end, Reason& why);
  // Of a page that was reported: waits for the daemon to take it out of DRAM, where another copy is
  // on NVMe.
  bool has_other_copy(const EntryView& damaged);
  // How many of these pages were fetched for this call.
  uint64_t fetched(size_t begin, size_t end) const { return fetches_.fetched(begin, end); }

 private:
  bool ask_ahead(size_t page, size_t end, Reason& why);
  Reason promote(std::span<const Key> keys, std::vector<PromoteAnswer>& answers);
  void wait(uint64_t tick);

  const ClientCall& call_;
  FetchWindow fetches_;
  uint64_t window_;
  size_t asked_until_ = 0;  // pages before it are in DRAM or on their way, as far as we were told
  size_t low_water_ = 0;    // so many of them left: ask for more
  bool ask_again_ = false;  // nothing has arrived for a while: what was asked for may be lost
};

}  // namespace kvw
