// Stores: reserve a window, copy and digest it, then seal it in the same exchange that reserves the
// next one. A GPU copies a window while the next one is reserved, so its seals go one exchange
// later.
#include <time.h>

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "base/sequence_point.h"
#include "client/client.h"
#include "client/page_writer.h"
#include "exchange/drop_counters.h"

namespace kvw {

namespace {

constexpr uint64_t kWindowBytes = 32ull << 20;
// Of what a client alone may leave unfinished, so that several can store side by side. From a
// device two windows are unfinished at a time.
constexpr uint64_t kLimitShare = 4, kDeviceLimitShare = 8;
// Whose seals fit into a message, however small the pages are.
static_assert(2 * (kMessageBytes / (sizeof(Reserve) + 8)) * sizeof(Seal) <= kMessageBytes - 64);
// Of the first window; each is twice the one before, up to a whole one. What is in it is sealed,
// found by others and on its way to NVMe sooner.
constexpr size_t kFirstShare = 4;
constexpr uint64_t kRetryPauseNs = kMillisecondNs;
constexpr uint64_t kSealGraceNs = 100 * kMillisecondNs;  // to seal what is copied when time is up

}  // namespace

// One store in progress. A page is fresh (from next_ on), asked for in the exchange under way,
// waiting (refused for now, and asked for again before fresh ones), or answered for good and
// counted. Pages are asked for in their order, so that a page's parent, where the call has it too,
// was answered before it.
//
// A page that is refused for good ends its run: what follows it there could never be found. Other
// runs of the call go on.
class StoreCall {
 public:
  StoreCall(const ClientCall& call, Gpus& gpus, size_t first, const Regions& regions,
            uint32_t shard, std::optional<uint64_t> since)
      : call_(call),
        prompt_(call.prompt),
        first_(first),
        writer_(page_writer(call, gpus, regions)),
        shard_(shard),
        since_(since),
        next_(first),
        end_(std::min(call.prompt.pages(), first + regions.count())) {
    const uint64_t limit = call.view().control().reserve_limit_bytes.value.load();
    const uint64_t slot = call.shape().slot_bytes();
    const uint64_t share = regions.device() == nullptr ? kLimitShare : kDeviceLimitShare;
    window_ = std::max<size_t>(1, std::min(kWindowBytes, limit / share) / slot);
    asks_ = std::max<size_t>(1, window_ / kFirstShare);
  }

  StoreReport run() {
    if (writer_ == nullptr) {
      refuse_rest(Reason::timeout);
      return report_;
    }
    try {
      while (unanswered() || !held_.empty()) {
        // Late: what is copied is still sealed, nothing new is begun.
        if (call_.late()) refuse_rest(Reason::timeout);
        if (!unanswered() && held_.empty()) break;
        if (!step() && unanswered() && held_.empty()) pause();
      }
    } catch (...) {
      // Where something may still write, the slots stay this session's until it ends; nobody else
      // is given them before.
      if (writer_->settle()) call_.link.give_up(held_);
      throw;
    }
    return report_;
  }

 private:
  struct Waiting {
    size_t page;
    Reason reason;  // none: only because its parent waits
  };

  bool unanswered() const { return !waiting_.empty() || next_ < end_; }
  void drop(Reason reason) { ++report_.dropped[reason_name(reason)]; }

