// The slots of the arena as a resource: slabs cut into classes of one slot size, free lists, and
// every transition of a slot's word. Owned by the core thread.
//
// Invariants:
//  - Only this class stores slot words. Transitions: FREE -> RESERVED | FILLING -> LIVE -> CLOSING
//  ->
//    LIVE | FREE; RESERVED | FILLING -> LIMBO -> FREE. The generation rises at FREE -> RESERVED |
//    FILLING, when a slab is cut anew, and when a slot that an earlier daemon freed is added again.
//  - A slot is among its class's free ones exactly when its word is FREE and it was added. A slab's
//    slots are added from its first on, a bounded number at a time: that of a slab of 256 MiB may
//    be 65,536.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "arena/arena.h"
#include "base/types.h"
#include "eviction/policy.h"
#include "slots/free_slots.h"
#include "slots/slots.h"

namespace kvw {

// Slots of one size. Residents are numbered densely within a class for the eviction policy.
struct SlotClass {
  SlabLayout layout;
  uint32_t slots_per_slab = 0;
  std::vector<uint32_t> slabs;  // in order of assignment; a retired one leaves UINT32_MAX
  std::deque<uint32_t> uncut;   // of them, those of which some slots are still to be added
  FreeSlots free;
  std::unique_ptr<EvictionPolicy> policy;
  uint64_t live = 0, reserved = 0, limbo = 0;
  uint64_t writing = 0;         // slots whose pages are on their way to NVMe
  uint64_t look_again_ns = 0;   // for a slab of another class
  uint64_t waits_until_ns = 0;  // for the slab that is on its way to it; 0 once it has taken of it
  bool unused = false;  // no namespace has such pages; without a slab, the next size takes it

  uint64_t total() const;
};

class Pool {
 public:
  Pool(Arena& arena, std::string_view policy_name);

  // Class of a namespace's pages, made at first use. Throws Error (usage "page_too_large") when a
  // slot of it fits no slab.
  SlotClass& class_of(const NamespaceShape& shape);
  SlotClass& class_of(SlotId slot) const { return *classes_[slab_class_[slots_.slab_of(slot)]]; }

  // A slab's arena bytes are there (from populate_slab, or an earlier daemon).
  void slab_ready(uint32_t slab);
  // Adds the next slots of a slab of the class, else the first of one that is ready, which it cuts.
  // False: none ready, or no room for their metadata.
  bool grow(SlotClass& cls);
  // Whether there is room for the metadata of a slab's first slots when it is cut for the class. It
  // is taken, whatever the slab is cut for now.
  bool can_cut(uint32_t slab, const SlotClass& cls);
  // Takes a slab whose slots are all FREE away from its class; it is ready and uncut again.
  // Every word's generation rises first, so that no old entry ever validates in the new layout.
  void retire(uint32_t slab);
  // A slab of another class that is all FREE, where that class has it to spare: it does not wait
  // for one itself, and one in `share` of its slots stays free without it. Nothing where there is
  // none.
  std::optional<uint32_t> spare_slab(const SlotClass& needy, uint64_t share, uint64_t now_ns) const;
  // From now on its slots that are free, or become so, are not taken, until it is retired or put
  // back. One at a time.
  void set_aside(uint32_t slab);
  void put_back(uint32_t slab);
  bool is_aside(SlotId slot) const { return slots_.slab_of(slot) == aside_; }
  bool all_free(uint32_t slab) const;
  uint64_t free_slots() const;                     // of all slabs
  uint64_t not_added(const SlotClass& cls) const;  // slots of its slabs that are to come
  // Adopts slots as an earlier daemon left them (recovery): registers the slab with its class.
  // Returns how many of its slots are to be adopted or restored, from the first on: those behind
  // them are FREE, and grow() adds them.
  uint32_t attach(uint32_t slab, const SlabLayout& layout);
  void adopt_free(SlotId slot);

