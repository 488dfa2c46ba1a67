// Runs of pages that clients wait for from the remote store: a bounded queue, by deadlines, which
// the worker of the remote tier is given from (server/get_link.h). Pages come back as stores, so
// what is here ends with what the worker says, or leaves unsaid: it holds nothing but the place of
// a run in the queue. Core thread only.
//
// Invariants:
//  - A run is here at most once at a time, whoever asks for it. It is what its asker says of it,
//    all of it: who says something else of the same page asks for something else.
//  - What is due first is handed out first, but for the beginning of a prompt that is due within
//    kSameDeadlineNs of it.
//  - At most kFetchRuns are here, and kFetchBytes, but for a single run that is larger. No session
//    has more than three quarters of what the others leave.
//  - None is here while the tier serves nothing, and none long after its deadline.
//  - Whoever waits for a run is woken when it ends, and when pages are stored meanwhile.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "exchange/messages.h"
#include "remote/get_link.h"
#include "session/registry.h"
#include "warehouse/options.h"

namespace kvw {

struct Space;
struct WarehouseState;

class Fetches {
 public:
  // Deadlines that are no further apart are taken for those of one prompt's runs.
  static constexpr uint64_t kSameDeadlineNs = 100 * kMillisecondNs;

  explicit Fetches(WarehouseState& state);

  // A client waits for these runs, from now on for all of them. An answer for each. Throws Error
  // usage "bad_fetch" where there can be no such object.
  std::vector<FetchAnswer> ask(SessionId session, const FetchSpace& space,
                               std::span<const FetchRun> runs);

  // What the worker has said of itself; and that it is gone, or says nothing any more.
  void state(const remote::LinkState& said);
  void off();
  // The next run, under way from here until done().
  std::optional<remote::RunToGet> next();
  // A run that next() gave has ended. Nothing happens where it was given up meanwhile.
  void done(const remote::RunToGet& run, remote::GetEnd end);

  // A page has been stored, perhaps one of a run.
  void sealed();
  void drain(bool draining);
  void tick();
  FetchesStatus status() const;

 private:
  // What a run is. Its pages follow from the namespace's shape.
  struct Name {
    Key namespace_id, key;
    uint64_t epoch;
    uint32_t day, first_position;
    WitnessKind witness_kind;

    bool operator==(const Name&) const = default;
  };
  struct NameHash {
    size_t operator()(const Name& name) const { return KeyHash{}(name.key); }
  };
  struct Fetch {
    SessionId session;    // that asked for it first
    uint64_t number = 0;  // 0: in the queue
    uint32_t pages, from;
    uint64_t record_bytes;
    uint64_t due_ns, until_ns;  // the first deadline of those who wait, and the last

    uint64_t bytes() const { return record_bytes * (pages - from); }
  };
  using Runs = std::unordered_map<Name, Fetch, NameHash>;
  struct Ended {
    FetchAnswer answer;
    uint64_t at_ns;
  };

  bool serving(uint64_t now_ns) const { return now_ns < until_ns_ && !draining_; }
  void publish();
  FetchAnswer ask(SessionId session, const FetchSpace& space, const FetchRun& run, uint64_t now_ns);
  FetchAnswer join(Fetch& fetch, uint32_t from, uint64_t until_ns);
  // For so much more of the session's.
  bool has_room(SessionId session, size_t runs, uint64_t bytes) const;
  std::optional<FetchAnswer> ended_lately(const Name& name) const;
  Runs::iterator first_due();
  void end_late(uint64_t now_ns);
  Runs::iterator end(Runs::iterator run, remote::GetEnd end);

  WarehouseState& state_;
  const uint64_t limit_bytes_;
  uint64_t until_ns_ = 0;  // as far as the worker has said so
  bool draining_ = false;
  Runs runs_;
  std::unordered_map<Name, Ended, NameHash> ended_;
  uint64_t bytes_ = 0, last_number_ = 0;
  uint64_t asked_ = 0, joined_ = 0, later_ = 0;
  std::array<uint64_t, static_cast<size_t>(remote::GetEnd::count)> ends_{};
};

}  // namespace kvw
