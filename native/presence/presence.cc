#include "presence/presence.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstddef>

#include "base/atomics.h"

namespace kvw {

namespace {

constexpr uint64_t kLanes = 0x0001000100010001ull;  // one in each cell of a word
constexpr uint64_t kLow15 = 0x7fff7fff7fff7fffull;
constexpr uint64_t kFingerprints = 0xfff8fff8fff8fff8ull;
constexpr int kLaneBits = 16;
constexpr uint32_t kWordsOfBucket = 2, kLanesOfWord = 4;
constexpr uint64_t kFingerprintMask = 0x1fff;
constexpr uint64_t kDayMask = kPresenceDays - 1;

// The top bit of each cell that is 0, and no other bit: nothing is carried between cells.
constexpr uint64_t zero_lanes(uint64_t word) {
  return ~(((word & kLow15) + kLow15) | word | kLow15);
}
static_assert(zero_lanes(0x0000000100008000ull) == 0x8000000080000000ull);

constexpr int first_lane(uint64_t tops) { return std::countr_zero(tops) / kLaneBits; }
constexpr uint64_t lane(uint64_t word, int at) { return word >> (at * kLaneBits) & 0xffff; }
constexpr uint64_t with_lane(uint64_t word, int at, uint64_t cell) {
  return (word & ~(0xffffull << (at * kLaneBits))) | cell << (at * kLaneBits);
}

// SplitMix64's finalizer (Steele et al. 2014).
uint64_t mixed(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;  // 2^64 over the golden ratio

Key salt_of(uint64_t epoch) {
  return {mixed(2 * epoch * kGolden + kGolden), mixed((2 * epoch + 1) * kGolden + kGolden)};
}

uint64_t scaled(uint64_t hash, uint64_t count) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(hash) * count >> 64);
}

PresencePlace place_of(const Key& key, const Key& salt, uint64_t buckets) {
  const uint64_t lo = key.lo ^ salt.lo, hi = key.hi ^ salt.hi;
  const uint64_t fingerprint = (lo ^ hi) & kFingerprintMask;
  return {scaled(lo, buckets), scaled(hi, buckets),
          static_cast<uint16_t>(fingerprint == 0 ? 1 : fingerprint)};
}

constexpr uint32_t newest_of(uint64_t window) { return static_cast<uint32_t>(window >> 8); }
constexpr uint32_t days_of(uint64_t window) { return static_cast<uint32_t>(window & 0xff); }
constexpr uint32_t age_of(uint64_t cell, uint32_t newest) {
  return static_cast<uint32_t>((newest - cell) & kDayMask);
}

uint64_t checksum_of(const PresenceHeader& header) {
  return XXH3_64bits(&header, offsetof(PresenceHeader, checksum));
}

}  // namespace

Presence::Look::Look(const Presence& table, uint64_t epoch)
    : words_(table.words_),
      buckets_(table.buckets_),
      salt_(salt_of(epoch)),
      window_(table.header_->window.load(std::memory_order_acquire)),
      ahead_(table.header_->ahead.load(std::memory_order_relaxed)) {}

void Presence::Look::prefetch(const Key& key) const {
  const PresencePlace place = place_of(key, salt_, buckets_);
  __builtin_prefetch(&words_[place.first * kWordsOfBucket]);
  __builtin_prefetch(&words_[place.second * kWordsOfBucket]);
}

std::optional<uint32_t> Presence::Look::day_of(const Key& key) const {
  const PresencePlace place = place_of(key, salt_, buckets_);
  const uint64_t wanted = uint64_t{place.fingerprint} << 3;
  const uint64_t pattern = wanted * kLanes;
  const uint32_t newest = newest_of(window_), days = days_of(window_);
  uint32_t best = kPresenceDays;
  for (const uint64_t bucket : {place.first, place.second})
    for (uint32_t half = 0; half < kWordsOfBucket; ++half) {
      const uint64_t word = words_[bucket * kWordsOfBucket + half].load(kWordLoad);
      uint64_t matches = zero_lanes((word ^ pattern) & kFingerprints);
      for (; matches != 0; matches &= matches - 1)
        best = std::min(best, age_of(lane(word, first_lane(matches)), newest));
    }
  if (best >= days) return std::nullopt;
  return newest - best;
}

uint32_t Presence::Look::today() const {
  const uint32_t newest = newest_of(window_);
  return newest - std::min(ahead_, newest);
}

void Presence::format(const Mapping& mapping, const Key& fleet, uint64_t buckets, uint32_t days) {
  assert(days >= 1 && days <= kPresenceDays && mapping.bytes() >= presence_bytes(buckets));
  auto* header = mapping.at<PresenceHeader>(0);
  header->magic = kPresenceMagic;
  header->version = kPresenceVersion;
  header->days = days;
  header->fleet = fleet;
  header->buckets = buckets;
  header->bytes = presence_bytes(buckets);
  header->checksum = checksum_of(*header);
  header->window.store(days, std::memory_order_release);
}

std::optional<Presence> Presence::attach(const Mapping& mapping, const Key& fleet) {
  if (mapping.bytes() < kBlockBytes) return std::nullopt;
  auto* header = mapping.at<PresenceHeader>(0);
  Presence table;
  table.header_ = header;
  table.words_ = mapping.at<std::atomic<uint64_t>>(kBlockBytes);
  table.buckets_ = header->buckets;
  table.days_ = header->days;
  const bool sound = header->magic == kPresenceMagic && header->version == kPresenceVersion &&
                     header->fleet == fleet && header->checksum == checksum_of(*header) &&
                     table.days_ >= 1 && table.days_ <= kPresenceDays && table.buckets_ >= 1 &&
                     table.buckets_ <= mapping.bytes() / kPresenceBucketBytes &&
                     presence_bytes(table.buckets_) <= mapping.bytes() && !mapping.lost();
  if (!sound) return std::nullopt;
  return table;
}

