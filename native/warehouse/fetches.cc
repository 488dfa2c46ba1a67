#include "warehouse/fetches.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "base/error.h"
#include "warehouse/state.h"

namespace kvw {

namespace {

using remote::GetEnd;

constexpr uint64_t kEndedNs = kSecondNs;  // how long it is known how a run has ended
constexpr size_t kEndedKept = 4096;
constexpr uint64_t kLongestWaitNs = 60 * kSecondNs;  // beyond it a client asks again
// A worker that has not said by then how a run ended is not waited for.
constexpr uint64_t kOverdueNs = 2 * kSecondNs;

bool is_witness_kind(uint32_t kind) {
  return kind == static_cast<uint32_t>(WitnessKind::tokens) ||
         kind == static_cast<uint32_t>(WitnessKind::engine_key);
}

// Who waits for much, or for long, leaves others a quarter of what there is.
bool is_share(uint64_t own, uint64_t all, uint64_t more, uint64_t limit) {
  if (all == 0 || (own == 0 && all + more <= limit)) return true;
  const uint64_t others = all - own;
  return others < limit && own + more <= (limit - others) / 4 * 3;
}

void check(const FetchSpace& space, const FetchRun& run, const NamespaceShape& shape) {
  const uint32_t pages = remote::object_pages(shape);
  if (pages != 0 && run.pages == pages && run.from < pages && run.first_position % pages == 0 &&
      is_witness_kind(space.witness_kind) && run.day <= remote::kLastDay)
    return;
  throw Error(ErrorKind::usage, "bad_fetch",
              "a run of " + std::to_string(run.pages) + " pages from position " +
                  std::to_string(run.first_position) + ", wanted from page " +
                  std::to_string(run.from) + ", is no object of this namespace, which have " +
                  std::to_string(pages) + "; upgrade the older of client and daemon");
}

// What a client is told that asks again. Nothing: it may be tried again at once.
std::optional<FetchAnswer> answer_of(GetEnd end) {
  switch (end) {
    case GetEnd::missing:
      return FetchAnswer::missing;
    case GetEnd::damaged:
      return FetchAnswer::damaged;
    case GetEnd::failed:
      return FetchAnswer::failed;
    case GetEnd::no_room:
    case GetEnd::filled:  // and not there any more
      return FetchAnswer::no_room;
    default:  // late: for who asked for it; others have more time
      return std::nullopt;
  }
}

}  // namespace

Fetches::Fetches(WarehouseState& state)
    : state_(state), limit_bytes_(std::min(state.arena.bytes() / 8, kFetchBytes)) {}

std::vector<FetchAnswer> Fetches::ask(SessionId session, const FetchSpace& space,
                                      std::span<const FetchRun> runs) {
  // Read once: what is asked for with one deadline has one, so that first_due() goes by its order.
  const uint64_t now_ns = state_.clock.boot_ns();
  std::vector<FetchAnswer> answers;
  answers.reserve(runs.size());
  for (const FetchRun& run : runs) answers.push_back(ask(session, space, run, now_ns));
  return answers;
}

FetchAnswer Fetches::ask(SessionId session, const FetchSpace& space, const FetchRun& run,
                         uint64_t now_ns) {
  ++asked_;
  const int ordinal = state_.ordinal_of(space.namespace_id);
  if (!serving(now_ns) || ordinal < 0) return FetchAnswer::off;
  const auto& [shape, epoch] =
      std::tie(state_.spaces[ordinal].shape, state_.spaces[ordinal].remote_epoch);
  if (!epoch) return FetchAnswer::off;
  check(space, run, shape);
  const auto kind = static_cast<WitnessKind>(space.witness_kind);
  const uint64_t until_ns = now_ns + std::min(run.within_ns, kLongestWaitNs);
  const Name name{shape.id, run.key, *epoch, run.day, run.first_position, kind};
  if (const auto found = runs_.find(name); found != runs_.end())
    return join(found->second, run.from, until_ns);
  // Stored since the client looked: there is no page at the end of a run without those before it,
  // but for the moment until a sweep.
  if (const auto view = state_.catalog.find(run.key);
      view && view->space == ordinal && !state_.is_cleared(*view)) {
    state_.waiters.note();
    return FetchAnswer::reading;
  }
  if (const auto ended = ended_lately(name)) return *ended;
  Fetch fetch{.session = session,
              .pages = run.pages,
              .from = run.from,
              .record_bytes = remote::record_blocks(shape, kind) * uint64_t{kBlockBytes},
              .due_ns = until_ns,
              .until_ns = until_ns};
  if (!has_room(session, 1, fetch.bytes())) {
    ++later_;
    return FetchAnswer::later;
  }
  bytes_ += fetch.bytes();
  runs_.emplace(name, fetch);
  publish();
  return FetchAnswer::reading;
}

bool Fetches::has_room(SessionId session, size_t runs, uint64_t bytes) const {
  uint64_t own_runs = 0, own_bytes = 0;
  for (const auto& [name, fetch] : runs_) {
    if (fetch.session != session) continue;
    ++own_runs;
    own_bytes += fetch.bytes();
  }
  return is_share(own_runs, runs_.size(), runs, kFetchRuns) &&
         is_share(own_bytes, bytes_, bytes, limit_bytes_);
}

// `until_ns` may be sooner or later than that of those who wait already.
FetchAnswer Fetches::join(Fetch& fetch, uint32_t from, uint64_t until_ns) {
  const bool wants_more = fetch.number == 0 && from < fetch.from;
  if (wants_more) {
    const uint64_t more = fetch.record_bytes * (fetch.from - from);
    if (!has_room(fetch.session, 0, more)) {
      ++later_;
      return FetchAnswer::later;
    }
    fetch.from = from;
    bytes_ += more;
  }
  fetch.due_ns = std::min(fetch.due_ns, until_ns);
  fetch.until_ns = std::max(fetch.until_ns, until_ns);
  ++joined_;
  if (wants_more) publish();  // last: it ends all of them where serving has just ended
  return FetchAnswer::reading;
}

std::optional<FetchAnswer> Fetches::ended_lately(const Name& name) const {
  const auto found = ended_.find(name);
  if (found == ended_.end() || state_.clock.boot_ns() >= found->second.at_ns + kEndedNs)
    return std::nullopt;
  return found->second.answer;
}

void Fetches::state(const remote::LinkState& said) {
  until_ns_ = std::min(said.until_ns, state_.clock.boot_ns() + remote::kStateOldNs);
  RemoteWords& words = state_.arena.control().remote;
  words.read_bytes_per_s.value.store(said.read_bytes_per_s, std::memory_order_relaxed);
  words.first_byte_ns.value.store(said.first_byte_ns, std::memory_order_relaxed);
  publish();
}

void Fetches::off() {
  until_ns_ = 0;
  publish();
}

void Fetches::drain(bool draining) {
  draining_ = draining;  // what is fetched now would not be stored
  publish();
}

void Fetches::publish() {
  const bool serves = serving(state_.clock.boot_ns());
  // Whoever waits need not wait any longer; what comes all the same is welcome.
  if (!serves)
    for (auto run = runs_.begin(); run != runs_.end();) run = end(run, GetEnd::failed);
  RemoteWords& words = state_.arena.control().remote;
  words.serving.value.store(serves ? 1 : 0, std::memory_order_release);
  words.queued_bytes.value.store(bytes_, std::memory_order_relaxed);
}

// Of one prompt the beginning, since pages are stored behind their parents: its runs come in
// messages of their own, whose deadlines count from when each was read, and which are therefore in
// no certain order where they are close.
Fetches::Runs::iterator Fetches::first_due() {
  auto due = runs_.end();
  for (auto run = runs_.begin(); run != runs_.end(); ++run)
    if (run->second.number == 0 && (due == runs_.end() || run->second.due_ns < due->second.due_ns))
      due = run;
  if (due == runs_.end()) return due;
  const auto order = [](const Runs::iterator& run) {
    return std::pair(run->first.first_position, run->second.due_ns);
  };
  auto first = due;
  for (auto run = runs_.begin(); run != runs_.end(); ++run)
    if (run->second.number == 0 && run->first.namespace_id == due->first.namespace_id &&
        run->second.due_ns <= due->second.due_ns + kSameDeadlineNs && order(run) < order(first))
      first = run;
  return first;
}

std::optional<remote::RunToGet> Fetches::next() {
  const uint64_t now = state_.clock.boot_ns();
  // This core may have stood still since the worker said so, and since the last tick.
  if (!serving(now)) return std::nullopt;
  end_late(now);
  for (auto run = first_due(); run != runs_.end(); run = first_due()) {
    const Name& name = run->first;
    Fetch& fetch = run->second;
    const int ordinal = state_.ordinal_of(name.namespace_id);
    if (ordinal < 0 || state_.spaces[ordinal].remote_epoch != name.epoch) {
      end(run, GetEnd::cleared);
    } else {
      fetch.number = ++last_number_;
      return remote::RunToGet{.number = fetch.number,
                              .namespace_id = name.namespace_id,
                              .key = name.key,
                              .epoch = name.epoch,
                              .clear_epoch = state_.spaces[ordinal].clear_epoch,
                              .record_bytes = fetch.record_bytes,
                              .within_ns = fetch.until_ns - now,
                              .first_position = name.first_position,
                              .pages = fetch.pages,
                              .from = fetch.from,
                              .day = name.day,
                              .witness_kind = name.witness_kind};
    }
  }
  return std::nullopt;
}

void Fetches::done(const remote::RunToGet& run, GetEnd end) {
  const auto found = runs_.find(
      {run.namespace_id, run.key, run.epoch, run.day, run.first_position, run.witness_kind});
  if (found != runs_.end() && found->second.number == run.number) this->end(found, end);
}

Fetches::Runs::iterator Fetches::end(Runs::iterator run, GetEnd end) {
  ++ends_[static_cast<size_t>(end)];
  bytes_ -= run->second.bytes();
  state_.arena.control().remote.queued_bytes.value.store(bytes_, std::memory_order_relaxed);
  if (const auto answer = answer_of(end); answer && ended_.size() < kEndedKept)
    ended_.insert_or_assign(run->first, Ended{*answer, state_.clock.boot_ns()});
  state_.waiters.note();
  return runs_.erase(run);
}

void Fetches::end_late(uint64_t now_ns) {
  for (auto run = runs_.begin(); run != runs_.end();) {
    const uint64_t patience_ns = run->second.number == 0 ? 0 : kOverdueNs;
    run = now_ns >= run->second.until_ns + patience_ns ? end(run, GetEnd::late) : std::next(run);
  }
}

void Fetches::sealed() {
  if (!runs_.empty()) state_.waiters.note();
}

void Fetches::tick() {
  const uint64_t now = state_.clock.boot_ns();
  if (until_ns_ != 0 && now >= until_ns_) off();
  end_late(now);
  std::erase_if(ended_, [now](const auto& item) { return now >= item.second.at_ns + kEndedNs; });
}

FetchesStatus Fetches::status() const {
  FetchesStatus status{asked_, joined_, later_, 0, 0, 0, ends_};
  for (const auto& [name, fetch] : runs_) {
    if (fetch.number == 0) {
      ++status.queued;
    } else {
      ++status.under_way;
      status.under_way_bytes += fetch.bytes();
    }
  }
  return status;
}

}  // namespace kvw
