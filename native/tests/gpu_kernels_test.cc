// The kernels of kvwarehouse/client/gpu/page_kernels.cu, compiled for the host: whatever a page's
// size and pieces, its bytes arrive and its digest is the host's.
#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "copy/copy.h"
#include "digest/digest.h"
#include "tests/check.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvw {
namespace {

// What kernels read and write of a range of memory, in accesses.
struct Watched {
  uint64_t begin, end, accesses;
} watched{};

uint64_t watch(uint64_t address) {
  watched.accesses += address >= watched.begin && address < watched.end;
  return address;
}

#define KVW_AT(address) watch(address)
#include "../../kvwarehouse/client/gpu/page_kernels.cu"

constexpr std::byte kGuard{0xa5};
constexpr Key kKey{0x0123456789abcdefull, 0xfedcba9876543210ull};

uint64_t address_of(const void* data) { return reinterpret_cast<uint64_t>(data); }

// Pages of one size, their bytes in pieces of random sizes with guards between them. `alignment`:
// of pieces, and of their sizes unless they are smaller.
struct Cache {
  Cache(size_t page_bytes, size_t pages, size_t largest_piece, size_t alignment,
        std::mt19937_64& random)
      : bytes(page_bytes) {
    size_t end = 16;
    for (size_t page = 0; page < pages; ++page) {
      work.push_back({0, pieces.size(), 0});
      for (size_t at = 0; at < bytes;) {
        size_t size = std::min(bytes - at, random() % largest_piece + 1);
        if (size > alignment) size = size / alignment * alignment;
        end = round_up(end + 1 + random() % 40, alignment);
        pieces.push_back({end, at});
        end += size;
        at += size;
        ++work.back().pieces;
      }
    }
    memory.assign(end / 16 + 2, {});
    std::memset(memory.data(), 0xa5, memory.size() * sizeof memory[0]);
    for (PagePiece& piece : pieces) piece.address += address_of(memory.data());
  }
  void put(size_t page, const std::vector<std::byte>& data) {
    each(page, [&](std::byte* piece, size_t at, size_t size) {
      std::copy_n(data.begin() + static_cast<ptrdiff_t>(at), size, piece);
    });
  }
  std::vector<std::byte> get(size_t page) {
    std::vector<std::byte> data(bytes);
    each(page, [&](const std::byte* piece, size_t at, size_t size) {
      std::copy_n(piece, size, data.begin() + static_cast<ptrdiff_t>(at));
    });
    return data;
  }
  // Every byte that is no page's.
  bool guards_hold() {
    std::vector<std::byte> all(reinterpret_cast<std::byte*>(memory.data()),
                               reinterpret_cast<std::byte*>(memory.data() + memory.size()));
    for (size_t page = 0; page < work.size(); ++page)
      each(page, [&](const std::byte* piece, size_t, size_t size) {
        std::fill_n(all.begin() + (piece - reinterpret_cast<std::byte*>(memory.data())), size,
                    kGuard);
      });
    return std::ranges::all_of(all, [](std::byte byte) { return byte == kGuard; });
  }

  size_t bytes;
  std::vector<PageWork> work;
  std::vector<PagePiece> pieces;
  std::vector<Pair> memory;

 private:
  template <class Visit>
  void each(size_t page, Visit visit) {
    const PageWork& own = work[page];
    for (size_t i = own.first_piece; i < own.first_piece + own.pieces; ++i) {
      const size_t end = i + 1 < own.first_piece + own.pieces ? pieces[i + 1].offset : bytes;
      visit(reinterpret_cast<std::byte*>(pieces[i].address), pieces[i].offset,
            end - pieces[i].offset);
    }
  }
};

using Kernel = void (*)(u64, u64, u64, u64, u64);

// Every warp of a grid, as the device would run them, in any order.
std::vector<uint64_t> launch(Kernel kernel, Cache& cache, uint32_t threads,
                             std::mt19937_64& random) {
  const size_t each = (cache.bytes + 4095) / 4096;
  std::vector<uint64_t> leaves(each * cache.work.size(), 0);
  const size_t blocks = (leaves.size() * 8 + threads - 1) / threads;
  std::vector<uint32_t> order(blocks * threads / 32);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, random);
  blockDim.x = threads;
  for (const uint32_t warp : order) {
    blockIdx.x = warp * 32 / threads;
    threadIdx.x = warp * 32 % threads;
    kernel(address_of(cache.work.data()), address_of(cache.pieces.data()),
           address_of(leaves.data()), cache.bytes, cache.work.size());
  }
  return leaves;
}

