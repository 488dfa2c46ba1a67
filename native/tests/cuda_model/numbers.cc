// The model's numbers, which tests set and read by name, and settings of the environment.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "tests/cuda_model/calls.h"

namespace kvw::cuda_model {

namespace {

struct Number {
  const char* name;
  std::atomic<uint64_t>* value;
};

std::vector<Number> setting_names() {
  Settings& s = settings();
  return {{"seed", &s.seed},
          {"pause_us", &s.pause_us},
          {"hold", &s.hold},
          {"hold_unregister", &s.hold_unregister},
          {"hold_stream_create", &s.hold_stream_create},
          {"stream_result", &s.stream_result},
          {"lost", &s.lost},
          {"capture", &s.capture},
          {"captured", &s.captured},
          {"devices", &s.devices},
          {"first", &s.first},
          {"device_bytes", &s.device_bytes},
          {"register_limit", &s.register_limit},
          {"register_us", &s.register_us},
          {"register_result", &s.register_result},
          {"read_only_register", &s.read_only_register},
          {"host_page_tables", &s.host_page_tables},
          {"shares", &s.shares},
          {"read_only_access", &s.read_only_access},
          {"granule", &s.granule},
          {"alloc_limit", &s.alloc_limit},
          {"create_limit", &s.create_limit},
          {"compiler_newest", &s.compiler_newest},
          {"refuses_ptx", &s.refuses_ptx},
          {"batch_limit", &s.batch_limit},
          {"batch_result", &s.batch_result},
          {"copy_us_per_mib", &s.copy_us_per_mib}};
}

std::vector<Number> count_names() {
  Counts& c = counts();
  return {{"copies", &c.copies},
          {"copied_bytes", &c.copied_bytes},
          {"batches", &c.batches},
          {"unpinned_copies", &c.unpinned_copies},
          {"launches", &c.launches},
          {"violations", &c.violations},
          {"retains", &c.retains},
          {"creates_asked", &c.creates_asked},
          {"allocations", &c.allocations},
          {"frees", &c.frees},
          {"broken_captures", &c.broken_captures},
          {"registered_bytes", &c.registered_bytes},
          {"registrations", &c.registrations},
          {"registers_asked", &c.registers_asked},
          {"unregisters_asked", &c.unregisters_asked},
          {"streams_asked", &c.streams_asked},
          {"device_bytes", &c.device_bytes},
          {"host_bytes", &c.host_bytes},
          {"busy_streams", &c.busy_streams},
          {"looks", &c.looks},
          {"early_looks", &c.early_looks},
          {"look_slack_ns", &c.look_slack_ns},
          {"streams", &c.streams},
          {"events", &c.events},
          {"modules", &c.modules},
          {"contexts", &c.contexts},
          {"handles", &c.handles},
          {"reserved_bytes", &c.reserved_bytes},
          {"mapped_bytes", &c.mapped_bytes}};
}

std::atomic<uint64_t>& named(const std::vector<Number>& numbers, std::string_view name) {
  for (const Number& each : numbers)
    if (name == each.name) return *each.value;
  std::fprintf(stderr, "cuda model: no number is called %.*s\n", static_cast<int>(name.size()),
               name.data());
  std::abort();
}

// Settings of the environment, read as the library is loaded.
const bool g_environment_read = [] {
  for (const Number& each : setting_names()) {
    std::string name = std::string("KVW_TEST_CUDA_") + each.name;
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::toupper(c); });
    if (const char* value = std::getenv(name.c_str()))
      *each.value = std::strtoull(value, nullptr, 0);
  }
  return true;
}();

}  // namespace

Settings& settings() {
  static auto* made = new Settings();
  return *made;
}

Counts& counts() {
  static auto* made = new Counts();
  return *made;
}

void violation(const char* what) {
  std::fprintf(stderr, "cuda model: %s\n", what);
  ++counts().violations;
}

MODEL void kvw_model_set(const char* name, uint64_t value) { named(setting_names(), name) = value; }
MODEL uint64_t kvw_model_count(const char* name) { return named(count_names(), name); }

}  // namespace kvw::cuda_model
