// The daemon's sessions: creating their files, telling the living from the dead by their locks,
// reading their pins, touches and counters. Owned by the core thread.
//
// Invariants:
//  - A session is dead when its lock can be taken, never because a socket hung up; what it held is
//    let go `grace_ns` later, when its DMA has ended. One that held nothing is reaped at once.
//  - Files are read with pread: a truncated one is a session without pins that its owner broke.
//    One that cannot be read (its page cannot be swapped in) counts as if it pinned everything.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "session/session_file.h"

namespace kvw {

using SessionId = uint64_t;
using PayerId = uint64_t;  // see Registry::payer_of()

struct Session {
  SessionId id = 0;
  uint64_t owner_pid = 0;
  uint32_t pin_capacity = 0;  // words of its pins that count
  Fd file;                    // the daemon's own open file: for pread and for trying the lock
  std::string path;
  bool connected = false;
  uint64_t dead_since_ns = 0;                 // 0: the lock is held
  uint64_t touch_read = 0;                    // touches seen
  std::array<uint64_t, kCounters> counted{};  // its counters, as last read
  uint64_t counted_ns = 0;                    // when; the boot, for one of an earlier daemon
};

// What the pins of all sessions name, read in one pass: for each few pages that are evicted, so its
// memory stays from one pass to the next, and a new pass clears nothing. Words are whatever clients
// wrote: its memory is bounded by what there is to pin.
class PinSet {
 public:
  // Slots from `slots` on do not exist; what pins them pins nothing.
  explicit PinSet(uint32_t slots) : slots_(slots) {}

  bool has_slot(SlotId slot) const { return has(slot_pin(slot, 0)); }
  bool has_segment(uint32_t segment) const {
    return segment_blocks_ > kSegmentBlocks || has(segment_pin(segment, 0));
  }
  uint64_t size() const { return size_; }
  size_t blocks() const { return blocks_; }
  // Calls visit(slot) once for each slot that is pinned, in any order; what cannot be read names
  // none.
  template <class Visit>
  void visit_slots(Visit&& visit) const {
    for (const Block& block : table_) {
      const uint64_t name = (block.tag & UINT32_MAX) * 64;  // of its first bit
      if (block.tag >> 32 != pass_ || is_segment_pin(name << 32)) continue;
      for (uint64_t bits = block.bits; bits != 0; bits &= bits - 1)
        visit(pinned_number((name + static_cast<uint64_t>(std::countr_zero(bits))) << 32));
    }
  }

  // Of 64 segments each, of 1 MiB and more: as many as no disk has. Beyond, all are pinned.
  static constexpr size_t kSegmentBlocks = 1 << 16;

  void begin();
  void add(uint64_t pin);
  void add_all() { all_ = true; }  // what cannot be read may name anything

 private:
  // 64 neighbours, since what is pinned together often lies together.
  struct Block {
    uint64_t tag;  // the pass, and the number of the block; of another pass: it is free
    uint64_t bits;
  };
  static uint64_t name_of(uint64_t pin) { return pin >> 32; }  // what it pins
  uint64_t tag_of(uint64_t name) const { return uint64_t{pass_} << 32 | name / 64; }
  // The place of this block, or the free one where it belongs.
  size_t place_of(uint64_t tag) const;
  bool has(uint64_t pin) const;

  uint32_t slots_;
  std::vector<Block> table_ = std::vector<Block>(256);  // a power of two, half of it free
  size_t last_ = 0;                                     // the place of the last one
  size_t blocks_ = 0, segment_blocks_ = 0;
  uint64_t size_ = 0;
  uint32_t pass_ = 1;
  bool all_ = false;
};

class Registry {
 public:
  // Finds the sessions of an earlier daemon in the directory: their pins count until their owners
  // are dead.
  // `writers`: the sessions that, pins aside, hold anything that their DMA may still write to.
  using Writers = std::function<std::unordered_set<SessionId>()>;
  // `slots`: how many there are.
  Registry(std::string directory, const Key& warehouse_id, const Clock& clock, uint64_t grace_ns,
           uint32_t slots, Writers writers);

  // Creates a session file that is already locked: the returned descriptor carries the lock and is
  // for the client alone. Throws Error (storage; capacity "too_many_sessions": of all, or half of
  // them of one process that is seen from here).
  struct Created {
    Session* session;
    Fd descriptor;
  };
  Created create(uint64_t owner_pid);
  // The session that a client presents again, if it is known, its lock is held, and it was made for
  // the same process: ids are no secret, and who takes one over is told what it writes. Where one
  // of both pids is 0 they may be the same. An older connection of it is the caller's to drop.
  Session* find(SessionId id, uint64_t pid);
  void hung_up(SessionId id);
  // Whose share its takings count in: its process's, where that is seen from here, or else its own.
  // Ids are drawn from 64 bits: none is the number of a process.
  PayerId payer_of(SessionId id) const;

