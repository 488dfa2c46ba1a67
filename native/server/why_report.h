// Why a prompt's pages are found or not, asked of a core that serves others meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/prompt.h"
#include "server/server.h"
#include "warehouse/why.h"

namespace kvw {

// Consecutive pages of which the same is to be said.
struct WhyRun {
  size_t first, pages;
  PageWhy why;                          // of the first; the latest remembered_s of all
  uint32_t earliest_at_s, latest_at_s;  // of their absences; 0: none
};

struct WhyReport {
  std::vector<WhyRun> runs;           // in the prompt's order; all of its pages
  size_t found = 0;                   // pages of the longest stored prefix
  Branches branches;                  // at the first page that is not there
  uint64_t boot_ns = 0, wall_ns = 0;  // one moment, for the absences' times
};

struct WhyQuestion {
  Key namespace_id;
  uint64_t as_of_ns = 0;  // see Warehouse::why()
  bool searches = false;  // of a prompt without its first page: those of others, for a second
};

// Blocks; any thread but the core's. The prompt is bound to the namespace. Each step waits
// `timeout_ms` at most. Throws as Server::call() and Warehouse::why() do.
WhyReport why(Server& server, const WhyQuestion& question, Prompt& prompt, int timeout_ms);

}  // namespace kvw
