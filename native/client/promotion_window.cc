#include "client/promotion_window.h"

#include <algorithm>

#include "base/error.h"
#include "client/promoted.h"

namespace kvw {

namespace {

constexpr uint64_t kWaitSliceNs = 20 * kMillisecondNs;
// For what the daemon makes of a report behind many others: it may find the page good, and then
// nothing changes.
constexpr uint64_t kJudgedWithinNs = 200 * kMillisecondNs;

}  // namespace

PromotionWindow::PromotionWindow(const ClientCall& call) : call_(call), fetches_(call) {
  // What the daemon reads at a time, so that one who loads alone is never told to ask again. And
  // never more than the tier can hold beside what others use: pages read too early are evicted
  // again before they are reached.
  const uint64_t limit =
      std::min(call.view().control().reserve_limit_bytes.value.load(), kPromoteBytes);
  window_ = std::clamp<uint64_t>(limit / call.shape().slot_bytes(), 1, kPromotePages);
}

std::optional<EntryView> PromotionWindow::in_dram(size_t page, size_t end, Reason& why) {
  for (;;) {
    const uint64_t tick = promoted(call_.view());
    const auto entry = call_.find(page);
    if (!entry) {
      if (call_.cleared()) {
        why = Reason::cleared;
        return std::nullopt;
      }
      if (!fetches_.bring(page, end, tick, why)) return std::nullopt;
      continue;
    }
    if (entry->in_dram()) {
      fetches_.reached(page, end);
      if (asked_until_ != 0 && asked_until_ < end && asked_until_ <= page + low_water_)
        ask_ahead(page, end, why);
      return entry;
    }
    if (call_.late()) {
      why = Reason::timeout;
      return std::nullopt;
    }
    // What the next daemon promotes is not seen here.
    if (call_.view().outdated()) {
      why = Reason::unreachable;
      return std::nullopt;
    }
    if (page >= asked_until_ || ask_again_) {
      if (!ask_ahead(page, end, why)) return std::nullopt;
      if (asked_until_ > page) continue;
    }
    wait(tick);
  }
}

bool PromotionWindow::has_other_copy(const EntryView& damaged) {
  if (!damaged.in_nvme()) return false;
  // Asked for behind the report: whoever answers has looked at the page, as far as it looks at any
  // at once, however busy it is.
  std::vector<PromoteAnswer> answers;
  if (promote(std::span(&damaged.key, 1), answers) != Reason::none) return false;
  const uint64_t until_ns = std::min(call_.deadline_ns, now_ns() + kJudgedWithinNs);
  for (bool last = false;; last = now_ns() >= until_ns) {
    const uint64_t tick = promoted(call_.view());
    const auto entry = call_.view().index().find(damaged.key);
    if (!entry || entry->slot != damaged.slot || entry->generation != damaged.generation)
      return true;
    if (last) return false;
    wait(tick);
  }
}

// Asks for the pages of the window from `page` on that are only on NVMe and were not asked for
// yet. The daemon takes the first of them that it has room for, down to none: what it did not
// take is asked for when half of what it did is used up. False: `page` will not come.
bool PromotionWindow::ask_ahead(size_t page, size_t end, Reason& why) {
  const size_t until = std::min<size_t>(end, page + window_);
  std::vector<Key> keys;
  std::vector<size_t> pages;
  for (size_t ahead = ask_again_ ? page : std::max(page, asked_until_); ahead < until; ++ahead) {
    const auto entry = call_.find(ahead);
    if (!entry) break;
    if (entry->in_dram()) continue;
    keys.push_back(call_.prompt.key(ahead));
    pages.push_back(ahead);
  }
  ask_again_ = false;
  std::vector<PromoteAnswer> answers;
  if (!keys.empty()) {
    if (const Reason refused = promote(keys, answers); refused != Reason::none) {
      why = refused;
      return false;
    }
  }
  const auto later = std::ranges::find(answers, PromoteAnswer::later);
  asked_until_ = later == answers.end() ? std::max(until, asked_until_)
                                        : pages[static_cast<size_t>(later - answers.begin())];
  low_water_ = (asked_until_ - page) / 2;
  // Only the page that is waited for decides; the others are asked for again when reached.
  if (pages.empty() || pages.front() != page) return true;
  if (answers.front() == PromoteAnswer::failed) why = Reason::io_error;
  if (answers.front() == PromoteAnswer::missing) why = Reason::missing;
  return answers.front() != PromoteAnswer::failed && answers.front() != PromoteAnswer::missing;
}

// One round trip. timeout: the daemon does not answer in time; unreachable: not at all, or not
// sensibly.
Reason PromotionWindow::promote(std::span<const Key> keys, std::vector<PromoteAnswer>& answers) {
  Writer message(MessageType::promote);
  message.put_bytes(keys.data(), keys.size_bytes());
  message.set_counts(static_cast<uint32_t>(keys.size()));
  try {
    auto reply = call_.link.ask(message, MessageType::promoting, call_.deadline_ns);
    Reader body = reply.body();
    const auto* array = body.take_array<PromoteAnswer>(reply.head().first);
    if (!body.ok() || reply.head().first != keys.size()) return Reason::unreachable;
    answers.assign(array, array + keys.size());
    return Reason::none;
  } catch (const Error& error) {
    return error.code() == "deadline" ? Reason::timeout : Reason::unreachable;
  }
}

// Sleeps until a promotion ends somewhere, at most a slice: a daemon that died wakes nobody.
void PromotionWindow::wait(uint64_t tick) {
  wait_promoted(call_.view(), tick, std::min(now_ns() + kWaitSliceNs, call_.deadline_ns));
  if (promoted(call_.view()) == tick) ask_again_ = true;
}

}  // namespace kvw