  // One exchange: seals what is copied, reserves the next window and begins to copy it. False when
  // no page was answered for good.
  bool step() {
    if (!unanswered()) writer_->finish();
    const std::vector<Seal> seals = std::exchange(writer_->seals(), {});
    if (!seals.empty() && call_.view().arena()->lost())
      throw Error(ErrorKind::storage, "memory_lost",
                  "the arena file lacks memory that this store has written: it was cut, or its "
                  "filesystem is full; see the daemon's log, and connect again");
    Writer message(MessageType::exchange);
    if (since_) message.put(*since_);
    message.put(call_.shape().id);
    for (const Seal& seal : seals) message.put(seal);
    const std::vector<size_t> asked = add_reserves(message);
    message.set_counts(static_cast<uint32_t>(seals.size()), static_cast<uint32_t>(asked.size()),
                       since_ ? kExchangeSince : 0);
    Connection::Reply reply;
    try {
      const std::vector<uint32_t> shards(asked.size(), shard_);
      reply = call_.link.exchange(*call_.daemon, message, seals, shards,
                                  std::max(call_.deadline_ns, now_ns() + kSealGraceNs));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::transport || report_.stored + report_.already == 0) throw;
      writer_->finish();
      give_up(asked);
      return true;
    }
    Reader body = reply.body();
    const auto* sealed = body.take_array<SealAnswer>(seals.size());
    const auto* reserved = body.take_array<ReserveAnswer>(asked.size());
    for (size_t i = 0; i < seals.size(); ++i) {
      if (sealed[i].reason == Reason::none)
        ++report_.stored;
      else
        drop(sealed[i].reason);
    }
    held_.erase(held_.begin(), held_.begin() + static_cast<ptrdiff_t>(seals.size()));
    const std::span answers(reserved, asked.size());
    for (const ReserveAnswer& answer : answers)
      if (answer.answer == Answer::granted)
        held_.push_back({answer.generation, answer.slot, shard_});
    const size_t answered = take(asked, answers);
    writer_->start();
    return answered > 0;
  }

  // Fills a window with pages that wait, then with fresh ones, and returns them.
  std::vector<size_t> add_reserves(Writer& message) {
    std::vector<size_t> asked;
    size_t again = 0;
    const size_t most = std::exchange(asks_, std::min(window_, 2 * asks_));
    while (asked.size() < most && (again < waiting_.size() || next_ < end_)) {
      const size_t page = again < waiting_.size() ? waiting_[again].page : next_;
      const auto witness = prompt_.witness(page);
      if (message.bytes() + sizeof(Reserve) + witness.size() + 8 > kMessageBytes) break;
      message.put(Reserve{prompt_.key(page), prompt_.parent(page), prompt_.position(page), shard_,
                          static_cast<uint32_t>(prompt_.witness_kind()),
                          static_cast<uint32_t>(witness.size())});
      message.put_bytes(witness.data(), witness.size());
      ++(again < waiting_.size() ? again : next_);
      asked.push_back(page);
    }
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(again));
    return asked;
  }

  // Puts what was granted and counts what was answered for good; returns how many that were.
  size_t take(std::span<const size_t> asked, std::span<const ReserveAnswer> answers) {
    std::vector<Waiting> again;
    std::optional<size_t> ended;  // the last run that a page was refused in for good
    for (size_t i = 0; i < asked.size(); ++i) {
      const size_t page = asked[i];
      switch (answers[i].answer) {
        case Answer::granted:
          copy(page, answers[i]);
          break;
        case Answer::already:
          ++report_.already;
          break;
        case Answer::busy:
          drop(Reason::busy);
          break;
        case Answer::dropped:
          if (ended == prompt_.run(page)) {
            drop(Reason::refused_tail);
          } else if (retryable(answers[i].reason)) {
            again.push_back({page, answers[i].reason});
          } else if (waits(again, prompt_.parent(page))) {
            again.push_back({page, Reason::none});
          } else {
            drop(answers[i].reason);
            ended = prompt_.run(page);
          }
          break;
      }
    }
    // Of the runs that ended here only the last one can go on in pages not asked for yet.
    if (ended && *ended == prompt_.run(asked.back())) refuse_run(*ended);
    waiting_.insert(waiting_.begin(), again.begin(), again.end());
    return asked.size() - again.size();
  }

  // Whether the page with this key is one of those. Rare, and the parent is mostly the last.
  bool waits(const std::vector<Waiting>& pages, const Key& key) {
    return std::any_of(pages.rbegin(), pages.rend(),
                       [&](const Waiting& each) { return prompt_.key(each.page) == key; });
  }

  void copy(size_t page, const ReserveAnswer& answer) {
    const View& view = call_.view();
    const SlabLayout layout = view.slots().layout(view.slots().slab_of(answer.slot));
    view.prefault(answer.slot, true);
    writer_->put(page - first_,
                 view.payload(answer.slot, layout) + shard_ * call_.shape().shard_stride(),
                 prompt_.key(page), {answer.generation, 0, answer.slot, shard_});
  }

  // The unanswered pages of a run, behind one that was refused for good.
  void refuse_run(size_t run) {
    for (; !waiting_.empty() && prompt_.run(waiting_.front().page) == run;
         waiting_.erase(waiting_.begin()))
      drop(Reason::refused_tail);
    for (; next_ < end_ && prompt_.run(next_) == run; ++next_) drop(Reason::refused_tail);
  }

  // All unanswered pages: the first of each run for what it waited for, or else for `reason`.
  void refuse_rest(Reason reason) {
    for (; next_ < end_; ++next_) waiting_.push_back({next_, reason});
    std::optional<size_t> ended;
    for (const Waiting& each : waiting_) {
      const size_t run = prompt_.run(each.page);
      drop(ended == run || each.reason == Reason::none ? Reason::refused_tail : each.reason);
      ended = run;
    }
    waiting_.clear();
  }

  // The daemon does not answer any more. Whether seals arrived nobody knows: what they are of is
  // not counted as stored.
  void give_up(std::span<const size_t> asked) {
    report_.dropped[reason_name(Reason::unreachable)] += held_.size();
    call_.link.give_up(held_);
    held_.clear();
    writer_->seals().clear();
    std::vector<Waiting> all;
    for (const size_t page : asked) all.push_back({page, Reason::unreachable});
    for (const Waiting& each : waiting_) all.push_back({each.page, Reason::unreachable});
    waiting_ = std::move(all);
    refuse_rest(Reason::unreachable);
  }

  static void pause() {
    const timespec pause{0, static_cast<long>(kRetryPauseNs)};
    ::nanosleep(&pause, nullptr);
  }

  const ClientCall& call_;
  Prompt& prompt_;
  size_t first_;
  std::unique_ptr<PageWriter> writer_;
  uint32_t shard_;
  std::optional<uint64_t> since_;
  size_t next_, end_;
  size_t window_, asks_ = 0;      // pages of an exchange, and of the next one
  std::vector<Waiting> waiting_;  // ascending, all before next_
  std::vector<SlotRef> held_;     // granted and not known to be sealed, as put; seals come first
  StoreReport report_;
};

