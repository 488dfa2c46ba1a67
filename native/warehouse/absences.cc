#include "warehouse/absences.h"

#include <algorithm>
#include <bit>
#include <new>

namespace kvw {

namespace {

uint64_t places_for(uint64_t pages) {
  return std::bit_ceil(std::clamp(pages, Absences::kFewestAbsences, Absences::kMostAbsences));
}

// A time before another, in 12 bits: 0 is none, else 1 more than how long before, of which the
// seven highest bits are kept.
constexpr uint32_t kMantissaBits = 7;

uint32_t age_code(uint32_t at_s, uint32_t before_s) {
  if (before_s == 0) return 0;
  const uint32_t age = 1 + at_s - std::min(at_s, before_s);
  const auto bits = static_cast<uint32_t>(std::bit_width(age));
  const uint32_t shift = bits > kMantissaBits ? bits - kMantissaBits : 0;
  return shift << kMantissaBits | age >> shift;
}

uint32_t time_before(uint32_t at_s, uint32_t code) {
  if (code == 0) return 0;
  const uint32_t shift = code >> kMantissaBits;
  const uint32_t age = (code & ((1u << kMantissaBits) - 1)) << shift;
  return at_s - std::min(at_s - 1, age - 1);
}

}  // namespace

Absences::Absences(uint64_t pages)
    : set_mask_(places_for(pages) / kWays - 1),
      sets_(static_cast<Set*>(std::aligned_alloc(alignof(Set), bytes(pages)))) {
  if (!sets_) throw std::bad_alloc();
  std::fill_n(sets_.get(), set_mask_ + 1, Set{});
}

uint64_t Absences::bytes(uint64_t pages) { return places_for(pages) * sizeof(Place); }

const Absences::Place& Absences::oldest(const Set& set) {
  return *std::ranges::min_element(set.places, {}, &Place::at_s);
}

void Absences::add(const Absence& absence) {
  Set& own = set(absence.key);
  const uint64_t own_tag = tag(absence.key, absence.refused);
  auto* place = std::ranges::find(own.places, own_tag, &Place::key);
  if (place == own.places.end() || place->at_s == 0) place = const_cast<Place*>(&oldest(own));
  place->key = own_tag;
  place->at_s = absence.at_s;
  place->stored_age = age_code(absence.at_s, absence.stored_at_s);
  place->used_age = age_code(absence.at_s, absence.used_at_s);
  place->refused = absence.refused;
  place->perhaps_earlier = absence.perhaps_earlier;
  place->why = absence.why;
}

std::optional<Absence> Absences::find(const Key& key, bool refused) const {
  const uint64_t own_tag = tag(key, refused);
  for (const Place& each : set(key).places)
    if (each.at_s != 0 && each.key == own_tag && (each.refused != 0) == refused)
      return Absence{.key = key,
                     .at_s = each.at_s,
                     .stored_at_s = time_before(each.at_s, each.stored_age),
                     .used_at_s = time_before(each.at_s, each.used_age),
                     .refused = each.refused != 0,
                     .why = static_cast<uint8_t>(each.why),
                     .perhaps_earlier = each.perhaps_earlier != 0};
  return std::nullopt;
}

uint32_t Absences::remembers_since_s(const Key& key) const { return oldest(set(key)).at_s; }

}  // namespace kvw
