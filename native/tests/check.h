// What the native tests are written with. Each file of this folder is one executable:
//
//   #include "tests/check.h"
//   TEST(slot_is_refused_when_its_generation_moved) { CHECK_EQ(seal(stale), Sealed::refused); }
//
// and needs no main. `--filter TEXT` runs the tests whose name has TEXT in it, `--list` names them,
// `--seed N` repeats a run (KVW_SEED does the same) and `--rounds N` scales the loops of fuzzing
// tests. The exit status is 1 when a test failed and 2 when no test ran.
//
// A failed check ends its test by throwing: on a thread of the test's own only inside a Thread,
// whose join() throws it again. A child of fork() ends in _exit().
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace kvw {

// How long a test waits for what has to come, before it fails: under a sanitizer on a busy machine.
inline constexpr int kPatienceMs = 60000;

namespace check {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  const char* name;
  void (*body)();
};

struct Run {
  uint64_t seed = 0;
  uint64_t rounds_factor = 1;
  std::string program, filter;
  bool list = false;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline Run& run() {
  static Run options;
  return options;
}

struct Registration {
  Registration(const char* name, void (*body)()) noexcept { tests().push_back({name, body}); }
};

// Every test starts its own generator from the run's seed and its name, so that --filter does not
// change what a test sees.
inline std::mt19937_64 random(std::string_view name) {
  uint64_t mixed = run().seed ^ 0xcbf29ce484222325ull;  // FNV-1a: the same on every library
  for (const char c : name) mixed = (mixed ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return std::mt19937_64(mixed);
}

// How often a fuzzing loop goes round.
inline uint64_t rounds(uint64_t usual) { return usual * run().rounds_factor; }

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class T>
std::string shown(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else if constexpr (requires(std::ostringstream out) { out << value; }) {
    std::ostringstream text;
    text << value;
    return text.str();
  } else {
    return "(a value that does not print)";
  }
}

// Integers compare by value, whatever their signs and sizes.
template <class A, class B>
bool same(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B>) {
    return (a < A{}) == (b < B{}) && static_cast<uint64_t>(a) == static_cast<uint64_t>(b);
  } else {
    return a == b;
  }
}

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (!same(a, b)) fail(file, line, std::string(text) + ": " + shown(a) + " is not " + shown(b));
}

template <class Body>
void throws(Body&& body, std::string_view code, const char* text, const char* file, int line) {
  try {
    body();
  } catch (const kvw::Error& error) {
    if (error.code() == code) return;
    fail(file, line,
         std::string(text) + ": threw code " + error.code() + " (" + error.what() + ")");
  }
  fail(file, line, std::string(text) + ": did not throw");
}

// A thread that may check: what it throws is thrown again by join().
class Thread {
 public:
  template <class Body>
  explicit Thread(Body body)
      : thread_([this, body = std::move(body)] {
          id_.store(::gettid(), std::memory_order_release);
          try {
            body();
          } catch (...) {
            thrown_ = std::current_exception();
          }
        }) {}
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;
  ~Thread() {
    if (thread_.joinable()) thread_.join();
  }
  // Returns when it sleeps, in what it waits for, or has ended. To be sure that a call was made and
  // waits, without a time after which it surely does. It may have slept for a lock or a page too,
  // so what follows has to be true of any moment.
  void until_it_waits() const {
    while (!waits()) std::this_thread::yield();
  }
  void join() {
    thread_.join();
    if (thrown_) std::rethrow_exception(thrown_);
  }

 private:
  // The state is the word behind the name, which is in parentheses (proc_pid_stat(5)).
  bool waits() const {
    const pid_t id = id_.load(std::memory_order_acquire);
    if (id == 0) return false;
    std::ifstream file("/proc/self/task/" + std::to_string(id) + "/stat");
    std::string line;
    if (!std::getline(file, line)) return true;
    const size_t name_end = line.rfind(") ");
    return name_end == std::string::npos || line[name_end + 2] != 'R';
  }

  std::exception_ptr thrown_;
  std::atomic<pid_t> id_{0};
  std::thread thread_;
};

inline uint64_t number(const char* text, const char* option) {
  char* end = nullptr;
  const uint64_t value = std::strtoull(text, &end, 0);
  if (end != text && *end == '\0') return value;
  std::fprintf(stderr, "%s needs a number, got \"%s\"\n", option, text);
  std::exit(2);
}

inline void parse(int argc, char** argv) {
  run().program = argv[0];
  run().seed = std::random_device{}();
  if (const char* seed = std::getenv("KVW_SEED")) run().seed = number(seed, "KVW_SEED");
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (option == "--list") {
      run().list = true;
      continue;
    }
    ++i;
    if (option == "--filter") {
      run().filter = value;
    } else if (option == "--seed") {
      run().seed = number(value, "--seed");
    } else if (option == "--rounds") {
      run().rounds_factor = number(value, "--rounds");
    } else {
      std::fprintf(stderr, "usage: %s [--list] [--filter TEXT] [--seed N] [--rounds N]\n", argv[0]);
      std::exit(2);
    }
  }
}

// One test alone, as it was in this run. The whole command: whoever reads a log has no more of it.
inline std::string repeat_command(const Test& test) {
  std::string command = std::string(run().program) + " --filter " + test.name + " --seed " +
                        std::to_string(run().seed);
  if (run().rounds_factor != 1) command += " --rounds " + std::to_string(run().rounds_factor);
  return command;
}

inline bool passes(const Test& test) {
  std::printf("%s ... ", test.name);
  std::fflush(stdout);  // a crash must leave the name of the test behind
  try {
    test.body();
  } catch (const std::exception& error) {
    std::printf("FAILED\n  %s\n  repeat it: %s\n", error.what(), repeat_command(test).c_str());
    return false;
  }
  std::printf("ok\n");
  return true;
}

inline int run_all(int argc, char** argv) {
  parse(argc, argv);
  if (!run().list) std::printf("seed %llu\n", static_cast<unsigned long long>(run().seed));
  int ran = 0;
  int failed = 0;
  for (const Test& test : tests()) {
    if (std::strstr(test.name, run().filter.c_str()) == nullptr) continue;
    ++ran;
    if (run().list) {
      std::printf("%s\n", test.name);
    } else if (!passes(test)) {
      ++failed;
    }
  }
  if (!run().list) std::printf("%d run, %d failed\n", ran, failed);
  if (ran == 0) return 2;
  return failed == 0 ? 0 : 1;
}

}  // namespace check
}  // namespace kvw

#define TEST(name)                                                             \
  static void test_##name();                                                   \
  static const kvw::check::Registration registered_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition) \
  ((condition) ? void() : kvw::check::fail(__FILE__, __LINE__, "not true: " #condition))

#define CHECK_EQ(a, b) kvw::check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)

// The expression throws kvw::Error with exactly this code.
#define CHECK_THROWS(expression, code) \
  kvw::check::throws([&] { (void)(expression); }, (code), #expression, __FILE__, __LINE__)

#ifndef KVW_CHECK_NO_MAIN
int main(int argc, char** argv) { return kvw::check::run_all(argc, argv); }
#endif