  // Oldest free slot as (generation + 1, state), fenced before return; kNoSlot when none.
  SlotId take(SlotClass& cls, SlotState state);
  // Of what is unfinished the caller knows state and generation: the word is shared memory that
  // nothing vouches for yet.
  void publish(SlotId slot, uint64_t generation);    // RESERVED | FILLING -> LIVE, release
  void to_limbo(SlotId slot, uint64_t generation);   // RESERVED | FILLING -> LIMBO
  void end_limbo(SlotId slot, uint64_t generation);  // LIMBO -> (generation + 1, FREE)
  void close(SlotId slot);                           // LIVE -> CLOSING
  void reopen(SlotId slot);                          // CLOSING -> LIVE
  void release(SlotId slot);                         // CLOSING -> FREE, to the end of the free list
  void discard(SlotId slot);  // as release, but unreadable at once: (generation + 1, FREE)
  void restore(SlotId slot,
               SlotState state);  // recovery: stores the state under the old generation

  SlotWord load(SlotId slot) const { return slots_.load(slot); }
  // Of a slab that has a class; from memory of our own, whatever became of the shared word.
  const SlabLayout& layout_of(SlotId slot) const { return class_of(slot).layout; }
  SlotMeta* meta(SlotId slot) const { return slots_.meta(slot, layout_of(slot)); }
  std::byte* payload(SlotId slot) const { return arena_.payload(slot, layout_of(slot)); }
  // Of a slot of the arena that a client names; 0: its slab is not cut, or has no such place.
  uint64_t slot_bytes(SlotId slot) const;
  uint32_t resident(SlotId slot) const;  // dense number in the class
  SlotId slot_of(const SlotClass& cls, uint32_t resident) const;

  PageId& page_at(SlotId slot);  // the page in a LIVE or CLOSING slot, else kNoPage

  // Brings what is written of a slot when it is taken, sealed or published into the cache.
  void prefetch(SlotId slot) const;
  // The same of the slot that take() gives after `ahead` others.
  void prefetch_free(const SlotClass& cls, size_t ahead) const {
    if (const auto slot = cls.free.after(ahead)) prefetch(slots_.slot_id(slot->slab, slot->place));
  }

  // Of the last grow() or can_cut(): why slots of a slab that is there could not be added; 0.
  int growth_errno() const { return growth_errno_; }
  uint64_t ready_slabs() const { return ready_.size(); }
  uint64_t populated_slabs() const { return populated_; }
  const std::vector<std::unique_ptr<SlotClass>>& classes() const { return classes_; }
  uint32_t slab_class(uint32_t slab) const { return slab_class_[slab]; }
  uint64_t unfinished_bytes() const { return unfinished_bytes_; }  // RESERVED, FILLING and LIMBO

  static constexpr uint32_t kNoClass = UINT32_MAX;

 private:
  void store(SlotId slot, SlotWord word, std::memory_order order);
  SlotClass& add_class(const SlabLayout& layout);
  SlotClass& assign(uint32_t slab, const SlotClass& cls);
  uint32_t added_at_a_time(const SlotClass& cls) const;
  bool add_some(SlotClass& cls, uint32_t slab);
  void add_free(SlotClass& cls, SlotId slot);
  // Of free slots: whoever still reads one finds out before a byte of it changes.
  void end_generations(uint32_t slab, uint32_t first, uint32_t end);

  Arena& arena_;
  const Slots& slots_;
  std::string policy_name_;
  uint64_t policy_clock_ = 0;  // of all classes
  std::vector<std::unique_ptr<SlotClass>> classes_;
  std::vector<uint32_t> slab_class_;        // by slab
  std::vector<uint32_t> slab_place_;        // place in its class's list of slabs
  std::vector<std::vector<PageId>> pages_;  // by slab, by place
  std::vector<uint32_t> added_in_;          // by slab: its slots that were added, from the first on
  uint32_t aside_ = UINT32_MAX;             // the slab
  std::deque<uint32_t> ready_;              // populated and uncut
  uint64_t populated_ = 0;
  uint64_t unfinished_bytes_ = 0;
  int growth_errno_ = 0;
};

}  // namespace kvw
