// Sessions, reserve, seal, limbo, reclaim and restarts as a small-step model: one slot, two ranks
// that store page K (a shard each), a writer of page L, a pinning reader, a daemon that may be
// killed at every step, clients that die, give up, answer late and copy late, and DMA that outlives
// its owner. Explored exhaustively; then each rule that core.md marks is left out, and the model
// must find what it was for.
//
// Steps follow the code: Reservations::reserve, join, open_group, seal, publish, settle, tick,
// settled; Recovery::recover_slot; Removal::evict_slots; Registry::reap, find;
// DaemonLink::reconnect (which settles what hello lists and it is not writing).
#include <array>

#include "tests/model_explorer.h"

namespace kvw::model {
namespace {

constexpr int kClients = 3;  // 0 and 1: ranks of K, a shard each; 2: both shards of L
constexpr uint8_t kShardsOf[] = {1, 2, 3};
constexpr uint8_t kPageOf[] = {1, 1, 2};
constexpr uint8_t kNobody = 0xff;

enum Slot : uint8_t { kFree, kReserved, kLive, kClosing, kLimbo };
enum Doing : uint8_t {
  kIdle,     // has not asked yet
  kWaiting,  // for the answer to its reserve
  kGaveUp,   // on the answer: it may still arrive
  kGranted,
  kCopying,
  kCopied,
  kOwesSettle,  // hello listed it, and it is not writing: abort
  kCopyThenSettle,
  kDone,
  kRefused,
  kDead
};
enum Message : uint8_t { kReserve = 1, kSeal, kSettle, kHello };
enum Work : uint8_t {
  kNone,
  kOpenWord,
  kOpenMeta,
  kOpenGrant,
  kJoinGrant,
  kSealLive,
  kSealEntry,
  kEvictScan,
  kEvictEntry,
  kEvictFree
};

struct State {
  uint8_t generation, slot, page;
  std::array<uint8_t, 2> owner;  // per shard, in the header
  uint8_t granted, sealed, settled;
  uint8_t sealed_generation;  // the last that was LIVE
  std::array<uint8_t, 2> bytes_page, bytes_generation, bytes_torn;
  uint8_t entry, old_entry;  // generation that the index of this and of an earlier daemon names
  uint8_t up, work, work_for;
  std::array<uint8_t, 6> message, from, about;  // a queue; per sender in order
  uint8_t messages;
  struct Client {
    uint8_t doing, generation, connected, locked, dma;
  };
  std::array<Client, kClients> clients;
  std::array<uint8_t, kClients> grant;  // generation of a grant on its way, or 0
  uint8_t pin, pin_generation;          // 0 none, 1 stored, 2 validated, 3 over
  uint8_t kills, evictions, wrong;
};

enum Wrong : uint8_t {
  kFine,
  kTorn,
  kReusedUnderWriter,
  kReusedUnderDma,
  kReusedUnderPin,
  kUnsealed,
  kQueueFull
};
constexpr const char* kWrongs[] = {nullptr,
                                   "I1: a sealed slot holds other bytes",
                                   "I2: handed on while a client may write",
                                   "I2: handed on while DMA is in flight",
                                   "I3: reused under a validated pin",
                                   "I4: an unsealed page came back",
                                   "the model's queue of messages is too short"};

struct Rules {
  bool limbo_waits_after_restart = true;  // recover_slot: LIMBO and RESERVED become LIMBO
  bool owner_per_shard = true;            // join: each shard has its owner in the header
  bool grace = true;                      // Registry: DMA of a dead owner ends first
  bool meta_before_grant = true;          // open_group: owners and masks stand before any grant
  bool client_settles = true;             // after a restart the client aborts, never the daemon
  bool death_is_the_lock = true;          // not the socket's hang-up
  bool limbo_never_publishes = true;      // seal: a page given up stays given up
  bool hello_lists = true;                // unsettled(): also what the client never saw granted
  bool settles_again = true;              // also for what it had sealed or aborted before
  bool pins_outlive_damage = true;        // recover_slot: bad checksum waits for its pins
};

struct Scope {
  bool rank0 = true, rank1 = true, other = true;  // who takes part
  bool reader = false, damage = false;
  bool deaths = true;  // without them, nobody is freed by dying
  uint8_t kills = 1, evictions = 1;
};

class Protocol {
 public:
  using State = model::State;
  static constexpr bool kMustSettle = true;

  Protocol(Scope scope, Rules rules) : scope_(scope), rules_(rules) {}

