// Named places in the protocols' order of stores, where a test holds one side and drives the other,
// or ends it there as a kill would. They are nothing in the core itself: only copies of a few files
// that fault_race_test is linked with have them (cmake/tests.cmake).
#pragma once

#ifdef KVW_SEQUENCE_POINTS

#include <functional>
#include <string_view>

namespace kvw {

// Called with the place's name, on the thread that reaches it; a thread that sets none passes by.
// What it throws goes through the code that was reached.
inline thread_local std::function<void(std::string_view)> at_sequence_point;

inline void reach(std::string_view place) {
  if (const auto act = at_sequence_point) act(place);  // a copy: it may take itself away
}

}  // namespace kvw

#define KVW_SEQUENCE_POINT(place) ::kvw::reach(place)

#else
#define KVW_SEQUENCE_POINT(place) static_cast<void>(0)
#endif
