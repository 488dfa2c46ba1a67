// Groups: slots that clients may be writing to, from the first grant until the page is published or
// limbo ends. What is decided of them is decided by this memory, which no client can write. Shared
// memory has a journal of it (granted and settled shards, their owners), for the daemon that comes
// after this one and for nobody else.
#pragma once

#include <memory_resource>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/types.h"
#include "exchange/messages.h"
#include "session/registry.h"

namespace kvw {

inline uint64_t all_shards(uint32_t shards) { return shards == 64 ? ~0ull : (1ull << shards) - 1; }

struct Group {
  struct Shard {
    SessionId owner = 0;
    uint64_t digest = 0;
  };

  Group(std::pmr::memory_resource* memory, uint32_t shards) : shards(shards, memory) {}

  bool granted_to(SessionId session, uint32_t shard) const {
    return shard < shards.size() && shards[shard].owner == session && (granted >> shard & 1) != 0;
  }
  bool whole() const { return settled == all_shards(static_cast<uint32_t>(shards.size())); }

  uint64_t generation = 0;
  Key key, parent;
  PageId page = kNoPage;  // claimed in the catalog, as long as it is RESERVED
  uint64_t clear_epoch = 0;
  uint64_t fixed = 0;  // checksum of the slot's metadata, which nobody writes until it is published
  uint64_t slot_bytes = 0;
  uint64_t deadline_ns = 0;    // RESERVED turns into LIMBO then
  uint64_t not_before_ns = 0;  // never freed earlier: DMA of an earlier daemon
  PayerId payer = 0;           // whose share it takes: of who was granted the first shard
  uint64_t granted = 0;        // masks of shards
  uint64_t settled = 0;        // sealed, or in limbo perhaps aborted
  uint16_t space = 0;
  bool limbo = false;
  std::pmr::vector<Shard> shards;
};

class Groups {
 public:
  // The core looks at each of them in every tick: however small pages are, it has no more.
  static constexpr size_t kUnfinishedSlots = 32768;
  // What counts against a payer's share.
  struct Held {
    uint64_t bytes = 0;
    size_t slots = 0;
  };
  using Table = std::pmr::unordered_map<SlotId, Group>;

  Group* find(SlotId slot) {
    const auto found = table_.find(slot);
    return found == table_.end() ? nullptr : &found->second;
  }
  const Group* find(SlotId slot) const {
    const auto found = table_.find(slot);
    return found == table_.end() ? nullptr : &found->second;
  }
  size_t size() const { return table_.size(); }
  Table::iterator begin() { return table_.begin(); }
  Table::iterator end() { return table_.end(); }

  // RESERVED: others may join it until no_longer_open().
  Group& open(SlotId slot, const Key& key, const Key& parent, uint32_t shards, PayerId payer,
              uint64_t slot_bytes);
  // LIMBO, of an earlier daemon, by its journal. A session that was found pays for itself: which
  // process is behind it only its own file says.
  Group& recovered(SlotId slot, uint32_t shards, SessionId payer, uint64_t slot_bytes);
  // It is published or given up: nobody may join it, and its parent waits for it no longer.
  void no_longer_open(const Group& group);
  void erase(SlotId slot);

  // kNoSlot: no group of this key is RESERVED.
  SlotId open_slot(const Key& key) const {
    const auto found = open_.find(key);
    return found == open_.end() ? kNoSlot : found->second.slot;
  }
  // The first key that is not RESERVED, from `key` on up.
  Key first_above(Key key) const;
  bool none_open() const { return open_.empty(); }
  bool has_open_child(const Key& key) const {
    const auto found = open_.find(key);
    return found != open_.end() && found->second.children != 0;
  }
  Held held(PayerId payer) const {
    const auto found = held_.find(payer);
    return found == held_.end() ? Held{} : found->second;
  }
  // What a session was granted and has neither sealed nor settled.
  std::vector<SlotRef> unsettled(SessionId session) const;
  // The sessions that have such.
  std::unordered_set<SessionId> writers() const;

 private:
  // Of a key: its RESERVED group's slot, or kNoSlot, and how many such groups are its children.
  struct Opening {
    SlotId slot = kNoSlot;
    uint32_t children = 0;

    bool over() const { return slot == kNoSlot && children == 0; }
  };

  Group& add(SlotId slot, uint32_t shards, PayerId payer, uint64_t slot_bytes);

  // Of the tables that every exchange writes: close to each other, and used again at once.
  std::pmr::unsynchronized_pool_resource nodes_;
  Table table_{&nodes_};
  std::pmr::unordered_map<Key, Opening, KeyHash> open_{&nodes_};  // RESERVED ones, their parents
  std::unordered_map<PayerId, Held> held_;
};

}  // namespace kvw
