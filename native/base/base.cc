#include <array>
#include <cstdint>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "base/types.h"

namespace kvw {

std::string to_hex(const Key& key) {
  static_assert(sizeof(Key) == 16);
  std::array<uint8_t, 16> bytes;
  std::memcpy(bytes.data(), &key, sizeof bytes);
  std::string text;
  for (const uint8_t byte : bytes)
    for (const int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
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
