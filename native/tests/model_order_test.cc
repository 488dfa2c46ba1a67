// Memory order of one slot, exhaustively: published as generation 1, reclaimed, reused as
// generation 2, under a reader that copies (View::load) or pins (pin_pages), with crash and
// recovery. Explored under sequential consistency, under TSO (store buffers), and under TSO with
// streaming stores that leave the buffer out of order. Every rule that core.md marks is then left
// out in turn, and the model must find what it was for.
//
// What only a compiler or a weaker machine could reorder (relaxed accesses without their fence) is
// modelled as the program with the two steps exchanged. Arm-like hardware is argued, not run.
//
// Steps follow the code: Index::write and Index::read, Pool::take, publish, close, reopen, release,
// Warehouse::evict_slots and leave_dram, Warehouse::recover_slot, copy/copy.h's final fence.
// A message is a plain store and a load that waits for it: less than a socket orders.
#include <array>

#include "tests/model_explorer.h"

namespace kvw::model {
namespace {

enum class Memory { sc, tso, streaming };
constexpr Memory kAll[] = {Memory::sc, Memory::tso, Memory::streaming};

enum Cell : uint8_t {
  kWord,
  kSeq,
  kEntryKey,
  kEntryGen,
  kMeta,
  kLow,
  kHigh,
  kPin,  // the slot, its entry, its bytes
  kSealed1,
  kGranted2,
  kSealed2,  // messages
  kSeqNew,
  kKeyNew,
  kGenNew,  // a new incarnation's index
  kCells
};
constexpr uint8_t kFree = 0, kReserved = 1, kLive = 2, kClosing = 3, kLimbo = 4;
constexpr uint8_t word(uint8_t generation, uint8_t state) {
  return static_cast<uint8_t>(generation << 3 | state);
}
constexpr uint8_t generation_of(uint8_t value) { return value >> 3; }
constexpr uint8_t state_of(uint8_t value) { return value & 7; }

constexpr int kThreads = 4, kRegisters = 8, kBuffer = 8;
using Registers = std::array<uint8_t, kRegisters>;
using When = bool (*)(const Registers&);
using Value = uint8_t (*)(const Registers&);

struct Step {
  enum Kind : uint8_t { load, store, fence, await, require, believe, hold, let_go, accept } kind;
  const char* what;
  uint8_t cell = 0, reg = 0, constant = 0;
  bool streaming = false;
  Value value = nullptr;  // instead of the constant
  When when = nullptr;    // skipped where it is false; for require: the thread ends
};
using Program = std::vector<Step>;

struct OrderState {
  std::array<uint8_t, kCells> cells;
  struct Thread {
    uint8_t pc, ended, pending;
    Registers registers;
    std::array<uint8_t, kBuffer> cell, value;  // cell's top bit: streaming
  };
  std::array<Thread, kThreads> threads;
  uint8_t held;   // generation under a validated pin
  uint8_t error;  // index into kErrors
};

constexpr const char* kErrors[] = {nullptr, "I1: bytes of another generation accepted",
                                   "I1: witness of another page compared",
                                   "I3: reused under a validated pin", "mixed entry believed"};

// What core.md marks, and what the code does. All true is the protocol.
struct Rules {
  bool reserved_fence = true;     // Pool::take: full fence after (generation + 1, RESERVED)
  bool streaming_fence = true;    // copy.h: streaming stores end in a fence
  bool reclaim_fence = true;      // evict_slots: full fence between CLOSING and the scan
  bool pin_fence = true;          // pin_pages: full fence between pin and check
  bool pin_needs_live = true;     // pin_pages: (generation, LIVE), not just the generation
  bool unpin_last = true;         // drop_pin: release, after the loads
  bool recheck_last = true;       // View::load: acquire fence between copy and re-check
  bool witness_inside = true;     // View::load: witness and digests inside the window
  bool odd_first = true;          // Index::write: odd before the fields
  bool even_last = true;          // Index::write: even after the fields
  bool sequence_again = true;     // Index::read: the sequence unchanged
  bool limbo_after_crash = true;  // recover_slot: RESERVED becomes LIMBO
  bool scan_after_crash = true;   // recover_slot: pins of living sessions are honoured
};

struct Scene {
  Memory memory = Memory::sc;
  bool pinned = false;        // the reader pins; else it copies and checks
  bool daemon_fills = false;  // generation 2 is written by the daemon's side, streaming
  bool crash = false;         // the daemon may end at any step; a new one recovers
  bool new_index = false;     // the reader looks into the new incarnation's index
};

class Order {
 public:
  using State = OrderState;
  static constexpr bool kMustSettle = false;

