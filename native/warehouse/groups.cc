#include "warehouse/groups.h"

namespace kvw {

Group& Groups::add(SlotId slot, uint32_t shards, PayerId payer, uint64_t slot_bytes) {
  Group& group = table_.try_emplace(slot, &nodes_, shards).first->second;
  group.payer = payer;
  group.slot_bytes = slot_bytes;
  Held& held = held_[payer];
  held.bytes += slot_bytes;
  ++held.slots;
  return group;
}

Group& Groups::open(SlotId slot, const Key& key, const Key& parent, uint32_t shards, PayerId payer,
                    uint64_t slot_bytes) {
  Group& group = add(slot, shards, payer, slot_bytes);
  group.key = key;
  group.parent = parent;
  open_[key].slot = slot;
  ++open_[parent].children;
  return group;
}

Group& Groups::recovered(SlotId slot, uint32_t shards, SessionId payer, uint64_t slot_bytes) {
  Group& group = add(slot, shards, payer, slot_bytes);
  group.limbo = true;
  return group;
}

void Groups::no_longer_open(const Group& group) {
  const auto own = open_.find(group.key);
  own->second.slot = kNoSlot;
  if (own->second.over()) open_.erase(own);
  const auto parent = open_.find(group.parent);
  --parent->second.children;
  if (parent->second.over()) open_.erase(parent);
}

void Groups::erase(SlotId slot) {
  const auto found = table_.find(slot);
  const auto held = held_.find(found->second.payer);
  held->second.bytes -= found->second.slot_bytes;
  if (--held->second.slots == 0) held_.erase(held);
  table_.erase(found);
}

Key Groups::first_above(Key key) const {
  // No more than there are: what clients said of parents may be a ring.
  for (size_t looks = open_.size(); looks > 0; --looks) {
    const SlotId slot = open_slot(key);
    if (slot == kNoSlot) break;
    key = table_.at(slot).parent;
  }
  return key;
}

std::vector<SlotRef> Groups::unsettled(SessionId session) const {
  std::vector<SlotRef> refs;
  for (const auto& [slot, group] : table_)
    for (uint32_t shard = 0; shard < group.shards.size(); ++shard)
      if (group.granted_to(session, shard) && (group.settled >> shard & 1) == 0)
        refs.push_back({group.generation, slot, shard});
  return refs;
}

std::unordered_set<SessionId> Groups::writers() const {
  std::unordered_set<SessionId> writers;
  for (const auto& [slot, group] : table_)
    for (uint64_t left = group.granted & ~group.settled; left != 0; left &= left - 1)
      writers.insert(group.shards[static_cast<size_t>(__builtin_ctzll(left))].owner);
  return writers;
}

}  // namespace kvw
