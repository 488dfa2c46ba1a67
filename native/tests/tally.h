// Counts injected faults for `make faults`: see testkit/tally.py in tests/support, which
// reads the file that is written here at the program's end, and fault_classes.py, which has the
// names.
//
//   kvw::check::tally("write torn at a crash");  // once what must hold after it was checked
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

namespace kvw::check {

class Tally {
 public:
  ~Tally() {
    const char* folder = std::getenv("KVW_TALLY");
    if (folder == nullptr || counts_.empty()) return;
    std::ofstream file(std::string(folder) + "/native-" + std::to_string(::getpid()) + ".tally");
    char before = '{';
    for (const auto& [name, injected] : counts_) {
      file << before << '"' << name << "\": " << injected;
      before = ',';
    }
    file << '}';
  }

  void count(const std::string& name, uint64_t injected) { counts_[name] += injected; }

 private:
  std::map<std::string, uint64_t> counts_;
};

// Of the main thread. Names have no quotes and no backslashes. A child of fork() ends in _exit(),
// which writes nothing.
inline void tally(const std::string& name, uint64_t injected = 1) {
  static Tally all;
  all.count(name, injected);
}

}  // namespace kvw::check
