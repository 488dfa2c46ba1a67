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
