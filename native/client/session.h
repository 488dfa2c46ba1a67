// The client's side of its session file: pins, touches and counters that the daemon reads without a
// call. Thread-safe. The lock on the file is held for as long as this object lives, in this process
// alone: a forked child closes its copy of the descriptor.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fd.h"
#include "base/fork.h"
#include "index/index.h"
#include "session/session_file.h"

namespace kvw {

// What a client may hold of something: so much at a time, as the daemon says.
class ClientShare {
 public:
  bool take(uint64_t amount, uint64_t limit) {
    uint64_t taken = taken_;
    do {
      if (taken + amount > limit) return false;
    } while (!taken_.compare_exchange_weak(taken, taken + amount));
    return true;
  }
  void give_back(uint64_t amount) { taken_ -= amount; }

 private:
  std::atomic<uint64_t> taken_{0};
};

// What all sessions of this process hold of a warehouse: one more is no way to hold more.
struct ProcessShares {
  ClientShare pinned_bytes, segments_held;
};

class ClientSession {
 public:
  // Takes the descriptor that hello passed. Throws Error storage "bad_files".
  explicit ClientSession(ParentFd file);
  ~ClientSession();

  uint64_t id() const { return id_; }
  ClientShare& pinned_bytes() { return shares_->pinned_bytes; }
  ClientShare& segments_held() { return shares_->segments_held; }

  void count(Counter counter, uint64_t amount = 1) {
    counter_of(*file_, counter).fetch_add(amount, std::memory_order_relaxed);
  }
  uint64_t counter(Counter counter) const {
    return counter_of(*file_, counter).load(std::memory_order_relaxed);
  }
  void touch(const EntryView& entry) { tell(entry, entry.page); }
  void release(const EntryView& entry) { tell(entry, entry.page | kReleasedPage); }

  uint32_t pin_capacity() const { return pin_capacity_; }  // pins at a time
  // A free pin word, or -1 when all are in use.
  int take_pin();
  void store_pin(int place, uint64_t pin) {
    file_->pins[place].store(pin, std::memory_order_relaxed);
  }
  // Release: everything read under the pin happened before.
  void drop_pin(int place);
  // Whether the file lacks what was written here: then the daemon sees no pin.
  bool lost() const { return mapping_.lost(); }

 private:
  void tell(const EntryView& entry, PageId word);

  ParentFd fd_;
  Mapping mapping_;
  SessionFile* file_ = nullptr;
  uint64_t id_ = 0;
  uint32_t pin_capacity_ = 0;
  std::shared_ptr<ProcessShares> shares_;
  std::mutex mutex_;
  std::vector<int> free_pins_;
  int next_pin_ = 0;
};

}  // namespace kvw
