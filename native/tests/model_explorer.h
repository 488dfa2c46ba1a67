// Exhaustive exploration of small models: every state that any interleaving of their steps reaches,
// breadth first, so that a violation comes with a shortest trace.
//
// A model has `State` (trivially copyable, bytes only: compared and hashed as memory), `first()`,
// `next(state, emit)` that calls emit(successor, what, who) for each step somebody could take, and
// `error(state)`: what is wrong with it, or nullptr. With kMustSettle it also has `settled(state)`,
// and from every state a settled one must be reachable: nothing leaks.
//
// KVW_MODEL_BOUND=N multiplies the bounds that the models choose for `make test`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/check.h"

namespace kvw::model {

inline uint64_t bound() {
  const char* text = std::getenv("KVW_MODEL_BOUND");
  return text != nullptr ? check::number(text, "KVW_MODEL_BOUND") : 1;
}

// A sanitizer has nothing to find in a model; it only makes the largest of them take minutes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSlow = true;
#else
inline constexpr bool kSlow = false;
#endif

struct Outcome {
  std::string error;  // empty: no reachable state is wrong
  std::vector<std::string> trace;
  size_t states = 0;

  std::string text() const {
    std::string all = error + " (" + std::to_string(states) + " states)";
    for (const std::string& step : trace) all += "\n      " + step;
    return all;
  }
};

template <class Model>
class Explorer {
 public:
  using State = typename Model::State;
  static_assert(std::has_unique_object_representations_v<State>, "padding would be compared");

  Explorer(const Model& model, size_t limit)
      : model_(model), limit_(limit), table_(1 << 16, kNone) {}

  Outcome run() {
    add(model_.first(), kNone, "", 0);
    for (uint32_t at = 0; at < states_.size() && outcome_.error.empty(); ++at) {
      const State from = states_[at];  // a copy: the vector grows
      model_.next(from, [&](const State& to, const char* what, int who) {
        if (!outcome_.error.empty()) return;
        const uint32_t number = add(to, at, what, who);
        if constexpr (Model::kMustSettle) edges_.emplace_back(at, number);
      });
      if (states_.size() > limit_) {
        outcome_.error = "more states than the limit";
        break;
      }
    }
    if constexpr (Model::kMustSettle)
      if (outcome_.error.empty()) find_leak();
    outcome_.states = states_.size();
    return std::move(outcome_);
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Origin {
    uint32_t from;
    int who;
    const char* what;
  };

  static uint64_t hash(const State& state) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&state);
    uint64_t mixed = 0xcbf29ce484222325ull;
    size_t i = 0;
    for (; i + 8 <= sizeof state; i += 8) {
      uint64_t word;
      std::memcpy(&word, bytes + i, 8);
      mixed = (mixed ^ word) * 0x9e3779b97f4a7c15ull;
      mixed ^= mixed >> 29;
    }
    for (; i < sizeof state; ++i) mixed = (mixed ^ bytes[i]) * 0x100000001b3ull;
    return mixed ^ mixed >> 32;
  }

  uint32_t add(const State& state, uint32_t from, const char* what, int who) {
    if (states_.size() * 2 >= table_.size()) grow();
    size_t place = hash(state) & (table_.size() - 1);
    while (table_[place] != kNone) {
      if (std::memcmp(&states_[table_[place]], &state, sizeof state) == 0) return table_[place];
      place = (place + 1) & (table_.size() - 1);
    }
    const auto number = static_cast<uint32_t>(states_.size());
    table_[place] = number;
    states_.push_back(state);
    origins_.push_back({from, who, what});
    if (const char* wrong = model_.error(state)) tell(wrong, number);
    return number;
  }

  void grow() {
    table_.assign(table_.size() * 2, kNone);
    for (uint32_t number = 0; number < states_.size(); ++number) {
      size_t place = hash(states_[number]) & (table_.size() - 1);
      while (table_[place] != kNone) place = (place + 1) & (table_.size() - 1);
      table_[place] = number;
    }
  }

  void tell(const std::string& wrong, uint32_t number) {
    outcome_.error = wrong;
    for (; origins_[number].from != kNone; number = origins_[number].from)
      outcome_.trace.push_back(std::to_string(origins_[number].who) + ": " + origins_[number].what);
    std::reverse(outcome_.trace.begin(), outcome_.trace.end());
  }

  void find_leak() {
    std::vector<std::vector<uint32_t>> before(states_.size());
    for (const auto& [from, to] : edges_) before[to].push_back(from);
    std::vector<bool> good(states_.size());
    std::vector<uint32_t> open;
    for (uint32_t number = 0; number < states_.size(); ++number)
      if (model_.settled(states_[number])) open.push_back(number);
    for (const uint32_t number : open) good[number] = true;
    while (!open.empty()) {
      const uint32_t number = open.back();
      open.pop_back();
      for (const uint32_t earlier : before[number])
        if (!good[earlier]) {
          good[earlier] = true;
          open.push_back(earlier);
        }
    }
    for (uint32_t number = 0; number < states_.size(); ++number)
      if (!good[number]) return tell("leak: no way leads back to rest from here", number);
  }

  const Model& model_;
  size_t limit_;
  std::vector<State> states_;
  std::vector<Origin> origins_;
  std::vector<std::pair<uint32_t, uint32_t>> edges_;
  std::vector<uint32_t> table_;
  Outcome outcome_;
};

template <class Model>
Outcome explore(const Model& model, size_t limit = 6000000) {
  return Explorer<Model>(model, limit * bound()).run();
}

// The rules as they are: nothing wrong in any reachable state.
template <class Model>
void holds(const Model& model, const char* name) {
  const Outcome outcome = explore(model);
  if (!outcome.error.empty()) throw check::Failure(std::string(name) + ": " + outcome.text());
  std::printf("%s: %zu states, ", name, outcome.states);
}

// A rule left out: the exploration must find what goes wrong, and it must be this.
template <class Model>
void breaks(const Model& model, const char* name, const std::string& expected) {
  const Outcome outcome = explore(model);
  if (outcome.error.rfind(expected, 0) != 0)
    throw check::Failure(std::string(name) + ": expected \"" + expected + "\", found " +
                         (outcome.error.empty() ? "nothing wrong" : outcome.text()));
}

}  // namespace kvw::model
