#include "warehouse/promotions.h"

#include <algorithm>
#include <cstring>

namespace kvw {

namespace {

constexpr uint64_t kReadRetryNs = kSecondNs;  // a record that failed to read is left alone so long
constexpr uint64_t kUnreadableNs = 60 * kSecondNs;  // and taken for lost when it is stored again
constexpr size_t kReadFailuresKept = 4096;
constexpr size_t kAhead = 4;  // pages whose lines are on their way to the cache meanwhile
static_assert(kPromotePages <= nvme::kMaxReads);

}  // namespace

Promotions::Promotions(WarehouseState& state, Eviction& eviction, Quarantine& quarantine)
    : state_(state),
      eviction_(eviction),
      quarantine_(quarantine),
      limit_bytes_(std::min(state.arena.bytes() / 8, kPromoteBytes)) {}

void Promotions::promote(std::span<const Key> keys, std::vector<PromoteAnswer>& answers) {
  state_.sessions.pins_are_old();  // as for an exchange
  bool full = false;
  for (size_t at = 0; at < keys.size(); ++at) {
    const Key& key = keys[at];
    if (at + kAhead < keys.size()) state_.catalog.prefetch(keys[at + kAhead]);
    const auto view = state_.catalog.find(key);
    if (!view || state_.is_cleared(*view)) {
      answers.push_back(PromoteAnswer::missing);
    } else if (view->in_dram()) {
      answers.push_back(PromoteAnswer::in_dram);
    } else if (promoting_.contains(key)) {
      answers.push_back(PromoteAnswer::reading);
    } else if (failed_lately(key) || !state_.log) {
      answers.push_back(PromoteAnswer::failed);
    } else {
      const Space& space = state_.spaces[view->space];
      const uint64_t bytes = space.shape.slot_bytes();
      full = full || (promoting_bytes_ != 0 && promoting_bytes_ + bytes > limit_bytes_);
      SlotId slot = kNoSlot;
      if (!full) {
        SlotId spare = kNoSlot;
        const auto above = state_.catalog.at(state_.catalog.parent(view->page));
        if (above && above->in_dram()) spare = above->slot;
        state_.pool.prefetch_free(*space.cls, kAhead);
        slot = eviction_.take_slot(*space.cls, SlotState::filling, spare);
      }
      if (slot != kNoSlot) {  // no writers of this generation: said before the device may write
        state_.pool.meta(slot)->granted.store(0);
        state_.pool.meta(slot)->key = key;
      }
      // Taking a slot may have evicted or reclaimed the page itself: look again.
      const auto again = state_.catalog.find(key);
      const bool there = again && again->in_nvme() && !again->in_dram();
      if (slot == kNoSlot || !there ||
          !state_.log->read(slot, again->extent, key, state_.pool.payload(slot))) {
        if (slot != kNoSlot) drop_filling(slot, state_.pool.load(slot).generation);
        full = full || there;
        answers.push_back(there ? PromoteAnswer::later : PromoteAnswer::missing);
        continue;
      }
      promoting_.emplace(key, again->extent);
      filling_.emplace(slot, Filling{key, state_.pool.load(slot).generation});
      promoting_bytes_ += bytes;
      answers.push_back(PromoteAnswer::reading);
    }
  }
}

bool Promotions::failed_lately(const Key& key) const {
  const auto failed = read_failures_.find(key);
  return failed != read_failures_.end() && state_.clock.boot_ns() < failed->second + kReadRetryNs;
}

bool Promotions::is_unreadable(PageId page) const {
  const auto view = state_.catalog.at(page);
  return !view->in_dram() && read_failures_.contains(view->key);
}

void Promotions::store_anew(const EntryView& page) {
  quarantine_.nvme(page, "io_error", true);
  read_failures_.erase(page.key);
}

// Whoever computes a page instead of loading it stores it within a minute.
void Promotions::tick() {
  std::erase_if(read_failures_, [now = state_.clock.boot_ns()](const auto& failed) {
    return now >= failed.second + kUnreadableNs;
  });
}

void Promotions::read(SlotId slot, nvme::ReadResult result, PageFacts&& facts) {
  state_.pool.prefetch(slot);
  const auto [key, generation] = filling_.extract(slot).mapped();
  state_.catalog.prefetch_write(key);
  const nvme::Extent read = promoting_.extract(key).mapped();
  promoting_bytes_ -= state_.pool.layout_of(slot).slot_bytes();
  const auto view = state_.catalog.find(key);
  const bool wanted = view && !view->in_dram();
  const bool usable =
      result == nvme::ReadResult::ok && wanted && state_.fits_namespace(*view, facts);
  if (!usable) {
    drop_filling(slot, generation);
    // Only the copy that was read is judged: a clear and a new store may have come between.
    const bool same = wanted && view->extent == read && !state_.is_cleared(*view);
    if (same && result == nvme::ReadResult::io_error) {
      if (read_failures_.size() < kReadFailuresKept) read_failures_[key] = state_.clock.boot_ns();
    } else if (same) {
      quarantine_.nvme(*view, result == nvme::ReadResult::ok ? "namespace" : "mismatch", false);
    }
    state_.waiters.note();
    return;
  }
  SlotMeta* meta = state_.pool.meta(slot);
  meta->namespace_id = facts.namespace_id;
  meta->key = key;
  meta->parent = facts.parent;
  meta->clear_epoch = facts.clear_epoch;
  meta->stored_at_ns = facts.stored_at_ns;
  meta->shard_bytes = facts.shard_bytes;
  meta->position = facts.position;
  meta->shards = facts.shards;
  meta->page_tokens = facts.page_tokens;
  meta->witness_kind = static_cast<uint32_t>(facts.witness_kind);
  meta->witness_bytes = static_cast<uint32_t>(facts.witness.size());
  meta->spare = 0;
  std::copy(facts.digests.begin(), facts.digests.end(), digests_of(meta));
  std::fill_n(owners_of(meta), facts.shards, 0);
  std::memcpy(witness_of(meta), facts.witness.data(), facts.witness.size());
  meta->granted.store(0);
  meta->settled.store(0);
  meta->checksum = meta_checksum(*meta, generation);
  // The device wrote the payload through the kernel; the release store orders it for readers.
  state_.pool.publish(slot, generation);
  EntryView entry = *view;
  entry.flags = static_cast<uint16_t>((entry.flags | kEntryDram) & ~kEntryUnverified);
  entry.slot = slot;
  entry.generation = static_cast<uint32_t>(generation);
  state_.catalog.update(entry);
  state_.make_resident(slot, entry);
  state_.catalog.node(entry.page).used = true;
  ++pages_promoted_;
  read_failures_.erase(key);
  state_.waiters.note();
}

void Promotions::drop_filling(SlotId slot, uint64_t generation) {
  state_.pool.to_limbo(slot, generation);
  state_.pool.end_limbo(slot, generation);
}

}  // namespace kvw
