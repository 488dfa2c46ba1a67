#include "warehouse/reservations.h"

#include <algorithm>
#include <cassert>

#include "base/error.h"
#include "base/sequence_point.h"

namespace kvw {

namespace {

constexpr size_t kPrefetchAhead = 8;  // pages of a message
constexpr size_t kRefusedKept = 8192;
constexpr size_t kEndedPerStep = 2048;      // groups that become LIMBO or are freed
constexpr uint64_t kRefusedNs = kSecondNs;  // ranks of one engine ask within a step of each other

ReserveAnswer drop(Reason reason) { return {0, kNoSlot, Answer::dropped, reason, 0}; }

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

// Nobody takes more than half of what the others leave: who never ends a store, frozen or waiting
// for a rank that is gone, leaves the others half of what they had without it.
bool half_of_rest(uint64_t own, uint64_t all, uint64_t more, uint64_t limit) {
  if (all == 0 || (own == 0 && all + more <= limit)) return true;
  const uint64_t others = all - own;
  return others < limit && own + more <= (limit - others) / 2;
}

}  // namespace

Reservations::Reservations(WarehouseState& state, const Parts& parts)
    // One process takes half of it at most: an eighth of the arena, which is what it goes by.
    : state_(state),
      parts_(parts),
      limit_bytes_(state.arena.bytes() / 4),
      draining_(state.options.inspect) {
  state.arena.control().reserve_limit_bytes.value.store(limit_bytes_ / 2);
}

void Reservations::exchange(SessionId session, const ExchangeTarget& target,
                            std::span<const Seal> seals, std::span<const ReserveRequest> reserves,
                            std::vector<SealAnswer>& sealed, std::vector<ReserveAnswer>& reserved) {
  const int ordinal = state_.ordinal_of(target.namespace_id);
  if (ordinal < 0 && !reserves.empty())
    throw Error(ErrorKind::usage, "namespace_unknown",
                "namespace " + to_hex(target.namespace_id) + " is not open here; open it again");
  parts_.uses.count_stores();
  state_.sessions.pins_are_old();  // whoever asks now may have let some go
  const bool outdated =
      ordinal >= 0 && target.since && *target.since < state_.spaces[ordinal].clear_epoch;
  const Step step{session,
                  state_.sessions.payer_of(session),
                  static_cast<uint16_t>(ordinal),
                  state_.clock.boot_ns(),
                  state_.clock.wall_ns(),
                  outdated};
  sealed.reserve(seals.size());
  for (size_t at = 0; at < seals.size(); ++at) {
    if (at + kPrefetchAhead < seals.size()) prefetch(seals[at + kPrefetchAhead]);
    sealed.push_back({seal(step, seals[at])});
  }
  reserved.reserve(reserves.size());
  if (!reserves.empty()) state_.spaces[step.ordinal].used_ns = step.boot_ns;
  bool again = false;  // a page was dropped that is worth asking for again
  for (size_t at = 0; at < reserves.size(); ++at) {
    if (at + kPrefetchAhead < reserves.size()) {
      state_.catalog.prefetch(reserves[at + kPrefetchAhead].fields->key);
      state_.pool.prefetch_free(*state_.spaces[step.ordinal].cls, kPrefetchAhead);
    }
    const ReserveRequest& item = reserves[at];
    const ReserveAnswer answer = reserve(step, item);
    reserved.push_back(answer);
    if (answer.answer != Answer::dropped) continue;
    again = again || retryable(answer.reason);
    // A tail was refused for what its beginning was.
    if (answer.reason != Reason::refused_tail) note_refused(item.fields->key, answer.reason);
    // What only lacks such a parent is asked for again with it: it was not refused for good.
    if (again && answer.reason != Reason::refused_tail) refused_.erase(item.fields->key);
  }
  note_stores(step.ordinal, reserves, reserved);
}

// What a seal a little later will write first: its slot's metadata and the place of its entry. Each
// is a cache miss otherwise, and there are hundreds in a message.
void Reservations::prefetch(const Seal& seal) {
  const Group* group = state_.groups.find(seal.slot);
  if (group == nullptr) return;
  state_.pool.prefetch(seal.slot);
  state_.catalog.prefetch_write(group->key);
}

// What was granted to its first shard is a page that no tier had.
void Reservations::note_stores(uint16_t ordinal, std::span<const ReserveRequest> reserves,
                               std::span<const ReserveAnswer> answers) {
  for (size_t at = 0; at < reserves.size(); ++at) {
    if (answers[at].answer != Answer::granted) continue;
    const Group& group = *state_.groups.find(answers[at].slot);
    if (group.granted != 1ull << reserves[at].fields->shard) continue;
    parts_.uses.store(group.key, ordinal, group.slot_bytes);
  }
}

Reason Reservations::seal(const Step& step, const Seal& seal) {
  Group* group = state_.groups.find(seal.slot);
  if (group == nullptr || group->generation != seal.generation) return Reason::stale;
  if (!group->granted_to(step.session, seal.shard)) return Reason::not_owner;
  const uint64_t bit = 1ull << seal.shard;
  if (group->settled & bit) return group->limbo ? Reason::stale : Reason::none;
  group->shards[seal.shard].digest = seal.digest;
  group->settled |= bit;
  add_bits(state_.pool.meta(seal.slot)->settled, bit);
  const bool cleared = !group->limbo && is_cleared(*group);  // and the clear is yet to reach it
  if (cleared) give_up(seal.slot, *group, Reason::cleared);
  if (group->limbo) {
    if (settled(*group)) close_group(seal.slot, *group);
    return cleared ? Reason::cleared : Reason::stale;
  }
  return group->whole() ? publish(seal.slot, *group, step.wall_ns) : Reason::none;
}

Reason Reservations::publish(SlotId slot, Group& group, uint64_t wall_ns) {
  SlotMeta* meta = state_.pool.meta(slot);
  const SlabLayout& layout = state_.pool.layout_of(slot);
  const Key key = group.key;
  const uint64_t generation = group.generation;
  assert(!state_.catalog.contains(key));  // a key with an open group is never stored by another way
  if (!meta_fits(*meta, layout.meta_bytes(), layout.slot_bytes()) ||
      meta_checksum(*meta, generation) != group.fixed) {
    // Damaged meanwhile: its checksum would vouch for the damage.
    state_.events.add("page_damaged_unfinished", "key=" + to_hex(key));
    give_up(slot, group, Reason::mismatch);
    close_group(slot, group);
    return Reason::mismatch;
  }
  EntryView view;
  view.page = group.page;
  view.key = key;
  view.space = group.space;
  view.flags = kEntryUsed | kEntryDram;
  view.slot = slot;
  view.generation = static_cast<uint32_t>(generation);
  view.clear_epoch = group.clear_epoch;
  meta->stored_at_ns = wall_ns;
  for (uint32_t shard = 0; shard < group.shards.size(); ++shard)
    digests_of(meta)[shard] = group.shards[shard].digest;
  KVW_SEQUENCE_POINT("publish: digests stored");
  meta->checksum = meta_checksum(*meta, generation);
  KVW_SEQUENCE_POINT("publish: checksum stored");
  state_.groups.no_longer_open(group);
  state_.groups.erase(slot);
  state_.pool.publish(slot, generation);
  KVW_SEQUENCE_POINT("publish: live");

  state_.catalog.insert(view, meta->parent, meta->position);
  KVW_SEQUENCE_POINT("publish: in the index");
  state_.make_resident(slot, view);
  ++pages_sealed_;
  bytes_sealed_ += meta->shard_bytes * meta->shards;
  // Children that waited for it, here and for NVMe, follow in the next ticks.
  parts_.writes.admit(view, slot);
  if (state_.puts) state_.puts->sealed(view);
  if (state_.fetches) state_.fetches->sealed();
  return Reason::none;
}

ReserveAnswer Reservations::reserve(const Step& step, const ReserveRequest& request) {
  const Reserve& fields = *request.fields;
  const NamespaceShape& shape = state_.spaces[step.ordinal].shape;
  if (fields.shard >= shape.shards || !witness_fits(fields, shape)) return drop(Reason::mismatch);
  if (draining_) return drop(Reason::draining);
  // What is reserved now and cleared later leaves with its clear, like every store.
  if (step.outdated) return drop(Reason::cleared);
  if (const SlotId open = group_to_join(fields.key); open != kNoSlot) {
    // A group has room for the owners of its own namespace's shards, not of any other's.
    if (state_.groups.find(open)->space != step.ordinal) return drop(Reason::mismatch);
    return join(step.session, open, request);
  }
  if (const PageId page = page_to_build_on(fields.key);
      page != kNoPage && !parts_.promotions.is_unreadable(page)) {
    state_.touch(page);
    return {0, kNoSlot, Answer::already, Reason::none, 0};
  }
  if (const auto refused = refused_.find(fields.key);
      refused != refused_.end() && step.boot_ns < refused->second)
    return drop(Reason::refused_tail);
  const ReserveAnswer answer = open_group(step, request);
  // What the device does not give is stored anew; its children wait for that.
  if (const auto old = state_.catalog.find(fields.key); old && answer.answer == Answer::granted) {
    parts_.promotions.store_anew(*old);
  }
  // A page is refused once for all its shards: half a page would only hold room.
  if (shape.shards > 1 && answer.answer == Answer::dropped && !retryable(answer.reason) &&
      refused_.size() < kRefusedKept)
    refused_[fields.key] = step.boot_ns + kRefusedNs;
  return answer;
}

// A clear that is under way takes pages out in steps: what it is yet to reach would be gone a
// moment later, and its children with it. It leaves now.
PageId Reservations::page_to_build_on(const Key& key) {
  const auto view = state_.catalog.find(key);
  if (!view) return kNoPage;
  if (!state_.is_cleared(*view)) return view->page;
  parts_.removal.leave(*view, LeaveReason::cleared);
  ++state_.spaces[view->space].cleared_early;
  return kNoPage;
}

// As page_to_build_on(): a clear is yet to reach some that were reserved before it.
SlotId Reservations::group_to_join(const Key& key) {
  const SlotId slot = state_.groups.open_slot(key);
  if (slot == kNoSlot) return kNoSlot;
  Group& group = *state_.groups.find(slot);
  if (!is_cleared(group)) return slot;
  give_up(slot, group, Reason::cleared);
  return kNoSlot;
}

ReserveAnswer Reservations::join(SessionId session, SlotId slot, const ReserveRequest& request) {
  SlotMeta* meta = state_.pool.meta(slot);
  Group& group = *state_.groups.find(slot);
  const Reserve& fields = *request.fields;
  // Whatever became of the witness in shared memory: it lies where this group's shards say.
  const auto shards = static_cast<uint32_t>(group.shards.size());
  const auto* witness = reinterpret_cast<const std::byte*>(digests_of(meta) + 2 * shards);
  if (meta->witness_bytes != fields.witness_bytes || !(group.parent == fields.parent) ||
      meta->position != fields.position || meta->witness_kind != fields.witness_kind ||
      std::memcmp(witness, request.witness, fields.witness_bytes) != 0)
    return drop(Reason::mismatch);
  const uint64_t bit = 1ull << fields.shard;
  if (group.settled & bit) return {0, kNoSlot, Answer::already, Reason::none, 0};
  if (group.granted & bit) return {0, kNoSlot, Answer::busy, Reason::busy, 0};
  group.shards[fields.shard].owner = session;
  group.granted |= bit;
  // Owner before grant: a daemon that dies now must know who may write.
  digests_of(meta)[shards + fields.shard] = session;
  add_bits(meta->granted, bit);
  full_fence();
  return {group.generation, slot, Answer::granted, Reason::none, 0};
}

bool Reservations::within_share(PayerId payer, uint64_t bytes) const {
  const Groups::Held own = state_.groups.held(payer);
  return half_of_rest(own.bytes, state_.pool.unfinished_bytes(), bytes, limit_bytes_) &&
         half_of_rest(own.slots, state_.groups.size(), 1, Groups::kUnfinishedSlots);
}

ReserveAnswer Reservations::open_group(const Step& step, const ReserveRequest& request) {
  const Reserve& fields = *request.fields;
  const Space& space = state_.spaces[step.ordinal];
  SlotId parent_slot = kNoSlot;
  if (fields.position > 0 && group_to_join(fields.parent) == kNoSlot) {
    const PageId above = page_to_build_on(fields.parent);
    if (above == kNoPage) return drop(Reason::parent_missing);
    state_.touch(above);
    const auto parent = state_.catalog.at(above);
    // Not evicted for its own child, unless NVMe keeps the chain whole.
    if (parent->in_dram() && !parent->in_nvme()) parent_slot = parent->slot;
  }
  if (!within_share(step.payer, space.shape.slot_bytes())) return drop(Reason::reserve_limit);
  const PageId page = parts_.index_room.claim(fields.key, fields.parent, parent_slot);
  if (page == kNoPage) return drop(Reason::index_full);
  const SlotId slot = parts_.eviction.take_slot(*space.cls, SlotState::reserved, parent_slot);
  if (slot == kNoSlot) {
    state_.catalog.unclaim(page);
    return drop(parts_.eviction.room_is_coming() ? Reason::later : Reason::no_room);
  }
  KVW_SEQUENCE_POINT("reserve: slot taken");

  SlotMeta* meta = state_.pool.meta(slot);
  meta->checksum = 0;
  meta->namespace_id = space.shape.id;
  meta->key = fields.key;
  meta->parent = fields.parent;
  meta->clear_epoch = state_.epoch;
  meta->stored_at_ns = 0;
  meta->shard_bytes = space.shape.shard_bytes;
  meta->position = fields.position;
  meta->shards = space.shape.shards;
  meta->page_tokens = space.shape.page_tokens;
  meta->witness_kind = fields.witness_kind;
  meta->witness_bytes = fields.witness_bytes;
  meta->spare = 0;
  meta->settled.store(0, std::memory_order_release);
  for (uint32_t shard = 0; shard < space.shape.shards; ++shard) {
    digests_of(meta)[shard] = 0;
    owners_of(meta)[shard] = 0;
  }
  owners_of(meta)[fields.shard] = step.session;
  meta->granted.store(1ull << fields.shard, std::memory_order_release);
  std::memcpy(witness_of(meta), request.witness, fields.witness_bytes);
  full_fence();
  KVW_SEQUENCE_POINT("reserve: metadata stored");

  Group& group = state_.groups.open(slot, fields.key, fields.parent, space.shape.shards, step.payer,
                                    space.shape.slot_bytes());
  group.page = page;
  group.generation = state_.pool.load(slot).generation;
  group.clear_epoch = state_.epoch;
  group.fixed = meta_checksum(*meta, group.generation);
  group.deadline_ns = step.boot_ns + state_.options.limbo_after_ns;
  group.space = step.ordinal;
  group.shards[fields.shard].owner = step.session;
  group.granted = 1ull << fields.shard;
  return {group.generation, slot, Answer::granted, Reason::none, 0};
}

void Reservations::note_refused(const Key& key, Reason why) {
  state_.absences.add({.key = key,
                       .at_s = absence_time(state_.clock.boot_ns()),
                       .refused = true,
                       .why = static_cast<uint8_t>(why)});
}

void Reservations::give_up(SlotId slot, Group& group, Reason why) {
  if (group.limbo) return;
  group.limbo = true;
  note_refused(group.key, why);
  state_.catalog.unclaim(group.page);
  state_.groups.no_longer_open(group);
  state_.pool.to_limbo(slot, group.generation);
}

bool Reservations::settled(const Group& group) const {
  if (state_.clock.boot_ns() < group.not_before_ns) return false;
  uint64_t waiting = group.granted & ~group.settled;
  for (; waiting != 0; waiting &= waiting - 1)
    if (!state_.sessions.gone(group.shards[static_cast<size_t>(__builtin_ctzll(waiting))].owner))
      return false;
  return true;
}

bool Reservations::is_cleared(const Group& group) const {
  return group.clear_epoch < state_.spaces[group.space].clear_epoch;
}

void Reservations::close_group(SlotId slot, const Group& group) {
  state_.pool.end_limbo(slot, group.generation);
  state_.groups.erase(slot);
}

void Reservations::settle(SessionId session, std::span<const SlotRef> refs) {
  for (const SlotRef& ref : refs) {
    Group* group = state_.groups.find(ref.slot);
    if (group == nullptr || group->generation != ref.generation ||
        !group->granted_to(session, ref.shard))
      continue;
    group->settled |= 1ull << ref.shard;
    add_bits(state_.pool.meta(ref.slot)->settled, 1ull << ref.shard);
    give_up(ref.slot, *group, Reason::stale);
    if (settled(*group)) close_group(ref.slot, *group);
  }
}

bool Reservations::give_up_cleared() {
  size_t given_up = 0;
  for (auto& [slot, group] : state_.groups) {
    if (group.limbo || !is_cleared(group)) continue;
    if (given_up++ == kEndedPerStep) return false;
    give_up(slot, group, Reason::cleared);
  }
  return true;
}

void Reservations::tick() {
  const uint64_t now = state_.clock.boot_ns();
  std::vector<SlotId> done;
  size_t given_up = 0;
  for (auto& [slot, group] : state_.groups) {
    if (done.size() + given_up >= kEndedPerStep) break;  // the rest in the next tick
    const bool over = settled(group);
    if (!group.limbo) {
      // Every owner has gone or aborted. Where all that were granted have sealed, a shard was not
      // asked for yet: it has until the deadline.
      const bool abandoned = over && (group.granted & ~group.settled) != 0;
      if (abandoned || now >= group.deadline_ns) {
        give_up(slot, group, Reason::stale);
        ++given_up;
      }
    }
    if (group.limbo && over) done.push_back(slot);
  }
  for (const SlotId slot : done) close_group(slot, *state_.groups.find(slot));
  std::erase_if(refused_, [now](const auto& item) { return item.second <= now; });
}

}  // namespace kvw
