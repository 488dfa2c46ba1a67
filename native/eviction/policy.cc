#include "eviction/policy.h"

#include "base/error.h"
#include "eviction/lru.h"
#include "eviction/s3fifo.h"

namespace kvw {
namespace {

struct Known {
  const char* name;
  std::unique_ptr<EvictionPolicy> (*make)(size_t capacity);
};

template <class Policy>
std::unique_ptr<EvictionPolicy> made(size_t capacity) {
  return std::make_unique<Policy>(capacity);
}

constexpr Known kKnown[] = {{"lru", made<LruPolicy>}, {"s3fifo", made<S3FifoPolicy>}};

}  // namespace

std::unique_ptr<EvictionPolicy> make_policy(std::string_view name, size_t capacity) {
  std::string names;
  for (const Known& known : kKnown) {
    if (name == known.name) return known.make(capacity);
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  throw Error(ErrorKind::usage, "eviction_policy",
              "no eviction policy is called \"" + std::string(name) + "\"; known: " + names);
}

std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  for (const Known& known : kKnown) names.emplace_back(known.name);
  return names;
}

}  // namespace kvw
