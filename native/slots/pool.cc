#include "slots/pool.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/atomics.h"
#include "base/error.h"
#include "base/sequence_point.h"

namespace kvw {

namespace {

// Of slots that are added at a time: some hundreds, where pages have few tokens.
constexpr uint64_t kAddedMetaBytes = 128 << 10;

}  // namespace

uint64_t SlotClass::total() const {
  uint64_t count = 0;
  for (const uint32_t slab : slabs) count += slab == UINT32_MAX ? 0 : slots_per_slab;
  return count;
}

Pool::Pool(Arena& arena, std::string_view policy_name)
    : arena_(arena),
      slots_(arena.slots()),
      policy_name_(policy_name),
      slab_class_(slots_.header().slab_max, kNoClass),
      slab_place_(slots_.header().slab_max, 0),
      pages_(slots_.header().slab_max),
      added_in_(slots_.header().slab_max, 0) {
  make_policy(policy_name_, 0);  // an unknown name is refused at start, not at the first page
}

SlotClass& Pool::class_of(const NamespaceShape& shape) {
  const uint64_t slot_bytes = shape.slot_bytes();
  const uint64_t meta_bytes = meta_bytes_of(shape);
  if (slot_bytes > arena_.slab_bytes())
    throw Error(ErrorKind::usage, "page_too_large",
                "a page of " + std::to_string(shape.shards) + " shards of " +
                    std::to_string(shape.shard_bytes) + " bytes needs a slot of " +
                    std::to_string(slot_bytes) + " bytes, but a slab has " +
                    std::to_string(arena_.slab_bytes()) +
                    "; use fewer tokens per page, or a larger --dram and a new --arena-dir: an "
                    "arena keeps its slabs");
  SlabLayout layout;
  layout.slot_blocks = static_cast<uint32_t>(slot_bytes / kBlockBytes);
  layout.meta_units = static_cast<uint16_t>(meta_bytes / 64);
  layout.populated = 1;
  if (slots_.slots_in(layout) == 0)
    throw Error(ErrorKind::usage, "page_too_large",
                "the metadata of a page (" + std::to_string(meta_bytes) +
                    " bytes) fits no slab of this arena; use fewer tokens per page, or a larger "
                    "--dram");
  return add_class(layout);
}

SlotClass& Pool::add_class(const SlabLayout& layout) {
  SlotClass* made = nullptr;  // in the place of one that nobody has any more
  for (const auto& cls : classes_) {
    if (cls->layout.slot_blocks == layout.slot_blocks &&
        cls->layout.meta_units == layout.meta_units) {
      cls->unused = false;
      return *cls;
    }
    if (cls->unused && cls->total() == 0) made = cls.get();
  }
  SlotClass own;
  own.layout = layout;
  own.slots_per_slab = slots_.slots_in(layout);
  own.free = FreeSlots(slots_.header().slab_max, own.slots_per_slab);
  // Address space for all pages that the class may have: a table that doubles moves, and all wait.
  own.policy = make_policy(policy_name_, size_t{own.slots_per_slab} * arena_.slab_count());
  own.policy->share_clock(policy_clock_);
  if (made == nullptr) made = classes_.emplace_back(std::make_unique<SlotClass>()).get();
  *made = std::move(own);
  return *made;
}

void Pool::slab_ready(uint32_t slab) {
  ++populated_;
  SlabLayout layout;
  layout.populated = 1;
  slots_.layout_word(slab).store(layout.pack(), std::memory_order_release);
  ready_.push_back(slab);
}

SlotClass& Pool::assign(uint32_t slab, const SlotClass& wanted) {
  uint32_t number = 0;
  while (classes_[number].get() != &wanted) ++number;
  SlotClass& cls = *classes_[number];
  size_t place = 0;
  while (place < cls.slabs.size() && cls.slabs[place] != UINT32_MAX) ++place;
  if (place == cls.slabs.size())
    cls.slabs.push_back(slab);
  else
    cls.slabs[place] = slab;
  slab_class_[slab] = number;
  slab_place_[slab] = static_cast<uint32_t>(place);
  pages_[slab].assign(cls.slots_per_slab, kNoPage);
  return cls;
}

uint32_t Pool::added_at_a_time(const SlotClass& cls) const {
  return static_cast<uint32_t>(std::max<uint64_t>(kAddedMetaBytes / cls.layout.meta_bytes(), 1));
}

bool Pool::can_cut(uint32_t slab, const SlotClass& cls) {
  growth_errno_ =
      arena_.back_metadata(slab, cls.layout, 0, std::min(cls.slots_per_slab, added_at_a_time(cls)));
  return growth_errno_ == 0;
}

bool Pool::grow(SlotClass& cls) {
  if (cls.uncut.empty()) return !ready_.empty() && add_some(cls, ready_.front());
  if (add_some(cls, cls.uncut.front())) return true;
  const int err = growth_errno_;
  const bool grown = !ready_.empty() && add_some(cls, ready_.front());
  growth_errno_ = err;
  return grown;
}

bool Pool::add_some(SlotClass& cls, uint32_t slab) {
  const bool is_new = slab_class_[slab] == kNoClass;
  const uint32_t first = added_in_[slab];
  const uint32_t end = std::min(cls.slots_per_slab, first + added_at_a_time(cls));
  growth_errno_ = arena_.back_metadata(slab, cls.layout, first, end);
  if (growth_errno_ != 0) return false;
  if (!is_new) end_generations(slab, first, end);  // that an earlier daemon freed
  // What an older layout left there must not look like metadata of this one.
  std::memset(static_cast<void*>(slots_.meta(slots_.slot_id(slab, first), cls.layout)), 0,
              (end - first) * cls.layout.meta_bytes());
  KVW_SEQUENCE_POINT("grow: metadata cleared");
  if (is_new) {
    ready_.pop_front();
    assign(slab, cls);
    cls.uncut.push_front(slab);
    slots_.layout_word(slab).store(cls.layout.pack(), std::memory_order_release);
  }
  for (uint32_t place = first; place < end; ++place) cls.free.push({slab, place});
  added_in_[slab] = end;
  if (end == cls.slots_per_slab) std::erase(cls.uncut, slab);
  return true;
}

void Pool::end_generations(uint32_t slab, uint32_t first, uint32_t end) {
  for (uint32_t place = first; place < end; ++place) {
    const SlotId slot = slots_.slot_id(slab, place);
    store(slot, {slots_.load(slot).generation + 1, SlotState::free}, std::memory_order_relaxed);
  }
  full_fence();
}

void Pool::retire(uint32_t slab) {
  SlotClass& cls = *classes_[slab_class_[slab]];
  end_generations(slab, 0, cls.slots_per_slab);
  KVW_SEQUENCE_POINT("retire: generations raised");
  if (aside_ == slab) aside_ = UINT32_MAX;
  cls.free.drop(slab);
  std::erase(cls.uncut, slab);
  added_in_[slab] = 0;
  cls.slabs[slab_place_[slab]] = UINT32_MAX;
  slab_class_[slab] = kNoClass;
  pages_[slab].clear();
  SlabLayout layout;
  layout.populated = 1;
  slots_.layout_word(slab).store(layout.pack(), std::memory_order_release);
  ready_.push_front(slab);  // whoever it was taken for is to get it
}

void Pool::set_aside(uint32_t slab) {
  aside_ = slab;
  SlotClass& cls = *classes_[slab_class_[slab]];
  std::erase(cls.uncut, slab);
  cls.free.hide(slab);
}

void Pool::put_back(uint32_t slab) {
  SlotClass& cls = *classes_[slab_class_[slab]];
  cls.free.show(slab);
  if (added_in_[slab] != cls.slots_per_slab) cls.uncut.push_back(slab);
  aside_ = UINT32_MAX;
}

bool Pool::all_free(uint32_t slab) const {
  return classes_[slab_class_[slab]]->free.in(slab) == added_in_[slab];
}

uint64_t Pool::not_added(const SlotClass& cls) const {
  uint64_t count = 0;
  for (const uint32_t slab : cls.uncut) count += cls.slots_per_slab - added_in_[slab];
  return count;
}

uint64_t Pool::free_slots() const {
  uint64_t count = 0;
  if (aside_ != UINT32_MAX) {
    const SlotClass& cls = *classes_[slab_class_[aside_]];
    count += cls.free.in(aside_) + cls.slots_per_slab - added_in_[aside_];
  }
  for (const auto& cls : classes_) count += cls->free.size() + not_added(*cls);
  return count;
}

uint32_t Pool::attach(uint32_t slab, const SlabLayout& layout) {
  ++populated_;
  SlotClass& cls = assign(slab, add_class(layout));
  uint32_t used = cls.slots_per_slab;
  while (used > 0 && slots_.load(slots_.slot_id(slab, used - 1)).state == SlotState::free) --used;
  added_in_[slab] = used;
  if (used < cls.slots_per_slab) cls.uncut.push_back(slab);
  return used;
}

std::optional<uint32_t> Pool::spare_slab(const SlotClass& needy, uint64_t share,
                                         uint64_t now_ns) const {
  for (uint32_t slab = 0; slab < slab_class_.size(); ++slab) {
    if (slab_class_[slab] == kNoClass) continue;
    const SlotClass& cls = *classes_[slab_class_[slab]];
    if (&cls == &needy || slab == aside_ || !all_free(slab)) continue;
    if (now_ns < cls.waits_until_ns) continue;
    const uint64_t left = cls.total() - cls.slots_per_slab;
    if (cls.free.size() + not_added(cls) - cls.slots_per_slab >= left / share) return slab;
  }
  return std::nullopt;
}

void Pool::adopt_free(SlotId slot) { add_free(class_of(slot), slot); }

void Pool::add_free(SlotClass& cls, SlotId slot) {
  cls.free.push({slots_.slab_of(slot), slots_.place_of(slot)});
}

SlotId Pool::take(SlotClass& cls, SlotState state) {
  if (cls.free.empty()) return kNoSlot;
  const auto [slab, place] = cls.free.pop();
  const SlotId slot = slots_.slot_id(slab, place);
  cls.waits_until_ns = 0;
  store(slot, {slots_.load(slot).generation + 1, state}, std::memory_order_relaxed);
  // Before anybody may write a byte of the new generation, every reader of the old one must see
  // that it ended.
  full_fence();
  KVW_SEQUENCE_POINT("reuse: generation raised");
  ++cls.reserved;
  unfinished_bytes_ += cls.layout.slot_bytes();
  return slot;
}

void Pool::publish(SlotId slot, uint64_t generation) {
  SlotClass& cls = class_of(slot);
  store(slot, {generation, SlotState::live}, std::memory_order_release);
  --cls.reserved;
  ++cls.live;
  unfinished_bytes_ -= cls.layout.slot_bytes();
}

void Pool::close(SlotId slot) {
  store(slot, {slots_.load(slot).generation, SlotState::closing}, std::memory_order_release);
}

void Pool::reopen(SlotId slot) {
  store(slot, {slots_.load(slot).generation, SlotState::live}, std::memory_order_release);
}

void Pool::to_limbo(SlotId slot, uint64_t generation) {
  SlotClass& cls = class_of(slot);
  store(slot, {generation, SlotState::limbo}, std::memory_order_release);
  --cls.reserved;
  ++cls.limbo;
}

void Pool::end_limbo(SlotId slot, uint64_t generation) {
  SlotClass& cls = class_of(slot);
  --cls.limbo;
  unfinished_bytes_ -= cls.layout.slot_bytes();
  // Torn bytes must not be readable under this generation.
  store(slot, {generation + 1, SlotState::free}, std::memory_order_release);
  page_at(slot) = kNoPage;
  add_free(cls, slot);
}

void Pool::release(SlotId slot) {
  SlotClass& cls = class_of(slot);
  --cls.live;
  store(slot, {slots_.load(slot).generation, SlotState::free}, std::memory_order_release);
  page_at(slot) = kNoPage;
  add_free(cls, slot);
}

void Pool::discard(SlotId slot) {
  SlotClass& cls = class_of(slot);
  --cls.live;
  store(slot, {slots_.load(slot).generation + 1, SlotState::free}, std::memory_order_release);
  page_at(slot) = kNoPage;
  add_free(cls, slot);
}

void Pool::restore(SlotId slot, SlotState state) {
  SlotClass& cls = class_of(slot);
  store(slot, {slots_.load(slot).generation, state}, std::memory_order_release);
  if (state == SlotState::live) ++cls.live;
  if (state == SlotState::limbo) {
    ++cls.limbo;
    unfinished_bytes_ += cls.layout.slot_bytes();
  }
}

uint64_t Pool::slot_bytes(SlotId slot) const {
  const uint32_t number = slab_class_[slots_.slab_of(slot)];
  if (number == kNoClass) return 0;
  const SlotClass& cls = *classes_[number];
  return slots_.place_of(slot) < cls.slots_per_slab ? cls.layout.slot_bytes() : 0;
}

uint32_t Pool::resident(SlotId slot) const {
  const uint32_t slab = slots_.slab_of(slot);
  return slab_place_[slab] * classes_[slab_class_[slab]]->slots_per_slab + slots_.place_of(slot);
}

SlotId Pool::slot_of(const SlotClass& cls, uint32_t resident) const {
  return slots_.slot_id(cls.slabs[resident / cls.slots_per_slab], resident % cls.slots_per_slab);
}

PageId& Pool::page_at(SlotId slot) { return pages_[slots_.slab_of(slot)][slots_.place_of(slot)]; }

void Pool::prefetch(SlotId slot) const {
  constexpr size_t kLines = 4;  // of its metadata: all of a page of 16 tokens
  __builtin_prefetch(&slots_.word(slot), 1);
  __builtin_prefetch(&pages_[slots_.slab_of(slot)][slots_.place_of(slot)], 1);
  const auto* meta = reinterpret_cast<const std::byte*>(this->meta(slot));
  for (size_t line = 0; line < kLines; ++line) __builtin_prefetch(meta + line * 64, 1);
}

void Pool::store(SlotId slot, SlotWord word, std::memory_order order) {
  slots_.word(slot).store(word.pack(), order);
}

}  // namespace kvw