  Order(Scene scene, Rules rules) : scene_(scene), rules_(rules) {
    daemon();
    crash_to_ = static_cast<uint8_t>(programs_[0].size());
    if (scene.crash) recovery();
    scene.pinned ? pinning_reader() : copying_reader();
    if (!scene.daemon_fills) writer(2, "second", kGranted2, kSealed2);
    if (!scene.crash) writer(1, "first", kCells, kSealed1);
  }

  State first() const {
    State state{};
    state.cells[kWord] = scene_.crash ? word(1, kLive) : word(1, kReserved);
    if (scene_.crash) {
      state.cells[kMeta] = state.cells[kLow] = state.cells[kHigh] = 1;
      state.cells[kEntryKey] = state.cells[kEntryGen] = 1;
      state.cells[kSeq] = 2;
    }
    return state;
  }

  const char* error(const State& state) const { return kErrors[state.error]; }

  template <class Emit>
  void next(const State& state, Emit&& emit) const {
    for (int who = 0; who < static_cast<int>(programs_.size()); ++who) {
      drain(state, who, emit);
      const auto& thread = state.threads[who];
      // Killed, a process loses no store that it made: its buffer drains all the same.
      if (who == 0 && scene_.crash && thread.pc < crash_to_ && thread.pending == 0) {
        State after = state;
        after.threads[0].pc = crash_to_;
        after.threads[0].registers = {};
        emit(after, "the daemon is killed", 0);
      }
      if (!thread.ended) take(state, who, emit);
    }
  }

 private:
  // --- the machine
  static bool may_drain(const OrderState::Thread& thread, int at, Memory memory) {
    if (at == 0) return true;
    if (memory != Memory::streaming) return false;
    for (int earlier = 0; earlier < at; ++earlier) {
      const uint8_t a = thread.cell[earlier], b = thread.cell[at];
      if ((a & 0x7f) == (b & 0x7f) || ((a | b) & 0x80) == 0) return false;
    }
    return true;
  }

  template <class Emit>
  void drain(const State& state, int who, Emit& emit) const {
    const auto& thread = state.threads[who];
    for (int at = 0; at < thread.pending; ++at) {
      if (!may_drain(thread, at, scene_.memory)) continue;
      State after = state;
      auto& own = after.threads[who];
      const uint8_t cell = own.cell[at] & 0x7f, value = own.value[at];
      for (int i = at; i + 1 < own.pending; ++i) {
        own.cell[i] = own.cell[i + 1];
        own.value[i] = own.value[i + 1];
      }
      --own.pending;
      own.cell[own.pending] = own.value[own.pending] = 0;
      reach(after, cell, value);
      emit(after, "a store reaches memory", who);
    }
  }

  static void reach(State& state, uint8_t cell, uint8_t value) {
    state.cells[cell] = value;
    if (cell == kWord && state_of(value) == kReserved && state.held != 0 &&
        state.held < generation_of(value))
      state.error = 3;
  }

  static uint8_t read(const State& state, int who, uint8_t cell) {
    const auto& thread = state.threads[who];
    for (int at = thread.pending; at-- > 0;)
      if ((thread.cell[at] & 0x7f) == cell) return thread.value[at];
    return state.cells[cell];
  }

  template <class Emit>
  void take(const State& state, int who, Emit& emit) const {
    const Program& program = programs_[who];
    State after = state;
    auto& thread = after.threads[who];
    // Steps whose condition is false cost no state of their own.
    while (thread.pc < end_of(who, thread.pc) && program[thread.pc].kind != Step::require &&
           program[thread.pc].when != nullptr && !program[thread.pc].when(thread.registers))
      ++thread.pc;
    if (thread.pc >= end_of(who, thread.pc)) {
      thread.ended = 1;
      emit(after, "ends", who);
      return;
    }
    const Step& step = program[thread.pc];
    if (!perform(after, who, step)) return;
    ++thread.pc;
    emit(after, step.what, who);
  }

