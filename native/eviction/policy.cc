#include "eviction/policy.h"

#include "base/error.h"
#include "eviction/adaptive.h"
#include "eviction/lru.h"
#include "eviction/s3fifo.h"

namespace kvw {
namespace {

struct Known {
  const char* name;
  uint64_t page_bytes;
  std::unique_ptr<EvictionPolicy> (*make)(size_t capacity);
};

template <class Policy>
Known known(const char* name) {
  return {name, Policy::kPageBytes, [](size_t capacity) -> std::unique_ptr<EvictionPolicy> {
            return std::make_unique<Policy>(capacity);
          }};
}

const Known kKnown[] = {known<LruPolicy>("lru"), known<AdaptivePolicy>("adaptive"),
                        known<S3FifoPolicy>("s3fifo")};

const Known& find(std::string_view name) {
  std::string names;
  for (const Known& each : kKnown) {
    if (name == each.name) return each;
    names += (names.empty() ? "" : ", ") + std::string(each.name);
  }
  throw Error(ErrorKind::usage, "eviction_policy",
              "no eviction policy is called \"" + std::string(name) + "\"; known: " + names);
}

}  // namespace

std::unique_ptr<EvictionPolicy> make_policy(std::string_view name, size_t capacity) {
  return find(name).make(capacity);
}

uint64_t policy_page_bytes(std::string_view name) { return find(name).page_bytes; }

std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  for (const Known& each : kKnown) names.emplace_back(each.name);
  return names;
}

}  // namespace kvw
