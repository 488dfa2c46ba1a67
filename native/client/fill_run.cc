// The object is judged first. Then its pages are stored as an engine stores its own: reserved,
// copied and digested in one pass, and sealed by the exchange that reserves the next window. All
// shards of a page are reserved by one session, so they go side by side.
#include "client/fill_run.h"

#include <time.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/sequence_point.h"
#include "client/call.h"
#include "client/client.h"

namespace kvw {

namespace {

using remote::GetEnd;
using remote::ObjectFault;

constexpr uint64_t kWindowBytes = 32ull << 20;
constexpr uint64_t kLimitShare = 4;  // of what a session may leave unfinished, as of a store
constexpr uint64_t kFirstPauseNs = kMillisecondNs, kLastPauseNs = 16 * kMillisecondNs;
constexpr uint64_t kGraceNs = 100 * kMillisecondNs;  // to seal and to settle when time is up

void pause(uint64_t ns) {
  const timespec time{0, static_cast<long>(ns)};
  ::nanosleep(&time, nullptr);
}

class RunFilling {
 public:
  RunFilling(DaemonLink& link, const remote::RunToGet& run, uint64_t within_ns)
      : link_(link),
        daemon_(link.attachment()),
        run_(run),
        deadline_ns_(now_ns() + std::min(within_ns, kLongestNs)) {}

  FilledRun run(std::span<const std::byte> body, const Key& fleet) {
    const auto row = view().space(run_.namespace_id);
    if (!row) return {GetEnd::cleared, 0, "unknown_namespace", {}};
    ordinal_ = row->ordinal;
    shape_ = row->shape;
    if (run_.pages != remote::object_pages(shape_)) return damaged(ObjectFault::shape);
    read_ = read_object(spec(fleet), run_.from, body);
    if (read_.pages.empty()) return damaged(read_.fault);
    const PageFacts& first = read_.pages.front().facts;
    if (first.position > 0 && !is_stored(first.parent))
      return {GetEnd::no_room, 0, reason_name(Reason::parent_missing), first.parent};
    return filled();
  }

 private:
  static constexpr uint64_t kLongestNs = 3600 * kSecondNs;

  // A shard of a page.
  struct Part {
    enum class State : uint8_t { wanted, granted, copied, there };
    State state = State::wanted;
    Reason waits = Reason::none;  // for what it was asked for in vain
    Seal seal{};                  // of what was granted
  };

  const View& view() const { return *daemon_->view; }
  static FilledRun damaged(ObjectFault fault) {
    return {GetEnd::damaged, 0, fault_name(fault), {}};
  }

  remote::ObjectSpec spec(const Key& fleet) const {
    return {fleet,
            Secret(view().control().secret, kSecretBytes),
            shape_,
            run_.witness_kind,
            run_.epoch,
            run_.key,
            run_.first_position,
            run_.pages};
  }

  // In a tier here. Those that others are about to seal are not.
  bool is_stored(const Key& key) const {
    const auto entry = view().index().find(key);
    return entry && entry->space == ordinal_ && entry->clear_epoch >= view().clear_epoch(ordinal_);
  }

  // --- storing the pages that look good

  FilledRun filled() {
    if (!daemon_->knows_since)
      throw Error(ErrorKind::usage, "since_unknown",
                  "the daemon is older than this worker, and cannot tell whether the namespace was "
                  "cleared since; restart it with this version");
    const uint64_t limit = view().control().reserve_limit_bytes.value.load();
    const uint64_t window_pages = std::min(kWindowBytes, limit / kLimitShare) / shape_.slot_bytes();
    window_ = std::max<uint64_t>(1, window_pages) * shape_.shards;
    parts_.resize(read_.pages.size() * shape_.shards);
    end_page_ = read_.pages.size();
    if (read_.fault != ObjectFault::none) report_ = damaged(read_.fault);
    try {
      work();
    } catch (const Error& error) {
      stop(error);
    } catch (...) {
      link_.give_up(unfinished());
      throw;
    }
    settle();
    report_.pages = static_cast<uint32_t>(done_pages());
    return report_;
  }

  void work() {
    for (uint64_t pause_ns = kFirstPauseNs; done_pages() < end_page_;) {
      if (now_ns() >= deadline_ns_) end_waiting();
      if (done_pages() == end_page_) return;
      const bool brought = step();
      ask_anew_for_lost();
      if (brought) {
        pause_ns = kFirstPauseNs;
      } else {
        pause(pause_ns);
        pause_ns = std::min(2 * pause_ns, kLastPauseNs);
      }
    }
  }

