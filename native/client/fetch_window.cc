#include "client/fetch_window.h"

#include <algorithm>

#include "base/error.h"
#include "client/promoted.h"
#include "remote/object.h"

namespace kvw {

namespace {

// Asked again after something has ended: no sooner than this, and than a share of what was waited
// already. So a miss is told that much late at most, and a slow store costs few messages.
constexpr uint64_t kLeastPauseNs = 2 * kMillisecondNs;
constexpr uint64_t kPauseShare = 4;
// Where nothing has ended: its daemon may have died, which wakes nobody.
constexpr uint64_t kQuietNs = 100 * kMillisecondNs;
// Engines load in slices of their time, and come again for what one has not brought: a fetch may
// take longer than a slice.
constexpr uint64_t kLeastWithinNs = 1000 * kMillisecondNs;
// Each run of a prompt is wanted that much later than the one before it, which comes first then:
// more than messages overtake each other by. A page is stored behind its parent only.
constexpr uint64_t kRunLaterNs = 4 * kMillisecondNs;

// none: it comes, or may be asked for again.
Reason reason_of(FetchAnswer answer) {
  switch (answer) {
    case FetchAnswer::reading:
    case FetchAnswer::later:
      return Reason::none;
    case FetchAnswer::off:
      return Reason::remote_off;
    case FetchAnswer::missing:
      return Reason::remote_missing;
    case FetchAnswer::damaged:
      return Reason::remote_damaged;
    case FetchAnswer::failed:
      return Reason::remote_failed;
    case FetchAnswer::no_room:
      return Reason::no_room;
  }
  return Reason::unreachable;  // not sensible
}

}  // namespace

FetchWindow::FetchWindow(const ClientCall& call) : call_(call), remote_(call) {
  // No more than the daemon fetches at a time, and no more than the tier can hold beside what
  // others use: pages that come too early are evicted again before they are reached.
  const uint64_t limit =
      std::min(call.view().control().reserve_limit_bytes.value.load(), kFetchBytes);
  window_ = std::max<uint64_t>(limit / call.shape().slot_bytes(), 1);
}

bool FetchWindow::bring(size_t page, size_t end, uint64_t tick, Reason& why) {
  const auto missed = [&why](Reason reason) {
    why = reason;
    return false;
  };
  const size_t gap = first_missing(page);
  if (gap > page) return true;  // it came meanwhile
  if (!call_.follows_stored(gap)) return missed(Reason::missing);
  if (!remote_.run(gap)) return missed(Reason::missing);
  if (!remote_.served()) return missed(Reason::remote_off);
  if (call_.late()) return missed(Reason::timeout);
  // What the next daemon fetches is not seen here.
  if (call_.view().outdated()) return missed(Reason::unreachable);
  if (const size_t run_end = remote_.end_of(gap); awaited_end_ != run_end) {
    awaited_end_ = run_end;
    waits_since_ns_ = now_ns();
  }
  if (gap >= asked_until_ || now_ns() >= due_ns())
    if (const Reason refused = ask_ahead(gap, gap, end); refused != Reason::none)
      return missed(refused);
  wait_promoted(call_.view(), tick, std::min(due_ns(), call_.deadline_ns));
  return true;
}

void FetchWindow::reached(size_t page, size_t end) {
  if (asked_until_ <= page || asked_until_ >= end || asked_until_ > page + low_water_) return;
  ask_ahead(page, asked_until_, end);  // whoever comes to what is refused hears it then
}

uint64_t FetchWindow::fetched(size_t begin, size_t end) const {
  uint64_t pages = 0;
  for (const auto& [first, last] : fetched_) {
    const size_t from = std::max(begin, first), to = std::min(end, last);
    if (from < to) pages += to - from;
  }
  return pages;
}

// What the page hangs on may be missing as well, and comes first.
size_t FetchWindow::first_missing(size_t page) const {
  // By hand: Clang 14 compiles no partition_point over the iota of libstdc++ 12.
  size_t begin = call_.prompt.run_begin(page), end = page + 1;
  while (begin < end) {
    const size_t middle = begin + (end - begin) / 2;
    if (call_.find(middle))
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// When to ask again what became of the page that is waited for.
uint64_t FetchWindow::due_ns() const {
  if (promoted(call_.view()) == asked_tick_) return asked_ns_ + kQuietNs;
  const uint64_t waited = asked_ns_ > waits_since_ns_ ? asked_ns_ - waits_since_ns_ : 0;
  return asked_ns_ + std::clamp(waited / kPauseShare, kLeastPauseNs, kQuietNs);
}

// Asks for the runs from page `at` on that are not here and were not asked for yet; once more for
// the first of them, where it is. The daemon takes what it has room for, down to none. Not none:
// the first will not come.
Reason FetchWindow::ask_ahead(size_t page, size_t at, size_t end) {
  const uint64_t tick = promoted(call_.view());
  const auto [runs, begins] = choose(page, at, end);
  if (runs.empty()) return Reason::none;
  std::vector<FetchAnswer> answers;
  const Reason unheard = ask(runs, answers);
  asked_ns_ = now_ns();
  asked_tick_ = tick;
  if (unheard != Reason::none) return unheard;
  size_t taken = 0;
  for (; taken < runs.size() && answers[taken] == FetchAnswer::reading; ++taken)
    note(begins[taken], remote_.end_of(begins[taken]));
  // Of what comes behind it only the run that is waited for decides.
  asked_until_ =
      taken < runs.size() ? begins[taken] : std::max(asked_until_, remote_.end_of(begins.back()));
  low_water_ = (asked_until_ - std::min(page, asked_until_)) / 2;
  return begins.front() == at ? reason_of(answers.front()) : Reason::none;
}

FetchWindow::Asked FetchWindow::choose(size_t page, size_t at, size_t end) {
  Asked asked;
  end = std::min(end, page + window_);
  const uint64_t now = now_ns();
  const uint64_t within_ns = std::max(call_.deadline_ns, now + kLeastWithinNs) - now;
  do {
    if (call_.find(at)) {
      ++at;  // somebody has stored it
      continue;
    }
    auto run = remote_.run(at);
    if (!run || !call_.follows_stored(at)) break;
    run->within_ns = within_ns + run->first_position / run->pages * kRunLaterNs;
    asked.runs.push_back(*run);
    asked.begins.push_back(at);
    at = remote_.end_of(at);
    if (asked.runs.size() == 1) at = std::max(at, asked_until_);
  } while (at < end && asked.runs.size() < kFetchRuns);
  return asked;
}

// One round trip. timeout: the daemon does not answer in time; unreachable: not at all, or not
// sensibly.
Reason FetchWindow::ask(std::span<const FetchRun> runs, std::vector<FetchAnswer>& answers) const {
  Writer message(MessageType::fetch);
  message.put(FetchSpace{call_.shape().id, static_cast<uint32_t>(call_.prompt.witness_kind()), 0});
  message.put_bytes(runs.data(), runs.size_bytes());
  message.set_counts(static_cast<uint32_t>(runs.size()));
  try {
    auto reply = call_.link.ask(message, MessageType::fetching, call_.deadline_ns);
    Reader body = reply.body();
    const auto* array = body.take_array<FetchAnswer>(reply.head().first);
    if (!body.ok() || reply.head().first != runs.size()) return Reason::unreachable;
    answers.assign(array, array + runs.size());
    return Reason::none;
  } catch (const Error& error) {
    return error.code() == "deadline" ? Reason::timeout : Reason::unreachable;
  }
}

// Of a run that is asked for again nothing is noted twice.
void FetchWindow::note(size_t begin, size_t end) {
  if (!fetched_.empty()) begin = std::max(begin, fetched_.back().second);
  if (begin >= end) return;
  if (!fetched_.empty() && fetched_.back().second == begin)
    fetched_.back().second = end;
  else
    fetched_.emplace_back(begin, end);
}

}  // namespace kvw
