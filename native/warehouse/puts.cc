#include "warehouse/puts.h"

#include <algorithm>
#include <utility>

#include "warehouse/state.h"

namespace kvw {

namespace {

constexpr size_t kLooksPerStep = 1024;  // at runs that may be of no use any more

}  // namespace

const char* put_drop_name(PutDrop why) {
  static constexpr const char* kNames[] = {"queue_full", "too_large", "not_in_dram", "cleared",
                                           "already"};
  static_assert(std::size(kNames) == kPutDrops);
  return kNames[static_cast<size_t>(why)];
}

bool Puts::open_filter() {
  filter_ = PresenceReader::open(state_.presence_path(), state_.options.remote_fleet);
  return filter_.has_value();
}

// By the filter's own idea of today: it is the store's clock.
Puts::Seen Puts::look(const Key& key, uint64_t epoch, std::optional<uint32_t>& day) const {
  if (!filter_) return Seen::nowhere;
  const Presence::Look look = filter_->table().look(epoch);
  day = look.day_of(key);
  if (!day) return Seen::nowhere;
  return *day >= look.today() ? Seen::today : Seen::earlier;
}

void Puts::used(const EntryView& view, bool again) {
  offer(view, again || state_.options.remote_write == RemoteWrite::all);
}

void Puts::sealed(const EntryView& view) {
  if (state_.options.remote_write == RemoteWrite::all) offer(view, true);
}

// `anew`: also where the store has it not.
void Puts::offer(const EntryView& view, bool anew) {
  const Space& space = state_.spaces[view.space];
  const uint32_t pages = remote::object_pages(space.shape);
  if (pages == 0 && anew) drop(PutDrop::too_large);
  if (pages == 0 || (state_.catalog.node(view.page).position + 1) % pages != 0) return;
  const auto known = known_.find(view.key);
  if (known != known_.end() && known->second != Known::under_way) return;
  std::optional<uint32_t> day;
  const Seen seen = space.remote_epoch ? look(view.key, *space.remote_epoch, day) : Seen::nowhere;
  if (seen == Seen::today || (seen == Seen::nowhere && !anew)) return;
  if (known != known_.end()) {
    known->second = Known::under_way_and_offered;
    return;
  }
  // A clear may be owed to the store for long: what waits for it leaves others half of the places.
  const size_t most = space.remote_epoch ? kQueued : kQueued / 2;
  if (queue_.size() >= most) return drop(PutDrop::queue_full);
  queue_.push_back(view.key);
  known_.emplace(view.key, Known::queued);
  ++offered_;
  if (seen == Seen::earlier) ++refreshes_;
}

std::optional<remote::RunToPut> Puts::next() {
  for (size_t looks = std::min(queue_.size(), kLooksPerStep); looks > 0; --looks) {
    const Key key = queue_.front();
    queue_.pop_front();
    if (waits_for_epoch(key)) {
      queue_.push_back(key);
      continue;
    }
    if (auto run = run_of(key)) {
      known_[key] = Known::under_way;
      return run;
    }
    known_.erase(key);
  }
  return std::nullopt;
}

void Puts::done(const Key& key) {
  const auto known = known_.extract(key);
  if (known.empty() || known.mapped() != Known::under_way_and_offered) return;
  const auto view = state_.catalog.find(key);
  if (view && !state_.is_cleared(*view)) offer(*view, true);
}

// Its name is not known before the epoch is: the worker has just begun, or a clear is on its way to
// the store. What was cleared waits for nothing.
bool Puts::waits_for_epoch(const Key& key) const {
  const auto view = state_.catalog.find(key);
  return view && !state_.is_cleared(*view) && !state_.spaces[view->space].remote_epoch;
}

std::optional<remote::RunToPut> Puts::run_of(const Key& key) {
  remote::RunToPut run;
  const auto pass_over = [this](PutDrop why) {
    drop(why);
    return std::nullopt;
  };
  const auto view = state_.catalog.find(key);
  if (view && state_.is_cleared(*view)) return pass_over(PutDrop::cleared);
  if (!view || !view->in_dram()) return pass_over(PutDrop::not_in_dram);
  const Space& space = state_.spaces[view->space];
  if (look(key, *space.remote_epoch, run.day) == Seen::today) return pass_over(PutDrop::already);
  const NamespaceShape& shape = space.shape;
  const auto kind = static_cast<WitnessKind>(state_.pool.meta(view->slot)->witness_kind);
  run.namespace_id = shape.id;
  run.key = key;
  run.pages = remote::object_pages(shape);
  run.first_position = state_.catalog.node(view->page).position + 1 - run.pages;
  run.epoch = *space.remote_epoch;
  run.record_bytes = remote::record_blocks(shape, kind) * uint64_t{kBlockBytes};
  return run;
}

PutsStatus Puts::status() const {
  return {queue_.size(), known_.size() - queue_.size(), offered_, refreshes_, dropped_};
}

}  // namespace kvw
