// The pages of a prompt: keys, parents and witnesses, from token ids or from an engine's own block
// hashes. Keys are computed as far as somebody asks, so that a miss on the first page costs one
// hash. Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"
#include "chain/chain.h"

namespace kvw {

class Prompt {
 public:
  // Token ids; only whole pages count. `tokens` must outlive the prompt.
  static Prompt of_tokens(std::span<const uint32_t> tokens);
  // An engine's hashes, one a page, which chain by themselves. Each 1 to kMaxEngineKeyBytes long.
  static Prompt of_keys(std::vector<std::span<const std::byte>> keys);

  // Fixes namespace and secret; call before anything below.
  void bind(Secret secret, const Key& namespace_id, uint32_t page_tokens);

  size_t pages() const { return pages_; }
  const Key& key(size_t page) {
    if (page >= keys_.size()) extend(page + 1);
    return keys_[page];
  }
  Key parent(size_t page) { return page == 0 ? root_ : key(page - 1); }
  WitnessKind witness_kind() const { return kind_; }
  std::span<const std::byte> witness(size_t page) const;

 private:
  void extend(size_t pages);

  WitnessKind kind_ = WitnessKind::tokens;
  std::span<const uint32_t> tokens_;
  std::vector<std::span<const std::byte>> engine_keys_;
  const std::byte* secret_ = nullptr;
  Key namespace_id_, root_;
  uint32_t page_tokens_ = 1;
  size_t pages_ = 0;
  std::vector<Key> keys_;
};

}  // namespace kvw