  State first() const {
    State s{};
    s.owner = {kNobody, kNobody};
    s.up = 1;
    const bool takes_part[] = {scope_.rank0, scope_.rank1, scope_.other};
    for (int i = 0; i < kClients; ++i)
      s.clients[i] = {takes_part[i] ? uint8_t{kIdle} : uint8_t{kRefused}, 0, 1, 1, 0};
    return s;
  }
  const char* error(const State& s) const { return kWrongs[s.wrong]; }
  bool settled(const State& s) const { return s.slot == kFree || s.slot == kLive; }

  template <class Emit>
  void next(const State& s, Emit&& raw) const {
    const auto emit = [&](State after, const char* what, int who) {
      judge(after);
      raw(after, what, who);
    };
    if (s.up) {
      s.work == kNone ? choose(s, emit) : work(s, emit);
      if (s.kills < scope_.kills) kill(s, emit);
    } else {
      recover(s, emit);
    }
    for (int i = 0; i < kClients; ++i) client(s, i, emit);
    if (scope_.reader) read(s, emit);
  }

 private:
  static bool sealed_now(const State& s) {
    return s.sealed_generation == s.generation && s.generation != 0 &&
           (s.slot == kLive || s.slot == kClosing || s.slot == kFree);
  }
  static void judge(State& s) {
    if (s.wrong != kFine || !sealed_now(s)) return;
    for (int shard = 0; shard < 2; ++shard)
      if (s.bytes_page[shard] != s.page || s.bytes_generation[shard] != s.generation ||
          s.bytes_torn[shard])
        s.wrong = kTorn;
  }
  // (generation + 1, RESERVED) has just been stored.
  static void judge_reuse(State& s) {
    for (int i = 0; i < kClients; ++i) {
      const State::Client& c = s.clients[i];
      const bool older = c.generation != 0 && c.generation < s.generation;
      const bool may_write =
          c.locked && (c.doing == kGranted || c.doing == kCopying || c.doing == kCopyThenSettle);
      if (older && may_write) s.wrong = kReusedUnderWriter;
      if (older && c.dma) s.wrong = kReusedUnderDma;
      if (s.grant[i] != 0 && s.grant[i] < s.generation && c.doing == kWaiting)
        s.wrong = kReusedUnderWriter;
    }
    if (s.pin == 2) s.wrong = kReusedUnderPin;
  }
  static void send(State& s, uint8_t what, int from, uint8_t about = 0) {
    if (s.messages == s.message.size()) {
      s.wrong = kQueueFull;
      return;
    }
    s.message[s.messages] = what;
    s.from[s.messages] = static_cast<uint8_t>(from);
    s.about[s.messages++] = about;
  }
  static void take_message(State& s, int at) {
    for (int i = at; i + 1 < s.messages; ++i) {
      s.message[i] = s.message[i + 1];
      s.from[i] = s.from[i + 1];
      s.about[i] = s.about[i + 1];
    }
    --s.messages;
    s.message[s.messages] = s.from[s.messages] = s.about[s.messages] = 0;
  }

  // Warehouse::settled
  bool all_settled(const State& s) const {
    for (int shard = 0; shard < 2; ++shard) {
      const uint8_t bit = static_cast<uint8_t>(1 << shard);
      if (!(s.granted & bit) || (s.settled & bit)) continue;
      if (s.owner[shard] == kNobody) continue;
      const State::Client& c = s.clients[s.owner[shard]];
      const bool gone = !c.locked && (!c.dma || !rules_.grace);
      const bool hung_up = !rules_.death_is_the_lock && !c.connected;
      if (!gone && !hung_up) return false;
    }
    return true;
  }

  // --- the daemon between two pieces of work
  template <class Emit>
  void choose(const State& s, Emit& emit) const {
    for (int at = 0; at < s.messages; ++at) {
      bool is_first = true;  // of its sender
      for (int earlier = 0; earlier < at; ++earlier)
        is_first = is_first && s.from[earlier] != s.from[at];
      if (!is_first) continue;
      State after = s;
      take_message(after, at);
      answer(after, s.message[at], s.from[at], s.about[at]);
      emit(after, "daemon takes a message", 9);
    }
    if (s.slot == kReserved) {
      State after = s;
      after.slot = kLimbo;
      emit(after, "daemon: time is over, LIMBO", 9);
    }
    if (s.slot == kLimbo && all_settled(s)) {
      State after = s;
      after.slot = kFree;
      emit(after, "daemon: settled, FREE", 9);
    }
    if (s.slot == kLive && s.evictions < scope_.evictions) {
      State after = s;
      ++after.evictions;
      after.slot = kClosing;
      after.work = kEvictScan;
      emit(after, "daemon: CLOSING, fence", 9);
    }
  }

