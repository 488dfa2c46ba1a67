#include "server/core_link.h"

#include <string>

namespace kvw {

namespace {

constexpr int kMessagesPerWake = 16;

}  // namespace

bool CoreLink::serve() {
  remote::LinkBuffer message;
  for (int i = 0; i < kMessagesPerWake; ++i) {
    const remote::LinkEnd::Got got = end_.receive(message);
    if (got == remote::LinkEnd::Got::closed) return false;
    if (got == remote::LinkEnd::Got::nothing) break;
    if (!take(message)) return false;
  }
  return give();
}

bool CoreLink::refuse(const char* reason) {
  warehouse_.on_event("remote_link_dropped", std::string("reason=") + reason);
  return false;
}

}  // namespace kvw
