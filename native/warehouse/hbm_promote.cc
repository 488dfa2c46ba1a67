// Promotion into HBM: what is wanted, where it goes, and what makes room for it or for an operator.
#include <algorithm>
#include <array>
#include <utility>

#include "warehouse/hbm.h"
#include "warehouse/state.h"

namespace kvw {

namespace {

constexpr size_t kVictims = 64;     // dropped for one scan of the pins
constexpr size_t kChain = 1 << 16;  // ancestors that are looked at for one page

}  // namespace

// The page, and before it what of its prefix is not in HBM. A prefix with a gap in DRAM is not
// worth a place.
void HbmTier::want(const EntryView& view) {
  if (queue_.size() >= kWanted) return;
  std::vector<EntryView> chain;
  for (EntryView at = view;;) {
    if (copies_.contains(at.slot) || queued_.contains(at.slot)) break;
    chain.push_back(at);
    const PageId parent = state_.catalog.parent(at.page);
    if (parent == kNoPage) break;
    const auto above = state_.catalog.at(parent);
    if (!above || !above->in_dram() || chain.size() == kChain) return;
    at = *above;
  }
  for (auto each = chain.rbegin(); each != chain.rend() && queue_.size() < kWanted; ++each) {
    queue_.push_back({each->slot, state_.pool.load(each->slot).generation});
    queued_.insert(each->slot);
  }
}

std::optional<EntryView> HbmTier::still_wanted(const Wanted& wanted) const {
  const SlotWord word = state_.pool.load(wanted.slot);
  if (word.state != SlotState::live || word.generation != wanted.generation ||
      copies_.contains(wanted.slot))
    return std::nullopt;
  const auto view = state_.catalog.at(state_.pool.page_at(wanted.slot));
  if (!view || !view->in_dram() || view->slot != wanted.slot || state_.is_cleared(*view) ||
      !state_.has_good_header(wanted.slot))
    return std::nullopt;
  const bool child = state_.catalog.parent(view->page) != kNoPage;
  if (child && !copies_.contains(parent_of(*view))) return std::nullopt;
  return view;
}

void HbmTier::pump() {
  if (!serving() || under_way_ != 0) return;
  std::vector<HbmPage> batch;
  uint64_t bytes = 0;
  for (; !queue_.empty() && bytes < HbmCopier::kBatchBytes; queue_.pop_front()) {
    const Wanted wanted = queue_.front();
    queued_.erase(wanted.slot);
    const auto view = still_wanted(wanted);
    if (!view) continue;
    const uint64_t page_bytes = state_.spaces[view->space].shape.slot_bytes();
    const auto offset = place_for(*view, page_bytes);
    if (!offset) continue;
    batch.push_back(page_of(*view, wanted.generation, *offset));
    copies_[wanted.slot] = {wanted.generation, *offset, page_bytes};
    const SlotId parent = parent_of(*view);
    policy_of(wanted.slot)
        .inserted(
            state_.pool.resident(wanted.slot),
            parent == kNoSlot || &state_.pool.class_of(parent) != &state_.pool.class_of(wanted.slot)
                ? kNoPage
                : state_.pool.resident(parent));
    bytes += page_bytes;
  }
  if (batch.empty()) return;
  under_way_ = batch.size();
  copier_.submit(std::move(batch));
}

HbmPage HbmTier::page_of(const EntryView& view, uint64_t generation, uint64_t offset) const {
  const SlotMeta* meta = state_.pool.meta(view.slot);
  const NamespaceShape& shape = state_.spaces[view.space].shape;
  HbmPage page;
  page.slot = view.slot;
  page.generation = generation;
  page.from = state_.pool.payload(view.slot);
  page.offset = offset;
  page.key = view.key;
  page.shard_bytes = shape.shard_bytes;
  page.digests.assign(digests_of(meta), digests_of(meta) + shape.shards);
  return page;
}

// A free place, or one of colder pages.
std::optional<uint64_t> HbmTier::place_for(const EntryView& view, uint64_t bytes) {
  if (const auto offset = places_->take(bytes)) return offset;
  if (bytes > places_->slab_bytes()) return std::nullopt;
  if (places_->slabs_of(bytes) == 0)
    take_slab();
  else if (demote(view, parent_of(view)) == 0)
    return std::nullopt;
  reap();
  return places_->take(bytes);
}

// Some of the coldest copies of the candidate's size, those that are colder than it.
size_t HbmTier::demote(const EntryView& candidate, SlotId parent) {
  const SlotClass& cls = state_.pool.class_of(candidate.slot);
  const uint64_t bytes = cls.layout.slot_bytes();
  // What still waits for its readers is room that is coming: no more is dropped than is wanted.
  const size_t coming = static_cast<size_t>(std::ranges::count_if(
      leaving_, [bytes](const Leaving& each) { return each.bytes == bytes; }));
  const size_t wish = std::min(kVictims, queue_.size() + 1);
  if (coming >= wish) return 0;
  const ExemptIf exempt([&](PageId resident) {
    const SlotId slot = state_.pool.slot_of(cls, resident);
    const auto copy = copies_.find(slot);
    return slot == parent || copy == copies_.end() || !copy->second.published;
  });
  std::array<PageId, kVictims> residents;
  const size_t found =
      policy_of(candidate.slot).victims(std::span(residents).first(wish - coming), exempt);
  const uint64_t heat = state_.heat(candidate);
  size_t dropped = 0;
  for (size_t i = 0; i < found; ++i) {
    const SlotId slot = state_.pool.slot_of(cls, residents[i]);
    const auto view = state_.catalog.at(state_.pool.page_at(slot));
    if (view && state_.heat(*view) >= heat) break;
    drop(slot, HbmLeaveReason::demoted);
    ++dropped;
  }
  return dropped;
}

uint64_t HbmTier::evict(int ordinal, uint64_t pages) {
  if (!serving()) return 0;
  const Pool& pool = state_.pool;
  struct Class {
    const SlotClass* cls;
    EvictionPolicy* policy;
    SlotId coldest = kNoSlot;
  };
  std::vector<Class> classes;
  classes.reserve(policies_.size());
  for (const auto& [cls, policy] : policies_) classes.push_back({cls, policy.get()});
  const auto view_in = [&](SlotId slot) { return state_.catalog.at(state_.pool.page_at(slot)); };
  uint64_t dropped = 0;
  for (; dropped < pages; ++dropped) {
    std::erase_if(classes, [&](Class& each) {
      if (each.coldest != kNoSlot) return false;
      const ExemptIf exempt([&](PageId resident) {
        const SlotId slot = pool.slot_of(*each.cls, resident);
        const auto view = view_in(slot);
        return !has(slot) || !view || (ordinal >= 0 && view->space != ordinal);
      });
      std::array<PageId, 1> resident;
      if (each.policy->victims(resident, exempt) == 0) return true;
      each.coldest = pool.slot_of(*each.cls, resident[0]);
      return false;
    });
    const auto heat = [&](const Class& each) { return state_.heat(*view_in(each.coldest)); };
    const auto next = std::ranges::min_element(classes, {}, heat);
    if (next == classes.end()) break;
    drop(std::exchange(next->coldest, kNoSlot), HbmLeaveReason::operator_);
  }
  reap();
  return dropped;
}

void HbmTier::take_slab() {
  const auto slab = places_->close_one();
  if (!slab) return;
  std::vector<SlotId> there;
  for (const auto& [slot, copy] : copies_)
    if (copy.published && places_->slab_of(copy.offset) == *slab) there.push_back(slot);
  for (const SlotId slot : there) drop_chain(slot);
}

// With what is below it, wherever that is: so that no copy stays without its parent's.
void HbmTier::drop_chain(SlotId slot) {
  std::vector<SlotId> slots{slot};
  while (!slots.empty()) {
    const SlotId next = slots.back();
    slots.pop_back();
    if (!has(next)) continue;
    const PageId page = state_.pool.page_at(next);
    drop(next, HbmLeaveReason::rebalanced);
    for (PageId child = state_.catalog.first_child(page); child != kNoPage;
         child = state_.catalog.next_sibling(child))
      if (const auto view = state_.catalog.at(child); view && view->in_dram())
        slots.push_back(view->slot);
  }
}

}  // namespace kvw