  void answer(State& s, uint8_t message, uint8_t from, uint8_t about) const {
    State::Client& c = s.clients[from];
    const uint8_t shards = kShardsOf[from];
    switch (message) {
      case kReserve:
        if (s.slot == kReserved && s.page == kPageOf[from] && !(s.granted & shards)) {
          s.granted |= shards;
          if (rules_.owner_per_shard) set_owner(s, from);
          s.work = kJoinGrant;
          s.work_for = from;
        } else if (s.slot == kFree) {
          s.work = kOpenWord;
          s.work_for = from;
        } else if (c.doing == kWaiting || c.doing == kGaveUp) {
          c.doing = kRefused;
        }
        return;
      case kSeal:
        if (about != s.generation || (s.slot != kReserved && s.slot != kLimbo)) return;
        if (!(s.granted & shards) || !owns(s, from)) return;
        s.sealed |= shards;
        s.settled |= shards;
        if (s.sealed == 3 && (s.slot == kReserved || !rules_.limbo_never_publishes))
          s.work = kSealLive;
        return;
      case kSettle:
        if (about != s.generation || (s.slot != kReserved && s.slot != kLimbo) || !owns(s, from))
          return;
        s.settled |= static_cast<uint8_t>(shards & s.granted);
        s.slot = kLimbo;
        return;
      default:
        welcome(s, from);
    }
  }
  bool owns(const State& s, uint8_t from) const {
    if (!rules_.owner_per_shard) return true;
    for (int shard = 0; shard < 2; ++shard)
      if ((kShardsOf[from] >> shard & 1) && s.owner[shard] != from) return false;
    return true;
  }
  static void set_owner(State& s, uint8_t who) {
    for (int shard = 0; shard < 2; ++shard)
      if (kShardsOf[who] >> shard & 1) s.owner[shard] = who;
  }

  // Warehouse::unsettled, and what DaemonLink::reconnect makes of it.
  void welcome(State& s, uint8_t from) const {
    uint8_t mine = 0;
    for (int shard = 0; shard < 2; ++shard)
      if (s.owner[shard] == from) mine |= static_cast<uint8_t>(1 << shard);
    mine &= static_cast<uint8_t>(s.granted & ~s.settled);
    if (mine == 0 || (s.slot != kReserved && s.slot != kLimbo)) return;
    if (!rules_.client_settles) {
      s.settled |= mine;
      s.slot = kLimbo;
      return;
    }
    if (!rules_.hello_lists) return;
    State::Client& c = s.clients[from];
    switch (c.doing) {
      case kWaiting:
      case kGaveUp:
      case kGranted:
      case kCopied:
        c.doing = kOwesSettle;
        break;
      case kCopying:
        c.doing = kCopyThenSettle;
        break;
      case kDone:
        if (!rules_.settles_again) return;
        c.doing = kOwesSettle;
        break;
      default:
        return;
    }
    c.generation = s.generation;
  }

  // --- the daemon's work, a store at a time
  template <class Emit>
  void work(const State& s, Emit& emit) const {
    State after = s;
    const uint8_t who = s.work_for;
    switch (s.work) {
      case kOpenWord:
        ++after.generation;
        after.slot = kReserved;
        judge_reuse(after);
        after.work = rules_.meta_before_grant ? kOpenMeta : kOpenGrant;
        return emit(after, "daemon: (g + 1, RESERVED), fence", 9);
      case kOpenMeta:
        after.page = kPageOf[who];
        after.granted = kShardsOf[who];
        after.sealed = after.settled = 0;
        after.owner = {kNobody, kNobody};
        set_owner(after, who);
        after.work = rules_.meta_before_grant ? kOpenGrant : kNone;
        return emit(after, "daemon: metadata, owners, masks", 9);
      case kOpenGrant:
        after.grant[who] = after.generation;
        after.work = rules_.meta_before_grant ? kNone : kOpenMeta;
        return emit(after, "daemon: grants", 9);
      case kJoinGrant:
        after.grant[who] = after.generation;
        after.work = kNone;
        return emit(after, "daemon: grants a joined shard", 9);
      case kSealLive:
        after.slot = kLive;
        after.sealed_generation = after.generation;
        after.work = kSealEntry;
        return emit(after, "daemon: LIVE", 9);
      case kSealEntry:
        after.entry = after.generation;
        after.work = kNone;
        return emit(after, "daemon: index entry", 9);
      case kEvictScan:
        after.work = kNone;
        if (s.pin == 1 || s.pin == 2)
          after.slot = kLive;
        else
          after.work = kEvictEntry;
        return emit(after, "daemon: reads the pins", 9);
      case kEvictEntry:
        after.entry = 0;
        after.work = kEvictFree;
        return emit(after, "daemon: index entry out", 9);
      default:
        after.slot = kFree;
        after.work = kNone;
        return emit(after, "daemon: FREE", 9);
    }
  }

