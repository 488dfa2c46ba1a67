// The link for gets between a daemon's core and the worker of its remote tier: a socketpair of its
// own beside that for puts, with the same head (remote/link.h). The core hands out runs that
// clients wait for; the worker says how each ended, and once a second how the store is.
//
// Neither end believes the other: what is not a whole message of this version ends the link, and
// nothing else.
#pragma once

#include <cstdint>
#include <optional>

#include "base/fd.h"
#include "base/types.h"
#include "remote/link.h"
#include "remote/object.h"

namespace kvw::remote {

inline constexpr uint32_t kLastDay = INT32_MAX;  // that a name can have (remote/names.py)
inline constexpr uint32_t kMostGets = 64;        // runs at a time: all fit a socket's buffer

// How a get ended; also the metric labels.
enum class GetEnd : uint32_t {
  filled,   // its pages are stored here now
  missing,  // the store has no such object
  damaged,  // it is not the object that its name says; pages before the damage are stored
  failed,   // the store did not give it
  late,     // its deadline passed before
  no_room,  // the daemon refused its pages
  cleared,  // the namespace was cleared meanwhile
  count
};
const char* get_end_name(GetEnd end);

// A run of pages to get: the records of an object from page `from` on.
struct RunToGet {
  uint64_t number = 0;  // on the link on which it is given to a worker
  Key namespace_id;
  Key key;                   // of the last page
  uint64_t epoch = 0;        // the fleet's, of the namespace
  uint64_t clear_epoch = 0;  // this host's as of the fleet's: what is stored is as old as this
  uint64_t record_bytes = 0;
  uint64_t within_ns = 0;  // from now on; nobody waits any longer
  uint32_t first_position = 0, pages = 1, from = 0;
  uint32_t day = 0;
  WitnessKind witness_kind = WitnessKind::tokens;

  uint64_t begin() const { return record_bytes * from; }  // of the range that is wanted
  uint64_t end() const { return record_bytes * pages; }
};

// Of the worker: it takes so many runs at a time.
struct LinkGets {
  static constexpr LinkType kType = LinkType::gets;
  uint32_t gets;  // 1 to kMostGets
  uint32_t spare;
};
// Of the worker, once a second. A core that has not heard it for kStateOldNs serves nothing.
struct LinkState {
  static constexpr LinkType kType = LinkType::state;
  // By the boot clock: nothing is served from then on, whenever this is read. 0: nothing at all.
  uint64_t until_ns;
  uint64_t read_bytes_per_s, first_byte_ns;  // smoothed; 0: not measured yet
};
inline constexpr uint64_t kStateOldNs = 5'000'000'000;
// Of the core.
struct LinkGet {
  static constexpr LinkType kType = LinkType::get;
  uint64_t number;
  Key namespace_id;
  Key key;
  uint64_t epoch, clear_epoch;
  uint64_t record_bytes;
  uint64_t within_ns;
  uint32_t first_position, pages, from, day;
  uint32_t witness_kind;
  uint32_t spare;
};
// Of the worker.
struct LinkGot {
  static constexpr LinkType kType = LinkType::got;
  uint64_t number;
  uint32_t end;    // GetEnd
  uint32_t pages;  // that are stored here now
};
static_assert(sizeof(LinkMessage<LinkGet>) <= 128);

LinkGet link_get(const RunToGet& run);
// Nothing: no run that there can be.
std::optional<RunToGet> run_from(const LinkGet& wire);

// The worker's end. Thread-safe. All of them throw Error transport "link_closed" where the core has
// ended it.
class WorkerGetLink {
 public:
  // Throws Error usage "bad_link".
  explicit WorkerGetLink(Fd fd) : end_(std::move(fd)) {}

  // Throws Error usage "bad_gets" unless 1 to kMostGets.
  void ready(uint32_t gets) const;
  void state(uint64_t until_ns, uint64_t read_bytes_per_s, uint64_t first_byte_ns) const;
  // Waits for the next run, at most that long.
  std::optional<RunToGet> next(uint64_t timeout_ns) const;
  void done(const RunToGet& run, GetEnd end, uint32_t pages) const;
  void close() const { end_.close(); }

 private:
  LinkEnd end_;
};

}  // namespace kvw::remote
