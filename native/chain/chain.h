// Prefix chains: the key of a page hashes its parent's key and its own tokens, keyed by the
// domain's secret. The first page's parent is the namespace's root key, so keys of different
// namespaces never meet. XXH3-128; docs/format.md has the definition. Stateless; thread-safe.
//
// The secret must be random bytes: XXH3 mixes input into it word by word, and a secret with zeros
// or repetition hashes badly, without an error. It hides which prompts are stored from those who do
// not have it; it does not make XXH3 a cryptographic hash, which is why a load compares tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.h"

namespace kvw {

using Secret = std::span<const std::byte, kSecretBytes>;

// Each key is XXH3-128 with the secret over packed little-endian fields; a Key is lo, then hi.

// The parent of every first page of a namespace. Over "kvwarehouse/root/1", namespace_id.
Key root_key(Secret secret, const Key& namespace_id);

// Key of the page whose token ids are `tokens` (as 32-bit little-endian), below `parent`. Over
// parent, tokens.
Key chain_key(Secret secret, const Key& parent, std::span<const uint32_t> tokens);

// Keys of consecutive pages: keys[i] is of tokens [i*page_tokens, (i+1)*page_tokens).
// `parent` is the key before the first. Throws Error (usage) unless page_tokens is positive and
// keys.size() * page_tokens <= tokens.size().
void chain_keys(Secret secret, const Key& parent, std::span<const uint32_t> tokens,
                uint32_t page_tokens, std::span<Key> keys);

// Key of a page that an engine names by a hash of its own (which already chains). Over
// "kvwarehouse/engine/1", namespace_id, engine_hash. Throws Error (usage) unless engine_hash has 1
// to kMaxEngineKeyBytes bytes.
Key engine_key(Secret secret, const Key& namespace_id, std::span<const std::byte> engine_hash);

}  // namespace kvw
