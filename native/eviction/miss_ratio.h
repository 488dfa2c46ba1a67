// A miss-ratio curve, kept while the warehouse runs: how many uses of pages would have found them
// in a cache of another size. Not thread-safe.
//
// The method is SHARDS with a bounded number of samples (Waldspurger, Park, Garthwaite and Ahmad,
// FAST '15): pages whose key's hash is below a threshold are followed, and the bytes of distinct
// pages used since a page's last use, divided by the share that is followed, are the size at which
// an LRU cache has it still. When too many are followed, the threshold falls.
//
// The unit that is sampled is the page, not the request and not the prefix tree. A page that
// everybody uses (a system prompt's first) is followed or is not, and would weigh 1/share too much
// or nothing. But all uses are counted, followed or not, and such pages come back soon: the
// difference between the uses that happened and those that the samples stand for is added to the
// shortest distances (the paper's adjustment), which takes exactly that error out.
//
// A page hits only if its ancestors do. An LRU that lets no page leave before its descendants keeps
// the pages that an LRU of single pages keeps when each prompt is used from its end to its root;
// done so here, distances of pages are prefix hits already.
//
// Memory: about 100 bytes a sample (3 MiB by default) and 4 KiB for each namespace, 64 of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/types.h"

namespace kvw {

class MissRatioCurve {
 public:
  static constexpr size_t kSamples = 32768;
  static constexpr size_t kSpaces = 64;  // namespaces with a curve of their own
  // Sizes of caches: sixteen steps an octave, 4.4 % apart.
  static constexpr size_t kSizes = 34 * 16;
  static constexpr uint64_t kSmallest = 64 * 1024;

  // Hits that a cache of each size would have had.
  struct Curve {
    uint64_t uses = 0;
    double share = 1;  // of pages that are followed now
    size_t samples = 0;
    std::array<double, kSizes> hits{};  // rising, at most uses
  };

  // A page was loaded, or stored because no tier had it.
  struct Use {
    Key key;
    uint16_t space = 0;
    uint64_t bytes = 0;
    uint64_t held_bytes = 0;  // the size of the cache that had it, 0 for none; it counts where the
                              // page's last use is not known
  };

  explicit MissRatioCurve(size_t most_samples = kSamples);

  // Pages used at one time, ancestors before descendants, each of them once.
  void use(std::span<const Use> pages);

  // The curve of a namespace goes; its pages are followed as before.
  void forget(uint16_t space) { spaces_.erase(space); }

  // Of a namespace, -1 for all. Empty for one without a curve of its own.
  Curve curve(int space) const;
  static uint64_t size_bytes(size_t step);

 private:
  static constexpr int kAll = -1;

  struct Sample {
    uint32_t time = 0;
    uint64_t bytes = 0;
  };
  struct Histogram {
    uint64_t uses = 0;
    double followed = 0;  // uses that the samples stand for
    std::array<double, kSizes> hits{};
  };

  Histogram* histogram(uint16_t space);
  double distance(const Use& page) const;
  void follow(const Use& page);
  void record(Histogram* histogram, double distance) const;
  void follow_fewer();
  void renumber();
  void add(uint32_t time, uint64_t bytes);
  uint64_t bytes_until(uint32_t time) const;
  double weight() const;

  size_t most_samples_;
  uint64_t threshold_ = UINT64_MAX;               // hashes up to it are followed
  std::unordered_map<uint64_t, Sample> samples_;  // by the key's hash
  std::priority_queue<uint64_t> hashes_;          // of the samples
  std::vector<uint64_t> tree_;                    // Fenwick tree: bytes by the time of the last use
  uint32_t now_ = 0;                              // of the next use; below tree_.size()
  uint64_t followed_bytes_ = 0;                   // of all samples
  Histogram all_;
  std::unordered_map<uint16_t, Histogram> spaces_;
};

}  // namespace kvw
