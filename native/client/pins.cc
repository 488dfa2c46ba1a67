#include "client/pins.h"

#include <algorithm>
#include <string>

#include "base/atomics.h"
#include "base/error.h"
#include "base/sequence_point.h"

namespace kvw {

PinBatch::PinBatch(const View& view, ClientSession& session, uint64_t bytes_each)
    : view_(view),
      session_(session),
      bytes_each_(bytes_each),
      limit_bytes_(view.control().pin_limit_bytes.value.load()) {}

bool PinBatch::add(const EntryView& entry) {
  if (bytes_each_ != 0 && !session_.pinned_bytes().take(bytes_each_, limit_bytes_)) return false;
  const int place = session_.take_pin();
  if (place < 0) {
    session_.pinned_bytes().give_back(bytes_each_);
    return false;
  }
  session_.store_pin(place, slot_pin(entry.slot, entry.generation));
  pages_.push_back({place, entry});
  return true;
}

size_t PinBatch::hold() {
  // The one fence of the batch: the reclaimer's stands between its CLOSING and its scan, so one
  // of the two sees the other.
  full_fence();
  KVW_SEQUENCE_POINT("pin: stored");
  size_t held = 0;
  // What the daemon does not see of the session holds nothing.
  while (held < pages_.size() && !session_.lost() && view_.slot_in_range(pages_[held].entry.slot) &&
         view_.is_live(pages_[held].entry.slot, pages_[held].entry.generation))
    ++held;
  drop(held);
  return held;
}

void PinBatch::drop(size_t from) {
  for (size_t i = from; i < pages_.size(); ++i) session_.drop_pin(pages_[i].place);
  session_.pinned_bytes().give_back((pages_.size() - from) * bytes_each_);
  pages_.resize(from);
}

std::vector<PinnedPage> pin_pages(PromotionWindow& promotions, size_t page, size_t end,
                                  uint64_t bytes_each, Reason& why) {
  const ClientCall& call = promotions.call();
  PinBatch batch(call.view(), call.session(), bytes_each);
  while (page + batch.size() < end) {
    const auto entry = promotions.in_dram(page + batch.size(), end, why);
    if (!entry) break;
    KVW_SEQUENCE_POINT("pin: entry found");
    if (!batch.add(*entry)) {
      call.session().count(Counter::pins_refused);
      throw Error(ErrorKind::pin, "pin_budget",
                  "beside all that is pinned now a process may pin " +
                      std::to_string(batch.limit_bytes()) + " bytes, and a session " +
                      std::to_string(call.session().pin_capacity()) +
                      " pages; release pins, pin fewer pages at a time, or come again when others "
                      "have released theirs");
    }
  }
  batch.hold();
  return batch.take();
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
