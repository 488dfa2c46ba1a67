#include "eviction/adaptive.h"

#include <algorithm>

namespace kvw {
namespace {

// Classes: pages by their uses before the last one, 0 to 5 and more, then the ends of chains that
// were used once. In a trace these are mostly what is left of a prompt behind its last whole page,
// and come back in one case of a hundred; the daemon has whole pages alone.
constexpr uint32_t kMostClass = 5, kTail = 6;
static_assert(kTail + 1 == Duel::kClasses);

// Drawn from the curves of reuse over time of the first half of Mooncake's conversation trace
// (docs/policies.md).
constexpr Duel::HoldTimes kRows[Duel::kRows] = {
    {1, 1, 1, 1, 1, 1, 1},                   // least recently used
    {1, 1.4F, 1.7F, 2, 2.2F, 2.4F, .1F},     // by uses, mildly
    {1, 2, 3, 4, 5, 6, .1F},                 // by uses
    {1, 2, 3, 4, 5, 6, 1},                   // and tails as others
    {.25F, 1, 1.4F, 1.6F, 2, 2, .02F},       // what was used twice, softly
    {.05F, 1, 1.5F, 1.5F, 2, 2, .02F},       // what was used twice
    {.01F, .2F, 1, 1.2F, 1.5F, 1.7F, .01F},  // what was used three times
};

// Of the pages that are there: uses of a page within so many uses of pages are one; how often the
// leader is looked for.
constexpr float kOneUse = 32;

// Likewise, what was used within so many uses waits for all that is older: the ends of prompts that
// are stored a part at a time, whose next part is not stored where they have left.
constexpr float kGrace = 3;

constexpr size_t kDecisions = 8, kLeastUses = 64;

constexpr size_t kForgets = 64;  // of a room that is not filled, a part each time

constexpr uint8_t kUsesMask = 7, kBore = 8;
constexpr uint32_t uses_in(uint8_t mark) { return mark & kUsesMask; }

uint8_t class_of(uint8_t mark) {
  const uint32_t uses = uses_in(mark);
  if (uses == 1 && (mark & kBore) == 0) return kTail;
  return static_cast<uint8_t>(std::min(uses - 1, kMostClass));
}

// MurmurHash3's finalizer (Appleby): identities may be small numbers.
uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}

}  // namespace

AdaptivePolicy::AdaptivePolicy(size_t capacity)
    : LeavesFirst(capacity, Duel::kClasses), duel_(kRows) {
  identities_.reserve(capacity);
  duel_.reserve(capacity);
}

void AdaptivePolicy::announced(PageId page, uint64_t identity) {
  if (page >= identities_.size()) identities_.resize(size_t{page} + 1);
  identities_[page] = std::max<uint64_t>(mixed(identity), 1);
}

LeavesFirst::Kind AdaptivePolicy::used(PageId page, Kind kind, Use use) {
  const uint64_t identity = identity_of(page);
  const bool fresh = use.before == 0;
  uint32_t uses = uses_in(kind.mark);
  if (fresh) {
    grow();
    uses = identity == 0 ? 0 : memory_.recall(identity);
  }
  if (is_new(use)) uses = std::min(uses + 1, UseMemory::kMostUses);
  if (!fresh) --pages_[kind.cls];
  kind.mark = static_cast<uint8_t>((kind.mark & kBore) | uses);
  kind.cls = class_of(kind.mark);
  ++pages_[kind.cls];
  if (identity != 0 && duel_.follows(identity)) duel_.used(identity, kind.cls, use.now);
  count_use();
  return kind;
}

LeavesFirst::Kind AdaptivePolicy::bore(PageId page, Kind kind) {
  kind.mark |= kBore;
  const uint8_t cls = class_of(kind.mark);
  if (cls == kind.cls) return kind;
  if (const uint64_t identity = identity_of(page); identity != 0 && duel_.follows(identity))
    duel_.became(identity, cls, now());
  --pages_[kind.cls];
  ++pages_[cls];
  kind.cls = cls;
  return kind;
}

void AdaptivePolicy::left(PageId page, Kind kind) {
  duel_.fill(true);
  --pages_[kind.cls];
  if (const uint64_t identity = identity_of(page); identity != 0) {
    memory_.remember(identity, uses_in(kind.mark));
    identities_[page] = 0;
  }
}

bool AdaptivePolicy::is_new(Use use) const {
  const auto ticks = static_cast<float>(use.now - use.before);
  return use.before == 0 || ticks * kOneUse > static_cast<float>(size()) * ticks_per_use_;
}

// Room is what there was lately: less, and pages were cleared, or others have the memory now.
void AdaptivePolicy::grow() {
  if (size() <= room_) return;
  room_ = size();
  memory_.reserve(kRemembered * room_);
  duel_.resize(room_);
  duel_.fill(false);
}

void AdaptivePolicy::count_use() {
  if (++uses_ < decides_at_) return;
  ticks_per_use_ =
      static_cast<float>(now() - decided_at_) / static_cast<float>(uses_ - uses_decided_);
  decided_at_ = now();
  uses_decided_ = uses_;
  decides_at_ = uses_ + std::max(kLeastUses, size() / kDecisions);
  follow(kRows[duel_.decide()]);
  room_ = std::max(size(), room_ - room_ / kForgets);
  duel_.resize(room_);
}

// Heats are compared with those of policies that follow other rows. So that the coldest page is
// about as hot as LRU's would be where as much comes, hold times are divided by the mean of what
// comes; of a class that is about what there is of it over how long it is held.
void AdaptivePolicy::follow(const HoldTimes& row) {
  float come = 0;
  for (size_t cls = 0; cls < row.size(); ++cls) come += static_cast<float>(pages_[cls]) / row[cls];
  HoldTimes times = row;
  for (float& time : times) time *= come / static_cast<float>(size());
  const float grace = static_cast<float>(size()) / kGrace * ticks_per_use_;
  hold(times, grace);
  duel_.grace(grace);
}

}  // namespace kvw
