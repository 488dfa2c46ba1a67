// Prefix chains: the key of a page hashes its parent's key and its own tokens, keyed by the
// domain's secret. The first page's parent is the namespace's root key, so keys of different
// namespaces never meet. XXH3-128; docs/format.md has the definition. Stateless; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.h"

namespace kvw {

using Secret = std::span<const std::byte, kSecretBytes>;

// The parent of every first page of a namespace.
Key root_key(Secret secret, const Key& namespace_id);

// Key of the page whose token ids are `tokens` (as 32-bit little-endian), below `parent`.
Key chain_key(Secret secret, const Key& parent, std::span<const uint32_t> tokens);

// Keys of consecutive pages: keys[i] is of tokens [i*page_tokens, (i+1)*page_tokens).
// `parent` is the key before the first; `keys.size() * page_tokens <= tokens.size()`.
void chain_keys(Secret secret, const Key& parent, std::span<const uint32_t> tokens,
                uint32_t page_tokens, std::span<Key> keys);

// Key of a page that an engine names by a hash of its own (which already chains).
Key engine_key(Secret secret, const Key& namespace_id, std::span<const std::byte> engine_hash);

}  // namespace kvw