StoreReport Client::store(const Key& namespace_id, Prompt& prompt, size_t first,
                          const Regions& regions, uint32_t shard, uint64_t timeout_ns,
                          std::optional<uint64_t> since) {
  if (link_.options().read_only)
    throw Error(ErrorKind::usage, "read_only",
                "this client was connected read-only; connect another one to store");
  const auto call = ClientCall::open(link_, namespace_id, prompt, true, now_ns() + timeout_ns);
  call.check_pages(regions, shard);
  link_.renew_remote(call.deadline_ns);
  if (since && !call.daemon->knows_since)
    throw Error(ErrorKind::usage, "since_unknown",
                "the daemon is older than this client, and cannot tell whether the namespace was "
                "cleared since; restart it with this version");
  // Bytes are as old as the call. Its later exchanges would hang them below what others have stored
  // since a clear.
  if (!since && call.daemon->knows_since) since = call.clear_epoch;
  StoreReport report = StoreCall(call, gpus_, first, regions, shard, since).run();
  ClientSession& session = call.session();
  session.count(Counter::stores);
  session.count(Counter::pages_stored, report.stored);
  session.count(Counter::bytes_stored, report.stored * call.shape().shard_bytes);
  session.count(Counter::pages_already, report.already);
  for (uint32_t at = 0; at < static_cast<uint32_t>(Reason::count); ++at)
    if (const auto found = report.dropped.find(reason_name(Reason(at)));
        found != report.dropped.end())
      session.count(drop_counter(Reason(at)), found->second);
  return report;
}

}  // namespace kvw
