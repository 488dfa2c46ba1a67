// Stores: reserve a window, copy and digest it, then seal it in the same exchange that reserves the
// next one.
#include <time.h>

#include <algorithm>

#include "base/error.h"
#include "client/client.h"

namespace kvw {

namespace {

constexpr uint64_t kWindowBytes = 16ull << 20;
constexpr uint64_t kRetryPauseNs = kMillisecondNs;
constexpr uint64_t kSealGraceNs = 100 * kMillisecondNs;  // to seal what is copied when time is up

uint64_t now_ns() { return system_clock().boot_ns(); }

}  // namespace

// One store in progress.
class Storer {
 public:
  Storer(Client& client, const Client::Open& call, Prompt& prompt, size_t first,
         const Regions& regions, uint32_t shard, uint64_t deadline_ns)
      : client_(client),
        call_(call),
        prompt_(prompt),
        first_(first),
        regions_(regions),
        shard_(shard),
        deadline_ns_(deadline_ns),
        page_(first),
        end_(std::min(prompt.pages(), first + regions.count())) {
    const uint64_t limit = call.view->control().reserve_limit_bytes.value.load();
    const uint64_t slot = call.row.shape.slot_bytes();
    // A quarter of what all clients share, so that several can store side by side.
    window_ = std::max<size_t>(1, std::min(kWindowBytes, limit / 4) / slot);
  }

  StoreReport run() {
    while (page_ < end_ || !seals_.empty()) {
      // Late: what is copied is still sealed, nothing new is begun.
      if (now_ns() >= deadline_ns_)
        refuse_rest(refused_ == Reason::none ? Reason::timeout : refused_);
      if (page_ >= end_ && seals_.empty()) break;
      const size_t begin = page_;
      step();
      if (page_ == begin && page_ < end_ && seals_.empty()) pause();
    }
    return report_;
  }

 private:
  // One exchange: seals what was copied last, reserves and copies the next window.
  void step() {
    const std::vector<Seal> seals = std::exchange(seals_, {});
    Writer message(MessageType::exchange, client_.next_request());
    message.put(call_.row.shape.id);
    for (const Seal& seal : seals) message.put(seal);
    const size_t begin = page_;
    const size_t count = add_reserves(message);
    message.set_counts(static_cast<uint32_t>(seals.size()), static_cast<uint32_t>(count));
    Client::Exchanged exchanged;
    try {
      exchanged = client_.exchange(*call_.view, message, seals, count, shard_,
                                   std::max(deadline_ns_, now_ns() + kSealGraceNs));
    } catch (const Error& error) {
      // Whether the seals arrived nobody knows: they are not counted as stored.
      report_.dropped[reason_name(Reason::unreachable)] += seals.size();
      if (error.kind() != ErrorKind::transport || report_.stored + report_.already == 0) throw;
      refuse_rest(Reason::unreachable);
      return;
    }
    Reader body = exchanged.reply.body();
    const auto* sealed = body.take_array<SealAnswer>(seals.size());
    const auto* reserved = body.take_array<ReserveAnswer>(count);
    for (size_t i = 0; i < seals.size(); ++i) {
      if (sealed[i].reason == Reason::none)
        ++report_.stored;
      else
        ++report_.dropped[reason_name(sealed[i].reason)];
    }
    copy_granted(begin, std::span(reserved, count), exchanged.settled_late);
  }

  size_t add_reserves(Writer& message) {
    size_t count = 0;
    while (page_ + count < end_ && count < window_) {
      const size_t page = page_ + count;
      const auto witness = prompt_.witness(page);
      if (message.bytes() + sizeof(Reserve) + witness.size() + 8 > kMessageBytes) break;
      message.put(Reserve{prompt_.key(page), prompt_.parent(page), static_cast<uint32_t>(page),
                          shard_, static_cast<uint32_t>(prompt_.witness_kind()),
                          static_cast<uint32_t>(witness.size())});
      message.put_bytes(witness.data(), witness.size());
      ++count;
    }
    return count;
  }

