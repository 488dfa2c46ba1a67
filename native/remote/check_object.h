// Verifies an object of a namespace whose shape nobody told, as a check of a whole store has it:
// the first record says it, and all the others have to agree. What no record can say of itself is
// known from the name and from the fleet's secret. Pure functions over spans; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.h"
#include "chain/chain.h"
#include "remote/object.h"

namespace kvw::remote {

// What an object's name says.
struct ObjectName {
  Key namespace_id;
  uint64_t epoch = 0;
  Key key;
};

struct ObjectCheck {
  ObjectFault fault = ObjectFault::none;
  uint32_t pages = 0;         // that are good, before the first that is not
  uint64_t record_bytes = 0;  // 0: the first record does not say
};
// All of it is read: headers, keys, and the digest of each shard.
ObjectCheck check_object(const Key& fleet, Secret secret, const ObjectName& name,
                         std::span<const std::byte> bytes);

}  // namespace kvw::remote
