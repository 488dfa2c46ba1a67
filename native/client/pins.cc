#include "client/pins.h"

#include <algorithm>
#include <string>

#include "base/atomics.h"
#include "base/error.h"
#include "base/sequence_point.h"

namespace kvw {

std::vector<PinnedPage> pin_pages(PromotionWindow& promotions, size_t page, size_t end,
                                  uint64_t bytes_each, Reason& why) {
  const ClientCall& call = promotions.call();
  ClientSession& session = call.session();
  const uint64_t limit_bytes = call.view().control().pin_limit_bytes.value.load();
  std::vector<PinnedPage> batch;
  const auto release = [&](size_t from) {
    for (size_t i = from; i < batch.size(); ++i) session.drop_pin(batch[i].place);
    session.pinned_bytes().give_back((batch.size() - from) * bytes_each);
    batch.resize(from);
  };
  for (; page + batch.size() < end;) {
    const auto entry = promotions.in_dram(page + batch.size(), end, why);
    if (!entry) break;
    const bool room = bytes_each == 0 || session.pinned_bytes().take(bytes_each, limit_bytes);
    const int place = room ? session.take_pin() : -1;
    if (place < 0) {
      if (room) session.pinned_bytes().give_back(bytes_each);
      release(0);
      session.count(Counter::pins_refused);
      throw Error(ErrorKind::pin, "pin_budget",
                  "beside all that is pinned now a process may pin " + std::to_string(limit_bytes) +
                      " bytes, and a session " + std::to_string(session.pin_capacity()) +
                      " pages; release pins, pin fewer pages at a time, or come again when others "
                      "have released theirs");
    }
    KVW_SEQUENCE_POINT("pin: entry found");
    session.store_pin(place, slot_pin(entry->slot, entry->generation));
    batch.push_back({place, *entry});
  }
  // The one fence of the batch: the reclaimer's stands between its CLOSING and its scan, so one
  // of the two sees the other.
  full_fence();
  KVW_SEQUENCE_POINT("pin: stored");
  size_t held = 0;
  // What the daemon does not see of the session holds nothing.
  while (held < batch.size() && !session.lost() &&
         call.view().slot_in_range(batch[held].entry.slot) &&
         call.view().is_live(batch[held].entry.slot, batch[held].entry.generation))
    ++held;
  release(held);
  return batch;
}

void Pins::take(const ClientCall& call, size_t first) {
  constexpr size_t kBatch = 256;  // pages per fence
  PromotionWindow promotions(call);
  Reason why = Reason::none;
  for (size_t page = first; page < call.prompt.pages();) {
    const size_t end = std::min(call.prompt.pages(), page + kBatch);
    const auto batch = pin_pages(promotions, page, end, bytes_each_, why);
    for (const PinnedPage& each : batch) {
      places_.push_back(each.place);
      session_->touch(each.entry);
    }
    page += batch.size();
    if (page < end) break;
  }
  session_->count(Counter::pins_taken, places_.size());
}

void Pins::release() {
  if (session_ != nullptr && forks_ == fork_count()) {
    for (const int place : places_) session_->drop_pin(place);
    session_->pinned_bytes().give_back(places_.size() * bytes_each_);
  }
  places_.clear();
  session_.reset();
}

}  // namespace kvw
