// What tests of sessions share.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>

#include "client/session.h"
#include "session/registry.h"
#include "tests/warehouse_world.h"

namespace kvw {

inline constexpr uint64_t kGrace = 5 * kSecondNs;
inline constexpr uint32_t kSlots = 1 << 20;

struct Desk {
  Desk() { open(); }
  void open() {
    registry =
        std::make_unique<Registry>(directory.path(), kWarehouse, clock, kGrace, kSlots, [this] {
          ++looks;
          return writing;
        });
  }
  std::string path(SessionId id) const {
    char name[32];
    std::snprintf(name, sizeof name, "/%016llx", static_cast<unsigned long long>(id));
    return directory.path() + name;
  }
  // Dead as soon as the client's descriptor is gone, reaped when the grace is over.
  bool buries(SessionId id) {
    for (const SessionId dead : registry->reap())
      if (dead == id) return true;
    return false;
  }
  // All that are to be, a pass after the other.
  size_t buries_all() {
    size_t count = 0;
    while (const size_t dead = registry->reap().size()) count += dead;
    return count;
  }
  TempDir directory;
  FakeClock clock;
  std::unordered_set<SessionId> writing;  // sessions that were granted something
  int looks = 0;                          // at them
  std::unique_ptr<Registry> registry;
};

// What a client does with the descriptor of its welcome.
inline ClientSession attach(Fd&& descriptor) {
  return ClientSession(ParentFd(descriptor.release()));
}
inline ClientSession attach(Fd& descriptor) { return attach(std::move(descriptor)); }

}  // namespace kvw