  template <class Emit>
  void kill(const State& s, Emit& emit) const {
    State after = s;
    after.up = after.work = after.work_for = 0;
    ++after.kills;
    after.messages = 0;
    after.message = after.from = after.about = {};
    after.grant = {};  // a reply that was on its way is lost
    for (State::Client& c : after.clients) c.connected = 0;
    emit(after, "daemon is killed", 9);
  }

  // Warehouse::recover_slot
  template <class Emit>
  void recover(const State& s, Emit& emit) const {
    for (const bool damaged : {false, true}) {
      if (damaged && (!scope_.damage || (s.slot != kLive && s.slot != kClosing))) continue;
      State after = s;
      after.up = 1;
      after.old_entry = s.entry != 0 ? s.entry : s.old_entry;
      after.entry = 0;
      if (damaged) {
        // CLOSING, retired: here it is freed at once if nothing pins it, or goes round again.
        const bool pinned = s.pin == 1 || s.pin == 2;
        if (pinned && rules_.pins_outlive_damage) continue;
        after.slot = kFree;
        after.sealed_generation = 0;
      } else if (s.slot == kLive || s.slot == kClosing) {
        if (s.sealed != 3) after.wrong = kUnsealed;
        after.slot = kLive;
        after.entry = s.generation;
      } else if (s.slot == kReserved) {
        after.slot = kLimbo;
      } else if (s.slot == kLimbo && !rules_.limbo_waits_after_restart) {
        after.slot = kFree;
      }
      emit(after, damaged ? "recovery: damaged" : "recovery", 9);
    }
  }

  // --- clients
  template <class Emit>
  void client(const State& s, int i, Emit& emit) const {
    const State::Client& c = s.clients[i];
    if (!c.locked) {
      if (!c.dma) return;
      State lands = s;
      write(lands, i, true);
      emit(lands, "DMA of the dead lands", i);
      State over = s;
      over.clients[i].dma = 0;
      emit(over, "grace is over", i);
      return;
    }
    const bool owns_some = s.granted != 0 && (s.owner[0] == i || s.owner[1] == i);
    if (scope_.deaths && c.doing != kIdle &&
        (owns_some || (c.doing != kDone && c.doing != kRefused))) {
      State after = s;
      const bool dma = c.doing == kCopying || c.doing == kCopyThenSettle;
      after.clients[i] = {kDead, c.generation, 0, 0, static_cast<uint8_t>(dma ? 1 : 0)};
      after.grant[i] = 0;
      emit(after, "dies: its lock is free", i);
    }
    // A copy goes on whether there is a daemon or not, at any time.
    if (c.doing == kGranted) step(s, i, kCopying, "begins to copy", emit);
    if (c.doing == kCopying || c.doing == kCopyThenSettle) {
      State after = s;
      write(after, i, false);
      after.clients[i].doing = c.doing == kCopying ? uint8_t{kCopied} : uint8_t{kOwesSettle};
      emit(after, "copies", i);
    }
    c.connected ? talk(s, i, emit) : reconnect(s, i, emit);
  }

  template <class Emit>
  void step(const State& s, int i, uint8_t doing, const char* what, Emit& emit) const {
    State after = s;
    after.clients[i].doing = doing;
    emit(after, what, i);
  }
  static void write(State& s, int i, bool torn) {
    for (int shard = 0; shard < 2; ++shard)
      if (kShardsOf[i] >> shard & 1) {
        s.bytes_page[shard] = kPageOf[i];
        s.bytes_generation[shard] = s.clients[i].generation;
        s.bytes_torn[shard] = torn;
      }
  }

  template <class Emit>
  void reconnect(const State& s, int i, Emit& emit) const {
    if (!s.up || s.clients[i].doing == kRefused) return;
    State after = s;
    after.clients[i].connected = 1;
    send(after, kHello, i);
    emit(after, "says hello again", i);
  }

