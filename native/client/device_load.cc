#include "client/device_load.h"

#include <algorithm>

#include "base/error.h"
#include "base/sequence_point.h"

namespace kvw {

DeviceLoad::DeviceLoad(const ClientCall& call, Gpus& gpus, size_t first, const Regions& regions,
                       uint32_t shard)
    : call_(call),
      first_(first),
      regions_(regions),
      shard_(shard),
      end_(std::min(call.prompt.pages(), first + regions.count())),
      next_(first),
      good_(first),
      promotions_(call),
      gpu_(gpus.use(regions.device()->ordinal, call.view())),
      mover_(gpu_.device->borrow(call.deadline_ns)) {
  gpu_.hbm = call.daemon->hbm.of(gpu_.device, call.link, call.deadline_ns);
}

DeviceLoad::~DeviceLoad() {
  bool all = true;
  for (Flight& flight : flights_) {
    const bool done = flight.batch->settle();
    if (done) drop(flight.held);
    all = all && done;
  }
  if (!all) Gpus::keep(gpu_, call_.daemon->session);
}

LoadReport DeviceLoad::run() {
  // Nothing is written before the engine is done with these pages; waited for here and not on the
  // stream, so that the wait has an end.
  if (mover_ == nullptr || !gpu_.device->wait(regions_.device()->ready, call_.deadline_ns))
    why_ = Reason::timeout;
  for (;;) {
    // Kernels of two batches share the device and end together, which would leave it idle until
    // the next is queued.
    const size_t most = in_hbm(1) == 0 ? gpu::Mover::kBatchesOnBus : gpu::Mover::kBatches;
    const bool may = flights_.size() < most && next_ < end_ && why_ == Reason::none;
    if (may && launch()) continue;
    if (!flights_.empty()) {
      land();
    } else if (next_ == end_ || why_ != Reason::none) {
      break;
    }
  }
  LoadReport report;
  report.pages = good_ - first_;
  report.fetched = promotions_.fetched(first_, good_);
  if (good_ < end_) report.reasons[reason_name(why_)] = end_ - good_;
  return report;
}

// False: no page could be had now.
bool DeviceLoad::launch() {
  gpu::Batch& batch = mover_->batch(launched_);
  batch.begin(gpu::Way::to_device, call_.shape().shard_bytes, gpu_.arena.get());
  // Pages that are on the device need no room beside it, so that many of them fit. Until the first
  // batch is queued the device rests, so that one is small.
  const size_t most = launched_ == 0 ? batch.device_room() / 4 : batch.device_room();
  const size_t end = std::min(end_, next_ + std::max(batch.room(), in_hbm(most)));
  Flight flight{&batch, next_, pin_pages(promotions_, next_, end, 0, why_), {}, {}};
  const size_t held = flight.held.size();
  const bool whole = fill(flight);
  if (!whole || (next_ + held < end && why_ == Reason::none)) {
    // A slot was reused between the index and the pin.
    call_.session().count(Counter::load_stale);
    why_ = ++stale_ >= kStaleTries ? Reason::stale : Reason::none;
  } else if (flight.held.size() < held) {
    why_ = Reason::none;  // they did not fit; the rest follows
  }
  if (flight.held.empty()) return false;
  next_ += flight.held.size();
  ++launched_;
  flights_.push_back(std::move(flight));
  batch.start();
  KVW_SEQUENCE_POINT("device load: under way");
  return true;
}

// How many pages from `next_` on seem to be in HBM, one after the other.
size_t DeviceLoad::in_hbm(size_t most) const {
  size_t pages = 0;
  if (gpu_.hbm == nullptr || !trust_hbm_) return 0;
  for (; pages < most && next_ + pages < end_; ++pages) {
    const auto entry = call_.find(next_ + pages);
    if (!entry || !entry->in_dram() || !gpu_.hbm->hints(entry->slot, entry->generation)) break;
  }
  return pages;
}

// Adds the pages that are held, and lets go of those that do not fit. False: one is another page.
bool DeviceLoad::fill(Flight& flight) {
  std::vector<Piece> pieces;
  bool same = true;
  size_t added = 0;
  for (; added < flight.held.size(); ++added) {
    const size_t page = flight.first + added;
    const EntryView& entry = flight.held[added].entry;
    const auto found = call_.view().find_pinned(entry, call_.expected(page), call_.shape(), shard_);
    same = found.has_value();
    if (!same) break;
    regions_.pieces(page - first_, pieces);
    const auto copy = gpu_.hbm != nullptr && trust_hbm_
                          ? gpu_.hbm->find(entry.slot, entry.generation)
                          : std::nullopt;
    const bool fits =
        copy ? flight.batch->add_from_device(pieces, *copy + shard_ * call_.shape().shard_stride())
             : flight.batch->add(pieces, found->payload);
    if (!fits) break;
    flight.digests.push_back(found->digest);
    flight.from_hbm.push_back(copy.has_value());
  }
  std::vector<PinnedPage> rest(flight.held.begin() + static_cast<ptrdiff_t>(added),
                               flight.held.end());
  flight.held.resize(added);
  drop(rest);
  return same;
}

void DeviceLoad::land() {
  Flight& flight = flights_.front();
  flight.batch->finish();
  for (size_t i = 0; i < flight.held.size(); ++i) {
    const EntryView entry = flight.held[i].entry;
    if (!verified(flight, i)) {
      const bool copy = flight.from_hbm[i];
      drain();
      call_.report_mismatch(entry, shard_);
      return copy ? doubted() : failed(entry);
    }
    call_.session().touch(entry);
    if (flight.from_hbm[i]) call_.session().count(Counter::pages_loaded_hbm);
    ++good_;
    stale_ = 0;
  }
  drop(flight.held);
  flights_.pop_front();
}

bool DeviceLoad::verified(const Flight& flight, size_t number) {
  return flight.batch->digest(number, call_.prompt.key(good_), shard_) == flight.digests[number];
}

// What is in DRAM was not looked at yet.
void DeviceLoad::doubted() {
  call_.session().count(Counter::load_mismatch_hbm);
  trust_hbm_ = false;
  next_ = good_;
  why_ = Reason::none;
}

void DeviceLoad::failed(const EntryView& entry) {
  call_.session().count(Counter::load_mismatch);
  next_ = good_;
  const bool again = ++stale_ < kStaleTries && promotions_.has_other_copy(entry);
  why_ = again ? Reason::none : Reason::mismatch;
}

// Ends all flights, whatever came of them.
void DeviceLoad::drain() {
  while (!flights_.empty()) {
    flights_.front().batch->finish();
    drop(flights_.front().held);
    flights_.pop_front();
  }
}

void DeviceLoad::drop(std::vector<PinnedPage>& held) {
  for (const PinnedPage& each : held) call_.session().drop_pin(each.place);
  held.clear();
}

}  // namespace kvw
