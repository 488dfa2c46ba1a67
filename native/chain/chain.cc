#include "chain/chain.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.h"

namespace kvw {
namespace {

static_assert(std::endian::native == std::endian::little, "keys are defined little-endian");
static_assert(sizeof(Key) == 16 && offsetof(Key, lo) == 0, "a Key's bytes are hashed as they lie");

constexpr std::string_view kRootLabel = "kvwarehouse/root/1";
constexpr std::string_view kEngineLabel = "kvwarehouse/engine/1";

constexpr uint32_t kUsualTokens = 16;  // of a page, in vLLM and here by default

// Pages of up to so many tokens are hashed from one buffer, in a fraction of the stream's set-up.
constexpr size_t kBufferedTokens = 256;

Key key_of(const XXH128_hash_t& hash) { return {hash.low64, hash.high64}; }

[[gnu::always_inline]] inline Key hash_once(Secret secret, const void* data, size_t bytes) {
  return key_of(XXH3_128bits_withSecret(data, bytes, secret.data(), secret.size()));
}

// Equal to hashing the concatenation, without making one.
Key hash_parts(Secret secret, std::span<const std::byte> first, std::span<const std::byte> second) {
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_128bits_reset_withSecret(&state, secret.data(), secret.size());
  XXH3_128bits_update(&state, first.data(), first.size());
  XXH3_128bits_update(&state, second.data(), second.size());
  return key_of(XXH3_128bits_digest(&state));
}

Key labelled(Secret secret, std::string_view label, const Key& namespace_id,
             std::span<const std::byte> rest) {
  std::byte packed[kEngineLabel.size() + sizeof(Key) + kMaxEngineKeyBytes];
  std::memcpy(packed, label.data(), label.size());
  std::memcpy(packed + label.size(), &namespace_id, sizeof(Key));
  const size_t fixed = label.size() + sizeof(Key);
  if (!rest.empty()) std::memcpy(packed + fixed, rest.data(), rest.size());
  return hash_once(secret, packed, fixed + rest.size());
}

// The chain of pages of the usual size. Each key waits for the one before: with the size known to
// the compiler nothing else is waited for, neither a look at the length nor bytes on their way
// through memory.
template <uint32_t page_tokens>
void chain_fixed(Secret secret, Key parent, const uint32_t* tokens, std::span<Key> keys) {
  for (Key& key : keys) {
    std::byte packed[sizeof(Key) + page_tokens * sizeof(uint32_t)];
    std::memcpy(packed, &parent, sizeof(Key));
    std::memcpy(packed + sizeof(Key), tokens, page_tokens * sizeof(uint32_t));
    key = parent = hash_once(secret, packed, sizeof packed);
    tokens += page_tokens;
  }
}

}  // namespace

Key root_key(Secret secret, const Key& namespace_id) {
  return labelled(secret, kRootLabel, namespace_id, {});
}

Key chain_key(Secret secret, const Key& parent, std::span<const uint32_t> tokens) {
  if (tokens.size() > kBufferedTokens)
    return hash_parts(secret, std::as_bytes(std::span(&parent, 1)), std::as_bytes(tokens));
  std::byte packed[sizeof(Key) + kBufferedTokens * sizeof(uint32_t)];
  std::memcpy(packed, &parent, sizeof(Key));
  if (!tokens.empty()) std::memcpy(packed + sizeof(Key), tokens.data(), tokens.size_bytes());
  return hash_once(secret, packed, sizeof(Key) + tokens.size_bytes());
}

void chain_keys(Secret secret, const Key& parent, std::span<const uint32_t> tokens,
                uint32_t page_tokens, std::span<Key> keys) {
  if (page_tokens == 0 || keys.size() > tokens.size() / page_tokens)
    throw Error(ErrorKind::usage, "chain_shape",
                std::to_string(keys.size()) + " keys of pages of " + std::to_string(page_tokens) +
                    " tokens do not fit " + std::to_string(tokens.size()) +
                    " tokens; ask for tokens / page_tokens keys at most");
  if (page_tokens == kUsualTokens)
    return chain_fixed<kUsualTokens>(secret, parent, tokens.data(), keys);
  Key before = parent;
  for (Key& key : keys) {
    key = before = chain_key(secret, before, tokens.first(page_tokens));
    tokens = tokens.subspan(page_tokens);
  }
}

Key engine_key(Secret secret, const Key& namespace_id, std::span<const std::byte> engine_hash) {
  if (engine_hash.empty() || engine_hash.size() > kMaxEngineKeyBytes)
    throw Error(ErrorKind::usage, "engine_hash",
                "an engine's block hash has " + std::to_string(engine_hash.size()) +
                    " bytes; pass 1 to " + std::to_string(kMaxEngineKeyBytes));
  return labelled(secret, kEngineLabel, namespace_id, engine_hash);
}

}  // namespace kvw
