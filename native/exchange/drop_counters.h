// Which counter of a session counts the pages that its stores dropped, by reason.
#pragma once

#include "exchange/messages.h"
#include "session/session_file.h"

namespace kvw {

// dropped_other for what only a client that breaks the protocol is told.
constexpr Counter drop_counter(Reason reason) {
  switch (reason) {
    case Reason::draining:
      return Counter::dropped_draining;
    case Reason::parent_missing:
      return Counter::dropped_parent_missing;
    case Reason::reserve_limit:
      return Counter::dropped_reserve_limit;
    case Reason::no_room:
      return Counter::dropped_no_room;
    case Reason::later:
      return Counter::dropped_later;
    case Reason::index_full:
      return Counter::dropped_index_full;
    case Reason::refused_tail:
      return Counter::dropped_refused_tail;
    case Reason::stale:
      return Counter::dropped_stale;
    case Reason::cleared:
      return Counter::dropped_cleared;
    case Reason::timeout:
      return Counter::dropped_timeout;
    case Reason::busy:
      return Counter::dropped_busy;
    case Reason::unreachable:
      return Counter::dropped_unreachable;
    default:
      return Counter::dropped_other;
  }
}

}  // namespace kvw
