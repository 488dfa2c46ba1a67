#include "client/prompt.h"

#include <algorithm>

namespace kvw {

namespace {

constexpr size_t kAhead = 32;  // pages hashed at a time: enough to prefetch their index entries

}  // namespace

Prompt Prompt::of_tokens(std::span<const uint32_t> tokens) {
  Prompt prompt;
  prompt.tokens_ = tokens;
  return prompt;
}

Prompt Prompt::of_keys(std::vector<std::span<const std::byte>> keys) {
  Prompt prompt;
  prompt.kind_ = WitnessKind::engine_key;
  prompt.engine_keys_ = std::move(keys);
  return prompt;
}

void Prompt::bind(Secret secret, const Key& namespace_id, uint32_t page_tokens) {
  secret_ = secret.data();
  namespace_id_ = namespace_id;
  page_tokens_ = page_tokens;
  root_ = root_key(secret, namespace_id);
  pages_ = kind_ == WitnessKind::tokens ? tokens_.size() / page_tokens : engine_keys_.size();
  keys_.clear();
  keys_.reserve(pages_);
}

void Prompt::extend(size_t pages) {
  const size_t begin = keys_.size();
  const size_t end = std::min(pages_, std::max(pages, begin + kAhead));
  keys_.resize(end);
  const Secret secret(secret_, kSecretBytes);
  if (kind_ == WitnessKind::tokens) {
    const auto tokens = tokens_.subspan(begin * page_tokens_, (end - begin) * page_tokens_);
    chain_keys(secret, begin == 0 ? root_ : keys_[begin - 1], tokens, page_tokens_,
               std::span(keys_).subspan(begin));
  } else {
    for (size_t page = begin; page < end; ++page)
      keys_[page] = engine_key(secret, namespace_id_, engine_keys_[page]);
  }
}

std::span<const std::byte> Prompt::witness(size_t page) const {
  if (kind_ == WitnessKind::engine_key) return engine_keys_[page];
  return std::as_bytes(tokens_.subspan(page * page_tokens_, page_tokens_));
}

}  // namespace kvw