  // The daemon's program ends where that of its successor begins.
  size_t end_of(int who, uint8_t pc) const {
    return who == 0 && pc < crash_to_ ? crash_to_ : programs_[who].size();
  }

  // False: not now.
  bool perform(State& state, int who, const Step& step) const {
    auto& thread = state.threads[who];
    const uint8_t value = step.value != nullptr ? step.value(thread.registers) : step.constant;
    switch (step.kind) {
      case Step::load:
        thread.registers[step.reg] = read(state, who, step.cell);
        return true;
      case Step::store:
        if (scene_.memory == Memory::sc) {
          reach(state, step.cell, value);
          return true;
        }
        if (thread.pending == kBuffer) return false;
        thread.cell[thread.pending] = static_cast<uint8_t>(step.cell | (step.streaming ? 0x80 : 0));
        thread.value[thread.pending++] = value;
        return true;
      case Step::fence:
        return thread.pending == 0;
      case Step::await:
        return read(state, who, step.cell) != 0;
      case Step::require:
        if (!step.when(thread.registers)) thread.ended = 1;
        return true;
      case Step::believe:
        if (thread.registers[1] != thread.registers[2]) state.error = 4;
        return true;
      case Step::hold:
        state.held = thread.registers[1];
        return true;
      case Step::let_go:
        state.held = 0;
        return true;
      default:
        judge(state, thread.registers);
        return true;
    }
  }

  // Registers of a reader: 0 sequence, 1 entry's generation, 2 entry's key, 3 low, 4 high, 5
  // witness, 6 word or sequence again.
  void judge(State& state, const Registers& registers) const {
    if (registers[3] != registers[1] || registers[4] != registers[1]) state.error = 1;
    if (registers[5] != registers[1] && state.error == 0) state.error = 2;
  }

  // --- the programs
  static Step load(const char* what, uint8_t cell, uint8_t reg, When when = nullptr) {
    return {.kind = Step::load, .what = what, .cell = cell, .reg = reg, .when = when};
  }
  static Step store(const char* what, uint8_t cell, uint8_t constant, When when = nullptr) {
    return {.kind = Step::store, .what = what, .cell = cell, .constant = constant, .when = when};
  }
  static Step put(const char* what, uint8_t cell, Value value, When when) {
    return {.kind = Step::store, .what = what, .cell = cell, .value = value, .when = when};
  }
  static Step stream(const char* what, uint8_t cell, uint8_t constant, When when = nullptr) {
    Step step = store(what, cell, constant, when);
    step.streaming = true;
    return step;
  }
  static Step simple(Step::Kind kind, const char* what, When when = nullptr) {
    return {.kind = kind, .what = what, .when = when};
  }

  void entry(Program& program, uint8_t base, uint8_t generation, When when = nullptr) const {
    const Step odd = store("entry: sequence odd", kSeq, base + 1, when);
    const Step even = store("entry: sequence even", kSeq, base + 2, when);
    if (rules_.odd_first) program.push_back(odd);
    if (!rules_.even_last) program.push_back(even);
    program.push_back(store("entry: key", kEntryKey, generation, when));
    program.push_back(store("entry: generation", kEntryGen, generation, when));
    if (rules_.even_last) program.push_back(even);
  }

