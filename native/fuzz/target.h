// What the fuzz targets of this folder are written with. Each file is one target: the function that
// libFuzzer calls, for one input. It returns 0, whatever the input; what must never happen ends the
// process. tests/fault_input_test.cc has all of them in one program, under other names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>

namespace kvw::fuzz {

inline void require(bool held, const char* what) {
  if (held) return;
  std::fprintf(stderr, "fuzz: not so: %s\n", what);
  std::abort();
}

// Takes numbers off the front of an input; zeros when it is at its end.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(data, size) {}
  bool empty() const { return rest_.empty(); }
  std::span<const uint8_t> take(size_t bytes) {
    const auto taken = rest_.first(bytes < rest_.size() ? bytes : rest_.size());
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  template <class T>
  T number() {
    T value{};
    const auto bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }

 private:
  std::span<const uint8_t> rest_;
};

}  // namespace kvw::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