  template <class Emit>
  void talk(const State& s, int i, Emit& emit) const {
    const State::Client& c = s.clients[i];
    if (c.doing == kIdle) {
      State after = s;
      after.clients[i].doing = kWaiting;
      send(after, kReserve, i);
      emit(after, "reserves", i);
    }
    if (s.grant[i] != 0) {
      State after = s;
      after.grant[i] = 0;
      after.clients[i].generation = s.grant[i];
      after.clients[i].doing = c.doing == kWaiting ? uint8_t{kGranted} : uint8_t{kOwesSettle};
      emit(after, c.doing == kWaiting ? "receives its grant" : "receives a grant too late", i);
    }
    if (c.doing == kWaiting) step(s, i, kGaveUp, "gives up waiting", emit);
    if (c.doing == kCopied || c.doing == kOwesSettle) {
      State after = s;
      after.clients[i].doing = kDone;
      send(after, c.doing == kCopied ? kSeal : kSettle, i, c.generation);
      emit(after, c.doing == kCopied ? "seals" : "settles", i);
    }
  }

  // --- a reader that pins, through this daemon's index or an earlier one's
  template <class Emit>
  void read(const State& s, Emit& emit) const {
    if (s.pin == 0)
      for (const uint8_t generation : {s.entry, s.old_entry}) {
        if (generation == 0) continue;
        State after = s;
        after.pin = 1;
        after.pin_generation = generation;
        emit(after, "stores its pin, fence", 8);
      }
    if (s.pin == 1) {
      State after = s;
      after.pin = s.generation == s.pin_generation && s.slot == kLive ? 2 : 3;
      emit(after, after.pin == 2 ? "holds" : "comes too late", 8);
    }
    if (s.pin == 2) {
      State after = s;
      after.pin = 3;
      emit(after, "lets go", 8);
    }
  }

  Scope scope_;
  Rules rules_;
};

constexpr Scope kRanks{.other = false};
constexpr Scope kImmortalRanks{.other = false, .deaths = false};

Scope with_reader(Scope scope) {
  scope.reader = true;
  return scope;
}

TEST(a_slot_is_safe_with_two_ranks_and_a_daemon_killed_at_any_step) {
  holds(Protocol(kRanks, {}), "two ranks");
  holds(Protocol(kImmortalRanks, {}), "two ranks that never die");
}

TEST(a_slot_is_safe_with_two_pages_and_a_daemon_killed_at_any_step) {
  holds(Protocol({.rank1 = false}, {}), "a rank and another page");
  holds(Protocol({.rank0 = false, .kills = 2}, {}), "a rank and another page, two kills");
}

TEST(a_slot_is_safe_with_a_pinning_reader_and_damage) {
  holds(Protocol(with_reader({.rank0 = false, .rank1 = false, .damage = true, .kills = 2}), {}),
        "reader and damage");
  holds(Protocol(with_reader({.rank1 = false}), {}), "reader and two pages");
  holds(Protocol(with_reader(kRanks), {}), "reader and two ranks");
}

TEST(a_slot_is_safe_with_everybody_at_once) {
  Scope everybody;
  everybody.kills = kSlow ? 0 : bound() > 1 ? 2 : 1;
  holds(Protocol(everybody, {}), "everybody");
}

TEST(the_model_finds_what_each_rule_of_the_protocol_is_for) {
  const Scope pages{.rank1 = false};
  breaks(Protocol({.rank1 = false, .kills = 2}, {.limbo_waits_after_restart = false}), "limbo",
         "I");
  breaks(Protocol(Scope{}, {.owner_per_shard = false}), "owner per shard", "I");
  breaks(Protocol(pages, {.grace = false}), "grace", "I2: handed on while DMA");
  breaks(Protocol(pages, {.meta_before_grant = false}), "metadata before grant", "I2");
  breaks(Protocol(pages, {.client_settles = false}), "the client settles", "I2");
  breaks(Protocol(pages, {.death_is_the_lock = false}), "death is the lock", "I2");
  breaks(Protocol(kImmortalRanks, {.hello_lists = false}), "hello lists", "leak");
  breaks(Protocol(kImmortalRanks, {.settles_again = false}), "settles again", "leak");
  breaks(Protocol(with_reader({.rank0 = false, .damage = true}), {.pins_outlive_damage = false}),
         "pins outlive damage", "I3");
}

}  // namespace
}  // namespace kvw::model