  void daemon() {
    programs_.emplace_back();
    Program& p = programs_.back();
    const When unpinned = [](const Registers& r) { return r[0] == 0; };
    const When pinned = [](const Registers& r) { return r[0] != 0; };
    if (!scene_.crash) {  // seal of generation 1, Warehouse::publish
      p.push_back({.kind = Step::await, .what = "seal 1 arrives", .cell = kSealed1});
      p.push_back(store("metadata of 1", kMeta, 1));
      p.push_back(store("word = (1, LIVE)", kWord, word(1, kLive)));
      entry(p, 0, 1);
    }
    // Warehouse::evict_slots, leave_dram
    p.push_back(store("word = (1, CLOSING)", kWord, word(1, kClosing)));
    if (rules_.reclaim_fence) p.push_back(simple(Step::fence, "full fence"));
    p.push_back(load("reads all pins", kPin, 0));
    p.push_back(store("pinned: back to (1, LIVE)", kWord, word(1, kLive), pinned));
    entry(p, 2, 0, unpinned);
    p.push_back(store("word = (1, FREE)", kWord, word(1, kFree), unpinned));
    // Pool::take, Warehouse::open_group
    p.push_back(store("word = (2, RESERVED)", kWord, word(2, kReserved), unpinned));
    if (rules_.reserved_fence) p.push_back(simple(Step::fence, "full fence", unpinned));
    if (scene_.daemon_fills) {
      p.push_back(stream("low bytes of 2", kLow, 2, unpinned));
      p.push_back(stream("high bytes of 2", kHigh, 2, unpinned));
      if (rules_.streaming_fence) p.push_back(simple(Step::fence, "streaming fence", unpinned));
    } else {
      p.push_back(store("grants 2", kGranted2, 1, unpinned));
      p.push_back(
          {.kind = Step::await, .what = "seal 2 arrives", .cell = kSealed2, .when = unpinned});
    }
    p.push_back(store("metadata of 2", kMeta, 2, unpinned));
    p.push_back(store("word = (2, LIVE)", kWord, word(2, kLive), unpinned));
    entry(p, 4, 2, unpinned);
  }

  // Warehouse::recover_slot with a new index, then eviction and reuse by the new daemon.
  // Registers: 0 the word found, 1 the pin, 2 whether the slot may be reused.
  void recovery() {
    Program& p = programs_[0];
    const When sealed = [](const Registers& r) {
      return state_of(r[0]) == kLive || state_of(r[0]) == kClosing;
    };
    const When unfinished = [](const Registers& r) { return state_of(r[0]) == kReserved; };
    const When keep = [](const Registers& r) {
      return (state_of(r[0]) == kLive || state_of(r[0]) == kClosing) && r[1] != 0;
    };
    const When reuse = [](const Registers& r) {
      return state_of(r[0]) == kFree ||
             (state_of(r[0]) != kLimbo && state_of(r[0]) != 7 && r[1] == 0);
    };
    const Value same = [](const Registers& r) { return generation_of(r[0]); };
    const Value later = [](const Registers& r) {
      return static_cast<uint8_t>(generation_of(r[0]) + 1);
    };
    p.push_back(load("recovery: the word", kWord, 0));
    p.push_back(put(
        "recovery: (g, LIVE)", kWord,
        [](const Registers& r) { return word(generation_of(r[0]), kLive); }, sealed));
    p.push_back(store("new index: odd", kSeqNew, 1, sealed));
    p.push_back(put("new index: key", kKeyNew, same, sealed));
    p.push_back(put("new index: generation", kGenNew, same, sealed));
    p.push_back(store("new index: even", kSeqNew, 2, sealed));
    if (rules_.limbo_after_crash) {
      p.push_back(put(
          "recovery: (g, LIMBO)", kWord,
          [](const Registers& r) { return word(generation_of(r[0]), kLimbo); }, unfinished));
      p.push_back(simple(Step::require, "limbo waits for its writer",
                         [](const Registers& r) { return state_of(r[0]) != kReserved; }));
    }
    p.push_back(put(
        "word = (g, CLOSING)", kWord,
        [](const Registers& r) { return word(generation_of(r[0]), kClosing); }, sealed));
    p.push_back(simple(Step::fence, "full fence"));
    if (rules_.scan_after_crash) p.push_back(load("reads all pins", kPin, 1));
    p.push_back(put(
        "pinned: back to LIVE", kWord,
        [](const Registers& r) { return word(generation_of(r[0]), kLive); }, keep));
    p.push_back(store("new index: out, odd", kSeqNew, 3, reuse));
    p.push_back(store("new index: out, key", kKeyNew, 0, reuse));
    p.push_back(store("new index: out, generation", kGenNew, 0, reuse));
    p.push_back(store("new index: out, even", kSeqNew, 4, reuse));
    p.push_back(put(
        "word = (g + 1, RESERVED)", kWord,
        [](const Registers& r) {
          return word(static_cast<uint8_t>(generation_of(r[0]) + 1), kReserved);
        },
        reuse));
    p.push_back(simple(Step::fence, "full fence", reuse));
    p.push_back(put("metadata of g + 1", kMeta, later, reuse));
    p.push_back(put("low bytes of g + 1", kLow, later, reuse));
    p.push_back(put("high bytes of g + 1", kHigh, later, reuse));
    p.push_back(put(
        "word = (g + 1, LIVE)", kWord,
        [](const Registers& r) {
          return word(static_cast<uint8_t>(generation_of(r[0]) + 1), kLive);
        },
        reuse));
    p.push_back(store("new index: odd", kSeqNew, 5, reuse));
    p.push_back(put("new index: key", kKeyNew, later, reuse));
    p.push_back(put("new index: generation", kGenNew, later, reuse));
    p.push_back(store("new index: even", kSeqNew, 6, reuse));
  }

