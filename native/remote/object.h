// An object of the remote tier: a run of consecutive pages of one chain, as records of the NVMe
// log's format, back to back, and nothing else. Pure functions over spans; thread-safe.
//
// Whoever reads an object knows all of it before but its bytes: the name is the key of its last
// page, and namespace, epoch, positions and sizes follow from what is asked for. So there is no
// directory, a range of an object is judged without the rest of it, and each record stands for
// itself. Reading believes nothing: what is not exactly that is a fault, whoever sent it.
//
// Fields of a record (nvme/format.h) that say something else in an object:
//    24  warehouse id   of the fleet
//    40  segment        kObjectSegment, which no segment has
//    44  life           kObjectVersion
//    48  offset         from the object's begin: page number * record_blocks()
//   136  clear epoch    the fleet's of the namespace
// Padding is zeros: nothing else of an arena leaves its host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/types.h"
#include "chain/chain.h"
#include "nvme/record.h"

namespace kvw::remote {

inline constexpr uint32_t kObjectSegment = 0xfffffffe;
inline constexpr uint32_t kObjectVersion = 1;

// Part of the version, because all hosts must cut chains alike.
inline constexpr uint32_t kObjectTokens = 256;         // of an object with several pages, at most
inline constexpr uint64_t kObjectBytes = 16ull << 20;  // of payload, likewise
inline constexpr uint64_t kMostPageBytes = 64ull << 20;

// How many pages an object of this namespace has: a power of two. 0: its pages are too large.
uint32_t object_pages(const NamespaceShape& shape);

// Of each record of its objects.
uint32_t record_blocks(const NamespaceShape& shape, WitnessKind kind);

// A run of pages that a daemon would have as an object.
struct RunToPut {
  uint64_t number = 0;  // on the link on which it is given to a worker
  Key namespace_id;
  Key key;  // of the last page
  uint32_t first_position = 0, pages = 1;
  uint64_t epoch = 0;           // the fleet's, of the namespace
  std::optional<uint32_t> day;  // the store has it, of that day: what is wanted is a refresh
  uint64_t record_bytes = 0;

  uint64_t bytes() const { return record_bytes * pages; }
};

// What is known of an object without its bytes.
struct ObjectSpec {
  Key fleet;
  Secret secret;  // the fleet's; keys are made anew with it
  NamespaceShape shape;
  WitnessKind witness_kind = WitnessKind::tokens;
  uint64_t epoch = 0;
  Key key;                      // of the last page: its name
  uint32_t first_position = 0;  // a multiple of `pages`
  uint32_t pages = 1;

  uint32_t record_blocks() const { return remote::record_blocks(shape, witness_kind); }
  uint64_t record_bytes() const { return uint64_t{record_blocks()} * kBlockBytes; }
  uint64_t bytes() const { return record_bytes() * pages; }
};

// Why a page is not had; also the metric labels. In the order in which it is looked at.
enum class ObjectFault : uint32_t {
  none,
  size,    // not as long as its records
  header,  // no record of this version, or a damaged one
  place,   // of another fleet, another place or another version of objects
  shape,   // of another namespace, position or size
  epoch,   // of before a clear, or not known here yet
  chain,   // not the page that its name stands for
  digest,  // not the bytes that were sealed
  count
};
const char* fault_name(ObjectFault fault);

struct ObjectPage {
  PageFacts facts;
  const std::byte* payload = nullptr;  // facts.payload_bytes() of them
};

// A page that is faulty ends it: what is in `to` then is of no use.
struct ObjectPacked {
  ObjectFault fault = ObjectFault::none;
  uint32_t page = 0;
};
// Copies the pages, which are all of the object's in their order, into `to`: spec.bytes() of them,
// 4 KiB aligned. They are digested on the way, so damage does not spread. Clear epochs of the facts
// are those of a host, and not looked at.
ObjectPacked pack_object(const ObjectSpec& spec, std::span<const ObjectPage> pages,
                         std::span<std::byte> to);

struct ObjectRead {
  std::vector<ObjectPage> pages;  // before the first that is faulty; payloads lie in the bytes
  ObjectFault fault = ObjectFault::none;
};
// The records of an object from page `from` on: all but their payloads is judged. None is had where
// all look good and the last is not the one that was asked for.
ObjectRead read_object(const ObjectSpec& spec, uint32_t from, std::span<const std::byte> bytes);
// Copies a page's payload to `to`, 4 KiB aligned with room for it, padding as zeros. False: not
// what was sealed.
bool copy_payload(const ObjectPage& page, std::byte* to);
// The same of one of its shards, to its place in `to`.
bool copy_shard(const ObjectPage& page, uint32_t shard, std::byte* to);

}  // namespace kvw::remote