  void copy_granted(size_t begin, std::span<const ReserveAnswer> answers, bool retry_busy) {
    bool stopped = false, over = false;
    const auto stop = [&](size_t i, Reason reason) {
      if (stopped) return;
      stopped = true;
      page_ = begin + i;
      refused_ = reason;
    };
    for (size_t i = 0; i < answers.size(); ++i) {
      const ReserveAnswer& answer = answers[i];
      switch (answer.answer) {
        case Answer::granted:
          copy(begin + i, answer);
          if (stopped) early_.insert(begin + i);  // asked for again, it will be there already
          break;
        // After a refusal these are asked for again, and counted then.
        case Answer::already:
          if (!stopped && early_.erase(begin + i) == 0) ++report_.already;
          break;
        case Answer::busy:
          if (retry_busy)
            stop(i, Reason::busy);
          else if (!stopped)
            ++report_.dropped[reason_name(Reason::busy)];
          break;
        case Answer::dropped:
          // Its descendants were refused with it; from here on it is tried again, or given up.
          over = over || (!stopped && !retryable(answer.reason));
          stop(i, answer.reason);
          break;
      }
    }
    if (!stopped) page_ = begin + answers.size();
    if (over) refuse_rest(refused_);
  }

  void copy(size_t page, const ReserveAnswer& answer) {
    const View& view = *call_.view;
    const SlabCut cut = view.slots().cut(view.slots().slab_of(answer.slot));
    view.prefault(answer.slot, cut, true);
    regions_.pieces(page - first_, pieces_);
    std::byte* to = view.payload(answer.slot, cut) + shard_ * call_.row.shape.shard_stride();
    const uint64_t digest = gather_digest(to, pieces_, prompt_.key(page), shard_);
    seals_.push_back({answer.generation, digest, answer.slot, shard_});
  }

  void refuse_rest(Reason reason) {
    for (bool first = true; page_ < end_; ++page_) {
      if (early_.contains(page_)) continue;
      ++report_.dropped[reason_name(first ? reason : Reason::refused_tail)];
      first = false;
    }
  }

  static void pause() {
    const timespec pause{0, static_cast<long>(kRetryPauseNs)};
    ::nanosleep(&pause, nullptr);
  }

  Client& client_;
  const Client::Open& call_;
  Prompt& prompt_;
  size_t first_;
  const Regions& regions_;
  uint32_t shard_;
  uint64_t deadline_ns_;
  size_t page_, end_, window_;
  Reason refused_ = Reason::none;
  std::set<size_t> early_;  // copied although a page before them was refused
  std::vector<Seal> seals_;
  std::vector<Piece> pieces_;
  StoreReport report_;
};

StoreReport Client::store(const Key& namespace_id, Prompt& prompt, size_t first,
                          const Regions& regions, uint32_t shard, uint64_t timeout_ns) {
  const uint64_t deadline_ns = now_ns() + timeout_ns;
  const Open call = open(namespace_id, prompt, true, deadline_ns);
  const NamespaceShape& shape = call.row.shape;
  if (options_.read_only)
    throw Error(ErrorKind::usage, "read_only", "this client was connected read-only");
  if (shard >= shape.shards)
    throw Error(ErrorKind::usage, "bad_shard",
                "shard is " + std::to_string(shard) + ", this namespace has " +
                    std::to_string(shape.shards));
  if (regions.page_bytes() != shape.shard_bytes)
    throw Error(ErrorKind::usage, "bad_page_bytes",
                "a page of the buffer has " + std::to_string(regions.page_bytes()) +
                    " bytes, a page of the namespace " + std::to_string(shape.shard_bytes));
  StoreReport report = Storer(*this, call, prompt, first, regions, shard, deadline_ns).run();
  ClientSession& session = *call.session;
  uint64_t dropped = 0;
  for (const auto& [reason, pages] : report.dropped) dropped += pages;
  session.count(Counter::stores);
  session.count(Counter::pages_stored, report.stored);
  session.count(Counter::bytes_stored, report.stored * shape.shard_bytes);
  session.count(Counter::pages_already, report.already);
  session.count(Counter::pages_dropped, dropped);
  return report;
}

}  // namespace kvw
