// What leaves by a clear, as an orphan, or because an operator says so.
#include <algorithm>

#include "base/error.h"
#include "warehouse/warehouse.h"

namespace kvw {

namespace {

constexpr uint64_t kEntriesPerStep = 16384;  // of the index that one step of a clear looks at
constexpr size_t kClearedPerStep = 512;      // and that it takes out

}  // namespace

void Warehouse::raise_epoch(uint64_t epoch) {
  if (epoch <= state_.epoch) return;
  state_.epoch = epoch;
  state_.arena.control().clear_epoch.value.store(epoch, std::memory_order_release);
  if (state_.log) state_.log->set_epoch(epoch);
}

void Warehouse::begin_clear(uint32_t ordinal, uint64_t epoch) {
  if (ordinal >= state_.spaces.size() || state_.spaces[ordinal].shape.shards == 0)
    throw Error(ErrorKind::usage, "namespace_unknown",
                "there is no namespace number " + std::to_string(ordinal));
  raise_epoch(epoch);
  raise_clear_epoch(ordinal, epoch);
}

void Warehouse::raise_clear_epoch(uint32_t ordinal, uint64_t epoch) {
  Space& space = state_.spaces[ordinal];
  if (epoch <= space.clear_epoch) return;
  // The store has what was cleared until it is told: nobody asks it for that.
  publish_remote(ordinal, std::nullopt);
  space.clear_epoch = epoch;
  // From here on no reader accepts an older page of it, whatever its index says.
  state_.arena.control().namespaces[ordinal].clear_epoch.store(epoch, std::memory_order_release);
}

uint64_t Warehouse::clear_some(uint32_t ordinal, uint64_t epoch, PageId& cursor) {
  const uint64_t end =
      std::min<uint64_t>(state_.catalog.index().entries(), cursor + kEntriesPerStep);
  std::vector<EntryView> found;
  for (; cursor < end && found.size() < kClearedPerStep; ++cursor)
    if (const auto view = state_.catalog.at(cursor);
        view && view->space == ordinal && view->clear_epoch < epoch)
      found.push_back(*view);
  if (cursor == state_.catalog.index().entries() && reservations_.give_up_cleared())
    cursor = kNoPage;
  removal_.evict_views(found, LeaveReason::cleared);
  for (const EntryView& view : found)
    if (!view.in_dram()) removal_.leave_nvme(view, LeaveReason::cleared);
  return found.size() + std::exchange(state_.spaces[ordinal].cleared_early, 0);
}

uint64_t Warehouse::clear(uint32_t ordinal, uint64_t epoch) {
  begin_clear(ordinal, epoch);
  uint64_t cleared = 0;
  for (PageId cursor = 0; cursor != kNoPage;) cleared += clear_some(ordinal, epoch, cursor);
  removal_.free_retired();
  while (removal_.goes_on()) removal_.go_on();
  return cleared;
}

uint64_t Warehouse::sweep(size_t limit) {
  std::vector<EntryView> found;
  const auto add = [&](PageId page) {
    // What a clear is yet to reach is left to it: it says how many pages it took.
    if (const auto view = state_.catalog.at(page); view && !state_.is_cleared(*view))
      found.push_back(*view);
  };
  const auto awaited = [this](const Key& key) { return state_.groups.open_slot(key) != kNoSlot; };
  for (const PageId page : state_.catalog.orphans_to_drop(limit, awaited)) add(page);
  // And what hangs below them, so that a long chain takes no more passes over the pins than one.
  for (size_t at = 0, looks = found.size(); at < found.size() && looks < limit; ++at)
    for (PageId child = state_.catalog.first_child(found[at].page);
         child != kNoPage && looks < limit; child = state_.catalog.next_sibling(child), ++looks)
      add(child);
  std::ranges::reverse(found);
  removal_.evict_views(found, LeaveReason::orphaned);
  uint64_t dropped = 0;
  for (const EntryView& view : found) {
    const auto rest = state_.catalog.find(view.key);
    if (rest && rest->in_dram()) continue;  // pinned: another time
    if (rest && rest->in_nvme()) removal_.leave_nvme(*rest, LeaveReason::orphaned);
    ++dropped;
  }
  return dropped;
}

OperatorEviction Warehouse::begin_eviction(int ordinal, uint64_t pages, std::string_view tiers) {
  uses_.apply_touches();
  return {state_, removal_, quarantine_, ordinal, pages, tiers};
}

std::vector<Tombstone> Warehouse::evict(int ordinal, uint64_t pages, std::string_view tiers,
                                        uint64_t& left) {
  OperatorEviction eviction = begin_eviction(ordinal, pages, tiers);
  while (eviction.step()) continue;
  left = eviction.left();
  return eviction.take_tombstones();
}

}  // namespace kvw
