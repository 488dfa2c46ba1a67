#include "eviction/duel.h"

#include <algorithm>
#include <bit>

#include "eviction/rings.h"

namespace kvw {
namespace {

constexpr uint64_t kLeastRate = 4, kMostRate = 64;
constexpr size_t kWantedRoom = 512;  // of a row's cache: smaller ones are chance
constexpr uint32_t kAllRows = (1u << Duel::kRows) - 1;
constexpr size_t kReservedRooms = 4;  // rows keep the same for the most part
constexpr double kAhead = 1.02, kAheadHits = 2;
constexpr double kKept = 0.99;  // of the scores, at each decision

uint64_t rate_for(size_t pages) {
  return std::clamp(std::bit_floor(pages / kWantedRoom), kLeastRate, kMostRate);
}

}  // namespace

Duel::Duel(std::span<const HoldTimes, kRows> rows) : pages_(kClasses) {
  for (Place head = 0; head < kClasses; ++head) rings::make_head(pages_, head);
  for (uint32_t i = 0; i < kRows; ++i) {
    rows_[i].hold = rows[i];
    for (Place head = 0; head < kClasses; ++head) rows_[i].coldest[head] = head;
  }
}

void Duel::reserve(size_t pages) {
  const size_t followed = kReservedRooms * (pages / rate_for(pages));
  pages_.reserve(kClasses + followed);
  free_.reserve(followed);
  places_.reserve(followed);
}

void Duel::resize(size_t pages) {
  const uint64_t wanted = rate_for(pages);
  if (wanted > rate_ || 2 * wanted < rate_) {
    for (Row& row : rows_) row.score *= static_cast<double>(rate_) / static_cast<double>(wanted);
    rate_ = wanted;
    for (Place place = kClasses; place < pages_.size(); ++place)
      if (pages_[place].hotter != kNone && !follows(pages_[place].identity)) {
        take_out(place);
        forget(place);
      }
  }
  room_ = std::max<size_t>(1, pages / rate_);
}

void Duel::used(uint64_t identity, uint32_t cls, uint64_t now) {
  const auto found = places_.find(identity);
  const Place place = found == places_.end() ? add(identity) : found->second;
  if (found != places_.end()) {
    const uint32_t kept = take_out(place);
    if (kept != kAllRows)  // says something about who is better
      for (uint32_t i = 0; i < kRows; ++i) rows_[i].score += kept >> i & 1;
  }
  push_hot(place, cls, now);
}

void Duel::became(uint64_t identity, uint32_t cls, uint64_t now) {
  const auto found = places_.find(identity);
  if (found == places_.end() || pages_[found->second].cls == cls) return;
  take_out(found->second);
  push_hot(found->second, cls, now);
}

size_t Duel::decide() {
  size_t best = 0;
  for (size_t i = 1; i < kRows; ++i)
    if (rows_[i].score > rows_[best].score) best = i;
  if (rows_[best].score > rows_[leader_].score * kAhead + kAheadHits) leader_ = best;
  for (Row& row : rows_) row.score *= kKept;
  return leader_;
}

bool Duel::keeps(const Row& row, Place place) const {
  const Place coldest = row.coldest[pages_[place].cls];
  return coldest >= kClasses && pages_[place].order >= pages_[coldest].order;
}

Duel::Place Duel::add(uint64_t identity) {
  Place place = static_cast<Place>(pages_.size());
  if (free_.empty()) {
    pages_.emplace_back();
  } else {
    place = free_.back();
    free_.pop_back();
  }
  pages_[place].identity = identity;
  places_.emplace(identity, place);
  return place;
}

uint32_t Duel::take_out(Place place) {
  Page& page = pages_[place];
  uint32_t kept = 0;
  for (uint32_t i = 0; i < kRows; ++i) {
    Row& row = rows_[i];
    if (!keeps(row, place)) continue;
    kept |= 1u << i;
    --row.kept;
    if (row.coldest[page.cls] == place) row.coldest[page.cls] = page.hotter;
  }
  rings::take_out(pages_, place);
  page.colder = page.hotter = kNone;
  return kept;
}

void Duel::push_hot(Place place, uint32_t cls, uint64_t now) {
  const Place head = cls;
  Page& page = pages_[place];
  page.cls = cls;
  page.used_at = now;
  page.order = ++orders_;
  rings::push_hot(pages_, head, place);
  uint32_t shrunk = 0;  // classes
  for (Row& row : rows_) {
    if (row.coldest[cls] == head) row.coldest[cls] = place;
    ++row.kept;
    while (full_ && row.kept > room_) shrunk |= 1u << shrink(row, now);
  }
  for (; shrunk != 0; shrunk &= shrunk - 1)
    forget_what_nobody_keeps(static_cast<uint32_t>(std::countr_zero(shrunk)));
}

uint32_t Duel::shrink(Row& row, uint64_t now) {
  uint32_t ripest = 0;
  float most = 0;
  for (uint32_t cls = 0; cls < kClasses; ++cls) {
    if (row.coldest[cls] < kClasses) continue;
    const float age = static_cast<float>(now - pages_[row.coldest[cls]].used_at + 1);
    const float ripeness = ripeness_of(age, row.hold[cls], grace_);
    if (ripeness <= most) continue;
    most = ripeness;
    ripest = cls;
  }
  row.coldest[ripest] = pages_[row.coldest[ripest]].hotter;
  --row.kept;
  return ripest;
}

void Duel::forget(Place place) {
  places_.erase(pages_[place].identity);
  pages_[place] = Page{};
  free_.push_back(place);
}

void Duel::forget_what_nobody_keeps(uint32_t cls) {
  for (;;) {
    const Place place = rings::coldest(pages_, cls);
    if (place < kClasses) return;
    for (const Row& row : rows_)
      if (keeps(row, place)) return;
    take_out(place);
    forget(place);
  }
}

}  // namespace kvw
