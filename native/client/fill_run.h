// What became of an object's pages that were to be stored here: Client::fill_run(). Plain value.
#pragma once

#include <cstdint>
#include <string>

#include "base/types.h"
#include "remote/get_link.h"

namespace kvw {

struct FilledRun {
  remote::GetEnd end = remote::GetEnd::filled;
  uint32_t pages = 0;  // from the first wanted one on, that are stored here now
  // What ended it: a fault's name (remote/object.h) where it is damaged, else a reason's
  // (exchange/messages.h) or "unknown_namespace". "parent_missing": nothing was begun, because the
  // page before the first is not stored. Empty where it is filled.
  std::string fault;
  Key parent;  // that page
};

}  // namespace kvw