  // A page whose parts are all there is stored, but where another session gave its part of it up
  // after that was waited for: what was there of it has gone with it.
  void ask_anew_for_lost() {
    for (const size_t done = done_pages(); looked_at_ < done; ++looked_at_) {
      const auto parts = std::span(parts_).subspan(looked_at_ * shape_.shards, shape_.shards);
      if (is_stored(facts_of(looked_at_ * shape_.shards).key)) continue;
      std::ranges::fill(parts, Part{});
      return;
    }
  }

  // From the first one on.
  size_t done_pages() const {
    const auto left =
        std::ranges::find_if(parts_, [](const Part& part) { return !is_there(part); });
    return page_of(static_cast<size_t>(left - parts_.begin()));
  }
  static bool is_there(const Part& part) { return part.state == Part::State::there; }
  static bool is_wanted(const Part& part) { return part.state == Part::State::wanted; }
  static bool waits(const Part& part) { return is_wanted(part) && part.waits != Reason::none; }

  // Pages before this one are still stored.
  void stop_at(size_t page, GetEnd end, const char* fault) {
    if (page >= end_page_) return;
    end_page_ = page;
    report_ = {end, 0, fault, {}};
  }
  // For good. What a clear has taken is cleared, whatever else it is called.
  void refused(size_t page, Reason reason) {
    if (view().clear_epoch(ordinal_) > run_.clear_epoch) reason = Reason::cleared;
    stop_at(page, reason == Reason::cleared ? GetEnd::cleared : GetEnd::no_room,
            reason_name(reason));
  }
  // Of what is being caught. Throws it on where it is not the end of this run alone.
  void stop(const Error& error) {
    link_.give_up(unfinished());
    if (error.code() == "namespace_unknown")
      return stop_at(done_pages(), GetEnd::cleared, "unknown_namespace");
    if (error.kind() != ErrorKind::transport || error.code() == "forked") throw;
    stop_at(done_pages(), error.code() == "deadline" ? GetEnd::late : GetEnd::no_room,
            reason_name(Reason::unreachable));
  }

  // Time is up: what was refused is not asked for again, and no page is begun. One that was begun
  // is asked for to its last shard, since half of one would only hold room.
  void end_waiting() {
    for (size_t page = done_pages(); page < end_page_; ++page) {
      const auto parts = std::span(parts_).subspan(page * shape_.shards, shape_.shards);
      const auto waiting = std::ranges::find_if(parts, waits);
      if (waiting != parts.end()) return stop_at(page, GetEnd::late, reason_name(waiting->waits));
      if (std::ranges::all_of(parts, is_wanted))
        return stop_at(page, GetEnd::late, reason_name(Reason::timeout));
    }
  }

  // One exchange: seals what is copied, reserves the next window and copies it. False: it brought
  // nothing.
  bool step() {
    const std::vector<size_t> sealing = copied();
    std::vector<Seal> seals;
    seals.reserve(sealing.size());
    for (const size_t part : sealing) seals.push_back(parts_[part].seal);
    if (!seals.empty() && view().arena()->lost())
      throw Error(ErrorKind::storage, "memory_lost",
                  "the arena file lacks memory that was written here: it was cut, or its "
                  "filesystem is full; see the daemon's log");
    Writer message(MessageType::exchange);
    message.put(run_.clear_epoch);
    message.put(shape_.id);
    for (const Seal& seal : seals) message.put(seal);
    const std::vector<size_t> asking = add_reserves(message);
    message.set_counts(static_cast<uint32_t>(seals.size()), static_cast<uint32_t>(asking.size()),
                       kExchangeSince);
    std::vector<uint32_t> shards;
    shards.reserve(asking.size());
    for (const size_t part : asking) shards.push_back(shard_of(part));
    const Connection::Reply reply = link_.exchange(*daemon_, message, seals, shards,
                                                   std::max(deadline_ns_, now_ns() + kGraceNs));
    Reader body = reply.body();
    const auto* sealed = body.take_array<SealAnswer>(sealing.size());
    const auto* answers = body.take_array<ReserveAnswer>(asking.size());
    for (size_t i = 0; i < sealing.size(); ++i) take(sealing[i], sealed[i].reason);
    bool brought = !sealing.empty(), waiting = false;
    for (size_t i = 0; i < asking.size(); ++i) {
      brought = take(asking[i], answers[i], waiting) || brought;
      waiting = waiting || waits(parts_[asking[i]]);
    }
    KVW_SEQUENCE_POINT("fill: granted");
    for (const size_t part : asking) copy(part);
    return brought;
  }

