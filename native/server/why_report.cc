#include "server/why_report.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvw {

namespace {

constexpr size_t kPagesPerStep = 4096;
constexpr uint64_t kSearchNs = kSecondNs;

bool is_there(const PageWhy& page) {
  using State = PageWhy::State;
  return page.state == State::hbm || page.state == State::dram || page.state == State::nvme;
}

bool alike(const PageWhy& one, const PageWhy& other) {
  return one.state == other.state && one.absence.refused == other.absence.refused &&
         one.absence.why == other.absence.why;
}

void add(std::vector<WhyRun>& runs, size_t at, const PageWhy& page) {
  const uint32_t at_s = page.absence.at_s;
  if (runs.empty() || !alike(runs.back().why, page)) {
    runs.push_back({at, 1, page, at_s, at_s});
    return;
  }
  WhyRun& run = runs.back();
  ++run.pages;
  run.earliest_at_s = std::min(run.earliest_at_s, at_s);
  run.latest_at_s = std::max(run.latest_at_s, at_s);
  run.why.remembered_s = std::max(run.why.remembered_s, page.remembered_s);
}

std::vector<uint32_t> tokens_of(const Prompt& prompt, size_t page) {
  if (prompt.witness_kind() != WitnessKind::tokens) return {};
  const std::span<const std::byte> witness = prompt.witness(page);
  std::vector<uint32_t> tokens(witness.size() / sizeof(uint32_t));
  std::memcpy(tokens.data(), witness.data(), witness.size());
  return tokens;
}

Branches branches_at(Server& server, const WhyQuestion& question, Prompt& prompt, size_t page,
                     int timeout_ms) {
  const std::vector<uint32_t> tokens = tokens_of(prompt, page);
  const uint32_t position = prompt.position(page);
  if (position > 0)
    return server.call(
        [question, position, parent = prompt.parent(page), tokens](const Warehouse& warehouse) {
          Branches found;
          warehouse.add_branches(question.namespace_id, parent, position, tokens, question.as_of_ns,
                                 found);
          return found;
        },
        timeout_ms);
  std::pair<Branches, PageId> found{{}, 0};
  const uint64_t until = system_clock().boot_ns() + kSearchNs;
  while (found.second != kNoPage && !found.first.more) {
    found = server.call(
        [question, found, tokens](const Warehouse& warehouse) {
          auto further = found;
          warehouse.add_first_pages(question.namespace_id, further.second, tokens,
                                    question.as_of_ns, further.first);
          return further;
        },
        timeout_ms);
    if (found.second != kNoPage && system_clock().boot_ns() >= until) found.first.more = true;
  }
  return found.first;
}

}  // namespace

WhyReport why(Server& server, const WhyQuestion& question, Prompt& prompt, int timeout_ms) {
  WhyReport report;
  size_t page = 0;
  while (page < prompt.pages()) {
    std::vector<Key> keys;
    for (size_t at = page; at < prompt.pages() && keys.size() < kPagesPerStep; ++at)
      keys.push_back(prompt.key(at));
    const auto pages = server.call(
        [question, keys = std::move(keys)](const Warehouse& warehouse) {
          return warehouse.why(question.namespace_id, keys, question.as_of_ns);
        },
        timeout_ms);
    for (const PageWhy& each : pages) {
      if (report.found == page && is_there(each)) ++report.found;
      add(report.runs, page++, each);
    }
  }
  report.boot_ns = system_clock().boot_ns();
  report.wall_ns = system_clock().wall_ns();
  const size_t gap = report.found;
  if (gap < prompt.pages() && (question.searches || prompt.position(gap) > 0))
    report.branches = branches_at(server, question, prompt, gap, timeout_ms);
  return report;
}

}  // namespace kvw