  // Tries the locks of sessions without a connection. Returns those that held nothing when they
  // died, or whose grace has passed, kEndedAtOnce at most; they are removed from the registry,
  // their counters kept in the totals.
  std::vector<SessionId> reap();
  // Nobody can still write in its name: dead for longer than the grace, or never known.
  bool gone(SessionId id) const { return !sessions_.contains(id); }

  // Reads all pins. Call after CLOSING is stored and the full fence. Good until the next call.
  const PinSet& pins();
  const PinSet& pins_seen() const { return pins_; }  // by the last call
  // By the last call, if that was since pins_are_old(): a pass over all pins for each page of a
  // message that finds no room would be most of the core's work. For choices that pins() confirms.
  bool seen_pinned(SlotId slot) const { return lately_ && pins_.has_slot(slot); }
  void pins_are_old() { lately_ = touches_lately_ = false; }
  // Whether touches were drained since then: there are heads to read in as many files.
  bool touches_are_new() const { return touches_lately_; }

  // New touches since the last call, as (page id, low half of the key's low word); lossy: of each
  // session the newest, and of all of them kTouchesPerPass, in equal parts.
  template <class Visit>
  void drain_touches(Visit&& visit) {
    read_touches();
    for (const uint64_t touch : touched_)
      visit(static_cast<PageId>(touch), static_cast<uint32_t>(touch >> 32));
    touched_.clear();
  }

  // Those that were overwritten, or too many for one pass.
  uint64_t touches_lost() const { return touches_lost_; }

  // Sums of all sessions, dead ones included. They never fall, and never pass kCountMost: a step
  // that no client can have made, back or beyond kCountsPerSecond, is left out.
  std::array<uint64_t, kCounters> totals();
  size_t size() const { return sessions_.size(); }

  static constexpr size_t kMaxSessions = 1024;
  static constexpr size_t kMaxSessionsOfProcess = kMaxSessions / 2;
  // The core reads the words of all sessions between two messages: what all may use is bounded, and
  // each new session gets a part of what is left, so that many get less rather than the last none.
  static constexpr uint32_t kPinsOfAll = 24 * 32768;  // of 24 full ones
  static constexpr uint32_t kPinsOfProcess = kPinsOfAll / 2;
  static constexpr uint32_t kPinsLeast = 256;  // of a session, beyond that bound too
  // So much a daemon may have granted, and the next one reads all of it: pins are held over it.
  static constexpr uint32_t kGrantedOfAll = kPinsOfAll + kMaxSessions * kPinsLeast;
  static constexpr uint32_t kGrantedOfProcess = kPinsOfProcess + kMaxSessionsOfProcess * kPinsLeast;
  // What the files of all take, at most.
  static constexpr uint64_t kFilesBytes =
      kMaxSessions * (offsetof(SessionFile, pins) + kPinsLeast * 8 + 4096) + kPinsOfAll * 8;
  static constexpr size_t kEndedAtOnce = 64;          // each has a file to be removed
  static constexpr uint64_t kTouchesPerPass = 16384;  // two milliseconds of the core's
  // Of one counter of one session: bytes from the memory of eight GPUs, times some.
  static constexpr uint64_t kCountsPerSecond = 1ull << 45;
  static constexpr uint64_t kCountMost = 1ull << 63;

 private:
  void adopt(const std::string& path);
  void prepare(Session& session, int client, uint64_t owner_pid);
  void read_touches();
  void drain(Session& session, uint64_t head, uint64_t most);
  void count(Session& session);
  void forget(Session& session);
  bool lock_is_free(const Session& session) const;
  bool full(uint64_t owner_pid) const;
  // What those of all, and of a process that is seen, leave of pin words.
  uint32_t pins_left(uint64_t owner_pid, uint32_t of_all, uint32_t of_process) const;
  // Until the next call. Nothing: they cannot be read.
  std::optional<std::span<const uint64_t>> pin_words(const Session& session);
  bool pins_any(const Session& session);

  std::string directory_;
  Key warehouse_id_;
  const Clock& clock_;
  uint64_t grace_ns_;
  Writers writers_;
  std::map<SessionId, std::unique_ptr<Session>> sessions_;
  std::array<uint64_t, kCounters> totals_{};
  std::vector<uint64_t> touched_;
  std::vector<uint64_t> words_;  // of pins, of one session
  PinSet pins_;
  bool lately_ = false, touches_lately_ = false;  // they were read
  uint64_t touches_lost_ = 0;
};

}  // namespace kvw
