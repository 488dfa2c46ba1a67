// Why the pages of a prompt are found or not, as an operator is told. Plain values.
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"
#include "warehouse/absences.h"

namespace kvw {

struct PageWhy {
  enum class State : uint8_t {
    hbm,  // there, and this is the fastest tier with it
    dram,
    nvme,
    storing,  // somebody writes it now
    absent,   // and `absence` says why
    unknown,  // it left before `remembered_s`, or never was there
  };
  State state = State::unknown;
  Absence absence;
  uint32_t remembered_s = 0;  // absence_time(); 0: since the daemon began
};
const char* page_state_name(PageWhy::State state);

// Pages at the place of one that is not there: where a prompt parts from those that are stored.
struct Branches {
  static constexpr uint64_t kMostBranches = 1024;  // that are looked at

  uint64_t looks = 0;  // at pages, those that do not count among them
  uint64_t pages = 0;
  bool more = false;             // there are others, which were not looked at
  uint64_t compared = 0;         // of `pages`, those whose tokens are at hand: in DRAM
  uint32_t common_tokens = 0;    // that the one like it begins with as the prompt's page does
  Key key;                       // of that one; zero: none was compared
  std::vector<uint32_t> tokens;  // its own
};

}  // namespace kvw
