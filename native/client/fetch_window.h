// Bringing the pages of one load or pin that no tier here has from the remote store: runs ahead are
// asked for together, in one message a window, and come into DRAM in any order. Belongs to one
// call.
//
// The daemon is asked again when half of a window is used up, and to hear what became of the run
// that is waited for: after something has ended, ever more seldom, or where nothing did for a
// while.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "client/remote_pages.h"

namespace kvw {

class FetchWindow {
 public:
  explicit FetchWindow(const ClientCall& call);

  // For a page that was not found since `tick` (promoted.h): has it fetched, and waits a while at
  // most. True: look again. False: it will not come, and `why` says so. `end`: of the pages that
  // are wanted.
  bool bring(size_t page, size_t end, uint64_t tick, Reason& why);
  // The page is in DRAM: asks ahead where half of what is on its way is used up.
  void reached(size_t page, size_t end);
  // How many of these pages were fetched.
  uint64_t fetched(size_t begin, size_t end) const;

 private:
  struct Asked {
    std::vector<FetchRun> runs;
    std::vector<size_t> begins;  // the page that each is wanted from
  };

  size_t first_missing(size_t page) const;
  uint64_t due_ns() const;
  Reason ask_ahead(size_t page, size_t at, size_t end);
  Asked choose(size_t page, size_t at, size_t end);
  Reason ask(std::span<const FetchRun> runs, std::vector<FetchAnswer>& answers) const;
  void note(size_t begin, size_t end);

  const ClientCall& call_;
  RemotePages remote_;
  size_t window_;           // pages
  size_t asked_until_ = 0;  // pages before it are here or on their way, as far as we were told
  size_t low_water_ = 0;    // so many of them left: ask for more
  size_t awaited_end_ = 0;  // of the run that the wait is for
  uint64_t waits_since_ns_ = 0;
  uint64_t asked_ns_ = 0, asked_tick_ = 0;          // when, and what `promoted` was before
  std::vector<std::pair<size_t, size_t>> fetched_;  // pages, ascending
};

}  // namespace kvw