uint64_t root_of(const std::vector<uint64_t>& leaves, size_t page, size_t bytes) {
  const size_t each = (bytes + 4095) / 4096;
  return digest_root(std::span(leaves).subspan(page * each, each), digest_seed(kKey, 3, bytes));
}

std::vector<std::byte> noise(size_t bytes, std::mt19937_64& random) {
  std::vector<std::byte> data(bytes);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

void check_pages(size_t bytes, size_t pages, size_t largest_piece, size_t alignment,
                 std::mt19937_64& random) {
  Cache cache(bytes, pages, largest_piece, alignment, random);
  // Every second page lies aligned, whatever the pieces.
  const size_t stride = round_up(bytes + 1, 16) + (alignment < 16 ? alignment : 0);
  std::vector<Pair> run(pages * stride / 16 + 2);
  auto* staged = reinterpret_cast<std::byte*>(run.data());
  std::vector<std::vector<std::byte>> data;
  std::vector<uint64_t> digests;
  for (size_t page = 0; page < pages; ++page) {
    data.push_back(noise(bytes, random));
    digests.push_back(page_digest(data[page].data(), bytes, kKey, 3));
    cache.put(page, data[page]);
    cache.work[page].staged = address_of(staged + page * stride);
  }
  std::vector<uint64_t> leaves = launch(kvw_gather, cache, 256, random);
  for (size_t page = 0; page < pages; ++page) {
    CHECK(std::equal(data[page].begin(), data[page].end(), staged + page * stride));
    CHECK(staged[page * stride + bytes] == std::byte{0});
    CHECK_EQ(root_of(leaves, page, bytes), digests[page]);
    cache.put(page, std::vector<std::byte>(bytes, std::byte{0}));
  }
  leaves = launch(kvw_scatter, cache, 64, random);
  for (size_t page = 0; page < pages; ++page) {
    CHECK(cache.get(page) == data[page]);
    CHECK_EQ(root_of(leaves, page, bytes), digests[page]);
    cache.work[page].staged = 0;
    std::memset(staged + page * stride, 0, bytes);
  }
  leaves = launch(kvw_scatter, cache, 32, random);
  for (size_t page = 0; page < pages; ++page) {
    CHECK_EQ(root_of(leaves, page, bytes), digests[page]);
    CHECK(cache.get(page) == data[page]);
  }
  CHECK(cache.guards_hold());
}

TEST(kernel_digest_of_a_leaf_is_the_hosts_for_every_length) {
  std::mt19937_64 random = check::random("kernel_lengths");
  const std::vector<std::byte> data = noise(4096, random);
  for (size_t bytes = 1; bytes <= 4096; ++bytes) {
    Cache cache(bytes, 1, 5000, 8, random);
    cache.put(0,
              std::vector<std::byte>(data.begin(), data.begin() + static_cast<ptrdiff_t>(bytes)));
    CHECK_EQ(launch(kvw_gather, cache, 32, random)[0], XXH3_64bits(data.data(), bytes));
  }
}

TEST(kernel_moves_and_digests_pages_whatever_their_pieces) {
  std::mt19937_64 random = check::random("kernel_pieces");
  const size_t largest[] = {1, 3, 9, 64, 300, 2048, 4096, 20000, 1u << 20};
  for (uint64_t round = 0; round < check::rounds(300); ++round) {
    const size_t bytes = 1 + (random() % 8 == 0 ? random() % 200000 : random() % 20000);
    check_pages(bytes, 1 + random() % 4, largest[random() % std::size(largest)],
                size_t{1} << random() % 5, random);
  }
}

TEST(kernel_moves_pages_of_several_mebibytes) {
  std::mt19937_64 random = check::random("kernel_large");
  for (const size_t bytes : {size_t{4} << 20, (size_t{3} << 20) + 4095, (size_t{2} << 20) + 1})
    check_pages(bytes, 2, 128 << 10, 16, random);
}

// Leaves of one page, and how often the kernels touch its bytes: a leaf of a warp's is read in 256
// accesses of 16 bytes, one of eight lanes in 512 of 8 bytes and 8 more for its last stripe.
struct Touched {
  const char* what;
  size_t bytes, pieces_shift, staged_shift;
  std::vector<size_t> pieces;  // where they begin
  size_t read, written;
};

constexpr size_t kWhole = 4096 / 16, kWords = 4096 / 8, kLast = 64 / 8;

const Touched kTouched[] = {
    {"one piece", 4 * 4096, 0, 0, {0}, 4 * kWhole, 4 * kWhole},
    {"leaves of several warps", 9 * 4096, 0, 0, {0, 4096, 12288}, 9 * kWhole, 9 * kWhole},
    {"pieces elsewhere than 16 bytes", 4096, 8, 0, {0}, kWords + kLast, kWords},
    {"staged elsewhere", 4096, 0, 8, {0}, kWords + kLast, kWords},
    {"a piece that ends in a leaf", 3 * 4096, 0, 0, {0, 4096 + 16}, 3 * kWhole, 3 * kWhole},
    {"a piece that ends in a pair of words",
     3 * 4096,
     0,
     0,
     {0, 4096 + 8},
     2 * kWhole + kWords + kLast,
     2 * kWhole + kWords},
    {"three pieces in a leaf", 4096, 0, 0, {0, 64, 4080}, kWords + kLast, kWords},
    {"a tail", 4096 + 512, 0, 0, {0}, kWhole + 512 / 8 + kLast, kWhole + 512 / 8},
};

uint64_t touches(const void* data, size_t bytes, const std::function<void()>& run) {
  watched = {address_of(data), address_of(data) + bytes, 0};
  run();
  return std::exchange(watched, {}).accesses;
}

TEST(kernel_takes_whole_aligned_leaves_16_bytes_at_a_time_and_others_by_words) {
  std::mt19937_64 random = check::random("kernel_paths");
  for (const Touched& each : kTouched) {
    const std::vector<std::byte> data = noise(each.bytes, random);
    std::vector<Pair> memory(2 * each.bytes / 16 + 2), staging(each.bytes / 16 + 2);
    auto* staged = reinterpret_cast<std::byte*>(staging.data()) + each.staged_shift;
    Cache cache(each.bytes, 1, 1, 1, random);
    cache.work[0] = {address_of(staged), 0, each.pieces.size()};
    cache.pieces.clear();
    for (const size_t offset : each.pieces)  // with a gap before the second, and those behind it
      cache.pieces.push_back({address_of(memory.data()) + each.pieces_shift + offset +
                                  (offset == 0 ? 0 : each.bytes / 16 * 16),
                              offset});
    const auto said = [&](uint64_t accesses) {
      return each.what + (": " + std::to_string(accesses));
    };
    const auto count = [&](const std::vector<Pair>& of, Kernel kernel) {
      return said(touches(of.data(), of.size() * sizeof of[0], [&] {
        CHECK_EQ(root_of(launch(kernel, cache, 64, random), 0, each.bytes),
                 page_digest(data.data(), each.bytes, kKey, 3));
      }));
    };
    std::ranges::copy(data, staged);
    CHECK_EQ(count(staging, kvw_scatter), said(each.read));
    CHECK_EQ(count(memory, kvw_scatter), said(each.written));
    std::fill_n(staged, each.bytes, std::byte{0});
    CHECK_EQ(count(memory, kvw_gather), said(each.read));
    CHECK(std::equal(data.begin(), data.end(), staged));
    CHECK_EQ(count(staging, kvw_gather), said(each.written));
    // In place the pieces alone count.
    cache.work[0].staged = 0;
    CHECK_EQ(count(memory, kvw_gather), said(each.staged_shift == 0 ? each.read : kWhole));
  }
}

TEST(kernel_digest_differs_when_any_byte_was_flipped) {
  std::mt19937_64 random = check::random("kernel_flips");
  for (const size_t bytes : {2, 7, 16, 100, 200, 241, 1024, 5000}) {
    const bool large = bytes > 4096;
    Cache cache(bytes, 1, large ? 1 << 20 : 700, large ? 16 : 1, random);
    const std::vector<std::byte> data = noise(bytes, random);
    cache.put(0, data);
    const std::vector<uint64_t> right = launch(kvw_gather, cache, 32, random);
    for (size_t at = 0; at < bytes; ++at) {
      std::vector<std::byte> flipped = data;
      flipped[at] ^= static_cast<std::byte>(1u << random() % 8);
      cache.put(0, flipped);
      CHECK(launch(kvw_gather, cache, 32, random) != right);
    }
  }
}

}  // namespace
}  // namespace kvw
