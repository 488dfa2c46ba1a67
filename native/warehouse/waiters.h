// Clients that wait for pages, on a futex in the control page, whatever brings them. Core thread
// only.
#pragma once

#include <utility>

#include "control/control.h"

namespace kvw {

class Waiters {
 public:
  explicit Waiters(HotWord& word) : word_(word) {}

  // Something that a client may wait for has come, or will not come: whoever begins to wait now
  // looks again first.
  void note() {
    word_.value.fetch_add(1, std::memory_order_release);
    noted_ = true;
  }
  // Once for all that was noted: each call goes to the kernel.
  void wake() {
    if (std::exchange(noted_, false)) wake_all();
  }

 private:
  void wake_all() const;

  HotWord& word_;
  bool noted_ = false;
};

}  // namespace kvw
