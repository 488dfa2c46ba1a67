// Keeps the pages of a prompt, in a core that serves others meanwhile.
#pragma once

#include <vector>

#include "client/prompt.h"
#include "server/server.h"
#include "warehouse/keeps.h"

namespace kvw {

struct KeepRequest {
  KeepId id = 0;
  Key namespace_id;
  uint64_t ttl_ns = 0;      // from the answer on
  bool is_renewed = false;  // by each use
  uint64_t promote_ns = 0;  // for what is on NVMe alone
};

struct KeepOutcome {
  KeepRefusal refusal = KeepRefusal::none;  // else nothing is kept
  KeepReport report;
  // Pages to make the keep from again: some along the prompt, the last one first; of pages that
  // stand alone all.
  std::vector<Key> marks;
};

// Keeps of each run of the prompt what is stored of it, up to its first page that is not, and has
// what is on NVMe alone read into DRAM, as far as that goes in the time. Blocks; any thread but the
// core's. The prompt is bound to the namespace, and its runs begin at their roots. Each step waits
// `timeout_ms` at most; what throws leaves none. Throws as Server::call() does, and usage
// "namespace_unknown", "bad_run".
KeepOutcome keep_prompt(Server& server, const KeepRequest& request, Prompt& prompt, int timeout_ms);

}  // namespace kvw
