// The page digest is a format: it is compared with values computed by another implementation
// (Python's xxhash and struct), and on every path of this machine with its definition.
#include "tests/check.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <vector>

#include "copy/copy_routines.h"
#include "digest/digest.h"

namespace kvw {
namespace {

using Bytes = std::vector<std::byte>;

constexpr Key kKey{0x0123456789abcdefull, 0xfedcba9876543210ull};
constexpr uint32_t kShard = 5;

Bytes pattern(size_t count) {
  Bytes bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 + (i >> 8));
  return bytes;
}

std::vector<const CopyRoutines*> paths_here() {
  std::vector<const CopyRoutines*> paths;
  for (const CopyPath path : {CopyPath::portable, CopyPath::avx2, CopyPath::avx512, CopyPath::neon})
    if (const CopyRoutines* routines = copy_routines(path)) paths.push_back(routines);
  return paths;
}

uint64_t by_definition(const Bytes& bytes, uint64_t seed) {
  std::vector<uint64_t> leaves;
  for (size_t at = 0; at < bytes.size(); at += kBlockBytes)
    leaves.push_back(XXH3_64bits(bytes.data() + at, std::min(kBlockBytes, bytes.size() - at)));
  return digest_root(leaves, seed);
}

}  // namespace

TEST(digest_equals_another_implementation) {
  const std::pair<size_t, uint64_t> known[] = {{0, 0x5000ad9f695fd9b9ull},
                                               {1, 0x9a8e4a98f73719b2ull},
                                               {4096, 0x0909c55a0cb93771ull},
                                               {10000, 0x90d00a535282b3ffull},
                                               {300000, 0xeeb31c43d4cbf8aeull}};
  CHECK_EQ(digest_seed(kKey, kShard, 10000), 0x8e683e20641b0015ull);
  for (const auto& [bytes, digest] : known) {
    const Bytes data = pattern(bytes);
    CHECK_EQ(page_digest(data.data(), data.size(), kKey, kShard), digest);
    for (const CopyRoutines* path : paths_here())
      CHECK_EQ(path->digest(data.data(), bytes, digest_seed(kKey, kShard, bytes)), digest);
  }
}

// Sizes around a leaf, around the batch in which the root takes leaves, and around its buffer.
TEST(digest_equals_its_definition_on_every_path_and_size) {
  for (const size_t leaves : {1, 2, 3, 31, 32, 33, 64, 65, 100}) {
    for (const int more : {-1, 0, 1, 2, 63, 2000}) {
      const Bytes data = pattern(leaves * kBlockBytes + more);
      for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}})
        for (const CopyRoutines* path : paths_here())
          CHECK_EQ(path->digest(data.data(), data.size(), seed), by_definition(data, seed));
    }
  }
}

TEST(digest_changes_with_key_shard_size_and_every_leaf) {
  Bytes data = pattern(3 * kBlockBytes + 100);
  const auto digest = [&](const Key& key, uint32_t shard, size_t bytes) {
    return page_digest(data.data(), bytes, key, shard);
  };
  const uint64_t first = digest(kKey, kShard, data.size());
  CHECK(digest({kKey.hi, kKey.lo}, kShard, data.size()) != first);
  CHECK(digest(kKey, kShard + 1, data.size()) != first);
  CHECK(digest(kKey, kShard, data.size() - 1) != first);
  for (size_t at = 0; at < data.size(); at += kBlockBytes / 2) {
    data[at] ^= std::byte{1};
    CHECK(digest(kKey, kShard, data.size()) != first);
    data[at] ^= std::byte{1};
  }
}

}  // namespace kvw
