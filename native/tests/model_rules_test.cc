// Small models of single rules: threads of straight-line steps over a few cells, every
// interleaving. Each rule of core.md about pins, segments, sessions and generations holds with it,
// and is missed without it. One rule a function; what its cells are is said above it.
#include <array>
#include <functional>

#include "tests/model_explorer.h"

namespace kvw::model {
namespace {

constexpr int kCells = 8, kLines = 3;
struct Cells {
  std::array<uint8_t, kCells> cell;
  std::array<uint8_t, kLines> at;
};
enum class Then { on, stop, wait };
struct Line {
  const char* what;
  std::function<Then(std::array<uint8_t, kCells>&)> run;
};

class Threads {
 public:
  using State = Cells;
  static constexpr bool kMustSettle = false;
  using Cell = std::array<uint8_t, kCells>;

  Threads(Cell first, std::vector<std::vector<Line>> threads,
          std::function<const char*(const Cell&)> bad)
      : first_(first), threads_(std::move(threads)), bad_(std::move(bad)) {}
  State first() const { return {first_, {}}; }
  const char* error(const State& state) const { return bad_(state.cell); }
  template <class Emit>
  void next(const State& state, Emit&& emit) const {
    for (size_t who = 0; who < threads_.size(); ++who) {
      if (state.at[who] >= threads_[who].size()) continue;
      State after = state;
      const Line& line = threads_[who][state.at[who]];
      const Then then = line.run(after.cell);
      if (then == Then::wait) continue;
      after.at[who] = then == Then::stop ? 0xff : static_cast<uint8_t>(state.at[who] + 1);
      emit(after, line.what, static_cast<int>(who));
    }
  }

