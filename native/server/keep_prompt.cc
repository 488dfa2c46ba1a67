#include "server/keep_prompt.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"

namespace kvw {

namespace {

constexpr size_t kPagesPerStep = 1024;
constexpr uint64_t kUnfinishedNs = 60 * kSecondNs;
constexpr size_t kMarks = 64;  // along a prompt
constexpr auto kPromotePause = std::chrono::milliseconds(5);

// Asks for the pages in turn, as the disk gives those before.
void promote(Server& server, std::vector<Key> keys, uint64_t for_ns, int timeout_ms) {
  const uint64_t until = system_clock().boot_ns() + for_ns;
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

// Of the first `pages` of a prompt.
std::vector<Key> marks_along(Prompt& prompt, size_t pages) {
  const size_t stride = std::max<size_t>(1, (pages + kMarks - 1) / kMarks);
  std::vector<Key> marks;
  for (size_t left = pages; left > 0; left -= std::min(left, stride))
    marks.push_back(prompt.key(left - 1));
  return marks;
}

void require_whole_prompts(const Prompt& prompt) {
  for (size_t page = 0; page < prompt.pages(); page = prompt.run_end(page))
    if (prompt.position(page) != 0)
      throw Error(ErrorKind::usage, "bad_run",
                  "a run begins at page " + std::to_string(prompt.position(page)) +
                      " of its prompt; what is kept begins with the first page");
}

KeepOutcome made(Server& server, const KeepRequest& request, Prompt& prompt, int timeout_ms) {
  const auto ask = [&](const auto& work) { return server.call(work, timeout_ms); };
  const auto refused = [&](KeepRefusal refusal) {
    ask([id = request.id](Warehouse& warehouse) { return warehouse.keeps().end(id); });
    return KeepOutcome{refusal, {}, {}};
  };
  const KeepRefusal begun = ask([id = request.id](Warehouse& warehouse) {
    return warehouse.keeps().begin(id, {system_clock().boot_ns() + kUnfinishedNs, 0});
  });
  if (begun != KeepRefusal::none) return {begun, {}, {}};
  bool is_broken = false;
  std::vector<Key> on_nvme;
  for (size_t page = 0; page < prompt.pages();) {
    std::vector<PageOfRun> pages;
    for (; page < prompt.pages() && pages.size() < kPagesPerStep; ++page)
      pages.push_back({prompt.key(page), prompt.run_begin(page) == page});
    const KeepStep step = ask([request, is_broken, pages = std::move(pages)](Warehouse& warehouse) {
      return warehouse.keep(request.id, request.namespace_id, pages, is_broken);
    });
    if (step.refusal != KeepRefusal::none) return refused(step.refusal);
    on_nvme.insert(on_nvme.end(), step.on_nvme.begin(), step.on_nvme.end());
    is_broken = step.is_broken;
    // Of a prompt that is one run nothing comes behind a gap.
    if (is_broken && page < prompt.pages() && prompt.run_end(page) == prompt.pages()) break;
  }
  promote(server, std::move(on_nvme), request.promote_ns, timeout_ms);
  KeepOutcome outcome;
  std::tie(outcome.report, outcome.marks) = ask([request](Warehouse& warehouse) {
    const uint64_t now = system_clock().boot_ns();
    const uint64_t until = now + std::min(request.ttl_ns, UINT64_MAX - now);
    Keeps& keeps = warehouse.keeps();
    keeps.set_time(request.id, {until, request.is_renewed ? request.ttl_ns : 0});
    return std::pair(keeps.report(request.id).value_or(KeepReport{}), keeps.ends(request.id));
  });
  if (outcome.report.pages == 0) return refused(KeepRefusal::none);
  const bool is_chain = prompt.run_end(0) == prompt.pages();
  const size_t kept = std::min<size_t>(outcome.report.pages, prompt.pages());
  if (is_chain) outcome.marks = marks_along(prompt, kept);
  return outcome;
}

}  // namespace

KeepOutcome keep_prompt(Server& server, const KeepRequest& request, Prompt& prompt,
                        int timeout_ms) {
  require_whole_prompts(prompt);
  try {
    return made(server, request, prompt, timeout_ms);
  } catch (...) {
    // What nobody waits for any more may still be done: this comes behind it, and nobody waits.
    const std::exception_ptr failed = std::current_exception();
    try {
      server.call([id = request.id](Warehouse& warehouse) { return warehouse.keeps().end(id); }, 0);
    } catch (const Error&) {
      std::rethrow_exception(failed);
    }
    throw;
  }
}

}  // namespace kvw
