// A client's window on the warehouse: the mapped files of one incarnation, read without a call.
// Immutable once built; readers on any thread. Old windows stay valid (if stale) for as long as
// somebody holds them: headers validate whatever an old index names.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/fork.h"
#include "control/control.h"
#include "copy/copy.h"
#include "index/index.h"
#include "slots/slots.h"

namespace kvw {

// What a page must be for a load to accept it.
struct Expected {
  Key namespace_id;
  Key key;
  Key parent;
  uint32_t position;
  WitnessKind witness_kind;
  std::span<const std::byte> witness;
};

// The arena as it is mapped here. The next daemon serves the same file again, and its view takes
// over the mapping of the view before: nothing has to be mapped, faulted in and registered with
// CUDA anew.
class MappedArena {
 public:
  // `before`, if it is this file, of this size and with these rights, and nothing of it was lost;
  // else a mapping of its own.
  static std::shared_ptr<const MappedArena> of(const ParentFd& file, size_t bytes, bool writable,
                                               const std::shared_ptr<const MappedArena>& before);

  std::byte* data() const { return mapping_.data(); }
  size_t bytes() const { return mapping_.bytes(); }
  bool writable() const { return id_.writable; }
  // Whether the file lacks what was read or written here, see Mapping.
  bool lost() const { return mapping_.lost(); }
  // Maps the pages of a range now instead of one fault each.
  void prefault(uint64_t begin, uint64_t end, bool for_write) const;

 private:
  struct Id {
    uint64_t device, inode;  // nobody else's for as long as it is mapped
    size_t bytes;
    bool writable;
    bool operator==(const Id&) const = default;
  };
  MappedArena(const ParentFd& file, const Id& id);

  Id id_;
  Mapping mapping_;
  mutable std::vector<std::atomic<uint8_t>> faulted_;  // by 2 MiB piece
};

enum class LoadResult {
  ok,
  stale,     // the slot was reused or its header names another page: look it up again
  mismatch,  // the header is this page's, the bytes are not
};

// Throws Error storage "memory_lost" unless the daemon's file `what` has all that it was made with.
void require_whole(bool whole, const char* what);
// Throws Error storage "bad_files" unless the file is in this version's format, as its `mapping`
// says; "memory_lost" where that has lost something: zeros are no other version's format.
void require_format(bool good, const Mapping& mapping, const char* what);

class View {
 public:
  // Takes the descriptors of a welcome. `before`: the arena of the view before this one, or null.
  // Throws Error storage "bad_files" when they are not the files of this protocol version,
  // "memory_lost" when one of them was cut.
  View(ParentFd control, ParentFd slots, ParentFd index, ParentFd arena, bool writable,
       const std::shared_ptr<const MappedArena>& before = nullptr);

  const ControlPage& control() const { return *control_; }
  const Index& index() const { return index_; }
  const Slots& slots() const { return slots_; }
  uint64_t incarnation() const { return incarnation_; }
  // A new daemon has published a newer index.
  bool outdated() const {
    return control_->incarnation.value.load(std::memory_order_acquire) != incarnation_;
  }

  // Whether what was read of the control page may be zeros that the daemon never wrote, see
  // Mapping.
  bool control_lost() const { return control_mapping_.lost(); }

  // The clear epoch below which pages of a namespace are gone; nothing when it is not declared.
  struct SpaceRow {
    uint16_t ordinal;
    NamespaceShape shape;
  };
  std::optional<SpaceRow> space(const Key& namespace_id) const;
  uint64_t clear_epoch(uint16_t ordinal) const {
    return control_->namespaces[ordinal].clear_epoch.load(std::memory_order_acquire);
  }

  std::byte* payload(SlotId slot, const SlabLayout& layout) const {
    return arena_->data() + slots_.arena_offset(slot, layout);
  }
  bool slot_in_range(SlotId slot) const {
    return slots_.in_range(slot) && slots_.slab_of(slot) < slab_count_;
  }
  // Is the word exactly (generation, LIVE)? What a pin is checked with, after its fence.
  bool is_live(SlotId slot, uint32_t generation) const;

  // Is the segment's word exactly (life, open)? What a hold on it is checked with, likewise.
  bool is_open(uint32_t segment, uint32_t life) const;

  // Copies one shard of the page out of its slot and accepts it only if the slot's generation
  // framed everything and identity, witness and (where `verify`) digest agree.
  LoadResult load(const EntryView& entry, const Expected& expected, const NamespaceShape& shape,
                  uint32_t shard, std::span<const Piece> to, bool verify) const;

  // One shard of a page in its slot, for who copies it by other means. Good for as long as the page
  // is pinned: pin it first. Nothing: the slot was reused or its header names another page.
  struct Found {
    std::byte* payload;
    uint64_t digest;
  };
  std::optional<Found> find_pinned(const EntryView& entry, const Expected& expected,
                                   const NamespaceShape& shape, uint32_t shard) const;

  // A whole page in its slot, as its header says. Its pin is stored first; it is good where the pin
  // holds, for as long as it does. Nothing: the header is damaged, or of no page of this shape.
  struct Whole {
    PageFacts facts;
    const std::byte* payload;
  };
  std::optional<Whole> find_whole(const EntryView& entry, const NamespaceShape& shape) const;

  // The same object for as long as daemons serve the same arena.
  const std::shared_ptr<const MappedArena>& arena() const { return arena_; }
  // What slots() reads, for who outlives the view.
  const std::shared_ptr<const Mapping>& slots_mapping() const { return slots_mapping_; }
  bool writable() const { return arena_->writable(); }

  // Maps a slot's pages now. Nothing where there is no such slot.
  void prefault(SlotId slot, bool for_write) const;

 private:
  // Of the slab that a slot lies in; nothing where there is no such slot.
  std::optional<SlabLayout> layout_of(SlotId slot) const;
  // What a slot's header says, which may be garbage until the word is seen unchanged.
  struct Header {
    SlotWord before;
    uint64_t digest;
    bool same;  // the page that is expected
    std::byte* payload;
  };
  std::optional<Header> read_header(const EntryView& entry, const Expected& expected,
                                    const NamespaceShape& shape, uint32_t shard) const;
  // After everything was read: whether the slot was this page's all the while.
  bool unchanged(SlotId slot, const SlotWord& before) const;

  Mapping control_mapping_, index_mapping_;
  std::shared_ptr<const Mapping> slots_mapping_;
  std::shared_ptr<const MappedArena> arena_;
  const ControlPage* control_ = nullptr;
  Slots slots_;
  Index index_;
  uint64_t incarnation_ = 0;
  uint32_t slab_count_ = 0;
  uint32_t segment_words_ = 0;  // as many as are mapped
  static constexpr size_t kLastOrdinals = 256;
  // By a part of the namespace's id, where it was last: the first place to look.
  mutable std::array<std::atomic<uint16_t>, kLastOrdinals> last_ordinals_{};
};

}  // namespace kvw
