#include <array>
#include <cstdio>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "base/types.h"

namespace kvw {

std::string to_hex(const Key& key) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(key.hi),
                static_cast<unsigned long long>(key.lo));
  return text;
}

namespace {

constexpr std::array<const char*, 6> kKinds = {"usage",   "capacity",  "pin",
                                               "storage", "transport", "internal"};

}  // namespace

const char* kind_name(ErrorKind kind) { return kKinds[static_cast<size_t>(kind)]; }

ErrorKind kind_from(std::string_view name) {
  for (size_t i = 0; i < kKinds.size(); ++i)
    if (name == kKinds[i]) return static_cast<ErrorKind>(i);
  return ErrorKind::internal;
}

Error storage_error(const std::string& what, int err) {
  const char* name = strerrorname_np(err);
  return Error(ErrorKind::storage, name != nullptr ? name : "errno",
               what + ": " + std::strerror(err));
}

const Clock& system_clock() {
  static const BootClock clock;
  return clock;
}

}  // namespace kvw