  // Index::read
  void look_up(Program& p) const {
    const bool fresh = scene_.new_index;
    p.push_back(load("reads the sequence", fresh ? kSeqNew : kSeq, 0));
    p.push_back(simple(Step::require, "even", [](const Registers& r) { return r[0] % 2 == 0; }));
    p.push_back(load("reads the key", fresh ? kKeyNew : kEntryKey, 2));
    p.push_back(load("reads the generation", fresh ? kGenNew : kEntryGen, 1));
    p.push_back(load("reads the sequence again", fresh ? kSeqNew : kSeq, 6));
    p.push_back(simple(Step::require, "unchanged and used",
                       rules_.sequence_again
                           ? When([](const Registers& r) { return r[6] == r[0] && r[2] != 0; })
                           : When([](const Registers& r) { return r[2] != 0; })));
    p.push_back(simple(Step::believe, "believes the entry"));
  }

  // View::load
  void copying_reader() {
    programs_.emplace_back();
    Program& p = programs_.back();
    look_up(p);
    const When readable = [](const Registers& r) {
      const uint8_t state = state_of(r[6]);
      return generation_of(r[6]) == r[1] && (state == kLive || state == kClosing || state == kFree);
    };
    p.push_back(load("reads the word", kWord, 6));
    p.push_back(simple(Step::require, "readable, of the entry's generation", readable));
    const Step again = load("reads the word again", kWord, 6);
    const Step unchanged = simple(Step::require, "unchanged", readable);
    const Step witness = load("reads the witness", kMeta, 5);
    if (rules_.witness_inside) p.push_back(witness);
    if (!rules_.recheck_last) p.insert(p.end(), {again, unchanged});
    p.push_back(load("copies low bytes", kLow, 3));
    p.push_back(load("copies high bytes", kHigh, 4));
    if (rules_.recheck_last) p.insert(p.end(), {again, unchanged});
    if (!rules_.witness_inside) p.push_back(witness);
    p.push_back(simple(Step::accept, "ACCEPTS"));
  }

  // pin_pages, a use of the bytes, ClientSession::drop_pin
  void pinning_reader() {
    programs_.emplace_back();
    Program& p = programs_.back();
    look_up(p);
    p.push_back(store("stores its pin", kPin, 1));
    if (rules_.pin_fence) p.push_back(simple(Step::fence, "full fence"));
    p.push_back(load("reads the word", kWord, 6));
    p.push_back(simple(Step::require, "(generation, LIVE)",
                       rules_.pin_needs_live
                           ? When([](const Registers& r) { return r[6] == word(r[1], kLive); })
                           : When([](const Registers& r) { return generation_of(r[6]) == r[1]; })));
    p.push_back(simple(Step::hold, "holds the page"));
    const Step let_go = simple(Step::let_go, "lets go");
    const Step unpin = store("clears its pin", kPin, 0);
    if (!rules_.unpin_last) p.push_back(unpin);
    p.push_back(load("uses low bytes", kLow, 3));
    p.push_back(load("uses high bytes", kHigh, 4));
    p.push_back(load("uses the witness", kMeta, 5));
    p.push_back(let_go);
    if (rules_.unpin_last) p.push_back(unpin);
    p.push_back(simple(Step::accept, "ACCEPTS"));
  }

