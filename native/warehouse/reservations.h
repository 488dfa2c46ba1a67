// Stores: exchange, the groups that clients are writing, and limbo. Core thread only.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "exchange/messages.h"
#include "warehouse/eviction.h"
#include "warehouse/index_room.h"
#include "warehouse/promotions.h"
#include "warehouse/removal.h"
#include "warehouse/state.h"
#include "warehouse/uses.h"
#include "warehouse/write_admission.h"

namespace kvw {

// Which namespace an exchange stores into. `since`: the clear epoch that its bytes belong to, where
// they may be older than the exchange.
struct ExchangeTarget {
  // Implicit: most are a namespace and nothing else.
  ExchangeTarget(const Key& id, std::optional<uint64_t> epoch = {})
      : namespace_id(id), since(epoch) {}

  Key namespace_id;
  std::optional<uint64_t> since;
};

struct ReserveRequest {
  const Reserve* fields;
  const std::byte* witness;  // fields->witness_bytes of them
};

class Reservations {
 public:
  struct Parts {
    WriteAdmission& writes;
    Removal& removal;
    Uses& uses;
    Eviction& eviction;
    IndexRoom& index_room;
    Promotions& promotions;
  };

  Reservations(WarehouseState& state, const Parts& parts);

  // See Warehouse::exchange().
  void exchange(SessionId session, const ExchangeTarget& target, std::span<const Seal> seals,
                std::span<const ReserveRequest> reserves, std::vector<SealAnswer>& sealed,
                std::vector<ReserveAnswer>& reserved);
  // What the session was granted and will never seal.
  void settle(SessionId session, std::span<const SlotRef> refs);
  // Some groups of what was cleared since become LIMBO. False: there are more.
  bool give_up_cleared();
  void tick();
  void drain(bool draining) { draining_ = draining; }
  bool draining() const { return draining_; }

  uint64_t pages_sealed() const { return pages_sealed_; }
  uint64_t bytes_sealed() const { return bytes_sealed_; }

 private:
  // What is the same for all of an exchange.
  struct Step {
    SessionId session;
    PayerId payer;
    uint16_t ordinal;
    uint64_t boot_ns, wall_ns;
    bool outdated;  // its bytes are older than a clear of the namespace
  };

  Reason seal(const Step& step, const Seal& seal);
  void prefetch(const Seal& seal);
  ReserveAnswer reserve(const Step& step, const ReserveRequest& request);
  ReserveAnswer join(SessionId session, SlotId slot, const ReserveRequest& request);
  ReserveAnswer open_group(const Step& step, const ReserveRequest& request);
  void note_stores(uint16_t ordinal, std::span<const ReserveRequest> reserves,
                   std::span<const ReserveAnswer> answers);
  // Of a page that a store may name as its own or its parent; kNoPage: there is none.
  PageId page_to_build_on(const Key& key);
  // The same of groups: the slot of one that is RESERVED, or kNoSlot.
  SlotId group_to_join(const Key& key);
  bool within_share(PayerId payer, uint64_t bytes) const;
  Reason publish(SlotId slot, Group& group, uint64_t wall_ns);
  void give_up(SlotId slot, Group& group, Reason why);
  void note_refused(const Key& key, Reason why);
  bool settled(const Group& group) const;
  bool is_cleared(const Group& group) const;
  void close_group(SlotId slot, const Group& group);

  WarehouseState& state_;
  Parts parts_;
  std::unordered_map<Key, uint64_t, KeyHash> refused_;  // pages refused to one shard, until when
  uint64_t limit_bytes_;
  bool draining_;  // nothing new is begun
  uint64_t pages_sealed_ = 0, bytes_sealed_ = 0;
};

}  // namespace kvw