 private:
  Cell first_;
  std::vector<std::vector<Line>> threads_;
  std::function<const char*(const Cell&)> bad_;
};

using Cell = Threads::Cell;
Line set(const char* what, int cell, uint8_t value) {
  return {what, [=](Cell& c) {
            c[cell] = value;
            return Then::on;
          }};
}
Line need(const char* what, int cell, uint8_t value) {
  return {what, [=](Cell& c) { return c[cell] == value ? Then::on : Then::stop; }};
}
Line until(const char* what, int cell, uint8_t value) {
  return {what, [=](Cell& c) { return c[cell] == value ? Then::on : Then::wait; }};
}
// Cells 6: reused, 7: held.
const char* reused_while_held(const Cell& c) {
  return c[6] != 0 && c[7] != 0 ? "I3: reused under a validated pin" : nullptr;
}

// A pin on a segment: 0 old index names it, 1 new index, 2 segment word, 3 pin.
Threads segment_pins(int reads, int checks, bool word_closes, bool out_before_scan) {
  std::vector<Line> reader{need("finds the extent", reads, 1),
                           set("pins the segment", 3, 1),
                           need("checks", checks, 1),
                           set("reads", 7, 1),
                           {"done", [](Cell& c) {
                              c[7] = c[3] = 0;
                              return Then::on;
                            }}};
  std::vector<Line> reclaim;
  if (word_closes) reclaim.push_back(set("segment word closing", 2, 0));
  const Line out = set("extents out of the index", 1, 0);
  const Line scan = need("no pin", 3, 0);
  reclaim.insert(reclaim.end(), {out_before_scan ? out : scan, out_before_scan ? scan : out,
                                 set("first new record", 6, 1)});
  return Threads({1, 1, 1}, {reader, reclaim}, reused_while_held);
}

// 0 word LIVE, 1 session known, 2 sessions as listed, 3 pin.
Threads sessions_listed(bool after_the_fence) {
  const Line list{"lists the sessions", [](Cell& c) {
                    c[2] = c[1];
                    return Then::on;
                  }};
  const Line close = set("CLOSING, fence", 0, 0);
  return Threads(
      {1},
      {{set("registers a session", 1, 1)},
       {until("welcome", 1, 1), set("pins", 3, 1), need("LIVE?", 0, 1), set("holds", 7, 1)},
       {after_the_fence ? close : list,
        after_the_fence ? list : close,
        {"no pin of those listed", [](Cell& c) { return c[2] && c[3] ? Then::stop : Then::on; }},
        set("reuses", 6, 1)}},
      reused_while_held);
}

// 0 word LIVE, 1 and 2 pin words, 3 and 4 what the scan read of them.
Threads pin_moved(bool checked) {
  std::vector<Line> client{set("copies its pin to a lower word", 2, 1)};
  if (checked) client.push_back(need("LIVE? else it keeps the old one", 0, 1));
  client.push_back(set("clears the old one", 1, 0));
  const auto read = [](const char* what, int from, int to) {
    return Line{what, [=](Cell& c) {
                  c[to] = c[from];
                  return Then::on;
                }};
  };
  return Threads({1, 1, 0, 0, 0, 0, 0, 1},
                 {client,
                  {set("CLOSING, fence", 0, 0),
                   read("reads the lower", 2, 4),
                   read("reads the old", 1, 3),
                   {"no pin", [](Cell& c) { return c[3] || c[4] ? Then::stop : Then::on; }},
                   set("reuses", 6, 1)}},
                 reused_while_held);
}

// 0 the word's generation; a pin word holds its low two bits (as 32 of 48 in the file).
Threads pin_matched(bool by_slot_alone) {
  const Line scan = by_slot_alone ? need("a pin of the slot?", 3, 0)
                                  : Line{"a pin of slot and generation?", [](Cell& c) {
                                           return c[3] != 0 && c[4] == c[0] ? Then::stop : Then::on;
                                         }};
  return Threads({5, 1},
                 {{{"pins",
                    [](Cell& c) {
                      c[3] = 1;
                      c[4] = c[0] & 3;
                      return Then::on;
                    }},
                   need("LIVE?", 1, 1),
                   set("holds", 7, 1)},
                  {set("CLOSING, fence", 1, 0), scan, set("reuses", 6, 1)}},
                 reused_while_held);
}

// 0 session file there, 1 locked, 2 reaped.
Threads session_announced(bool locked_first) {
  const Line file = set("creates the file", 0, 1);
  std::vector<Line> made{file, set("locks it", 1, 1), set("announces it", 3, 1)};
  if (!locked_first) made = {file, set("announces it", 3, 1), set("locks it", 1, 1)};
  return Threads({},
                 {made,
                  {until("welcome", 3, 1), until("lock", 1, 1), set("pins", 7, 1)},
                  {until("knows the session", 3, 1), need("can take the lock", 1, 0),
                   set("reaps it, reuses", 6, 1)}},
                 reused_while_held);
}

// 0 lock of session 1 held by A, 1 lock of B's session held; A still writes while 7.
Threads session_ids(bool unique) {
  std::vector<Line> second{{"B has a session",
                            [=](Cell& c) {
                              c[unique ? 1 : 0] = 1;
                              return Then::on;
                            }},
                           {"B dies", [=](Cell& c) {
                              c[unique ? 1 : 0] = 0;
                              return Then::on;
                            }}};
  return Threads({1, 0, 0, 0, 0, 0, 0, 1},
                 {second, {need("owner 1 dead?", 0, 0), set("hands its slot on", 6, 1)}},
                 reused_while_held);
}

// A slots file made anew while an old client maps the old one: 0 old word, 1 bytes, 2 copied.
Threads slots_made_anew(bool words_retired) {
  std::vector<Line> upgrade;
  if (words_retired) upgrade.push_back(set("old words retired", 0, 0));
  upgrade.push_back(set("a writer of the new file", 1, 2));
  return Threads({1, 1},
                 {{need("old word", 0, 1),
                   {"copies",
                    [](Cell& c) {
                      c[2] = c[1];
                      return Then::on;
                    }},
                   need("old word again", 0, 1),
                   set("accepts", 3, 1)},
                  upgrade},
                 [](const Cell& c) {
                   return c[3] && c[2] == 2 ? "I1: new bytes under an old word" : nullptr;
                 });
}

// Entries hold fewer bits of the generation than words: 0 word, 1 bytes, 2 first look, 3 copied, 4
// tokens.
Threads generation_wraps(bool whole_word, bool tokens_compared) {
  std::vector<Line> daemon;
  for (uint8_t generation = 2; generation <= 5; ++generation) {
    daemon.push_back(set("next generation", 0, generation));
    daemon.push_back({"its tokens and bytes", [=](Cell& c) {
                        c[1] = c[4] = generation;
                        return Then::on;
                      }});
  }
  std::vector<Line> reader{{"low bits agree",
                            [](Cell& c) {
                              c[2] = c[0];
                              return c[0] % 4 == 1 ? Then::on : Then::stop;
                            }},
                           {"copies", [](Cell& c) {
                              c[3] = c[1];
                              return Then::on;
                            }}};
  if (tokens_compared) reader.push_back(need("tokens are its own", 4, 1));
  reader.push_back({"again", [=](Cell& c) {
                      return (whole_word ? c[0] == c[2] : c[0] % 4 == 1) ? Then::on : Then::stop;
                    }});
  reader.push_back(set("accepts", 5, 1));
  return Threads({1, 1, 0, 0, 1}, {reader, daemon}, [](const Cell& c) {
    return c[5] && c[3] != 1 ? "I1: another generation's bytes" : nullptr;
  });
}

TEST(small_models_hold_with_the_rules) {
  holds(segment_pins(1, 2, true, true), "segment word, new index");
  holds(segment_pins(0, 2, true, true), "segment word, old index");
  holds(sessions_listed(true), "sessions listed after the fence");
  holds(pin_moved(true), "a moved pin is checked");
  holds(pin_matched(true), "pins match by slot alone");
  holds(session_announced(true), "announced once locked");
  holds(session_ids(true), "ids are unique for ever");
  holds(slots_made_anew(true), "old words retired");
  holds(generation_wraps(true, true), "whole word, and tokens");
}

TEST(small_models_find_what_each_rule_is_for) {
  breaks(segment_pins(0, 0, false, true), "a segment word outside the index", "I3");
  breaks(segment_pins(1, 1, false, false), "out before the scan", "I3");
  breaks(sessions_listed(false), "sessions listed after the fence", "I3");
  breaks(pin_moved(false), "a moved pin is checked", "I3");
  breaks(pin_matched(false), "pins match by slot alone", "I3");
  breaks(session_announced(false), "announced once locked", "I3");
  breaks(session_ids(false), "ids are unique for ever", "I3");
  breaks(slots_made_anew(false), "slots are never made anew", "I1");
  breaks(generation_wraps(true, false), "tokens compared", "I1");
  breaks(generation_wraps(false, false), "whole word compared", "I1");
}

}  // namespace
}  // namespace kvw::model
