// The messages of the local socket (SOCK_SEQPACKET, little-endian, fixed layouts). docs/protocol.md
// explains them. A message never exceeds kMessageBytes, which fits the default socket buffer;
// larger batches go in pieces. Every request gets one reply with the same number.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/types.h"

namespace kvw {

inline constexpr uint32_t kMessageMagic = 0x3157564b;  // "KVW1"
inline constexpr uint16_t kProtocolVersion = 1;
inline constexpr size_t kMessageBytes = 128 * 1024;

enum class MessageType : uint16_t {
  none = 0,
  hello = 1,
  welcome = 2,   // with descriptors: control, slots, index, arena and, for a new session, its file
  exchange = 3,  // seals of the last step, reservations of this one
  exchanged = 4,
  settle = 5,  // the client will not write these slots any more: abort
  settled = 6,
  promote = 7,  // read these keys from NVMe
  promoting = 8,
  report = 9,  // a page whose bytes are not what its header says
  reported = 10,
  refused = 11,     // instead of any reply: code and text
  locate = 12,      // where the NVMe tier's segments are, for who reads pinned extents by itself
  located = 13,     // with a descriptor: their directory
  hbm = 14,         // the copies in HBM, for who loads into the memory of a device
  hbm_shared = 15,  // with descriptors: their table, and the pool of device memory
  presence = 16,    // the presence filter of the remote tier
  presence_shared = 17,  // with a descriptor: its file, read-only
  fetch = 18,            // bring these runs of pages from the remote tier
  fetching = 19,
};

struct MessageHead {
  uint32_t magic = kMessageMagic;
  uint16_t version = kProtocolVersion;
  MessageType type{};
  uint64_t request = 0;
  uint32_t bytes = 0;  // of the whole message
  uint32_t first = 0;  // counts; their meaning depends on the type
  uint32_t second = 0;
  uint32_t flags = 0;
};
static_assert(sizeof(MessageHead) == 32);

inline constexpr uint32_t kHelloReadOnly =
    1;  // no exchange, and the arena's descriptor is read-only
// In the flags of a welcome: this daemon has an NVMe tier and answers `locate`. An older daemon
// hangs up on a message that it does not know, so nobody asks without it.
inline constexpr uint32_t kWelcomeLocates = 1;
inline constexpr uint32_t kWelcomeHbm = 2;  // likewise: it has an HBM tier and answers `hbm`
// It knows kExchangeSince. An older daemon ignores flags of requests, and would take the epoch for
// the namespace.
inline constexpr uint32_t kWelcomeSince = 8;
// It reads from a remote tier, and answers `presence` and `fetch`.
inline constexpr uint32_t kWelcomeRemote = 16;
// In the flags of an exchange: its body begins with the clear epoch that the bytes belong to. In a
// namespace that was cleared after it nothing is reserved (`cleared`).
inline constexpr uint32_t kExchangeSince = 1;
// A welcome lists at most so many unsettled slots, in the order of slot and shard. The client says
// hello again, with the last of them, for those behind it.
inline constexpr uint32_t kUnsettledPerWelcome = 4096;

struct Hello {
  uint64_t session;  // 0: a new one
  uint64_t pid;      // information only: the kernel knows it
  // `first` SlotRefs follow, none or one: what is listed begins behind it.
};

struct Welcome {
  uint64_t session;
  uint64_t incarnation;
  Key warehouse_id;
  // `first` SlotRefs follow: every group of this session that is not settled. `second` is the
  // number of descriptors.
};

struct SlotRef {
  uint64_t generation;
  SlotId slot;
  uint32_t shard;
};

struct Seal {
  uint64_t generation;
  uint64_t digest;
  SlotId slot;
  uint32_t shard;
};

// exchange: with kExchangeSince a uint64_t epoch, then Key namespace_id, `first` Seals and `second`
// Reserves, each followed by its witness padded to 8 bytes.
struct Reserve {
  Key key;
  Key parent;
  uint32_t position;
  uint32_t shard;
  uint32_t witness_kind;
  uint32_t witness_bytes;
};

// Why something was not done; also the metric labels. One list for the whole product.
enum class Reason : uint32_t {
  none,
  draining,        // the daemon is shutting down
  parent_missing,  // the page before it is not stored
  reserve_limit,   // too many unfinished reservations
  no_room,         // every slot is pinned or holds an ancestor
  later,           // room is being made: pages are being written, or slabs allocated
  index_full,
  refused_tail,  // a page before it was refused in this call
  stale,         // sealed too late: the reservation was given up or its daemon ended
  not_owner,
  cleared,  // the namespace was cleared meanwhile
  mismatch,
  io_error,  // its record on NVMe cannot be read now
  timeout,
  busy,         // another session is writing the same shard
  unreachable,  // the daemon did not answer
  missing,      // not stored
  // Of a page that the remote tier was to have: it is not there, not what was sealed, the store
  // fails or is late, or the tier serves nothing now.
  remote_missing,
  remote_damaged,
  remote_failed,
  remote_off,
  count
};
const char* reason_name(Reason reason);
// Worth asking again within the same store.
constexpr bool retryable(Reason reason) {
  return reason == Reason::reserve_limit || reason == Reason::later;
}

enum class Answer : uint32_t { granted, already, busy, dropped };

struct SealAnswer {
  Reason reason;  // none: taken
};
struct ReserveAnswer {
  uint64_t generation;
  SlotId slot;
  Answer answer;
  Reason reason;
  uint32_t spare;
};
// exchanged: `first` SealAnswers padded to 8 bytes, then `second` ReserveAnswers.

// settle: `first` SlotRefs. settled: nothing.
// promote: `first` Keys. promoting: `first` PromoteAnswers, in their order.
enum class PromoteAnswer : uint32_t {
  reading,
  in_dram,
  missing,
  failed,  // its record could not be read; tried again after a second
  later,   // no slot or no place in the queue now
};

// What the daemon reads for promotions at a time; beyond it a page is told `later`. Clients ask for
// no more than that ahead, and for more when half of it is used up: that is twice what the disk has
// under way, so that its queue is full over their round trips even where all of that is there at
// the same moment.
inline constexpr uint64_t kPromoteBytes = 128ull << 20;
inline constexpr uint64_t kPromotePages = 256;

// presence: nothing. presence_shared: with the descriptor. Refused with "presence_not_ready" while
// there is none.

// fetch: one FetchSpace, then `first` FetchRuns. fetching: `first` FetchAnswers, in their order.
struct FetchSpace {
  Key namespace_id;
  uint32_t witness_kind;
  uint32_t spare;
};
// A run of pages that is one object (remote/object.h): the last `pages - from` of its pages are
// wanted.
struct FetchRun {
  Key key;  // of its last page
  uint32_t day;
  uint32_t first_position;
  uint32_t pages, from;
  uint64_t within_ns;  // what is left of the load's time
};
static_assert(sizeof(FetchRun) == 40);
enum class FetchAnswer : uint32_t {
  reading,  // it is on its way: wait for the control page's `promoted`, and look again
  later,    // as many as there may be are on their way
  off,      // nothing is served now, of this namespace or at all
  // How the same run's fetch has ended within the last second:
  missing,
  damaged,
  failed,   // the store, or it was late
  no_room,  // in the tiers here
};
// What is on its way at a time, at most; beyond it a run is told `later`.
inline constexpr uint64_t kFetchBytes = 128ull << 20;
inline constexpr uint32_t kFetchRuns = 256;

// report: one Report.
struct Report {
  Key key;
  uint64_t generation;
  SlotId slot;
  uint32_t shard;
};

// locate: nothing. located: one Located, and the directory's descriptor, which opens nothing but
// paths (O_PATH).
struct Located {
  uint64_t segments_held;  // that all sessions of a process may hold at a time
};

// hbm, hbm_shared: nothing. With the latter the descriptors of the table (hbm/table.h), which has
// what there is to know of the pool, and of the pool, as the driver exports it. Refused with
// "hbm_not_ready" while there is no pool.

// refused: text "kind\0code\0message".

// Reads a message's body in order; every read is bounds-checked, so that garbage ends in ok() ==
// false and never in a read outside.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> body) : rest_(body) {}
  template <class T>
  const T* take() {
    return take_array<T>(1);
  }
  template <class T>
  const T* take_array(size_t count) {
    static_assert(alignof(T) <= 8);
    if (!ok_ || count > rest_.size() / sizeof(T)) {
      ok_ = false;
      return nullptr;
    }
    // Bodies start 8-byte aligned in the receive buffer and every item is padded to 8.
    const auto* data = reinterpret_cast<const T*>(rest_.data());
    skip(count * sizeof(T));
    return data;
  }
  bool ok() const { return ok_; }
  bool at_end() const { return rest_.empty(); }

 private:
  void skip(size_t bytes) {
    const size_t padded = round_up(bytes, 8);
    rest_ = rest_.subspan(padded < rest_.size() ? padded : rest_.size());
  }
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

// Builds a message; the head is filled by finish().
class Writer {
 public:
  explicit Writer(MessageType type, uint64_t request = 0);
  template <class T>
  void put(const T& value) {
    put_bytes(&value, sizeof value);
  }
  void put_bytes(const void* data, size_t bytes);  // padded to 8
  void set_counts(uint32_t first, uint32_t second = 0, uint32_t flags = 0);
  size_t bytes() const { return data_.size(); }
  std::span<const std::byte> finish();
  std::span<const std::byte> finish(uint64_t request) {
    head().request = request;
    return finish();
  }

 private:
  MessageHead& head() { return *reinterpret_cast<MessageHead*>(data_.data()); }
  std::vector<std::byte> data_;
};

// The head of a received message, or nullptr when it is not one of ours.
const MessageHead* parse_head(std::span<const std::byte> message);

}  // namespace kvw
