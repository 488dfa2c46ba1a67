// Loads and pins: from DRAM without a call, from NVMe after asking for promotion, window by window,
// so that the first pages are usable while the rest are read.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "base/sequence_point.h"
#include "client/client.h"

namespace kvw {

namespace {

constexpr int kStaleTries = 4;
constexpr uint64_t kWaitSliceNs = 20 * kMillisecondNs;

uint64_t now_ns() { return system_clock().boot_ns(); }

}  // namespace

// One load or pin in progress.
class Loader {
 public:
  Loader(Client& client, const Client::Open& call, Prompt& prompt, uint64_t deadline_ns)
      : client_(client),
        call_(call),
        prompt_(prompt),
        deadline_ns_(deadline_ns),
        epoch_(call.view->clear_epoch(call.row.ordinal)) {
    // What the daemon reads at a time, so that one who loads alone is never told to ask again. And
    // never more than the tier can hold beside what others use: pages read too early are evicted
    // again before they are reached.
    const uint64_t limit =
        std::min(call.view->control().reserve_limit_bytes.value.load(), kPromoteBytes);
    window_ = std::clamp<uint64_t>(limit / call.row.shape.slot_bytes(), 1, kPromotePages);
  }

  // The entry of a page that is in DRAM now, promoting it if it must. Nothing: `why` says.
  std::optional<EntryView> in_dram(size_t page, size_t end, Reason& why) {
    for (;;) {
      const uint64_t tick = promoted_word().load(std::memory_order_acquire);
      const auto entry = call_.view->index().find(prompt_.key(page));
      if (!entry || entry->space != call_.row.ordinal || entry->clear_epoch < epoch_) {
        why = Reason::missing;
        return std::nullopt;
      }
      if (entry->in_dram()) {
        if (asked_until_ != 0 && asked_until_ < end && asked_until_ <= page + low_water_)
          ask_ahead(page, end, why);
        return entry;
      }
      if (now_ns() >= deadline_ns_) {
        why = Reason::timeout;
        return std::nullopt;
      }
      if (page >= asked_until_ || ask_again_) {
        if (!ask_ahead(page, end, why)) return std::nullopt;
        if (asked_until_ > page) continue;
      }
      wait(tick);
    }
  }

 private:
  std::atomic<uint64_t>& promoted_word() const {
    return const_cast<std::atomic<uint64_t>&>(call_.view->control().promoted.value);
  }

