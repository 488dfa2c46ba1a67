// The free slots of a page size. Each slab has a queue of its own, first in, first out, so that a
// slab comes and goes without a look at the slots of others, however many are free. Slabs take
// turns, each with as many slots as it had when its turn began: so what was freed last stays
// readable longest. 4 bytes a slot. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace kvw {

class FreeSlots {
 public:
  struct Slot {
    uint32_t slab;
    uint32_t place;
  };

  FreeSlots() = default;
  FreeSlots(uint32_t slabs, uint32_t slots_per_slab)
      : queues_(slabs), slots_per_slab_(slots_per_slab) {}

  // Of slabs that are not hidden.
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  // Of a slab, hidden or not.
  uint32_t in(uint32_t slab) const { return queues_[slab].count; }

  void push(Slot slot) {
    Queue& queue = queues_[slot.slab];
    if (queue.next.empty()) queue.next.resize(slots_per_slab_);
    (queue.count == 0 ? queue.first : queue.next[queue.last]) = slot.place;
    queue.last = slot.place;
    ++queue.count;
    if (queue.hidden) return;
    ++size_;
    if (queue.count == 1) turns_.push_back(slot.slab);
  }
  // There is one.
  Slot pop() {
    const uint32_t slab = turns_.front();
    Queue& queue = queues_[slab];
    const Slot slot{slab, queue.first};
    if (left_in_turn_ == 0) left_in_turn_ = queue.count;
    queue.first = queue.next[queue.first];
    --queue.count;
    --size_;
    if (--left_in_turn_ == 0) {
      turns_.pop_front();
      if (queue.count != 0) turns_.push_back(slab);
    }
    return slot;
  }
  // What pop() gives after `ahead` others, where it is of the same turn.
  std::optional<Slot> after(size_t ahead) const {
    if (turns_.empty()) return std::nullopt;
    const Queue& queue = queues_[turns_.front()];
    if (ahead >= (left_in_turn_ == 0 ? queue.count : left_in_turn_)) return std::nullopt;
    uint32_t place = queue.first;
    while (ahead-- > 0) place = queue.next[place];
    return Slot{turns_.front(), place};
  }

  // Its slots are not given until show(); others may be pushed meanwhile.
  void hide(uint32_t slab) {
    Queue& queue = queues_[slab];
    queue.hidden = true;
    if (queue.count == 0) return;
    size_ -= queue.count;
    if (turns_.front() == slab) left_in_turn_ = 0;
    std::erase(turns_, slab);
  }
  void show(uint32_t slab) {
    Queue& queue = queues_[slab];
    queue.hidden = false;
    if (queue.count == 0) return;
    size_ += queue.count;
    turns_.push_back(slab);
  }
  // The slab goes, with all of its slots.
  void drop(uint32_t slab) {
    if (!queues_[slab].hidden) hide(slab);
    queues_[slab] = Queue{};
  }

 private:
  struct Queue {
    std::vector<uint32_t> next;    // by place
    uint32_t first = 0, last = 0;  // where there are any
    uint32_t count = 0;
    bool hidden = false;
  };

  std::vector<Queue> queues_;   // by slab
  std::deque<uint32_t> turns_;  // slabs with free slots that are not hidden
  uint32_t slots_per_slab_ = 0;
  uint32_t left_in_turn_ = 0;  // of the first of them; 0: it has not begun
  size_t size_ = 0;
};

}  // namespace kvw
