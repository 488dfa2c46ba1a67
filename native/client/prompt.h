// The pages of a call: keys, parents, positions and witnesses, from token ids or from an engine's
// own block hashes. Keys are computed as far as somebody asks, so that a miss on the first page
// costs one hash. Not thread-safe.
//
// Pages by token ids, and by a plain list of keys, are one prompt from its root. By runs they are
// parts of prompts: each run is consecutive pages of one, and says where it begins. The pages of a
// call are numbered through all its runs; `position` is the number within the page's own prompt.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"
#include "chain/chain.h"

namespace kvw {

// Consecutive pages of one prompt, by an engine's keys.
struct KeyRun {
  size_t pages;
  uint32_t position;                  // of its first page
  std::span<const std::byte> parent;  // the engine's key of the page before; empty at the root
};

class Prompt {
 public:
  // Token ids; only whole pages count. `tokens` must outlive the prompt.
  static Prompt of_tokens(std::span<const uint32_t> tokens);
  // An engine's hashes, one a page, which chain by themselves. Each 1 to kMaxEngineKeyBytes long.
  static Prompt of_keys(std::vector<std::span<const std::byte>> keys);
  // As above, cut into runs in their order. Throws Error usage "bad_runs" unless the runs have
  // exactly as many pages as there are keys, and a parent exactly where they begin behind a page.
  static Prompt of_runs(std::vector<std::span<const std::byte>> keys,
                        const std::vector<KeyRun>& runs);

  // Fixes namespace and secret; call before anything below.
  void bind(Secret secret, const Key& namespace_id, uint32_t page_tokens);

  size_t pages() const { return pages_; }
  const Key& key(size_t page) {
    if (page >= keys_.size()) extend(page + 1);
    return keys_[page];
  }
  Key parent(size_t page);
  uint32_t position(size_t page) const;
  // Which run a page is in, from 0, its first page, and the page behind its last one.
  size_t run(size_t page) const { return run_of_.empty() ? 0 : run_of_[page]; }
  size_t run_begin(size_t page) const { return run_of_.empty() ? 0 : begins_[run(page)]; }
  size_t run_end(size_t page) const { return run_of_.empty() ? pages_ : begins_[run(page) + 1]; }

  WitnessKind witness_kind() const { return kind_; }
  std::span<const std::byte> witness(size_t page) const;

 private:
  void extend(size_t pages);

  WitnessKind kind_ = WitnessKind::tokens;
  std::span<const uint32_t> tokens_;
  std::vector<std::span<const std::byte>> engine_keys_;
  std::vector<KeyRun> runs_;      // none: one run from the root
  std::vector<size_t> begins_;    // first page of each run, and the end of the last
  std::vector<uint32_t> run_of_;  // by page
  const std::byte* secret_ = nullptr;
  Key namespace_id_, root_;
  uint32_t page_tokens_ = 1;
  size_t pages_ = 0;
  std::vector<Key> keys_;
};

}  // namespace kvw