PresenceWriter::PresenceWriter(const Presence& table) : table_(table) {
  const uint64_t window = table_.header_->window.load(std::memory_order_relaxed);
  drop_older_than(std::min(days_of(window), table_.days_));
  set_window(newest_of(window), table_.days_);
}

uint32_t PresenceWriter::newest() const {
  return newest_of(table_.header_->window.load(std::memory_order_relaxed));
}

void PresenceWriter::set_window(uint32_t newest, uint32_t days) {
  table_.header_->window.store(uint64_t{newest} << 8 | days, std::memory_order_release);
}

// Cells of the `age` newest days stay. Counts anew.
void PresenceWriter::drop_older_than(uint32_t age) {
  const uint32_t newest = this->newest();
  counts_ = {};
  for (uint64_t at = 0; at < table_.buckets_ * kWordsOfBucket; ++at) {
    const uint64_t word = table_.words_[at].load(std::memory_order_relaxed);
    if (word == 0) continue;
    uint64_t kept = word;
    for (uint32_t i = 0; i < kLanesOfWord; ++i) {
      const uint64_t cell = lane(word, static_cast<int>(i));
      if (cell == 0) continue;
      if (age_of(cell, newest) < age)
        ++counts_[cell & kDayMask];
      else
        kept = with_lane(kept, static_cast<int>(i), 0);
    }
    if (kept != word) table_.words_[at].store(kept, kWordStore);
  }
}

void PresenceWriter::advance(uint32_t newest, uint32_t today) {
  const uint32_t last = this->newest();
  const uint32_t next = std::max(newest, last);
  // Before the window: a reader in between takes what is of today for such.
  table_.header_->ahead.store(next - std::min(today, next), std::memory_order_relaxed);
  if (next == last) return;
  const uint32_t passed = std::min(next - last, kPresenceDays);
  const uint32_t kept = passed < table_.days_ ? table_.days_ - passed : 0;
  set_window(last, kept);
  drop_older_than(kept);
  set_window(next, table_.days_);
}

PresenceWriter::Put PresenceWriter::put(const Key& key, uint64_t epoch, uint32_t day) {
  const uint32_t newest = this->newest();
  if (day > newest || newest - day >= table_.days_) return Put::outside;
  const uint32_t age = newest - day;
  const PresencePlace place = place_of(key, salt_of(epoch), table_.buckets_);
  const uint64_t cell = uint64_t{place.fingerprint} << 3 | (day & kDayMask);

  // Of each bucket what is free, and of both the oldest cell.
  struct Spot {
    std::atomic<uint64_t>* word = nullptr;
    int lane = 0;
    uint32_t age = 0;
  };
  Spot free[2], oldest;
  uint32_t room[2] = {0, 0};
  const uint64_t buckets[2] = {place.first, place.second};
  for (uint32_t which = 0; which < 2; ++which)
    for (uint32_t i = 0; i < kPresenceCells; ++i) {
      const int at = static_cast<int>(i % kLanesOfWord);
      auto& word = table_.words_[buckets[which] * kWordsOfBucket + i / kLanesOfWord];
      const uint64_t there = lane(word.load(std::memory_order_relaxed), at);
      const uint32_t its_age = there == 0 ? 0 : age_of(there, newest);
      if (there == 0) {
        if (room[which]++ == 0) free[which] = {&word, at, 0};
        continue;
      }
      if ((there ^ cell) >> 3 == 0) {
        if (its_age <= age) return Put::already;
        word.store(with_lane(word.load(std::memory_order_relaxed), at, cell), kWordStore);
        --counts_[there & kDayMask];
        ++counts_[cell & kDayMask];
        return Put::renewed;
      }
      if (its_age > oldest.age) oldest = {&word, at, its_age};
    }
  Put result = Put::added;
  Spot spot = room[1] > room[0] ? free[1] : free[0];
  if (spot.word == nullptr) {
    if (oldest.age <= age) return Put::no_room;
    spot = oldest;
    result = Put::replaced;
    --counts_[lane(spot.word->load(std::memory_order_relaxed), spot.lane) & kDayMask];
  }
  spot.word->store(with_lane(spot.word->load(std::memory_order_relaxed), spot.lane, cell),
                   kWordStore);
  ++counts_[cell & kDayMask];
  return result;
}

bool PresenceWriter::remove(const Key& key, uint64_t epoch, uint32_t day) {
  const PresencePlace place = place_of(key, salt_of(epoch), table_.buckets_);
  const uint64_t cell = uint64_t{place.fingerprint} << 3 | (day & kDayMask);
  if (day > newest() || newest() - day >= table_.days_) return false;
  for (const uint64_t bucket : {place.first, place.second})
    for (uint32_t half = 0; half < kWordsOfBucket; ++half) {
      auto& word = table_.words_[bucket * kWordsOfBucket + half];
      const uint64_t all = word.load(std::memory_order_relaxed);
      const uint64_t matches = zero_lanes(all ^ cell * kLanes);
      if (matches == 0) continue;
      word.store(with_lane(all, first_lane(matches), 0), kWordStore);
      --counts_[cell & kDayMask];
      return true;
    }
  return false;
}

uint64_t PresenceWriter::objects() const {
  uint64_t all = 0;
  for (const uint64_t count : counts_) all += count;
  return all;
}

uint64_t PresenceWriter::objects(uint32_t day) const {
  const uint32_t newest = this->newest();
  if (day > newest || newest - day >= table_.days_) return 0;
  return counts_[day & kDayMask];
}

}  // namespace kvw
