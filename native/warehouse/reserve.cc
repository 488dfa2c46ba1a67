// Stores: exchange, the groups that clients are writing, and limbo.
#include <algorithm>
#include <cassert>

#include "base/error.h"
#include "base/sequence_point.h"
#include "warehouse/warehouse.h"

namespace kvw {

namespace {

constexpr size_t kPrefetchAhead = 8;  // pages of a message
constexpr size_t kRefusedKept = 8192;
constexpr uint64_t kRefusedNs = kSecondNs;  // ranks of one engine ask within a step of each other

ReserveAnswer drop(Reason reason) { return {0, kNoSlot, Answer::dropped, reason, 0}; }

uint64_t all_shards(uint32_t shards) { return shards == 64 ? ~0ull : (1ull << shards) - 1; }

void add_bits(std::atomic<uint64_t>& mask, uint64_t bits) {
  mask.store(mask.load(std::memory_order_relaxed) | bits, std::memory_order_release);
}

// A page whose witness no reader could present would be there for nobody.
bool witness_fits(const Reserve& fields, const NamespaceShape& shape) {
  if (fields.witness_kind == static_cast<uint32_t>(WitnessKind::tokens))
    return fields.witness_bytes == shape.page_tokens * 4;
  return fields.witness_kind == static_cast<uint32_t>(WitnessKind::engine_key) &&
         fields.witness_bytes >= 1 && fields.witness_bytes <= kMaxEngineKeyBytes;
}

}  // namespace

void Warehouse::exchange(SessionId session, const Key& namespace_id, std::span<const Seal> seals,
                         std::span<const ReserveRequest> reserves, std::vector<SealAnswer>& sealed,
                         std::vector<ReserveAnswer>& reserved) {
  const int ordinal = ordinal_of(namespace_id);
  if (ordinal < 0 && !reserves.empty())
    throw Error(ErrorKind::usage, "namespace_unknown",
                "namespace " + to_hex(namespace_id) + " is not open here; open it again");
  count_stores();
  const Step step{session, static_cast<uint16_t>(ordinal), clock_.boot_ns(), clock_.wall_ns()};
  sealed.reserve(seals.size());
  for (size_t at = 0; at < seals.size(); ++at) {
    if (at + kPrefetchAhead < seals.size()) prefetch(seals[at + kPrefetchAhead]);
    sealed.push_back({seal(step, seals[at])});
  }
  reserved.reserve(reserves.size());
  bool again = false;  // a page was dropped that is worth asking for again
  for (size_t at = 0; at < reserves.size(); ++at) {
    if (at + kPrefetchAhead < reserves.size()) {
      catalog_.prefetch(reserves[at + kPrefetchAhead].fields->key);
      pool_.prefetch_free(*spaces_[step.ordinal].cls, kPrefetchAhead);
    }
    const ReserveRequest& item = reserves[at];
    const ReserveAnswer answer = reserve(step, item);
    reserved.push_back(answer);
    if (answer.answer != Answer::dropped) continue;
    again = again || retryable(answer.reason);
    // What only lacks such a parent is asked for again with it: it was not refused for good.
    if (again && answer.reason != Reason::refused_tail) refused_.erase(item.fields->key);
  }
  note_stores(step.ordinal, reserves, reserved);
}

// What a seal a little later will write first: its slot's metadata and the place of its entry. Each
// is a cache miss otherwise, and there are hundreds in a message.
void Warehouse::prefetch(const Seal& seal) const {
  const auto found = groups_.find(seal.slot);
  if (found == groups_.end()) return;
  pool_.prefetch(seal.slot);
  catalog_.prefetch_write(found->second.key);
}

// What was granted to its first shard is a page that no tier had.
void Warehouse::note_stores(uint16_t ordinal, std::span<const ReserveRequest> reserves,
                            std::span<const ReserveAnswer> answers) {
  for (size_t at = 0; at < reserves.size(); ++at) {
    if (answers[at].answer != Answer::granted) continue;
    const SlotMeta* meta = pool_.meta(answers[at].slot);
    if (meta->granted.load() != 1ull << reserves[at].fields->shard) continue;
    stores_.push_back({meta->key, ordinal, spaces_[ordinal].shape.slot_bytes(), 0});
  }
}

void Warehouse::count_stores() {
  curve_.use(stores_);
  stores_.clear();
}

Reason Warehouse::seal(const Step& step, const Seal& seal) {
  const auto found = groups_.find(seal.slot);
  if (found == groups_.end() || found->second.generation != seal.generation) return Reason::stale;
  SlotMeta* meta = pool_.meta(seal.slot);
  if (seal.shard >= meta->shards || owners_of(meta)[seal.shard] != step.session ||
      (meta->granted.load() >> seal.shard & 1) == 0)
    return Reason::not_owner;
  const uint64_t bit = 1ull << seal.shard;
  if (meta->settled.load() & bit) return found->second.limbo ? Reason::stale : Reason::none;
  digests_of(meta)[seal.shard] = seal.digest;
  KVW_SEQUENCE_POINT("seal: digest stored");
  add_bits(meta->sealed, bit);
  add_bits(meta->settled, bit);
  if (found->second.limbo) {
    if (settled(seal.slot, found->second)) close_group(seal.slot);
    return Reason::stale;
  }
  if (meta->sealed.load() != all_shards(meta->shards)) return Reason::none;
  return publish(found, step.wall_ns);
}

Reason Warehouse::publish(Groups::iterator group, uint64_t wall_ns) {
  const SlotId slot = group->first;
  const uint64_t generation = group->second.generation;
  SlotMeta* meta = pool_.meta(slot);
  const Key key = meta->key;
  const int ordinal = ordinal_of(meta->namespace_id);
  assert(!catalog_.contains(key));  // a key with an open group is never stored by another way
  Reason refusal = Reason::none;
  if (ordinal < 0 || meta->clear_epoch < spaces_[ordinal].clear_epoch)
    refusal = Reason::cleared;
  else if (!catalog_.has_room(key) && !make_window(key, kNoSlot))
    refusal = Reason::index_full;
  if (refusal != Reason::none) {
    give_up(slot, group->second);
    close_group(slot);
    return refusal;
  }
  meta->stored_at_ns = wall_ns;
  meta->checksum = meta_checksum(*meta, generation);
  KVW_SEQUENCE_POINT("publish: checksum stored");
  no_longer_open(group->second);
  groups_.erase(group);
  pool_.publish(slot);
  KVW_SEQUENCE_POINT("publish: live");

  EntryView view;
  view.key = key;
  view.space = static_cast<uint16_t>(ordinal);
  view.flags = kEntryUsed | kEntryDram;
  view.slot = slot;
  view.generation = static_cast<uint32_t>(generation);
  view.clear_epoch = meta->clear_epoch;
  view.digest = digests_of(meta)[0];
  std::vector<PageId> adopted;
  view.page = catalog_.insert(view, meta->parent, meta->position, adopted);
  KVW_SEQUENCE_POINT("publish: in the index");
  make_resident(slot, view);
  ++pages_sealed_;
  bytes_sealed_ += meta->shard_bytes * meta->shards;
  admit(view, slot);
  for (const PageId child : adopted)  // they waited for this parent, here and for NVMe
    if (const auto waiting = catalog_.at(child);
        waiting && waiting->in_dram() && !waiting->in_nvme())
      admit(*waiting, waiting->slot);
  return Reason::none;
}

ReserveAnswer Warehouse::reserve(const Step& step, const ReserveRequest& request) {
  const Reserve& fields = *request.fields;
  const NamespaceShape& shape = spaces_[step.ordinal].shape;
  if (fields.shard >= shape.shards || !witness_fits(fields, shape)) return drop(Reason::mismatch);
  if (draining_) return drop(Reason::draining);
  if (const SlotId open = open_slot(fields.key); open != kNoSlot) {
    // A group has room for the owners of its own namespace's shards, not of any other's.
    if (!(pool_.meta(open)->namespace_id == shape.id)) return drop(Reason::mismatch);
    return join(step.session, open, request);
  }
  if (const PageId page = catalog_.page_of(fields.key); page != kNoPage) {
    touch(page);
    return {0, kNoSlot, Answer::already, Reason::none, 0};
  }
  if (const auto refused = refused_.find(fields.key);
      refused != refused_.end() && step.boot_ns < refused->second)
    return drop(Reason::refused_tail);
  const ReserveAnswer answer = open_group(step, request);
  // A page is refused once for all its shards: half a page would only hold room.
  if (shape.shards > 1 && answer.answer == Answer::dropped && !retryable(answer.reason) &&
      refused_.size() < kRefusedKept)
    refused_[fields.key] = step.boot_ns + kRefusedNs;
  return answer;
}

ReserveAnswer Warehouse::join(SessionId session, SlotId slot, const ReserveRequest& request) {
  SlotMeta* meta = pool_.meta(slot);
  const Reserve& fields = *request.fields;
  if (meta->witness_bytes != fields.witness_bytes || !(meta->parent == fields.parent) ||
      meta->position != fields.position || meta->witness_kind != fields.witness_kind ||
      std::memcmp(witness_of(meta), request.witness, fields.witness_bytes) != 0)
    return drop(Reason::mismatch);
  const uint64_t bit = 1ull << fields.shard;
  if (meta->sealed.load() & bit) return {0, kNoSlot, Answer::already, Reason::none, 0};
  if (meta->granted.load() & bit) return {0, kNoSlot, Answer::busy, Reason::busy, 0};
  // Owner before grant: a daemon that dies now must know who may write.
  owners_of(meta)[fields.shard] = session;
  add_bits(meta->granted, bit);
  full_fence();
  return {groups_.at(slot).generation, slot, Answer::granted, Reason::none, 0};
}

ReserveAnswer Warehouse::open_group(const Step& step, const ReserveRequest& request) {
  const Reserve& fields = *request.fields;
  const Space& space = spaces_[step.ordinal];
  SlotId parent_slot = kNoSlot;
  if (fields.position > 0 && open_slot(fields.parent) == kNoSlot) {
    const auto parent = catalog_.find(fields.parent);
    if (!parent) return drop(Reason::parent_missing);
    touch(parent->page);
    // Not evicted for its own child, unless NVMe keeps the chain whole.
    if (parent->in_dram() && !parent->in_nvme()) parent_slot = parent->slot;
  }
  const uint64_t unfinished = pool_.unfinished_bytes();
  if (unfinished != 0 && unfinished + space.shape.slot_bytes() > reserve_limit_bytes_)
    return drop(Reason::reserve_limit);
  if (!catalog_.has_room(fields.key) && !make_window(fields.key, parent_slot))
    return drop(Reason::index_full);
  const SlotId slot = take_slot(*space.cls, SlotState::reserved, parent_slot);
  if (slot == kNoSlot) return drop(room_is_coming() ? Reason::later : Reason::no_room);
  KVW_SEQUENCE_POINT("reserve: slot taken");

  SlotMeta* meta = pool_.meta(slot);
  meta->checksum = 0;
  meta->namespace_id = space.shape.id;
  meta->key = fields.key;
  meta->parent = fields.parent;
  meta->clear_epoch = epoch_;
  meta->stored_at_ns = 0;
  meta->shard_bytes = space.shape.shard_bytes;
  meta->position = fields.position;
  meta->shards = space.shape.shards;
  meta->page_tokens = space.shape.page_tokens;
  meta->witness_kind = fields.witness_kind;
  meta->witness_bytes = fields.witness_bytes;
  meta->spare = 0;
  meta->sealed.store(0, std::memory_order_release);
  meta->settled.store(0, std::memory_order_release);
  for (uint32_t shard = 0; shard < meta->shards; ++shard) {
    digests_of(meta)[shard] = 0;
    owners_of(meta)[shard] = 0;
  }
  owners_of(meta)[fields.shard] = step.session;
  meta->granted.store(1ull << fields.shard, std::memory_order_release);
  std::memcpy(witness_of(meta), request.witness, fields.witness_bytes);
  full_fence();
  KVW_SEQUENCE_POINT("reserve: metadata stored");

  const uint64_t generation = pool_.load(slot).generation;
  groups_[slot] = {generation, fields.key, step.boot_ns + options_.limbo_after_ns,
                   0,          false,      fields.parent};
  open_[fields.key].slot = slot;
  ++open_[fields.parent].children;
  return {generation, slot, Answer::granted, Reason::none, 0};
}

SlotId Warehouse::open_slot(const Key& key) const {
  const auto found = open_.find(key);
  return found == open_.end() ? kNoSlot : found->second.slot;
}

bool Warehouse::room_is_coming() const {
  const bool growing = next_slab_ < arena_.slab_count() && growth_error_.empty();
  return growing || !writing_.empty() || !zombies_.empty() || pool_.unfinished_bytes() != 0;
}

void Warehouse::give_up(SlotId slot, Group& group) {
  if (group.limbo) return;
  group.limbo = true;
  no_longer_open(group);
  pool_.to_limbo(slot);
}

void Warehouse::no_longer_open(const Group& group) {
  const auto own = open_.find(group.key);
  own->second.slot = kNoSlot;
  if (own->second.over()) open_.erase(own);
  const auto parent = open_.find(group.parent);
  --parent->second.children;
  if (parent->second.over()) open_.erase(parent);
}

bool Warehouse::settled(SlotId slot, const Group& group) const {
  if (clock_.boot_ns() < group.not_before_ns) return false;
  const SlotMeta* meta = pool_.meta(slot);
  const uint64_t granted = meta->granted.load() & all_shards(std::min(meta->shards, kMaxShards));
  uint64_t waiting = granted & ~meta->settled.load();
  for (; waiting != 0; waiting &= waiting - 1) {
    const auto shard = static_cast<uint32_t>(__builtin_ctzll(waiting));
    if (!sessions_->gone(owners_of(meta)[shard])) return false;
  }
  return true;
}

void Warehouse::close_group(SlotId slot) {
  groups_.erase(slot);
  pool_.release(slot);
}

void Warehouse::settle(SessionId session, std::span<const SlotRef> refs) {
  for (const SlotRef& ref : refs) {
    const auto found = groups_.find(ref.slot);
    if (found == groups_.end() || found->second.generation != ref.generation) continue;
    SlotMeta* meta = pool_.meta(ref.slot);
    if (ref.shard >= meta->shards || owners_of(meta)[ref.shard] != session) continue;
    add_bits(meta->settled, 1ull << ref.shard);
    give_up(ref.slot, found->second);
    if (settled(ref.slot, found->second)) close_group(ref.slot);
  }
}

std::vector<SlotRef> Warehouse::unsettled(SessionId session) const {
  std::vector<SlotRef> refs;
  for (const auto& [slot, group] : groups_) {
    const SlotMeta* meta = pool_.meta(slot);
    for (uint32_t shard = 0; shard < meta->shards; ++shard)
      if (owners_of(meta)[shard] == session && (meta->granted.load() >> shard & 1) != 0 &&
          (meta->settled.load() >> shard & 1) == 0)
        refs.push_back({group.generation, slot, shard});
  }
  return refs;
}

void Warehouse::settle_groups() {
  const uint64_t now = clock_.boot_ns();
  std::vector<SlotId> done;
  for (auto& [slot, group] : groups_) {
    const bool over = settled(slot, group);
    if (!group.limbo && (over || now >= group.deadline_ns)) {
      // Over without being published: every owner has gone or aborted; or it took too long.
      const SlotMeta* meta = pool_.meta(slot);
      // All that were granted have sealed, but a shard was not asked for yet: it has until then.
      const bool incomplete = (meta->granted.load() & ~meta->settled.load()) == 0;
      if (!incomplete || now >= group.deadline_ns) give_up(slot, group);
    }
    if (group.limbo && over) done.push_back(slot);
  }
  for (const SlotId slot : done) close_group(slot);
}

}  // namespace kvw