  // Asks for the pages of the window from `page` on that are only on NVMe and were not asked for
  // yet. The daemon takes the first of them that it has room for, down to none: what it did not
  // take is asked for when half of what it did is used up. False: `page` will not come.
  bool ask_ahead(size_t page, size_t end, Reason& why) {
    const size_t until = std::min<size_t>(end, page + window_);
    std::vector<Key> keys;
    std::vector<size_t> pages;
    for (size_t ahead = ask_again_ ? page : std::max(page, asked_until_); ahead < until; ++ahead) {
      const auto entry = call_.view->index().find(prompt_.key(ahead));
      if (!entry) break;
      if (entry->in_dram()) continue;
      keys.push_back(prompt_.key(ahead));
      pages.push_back(ahead);
    }
    ask_again_ = false;
    std::vector<PromoteAnswer> answers;
    if (!keys.empty() && !promote(keys, answers)) {
      why = Reason::unreachable;
      return false;
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

  // One round trip. False: the daemon does not answer, or not sensibly.
  bool promote(std::span<const Key> keys, std::vector<PromoteAnswer>& answers) {
    Writer message(MessageType::promote, client_.next_request());
    message.put_bytes(keys.data(), keys.size_bytes());
    message.set_counts(static_cast<uint32_t>(keys.size()));
    try {
      auto reply = client_.ask(message, MessageType::promoting, deadline_ns_);
      Reader body = reply.body();
      const auto* array = body.take_array<PromoteAnswer>(reply.head().first);
      if (!body.ok() || reply.head().first != keys.size()) return false;
      answers.assign(array, array + keys.size());
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  // Sleeps until a promotion ends somewhere, at most a slice: a daemon that died wakes nobody.
  void wait(uint64_t tick) {
    const uint64_t now = now_ns();
    const uint64_t slice = std::min(kWaitSliceNs, deadline_ns_ > now ? deadline_ns_ - now : 0);
    timespec timeout{static_cast<time_t>(slice / kSecondNs), static_cast<long>(slice % kSecondNs)};
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&promoted_word()), FUTEX_WAIT,
              static_cast<uint32_t>(tick), &timeout, nullptr, 0);
    if (promoted_word().load(std::memory_order_acquire) == tick) ask_again_ = true;
  }

  Client& client_;
  const Client::Open& call_;
  Prompt& prompt_;
  uint64_t deadline_ns_, epoch_, window_;
  size_t asked_until_ = 0;  // pages before it are in DRAM or on their way, as far as we were told
  size_t low_water_ = 0;    // so many of them left: ask for more
  bool ask_again_ = false;  // nothing has arrived for a while: what was asked for may be lost
};

LoadReport Client::load(const Key& namespace_id, Prompt& prompt, size_t first,
                        const Regions& regions, uint32_t shard, uint64_t timeout_ns) {
  const uint64_t deadline_ns = now_ns() + timeout_ns;
  const Open call = open(namespace_id, prompt, false, deadline_ns);
  const NamespaceShape& shape = call.row.shape;
  if (shard >= shape.shards)
    throw Error(ErrorKind::usage, "bad_shard",
                "shard is " + std::to_string(shard) + ", this namespace has " +
                    std::to_string(shape.shards));
  if (regions.page_bytes() != shape.shard_bytes)
    throw Error(ErrorKind::usage, "bad_page_bytes",
                "a page of the buffer has " + std::to_string(regions.page_bytes()) +
                    " bytes, a page of the namespace " + std::to_string(shape.shard_bytes));
  if (!regions.writable())
    throw Error(ErrorKind::usage, "read_only_buffer", "the buffer to load into is read-only");
  ClientSession& session = *call.session;
  const size_t end = std::min(prompt.pages(), first + regions.count());
  Loader loader(*this, call, prompt, deadline_ns);
  LoadReport report;
  std::vector<Piece> pieces;
  Reason why = Reason::none;
  size_t page = first;
  int stale = 0;
  while (page < end) {
    const auto entry = loader.in_dram(page, end, why);
    if (!entry) break;
    KVW_SEQUENCE_POINT("load: entry found");
    regions.pieces(page - first, pieces);
    const Expected expected{namespace_id,          prompt.key(page),      prompt.parent(page),
                            prompt.position(page), prompt.witness_kind(), prompt.witness(page)};
    const bool verify = options_.verify_always || (entry->flags & kEntryUnverified) != 0;
    if (call.view->slot_in_range(entry->slot))
      call.view->prefault(entry->slot,
                          call.view->slots().cut(call.view->slots().slab_of(entry->slot)), false);
    const LoadResult result = call.view->load(*entry, expected, shape, shard, pieces, verify);
    if (result == LoadResult::ok) {
      session.touch(*entry);
      ++page;
      stale = 0;
      continue;
    }
    if (result == LoadResult::mismatch) {
      session.count(Counter::load_mismatch);
      report_mismatch(*entry, *call.view, shard);
      // Another copy may exist on NVMe: the index says so after the report.
    } else {
      session.count(Counter::load_stale);
    }
    if (++stale >= kStaleTries) {
      why = result == LoadResult::mismatch ? Reason::mismatch : Reason::stale;
      break;
    }
  }
  report.pages = page - first;
  if (page < end && why != Reason::none) {
    report.reasons[reason_name(why)] = end - page;
    if (why == Reason::timeout) session.count(Counter::load_timeout);
  }
  session.count(Counter::loads);
  session.count(Counter::pages_loaded, report.pages);
  session.count(Counter::bytes_loaded, report.pages * shape.shard_bytes);
  return report;
}

std::unique_ptr<Pins> Client::pin(const Key& namespace_id, Prompt& prompt, size_t first,
                                  uint64_t timeout_ns) {
  constexpr size_t kBatch = 256;  // pages per fence
  const uint64_t deadline_ns = now_ns() + timeout_ns;
  const Open call = open(namespace_id, prompt, false, deadline_ns);
  auto pins = std::make_unique<Pins>(call.session, pinned_bytes_);
  pins->bytes_each_ = call.row.shape.slot_bytes();
  ClientSession& session = *call.session;
  const uint64_t limit = call.view->control().pin_limit_bytes.value.load();
  Loader loader(*this, call, prompt, deadline_ns);
  Reason why = Reason::none;
  bool more = true;
  for (size_t page = first; page < prompt.pages() && more;) {
    std::vector<std::pair<int, EntryView>> batch;
    for (; batch.size() < kBatch && page + batch.size() < prompt.pages();) {
      const auto entry = loader.in_dram(page + batch.size(), prompt.pages(), why);
      if (!entry) {
        more = false;
        break;
      }
      const bool over = pinned_bytes_.load() + (batch.size() + 1) * pins->bytes_each_ > limit;
      const int place = over ? -1 : session.take_pin();
      if (place < 0) {
        for (const auto& [taken, unused] : batch) session.drop_pin(taken);
        session.count(Counter::pins_refused);
        throw Error(ErrorKind::pin, "pin_budget",
                    "a session may pin " + std::to_string(limit) + " bytes and " +
                        std::to_string(kPinCapacity) +
                        " pages; release pins, or pin fewer pages at a time");
      }
      KVW_SEQUENCE_POINT("pin: entry found");
      session.store_pin(place, slot_pin(entry->slot, entry->generation));
      batch.emplace_back(place, *entry);
    }
    // The one fence of the batch: the reclaimer's stands between its CLOSING and its scan, so one
    // of the two sees the other.
    full_fence();
    KVW_SEQUENCE_POINT("pin: stored");
    size_t held = 0;
    while (held < batch.size() && call.view->slot_in_range(batch[held].second.slot) &&
           call.view->is_live(batch[held].second.slot, batch[held].second.generation))
      ++held;
    for (size_t i = 0; i < batch.size(); ++i) {
      if (i < held) {
        pins->places_.push_back(batch[i].first);
        session.touch(batch[i].second);
      } else {
        session.drop_pin(batch[i].first);
      }
    }
    pinned_bytes_ += held * pins->bytes_each_;
    if (held < batch.size()) break;
    page += held;
  }
  session.count(Counter::pins_taken, pins->places_.size());
  return pins;
}

}  // namespace kvw