  std::vector<size_t> copied() const {
    std::vector<size_t> found;
    for (size_t part = 0; part < end_page_ * shape_.shards; ++part)
      if (parts_[part].state == Part::State::copied) found.push_back(part);
    return found;
  }

  std::vector<size_t> add_reserves(Writer& message) const {
    std::vector<size_t> asking;
    for (size_t part = 0; part < end_page_ * shape_.shards && asking.size() < window_; ++part) {
      if (!is_wanted(parts_[part])) continue;
      const PageFacts& facts = facts_of(part);
      const auto& witness = facts.witness;
      if (message.bytes() + sizeof(Reserve) + witness.size() + 8 > kMessageBytes) break;
      message.put(Reserve{facts.key, facts.parent, facts.position, shard_of(part),
                          static_cast<uint32_t>(facts.witness_kind),
                          static_cast<uint32_t>(witness.size())});
      message.put_bytes(witness.data(), witness.size());
      asking.push_back(part);
    }
    return asking;
  }

  void take(size_t part, Reason sealed) {
    parts_[part].state = Part::State::there;
    if (sealed == Reason::none) return;
    parts_[part].state = Part::State::granted;
    refused(page_of(part), sealed);
  }

  // False: it has to be asked for again, or ends the run. `waiting`: a page before it is asked for
  // again, and then its children are too.
  bool take(size_t part, const ReserveAnswer& answer, bool waiting) {
    Part& asked = parts_[part];
    switch (answer.answer) {
      case Answer::granted:
        asked.state = Part::State::granted;
        asked.seal = {answer.generation, 0, answer.slot, shard_of(part)};
        return true;
      case Answer::already:
        asked.state = Part::State::there;
        return true;
      case Answer::busy:
        asked.waits = Reason::busy;
        return false;
      case Answer::dropped:
        break;
    }
    if (answer.reason != Reason::cleared &&
        (retryable(answer.reason) || answer.reason == Reason::refused_tail || waiting))
      asked.waits = answer.reason;
    else
      refused(page_of(part), answer.reason);
    return false;
  }

  void copy(size_t part) {
    if (parts_[part].state != Part::State::granted || page_of(part) >= end_page_) return;
    Seal& seal = parts_[part].seal;
    const SlabLayout layout = view().slots().layout(view().slots().slab_of(seal.slot));
    view().prefault(seal.slot, true);
    if (!copy_shard(read_.pages[page_of(part)], seal.shard, view().payload(seal.slot, layout)))
      return stop_at(page_of(part), GetEnd::damaged, fault_name(ObjectFault::digest));
    KVW_SEQUENCE_POINT("fill: copied");
    seal.digest = facts_of(part).digests[seal.shard];
    parts_[part].state = Part::State::copied;
  }

  // What was granted and will not be sealed goes back at once, or with the next round trip.
  void settle() {
    const std::vector<SlotRef> refs = unfinished();
    if (refs.empty()) return;
    link_.give_up(refs);
    try {
      link_.renew(true, now_ns() + kGraceNs);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::transport) throw;
    }
  }
  std::vector<SlotRef> unfinished() const {
    std::vector<SlotRef> refs;
    for (const Part& part : parts_)
      if (part.state == Part::State::granted || part.state == Part::State::copied)
        refs.push_back({part.seal.generation, part.seal.slot, part.seal.shard});
    return refs;
  }

  size_t page_of(size_t part) const { return part / shape_.shards; }
  uint32_t shard_of(size_t part) const { return static_cast<uint32_t>(part % shape_.shards); }
  const PageFacts& facts_of(size_t part) const { return read_.pages[page_of(part)].facts; }

  DaemonLink& link_;
  std::shared_ptr<Attachment> daemon_;
  const remote::RunToGet& run_;
  const uint64_t deadline_ns_;
  uint16_t ordinal_ = 0;
  NamespaceShape shape_;
  remote::ObjectRead read_;
  std::vector<Part> parts_;  // page by page
  size_t window_ = 0;        // parts of an exchange
  size_t end_page_ = 0;      // pages before it are to be stored
  size_t looked_at_ = 0;     // pages before it were stored when their last part was there
  FilledRun report_;
};

}  // namespace

FilledRun Client::fill_run(const remote::RunToGet& run, std::span<const std::byte> body,
                           const Key& fleet, uint64_t within_ns) {
  link_.renew(false, now_ns() + link_.options().timeout_ns);
  return RunFilling(link_, run, within_ns).run(body, fleet);
}

}  // namespace kvw
