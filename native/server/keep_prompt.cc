#include "server/keep_prompt.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace kvw {

namespace {

constexpr size_t kPagesPerStep = 1024;
constexpr uint64_t kUnfinishedNs = 60 * kSecondNs;
constexpr uint64_t kPromoteNs = 2 * kSecondNs;
constexpr auto kPromotePause = std::chrono::milliseconds(5);

// Asks for the pages in turn, as the disk gives those before.
void promote(Server& server, std::vector<Key> keys, int timeout_ms) {
  const uint64_t until = system_clock().boot_ns() + kPromoteNs;
  while (!keys.empty() && system_clock().boot_ns() < until) {
    const std::vector<Key> some(
        keys.begin(),
        keys.begin() + static_cast<ptrdiff_t>(std::min<size_t>(keys.size(), kPromotePages)));
    const auto answers = server.call(
        [some](Warehouse& warehouse) {
          std::vector<PromoteAnswer> made;
          warehouse.promote(some, made);
          return made;
        },
        timeout_ms);
    std::vector<Key> later;
    for (size_t at = 0; at < some.size(); ++at)
      if (answers[at] == PromoteAnswer::later) later.push_back(some[at]);
    if (!later.empty()) std::this_thread::sleep_for(kPromotePause);
    later.insert(later.end(), keys.begin() + static_cast<ptrdiff_t>(some.size()), keys.end());
    keys = std::move(later);
  }
}

}  // namespace

KeepOutcome keep_prompt(Server& server, const KeepRequest& request, Prompt& prompt,
                        int timeout_ms) {
  for (size_t page = 0; page < prompt.pages(); page = prompt.run_end(page))
    if (prompt.position(page) != 0)
      throw Error(ErrorKind::usage, "bad_run",
                  "a run begins at page " + std::to_string(prompt.position(page)) +
                      " of its prompt; what is kept begins with the first page");
  const auto end = [&] {
    server.call([id = request.id](Warehouse& warehouse) { return warehouse.keeps().end(id); },
                timeout_ms);
    return KeepOutcome{false, {}};
  };
  const bool begun = server.call(
      [id = request.id](Warehouse& warehouse) {
        return warehouse.keeps().begin(id, {system_clock().boot_ns() + kUnfinishedNs, 0});
      },
      timeout_ms);
  if (!begun) return {false, {}};
  KeptRun kept;
  std::vector<Key> to_promote;
  for (size_t page = 0; page < prompt.pages();) {
    std::vector<PageOfRun> pages;
    for (; page < prompt.pages() && pages.size() < kPagesPerStep; ++page)
      pages.push_back({prompt.key(page), prompt.run_begin(page) == page});
    kept = server.call(
        [request, kept, pages = std::move(pages)](Warehouse& warehouse) {
          return warehouse.keep(request.id, request.namespace_id, pages, kept);
        },
        timeout_ms);
    if (!kept.has_room) return end();
    to_promote.insert(to_promote.end(), kept.on_nvme.begin(), kept.on_nvme.end());
    // Of a prompt that is one run nothing comes behind a gap.
    if (kept.is_broken && page < prompt.pages() && prompt.run_end(page) == prompt.pages()) break;
  }
  promote(server, std::move(to_promote), timeout_ms);
  const auto report = server.call(
      [request](Warehouse& warehouse) {
        const uint64_t now = system_clock().boot_ns();
        const uint64_t until = now + std::min(request.ttl_ns, UINT64_MAX - now);
        warehouse.keeps().set_time(request.id, {until, request.is_renewed ? request.ttl_ns : 0});
        return warehouse.keeps().report(request.id);
      },
      timeout_ms);
  if (report && report->pages != 0) return {true, *report};
  end();
  return {true, {request.id, {}, 0, 0, {}}};
}

}  // namespace kvw
