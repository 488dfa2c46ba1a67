// Keys are a format: they are compared with values from plain calls of the hash's shared library
// over packed bytes.
#include "tests/check.h"

#include <array>
#include <vector>

#include "chain/chain.h"

namespace kvw {
namespace {

constexpr Key kParent{0x0123456789abcdefull, 0xfedcba9876543210ull};

// Not random, as a domain's must be: the known values below are of this one.
const std::array<std::byte, kSecretBytes> kSecret = [] {
  std::array<std::byte, kSecretBytes> secret{};
  for (size_t i = 0; i < secret.size(); ++i) secret[i] = static_cast<std::byte>(i * 167 + 13);
  return secret;
}();

std::vector<uint32_t> pattern(size_t count) {
  std::vector<uint32_t> tokens(count);
  for (size_t i = 0; i < count; ++i) tokens[i] = static_cast<uint32_t>(i) * 2654435761u;
  return tokens;
}

std::vector<std::byte> engine_hash(size_t bytes) {
  std::vector<std::byte> hash(bytes);
  for (size_t i = 0; i < bytes; ++i) hash[i] = static_cast<std::byte>(i * 29 + 3);
  return hash;
}

}  // namespace

TEST(chain_keys_equal_another_implementation) {
  const std::pair<size_t, Key> known[] = {{0, {0xe6d253e6255cc895ull, 0xd2ffc0cb23f2a986ull}},
                                          {1, {0x38595c9a23b0effdull, 0x773b5545c7e5547full}},
                                          {16, {0xff920c7cc59b458eull, 0xde399a2016d5c971ull}},
                                          {64, {0xa80950bef07b7060ull, 0xd06d68b3bcdc3b09ull}},
                                          {65, {0x4c08b6277a15821aull, 0xbf3fef87fdcdf56dull}},
                                          {256, {0x7e37c344fb59719full, 0x6f24be8c613d9a42ull}},
                                          {4096, {0x8c7caa70a4df7c8bull, 0x19781ad6bed1f4f0ull}}};
  for (const auto& [tokens, key] : known)
    CHECK(chain_key(kSecret, kParent, pattern(tokens)) == key);
  CHECK(root_key(kSecret, kParent) == (Key{0x06305e4ea2d854e5ull, 0x8c54920b416f2762ull}));
  const std::pair<size_t, Key> engine[] = {{1, {0xbdb64ac0e7c41163ull, 0x160032e37174b5e3ull}},
                                           {32, {0x89e153028b5be1baull, 0x94f70686f1b7b6f4ull}},
                                           {64, {0x2ee1d9794e4f7182ull, 0x9242fe3833978825ull}}};
  for (const auto& [bytes, key] : engine)
    CHECK(engine_key(kSecret, kParent, engine_hash(bytes)) == key);
}

TEST(chain_keys_hash_each_page_below_the_one_before) {
  for (const uint32_t page_tokens : {1u, 16u, 64u, 256u, 257u, 4096u}) {
    const std::vector<uint32_t> tokens = pattern(page_tokens * 5 + 3);
    std::vector<Key> keys(5);
    chain_keys(kSecret, kParent, tokens, page_tokens, keys);
    Key parent = kParent;
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto page = std::span(tokens).subspan(i * page_tokens, page_tokens);
      CHECK(keys[i] == chain_key(kSecret, parent, page));
      parent = keys[i];
    }
  }
}

TEST(chain_keys_continue_from_any_page) {
  const std::vector<uint32_t> tokens = pattern(16 * 8);
  std::vector<Key> whole(8);
  chain_keys(kSecret, kParent, tokens, 16, whole);
  std::vector<Key> rest(5);
  chain_keys(kSecret, whole[2], std::span(tokens).subspan(16 * 3), 16, rest);
  CHECK(std::equal(rest.begin(), rest.end(), whole.begin() + 3));
}

TEST(chain_keys_differ_when_secret_namespace_parent_or_token_differs) {
  const std::vector<uint32_t> tokens = pattern(16);
  const Key key = chain_key(kSecret, kParent, tokens);
  auto other_secret = kSecret;
  for (std::byte& byte : other_secret) byte ^= std::byte{0x5a};
  CHECK(chain_key(other_secret, kParent, tokens) != key);
  CHECK(chain_key(kSecret, {kParent.hi, kParent.lo}, tokens) != key);
  CHECK(root_key(kSecret, {1, 0}) != root_key(kSecret, {0, 1}));
  CHECK(engine_key(kSecret, {1, 0}, engine_hash(32)) !=
        engine_key(kSecret, {2, 0}, engine_hash(32)));
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::vector<uint32_t> changed = tokens;
    changed[i] ^= 1u << (2 * i);
    CHECK(chain_key(kSecret, kParent, changed) != key);
  }
}

TEST(chain_keys_are_refused_when_the_tokens_do_not_fill_them) {
  const std::vector<uint32_t> tokens = pattern(31);
  std::vector<Key> keys(2);
  CHECK_THROWS(chain_keys(kSecret, kParent, tokens, 16, keys), "chain_shape");
  CHECK_THROWS(chain_keys(kSecret, kParent, tokens, 0, keys), "chain_shape");
  chain_keys(kSecret, kParent, tokens, 15, keys);
  chain_keys(kSecret, kParent, {}, 16, {});
}

TEST(engine_key_is_refused_when_the_hash_is_empty_or_too_long) {
  CHECK_THROWS(engine_key(kSecret, kParent, {}), "engine_hash");
  CHECK_THROWS(engine_key(kSecret, kParent, engine_hash(kMaxEngineKeyBytes + 1)), "engine_hash");
}

}  // namespace kvw