  void writer(uint8_t generation, const char*, uint8_t granted, uint8_t sealed) {
    programs_.emplace_back();
    Program& p = programs_.back();
    if (granted != kCells)
      p.push_back({.kind = Step::await, .what = "its grant arrives", .cell = granted});
    p.push_back(stream("copies low bytes in", kLow, generation));
    p.push_back(stream("copies high bytes in", kHigh, generation));
    if (rules_.streaming_fence) p.push_back(simple(Step::fence, "streaming fence"));
    p.push_back(store("seals", sealed, 1));
  }

  Scene scene_;
  Rules rules_;
  std::vector<Program> programs_;
  uint8_t crash_to_ = 0;
};

constexpr const char* kWrongBytes = "I1: bytes";
constexpr const char* kWrongWitness = "I1: witness";
constexpr const char* kReused = "I3";
constexpr const char* kMixed = "mixed";

TEST(a_page_is_accepted_only_with_its_own_bytes_under_every_memory_order) {
  for (const Memory memory : kAll)
    for (const bool fills : {false, true})
      holds(Order({.memory = memory, .daemon_fills = fills}, {}), "copying reader");
}

TEST(a_pinned_slot_is_not_reused_under_any_memory_order) {
  for (const Memory memory : kAll)
    for (const bool fills : {false, true})
      holds(Order({.memory = memory, .pinned = true, .daemon_fills = fills}, {}), "pinning reader");
}

TEST(readers_are_safe_when_the_daemon_is_killed_at_any_step) {
  for (const Memory memory : kAll)
    for (const bool pinned : {false, true})
      for (const bool fills : {false, true})
        for (const bool fresh : {false, true})
          holds(Order({memory, pinned, fills, true, fresh}, {}), "crash and recovery");
}

TEST(the_model_finds_what_each_fence_is_for) {
  breaks(Order({.memory = Memory::tso, .pinned = true}, {.reclaim_fence = false}), "reclaim fence",
         kReused);
  breaks(Order({.memory = Memory::tso, .pinned = true}, {.pin_fence = false}), "pin fence",
         kReused);
  breaks(Order({.memory = Memory::streaming, .daemon_fills = true}, {.reserved_fence = false}),
         "fence after RESERVED", kWrongBytes);
  breaks(Order({.memory = Memory::streaming}, {.streaming_fence = false}), "streaming fence",
         kWrongBytes);
  breaks(Order({.memory = Memory::streaming, .daemon_fills = true}, {.streaming_fence = false}),
         "streaming fence of the daemon's copies", kWrongBytes);
  // Under sequential consistency no fence is missed: what is found above is found by the buffers.
  Rules none;
  none.reclaim_fence = none.pin_fence = none.reserved_fence = none.streaming_fence = false;
  holds(Order({.pinned = true}, none), "no fences, sequentially consistent");
  holds(Order({}, none), "no fences, sequentially consistent");
}

TEST(the_model_finds_what_each_order_of_steps_is_for) {
  breaks(Order({}, {.recheck_last = false}), "re-check after the copy", kWrongBytes);
  breaks(Order({}, {.witness_inside = false}), "witness inside the window", kWrongWitness);
  breaks(Order({.pinned = true}, {.pin_needs_live = false}), "pin needs LIVE", kReused);
  breaks(Order({}, {.odd_first = false}), "odd before the fields", kMixed);
  breaks(Order({}, {.even_last = false}), "even after the fields", kMixed);
  breaks(Order({}, {.sequence_again = false}), "sequence read again", kMixed);
  breaks(Order({.pinned = true}, {.unpin_last = false}), "unpin after the loads", kReused);
}

TEST(the_model_finds_what_each_rule_of_recovery_is_for) {
  breaks(Order({.crash = true, .new_index = true}, {.limbo_after_crash = false}),
         "RESERVED becomes LIMBO", kWrongBytes);
  breaks(Order({.pinned = true, .daemon_fills = true, .crash = true}, {.scan_after_crash = false}),
         "a new daemon honours pins", kReused);
}

}  // namespace
}  // namespace kvw::model
