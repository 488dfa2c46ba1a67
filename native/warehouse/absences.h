// Pages that are not there, and why: what left its last tier, and what was not stored. For whoever
// asks why a prompt was not found, and to tell a page that comes back from one that is new.
//
// A table of sets of one cache line: a key has one set, whose oldest absence makes place for a new
// one. So memory is bounded, an absence costs one cache line, and of each key it is known how far
// back it would be remembered. Only this daemon's time is in it. Core thread only.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>

#include "base/clock.h"
#include "base/types.h"
#include "exchange/messages.h"
#include "warehouse/options.h"

namespace kvw {

// Times are absence_time(); those of what left are remembered to one part in a hundred of how long
// before it left they were.
struct Absence {
  Key key;
  uint32_t at_s = 0;         // since when
  uint32_t stored_at_s = 0;  // of what left; 0: not known
  // Of what left, its last use; 0: none since it was stored, or since this daemon began.
  uint32_t used_at_s = 0;
  bool refused = false;          // it was not stored; else it left
  uint8_t why = 0;               // a Reason, or a LeaveReason
  bool perhaps_earlier = false;  // used_at_s is the latest that its last use can have been

  LeaveReason left() const { return static_cast<LeaveReason>(why); }
  Reason reason() const { return static_cast<Reason>(why); }
  const char* name() const { return refused ? reason_name(reason()) : leave_reason_name(left()); }
};

// Seconds, of which none is 0.
constexpr uint32_t absence_time(uint64_t boot_ns) {
  return static_cast<uint32_t>(1 + boot_ns / kSecondNs);
}

class Absences {
 public:
  static constexpr uint64_t kFewestAbsences = 1 << 13;  // 128 KiB
  static constexpr uint64_t kMostAbsences = 1 << 20;    // 16 MiB

  // Remembers about as many as a warehouse of so many `pages` has, within bounds.
  explicit Absences(uint64_t pages);

  static uint64_t bytes(uint64_t pages);

  void add(const Absence& absence);
  // When the page last left, or when it was last refused: what was refused had left before,
  // perhaps.
  std::optional<Absence> left(const Key& key) const { return find(key, false); }
  std::optional<Absence> refused(const Key& key) const { return find(key, true); }
  // Absences of the page from before may be forgotten; 0: none are.
  uint32_t remembers_since_s(const Key& key) const;
  void prefetch(const Key& key) const { __builtin_prefetch(set(key).places.data(), 1); }

 private:
  static constexpr uint64_t kWays = 4;

  // 16 bytes. The set says the rest of the key's low half, so that one key in 2^64 and more is
  // taken for another, in what an operator is told.
  struct Place {
    uint64_t key = 0;                                 // tag()
    uint32_t at_s = 0;                                // 0: empty
    uint32_t stored_age : 12 = 0, used_age : 12 = 0;  // see age_code()
    uint32_t refused : 1 = 0, perhaps_earlier : 1 = 0, why : 6 = 0;
  };
  static_assert(sizeof(Place) == 16 && static_cast<size_t>(Reason::count) <= 64);
  struct alignas(64) Set {
    std::array<Place, kWays> places;
  };

  // The key's high half; its complement where it was refused: the two have a place each.
  static uint64_t tag(const Key& key, bool refused) { return refused ? ~key.hi : key.hi; }
  std::optional<Absence> find(const Key& key, bool refused) const;
  Set& set(const Key& key) const { return sets_[key.lo & set_mask_]; }
  static const Place& oldest(const Set& set);

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  uint64_t set_mask_;
  std::unique_ptr<Set[], Free> sets_;
};

}  // namespace kvw
