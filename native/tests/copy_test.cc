// Copies between pieces and the arena, on every path that this machine has.
#include "tests/check.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "copy/copy.h"
#include "copy/copy_routines.h"
#include "digest/digest.h"

namespace kvw {
namespace {

using Bytes = std::vector<std::byte>;

constexpr Key kKey{11, 22};
constexpr std::byte kGuard{0xa5};

std::vector<const CopyRoutines*> paths_here() {
  std::vector<const CopyRoutines*> paths;
  for (const CopyPath path : {CopyPath::portable, CopyPath::avx2, CopyPath::avx512, CopyPath::neon})
    if (const CopyRoutines* routines = copy_routines(path)) paths.push_back(routines);
  return paths;
}

void fill(std::span<std::byte> bytes, std::mt19937_64& random) {
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
}

// A page's place in the arena: 4 KiB aligned, with a guard after its last byte.
class Place {
 public:
  explicit Place(size_t bytes)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(
            std::aligned_alloc(kBlockBytes, round_up(bytes + 1, kBlockBytes)))) {
    std::fill_n(data_.get(), round_up(bytes + 1, kBlockBytes), kGuard);
  }
  std::byte* data() const { return data_.get(); }
  std::span<std::byte> page() const { return {data(), bytes_}; }
  bool guard_holds() const { return data()[bytes_] == kGuard; }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// A page of random bytes in client memory: pieces of random sizes, in random order in memory, with
// guards between them, from an odd address on. Or of multiples of `unit`, a power of two, and so
// many bytes behind multiples of it.
class Scattered {
 public:
  Scattered(size_t bytes, size_t largest_piece, std::mt19937_64& random, size_t unit = 1,
            size_t behind = 0)
      : page_(bytes) {
    fill(page_, random);
    for (size_t left = bytes; left > 0; left -= sizes_.back())
      sizes_.push_back(std::min<size_t>(left, (random() % (largest_piece / unit) + 1) * unit));
    if (random() % 4 == 0) sizes_.insert(sizes_.begin() + random() % (sizes_.size() + 1), 0);
    std::vector<size_t> order(sizes_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<size_t> offsets(order.size());
    size_t end = 0;
    for (const size_t i : order) {
      end = round_up(end + 1 + random() % 100, unit);
      offsets[i] = end;
      end += sizes_[i];
    }
    memory_.assign(end + unit + behind, kGuard);
    const size_t begin = -reinterpret_cast<uintptr_t>(memory_.data()) % unit + behind;
    for (size_t i = 0; i < order.size(); ++i)
      pieces_.push_back({memory_.data() + begin + offsets[i], sizes_[i]});
  }

  const Bytes& page() const { return page_; }
  std::span<const Piece> pieces() const { return pieces_; }
  // As a client's memory has it: before a store, and after a load.
  Bytes with_page(const Bytes& page) const {
    Bytes memory(memory_.size(), kGuard);
    size_t at = 0;
    for (const Piece& piece : pieces_) {
      std::copy_n(page.begin() + at, piece.bytes, memory.begin() + (piece.data - memory_.data()));
      at += piece.bytes;
    }
    return memory;
  }
  void put_page() { std::copy_n(with_page(page_).begin(), memory_.size(), memory_.begin()); }
  void clear() { std::fill(memory_.begin(), memory_.end(), kGuard); }
  bool holds_page() const { return memory_ == with_page(page_); }

 private:
  Bytes page_;
  std::vector<size_t> sizes_;
  Bytes memory_;
  std::vector<Piece> pieces_;
};

void check_round_trip(const CopyRoutines& path, Scattered& client, uint64_t seed) {
  const Place arena(client.page().size());
  client.put_page();
  const uint64_t stored =
      path.gather_digest(arena.data(), client.pieces().data(), client.pieces().size(), seed);
  CHECK(std::ranges::equal(arena.page(), client.page()));
  CHECK(arena.guard_holds());
  CHECK(client.holds_page());
  CHECK_EQ(stored, path.digest(client.page().data(), client.page().size(), seed));
  CHECK_EQ(stored, kPortableCopy.digest(client.page().data(), client.page().size(), seed));

  client.clear();
  const uint64_t loaded =
      path.scatter_digest(client.pieces().data(), client.pieces().size(), arena.data(), seed);
  CHECK_EQ(loaded, stored);
  CHECK(client.holds_page());

  client.clear();
  path.scatter(client.pieces().data(), client.pieces().size(), arena.data());
  CHECK(client.holds_page());
}

}  // namespace

TEST(copy_moves_and_digests_a_page_on_every_path_whatever_its_pieces) {
  std::mt19937_64 random = check::random("copy_pieces");
  const size_t largest[] = {2, 40, 300, 700, 3000, 4096, 5000, 20000, 1000000};
  for (uint64_t round = 0; round < check::rounds(300); ++round) {
    const size_t bytes = random() % 8 == 0 ? random() % 400000 : random() % 20000;
    Scattered client(bytes, largest[random() % std::size(largest)], random);
    const uint64_t seed = random();
    for (const CopyRoutines* path : paths_here()) check_round_trip(*path, client, seed);
  }
}

TEST(copy_hashes_blocks_as_it_stores_them_wherever_allocators_put_them) {
  std::mt19937_64 random = check::random("copy_lines");
  for (uint64_t round = 0; round < check::rounds(300); ++round) {
    const size_t unit = size_t{64} << random() % 7;  // a line to a leaf
    const size_t behind = random() % 4 * 16;
    const size_t largest[] = {unit, 16 * unit, 100 * unit};
    const size_t bytes = (1 + random() % (random() % 8 == 0 ? 5000 : 400)) * 64;
    Scattered client(bytes, largest[random() % std::size(largest)], random, unit, behind);
    const uint64_t seed = random();
    for (const CopyRoutines* path : paths_here()) check_round_trip(*path, client, seed);
  }
}

TEST(copy_moves_pieces_of_whole_leaves_at_every_alignment) {
  std::mt19937_64 random = check::random("copy_alignments");
  for (size_t skew = 0; skew < 130; ++skew) {
    const Place arena(3 * kBlockBytes + 17);
    fill(arena.page(), random);
    for (const CopyRoutines* path : paths_here()) {
      Bytes client(skew + arena.page().size() + 1, kGuard);
      const Piece piece{client.data() + skew, arena.page().size()};
      path->scatter_digest(&piece, 1, arena.data(), 1);
      CHECK(std::equal(arena.page().begin(), arena.page().end(), client.begin() + skew));
      CHECK(client.back() == kGuard && (skew == 0 || client[skew - 1] == kGuard));
    }
  }
}

TEST(copy_streaming_copies_exactly_its_bytes_on_every_path) {
  std::mt19937_64 random = check::random("copy_streaming");
  for (const CopyRoutines* path : paths_here()) {
    for (uint64_t round = 0; round < check::rounds(200); ++round) {
      const size_t from_skew = random() % 70;
      const size_t to_skew = 1 + random() % 70;
      const size_t bytes = random() % 1000;
      Bytes from(from_skew + bytes);
      Bytes to(to_skew + bytes + 1, kGuard);
      fill(from, random);
      path->copy(to.data() + to_skew, from.data() + from_skew, bytes);
      CHECK(std::equal(from.begin() + from_skew, from.end(), to.begin() + to_skew));
      CHECK(to.back() == kGuard && to[to_skew - 1] == kGuard);
    }
  }
}

TEST(copy_digests_equal_page_digest_when_called_by_key_and_shard) {
  std::mt19937_64 random = check::random("copy_public");
  Scattered client(50001, 9000, random);
  client.put_page();
  const Place arena(client.page().size());
  const uint64_t digest = page_digest(client.page().data(), client.page().size(), kKey, 3);
  CHECK_EQ(gather_digest(arena.data(), client.pieces(), kKey, 3), digest);
  client.clear();
  CHECK_EQ(scatter_digest(client.pieces(), arena.data(), kKey, 3), digest);
  CHECK(client.holds_page());
  client.clear();
  scatter(client.pieces(), arena.data());
  CHECK(client.holds_page());
  const Place other(client.page().size());
  copy_streaming(other.data(), arena.data(), client.page().size());
  CHECK(std::ranges::equal(other.page(), client.page()));
}

TEST(copy_of_no_bytes_has_the_digest_of_no_bytes) {
  const Place arena(0);
  const Piece empty{nullptr, 0};
  const uint64_t digest = page_digest(nullptr, 0, kKey, 0);
  CHECK_EQ(gather_digest(arena.data(), {}, kKey, 0), digest);
  CHECK_EQ(gather_digest(arena.data(), {&empty, 1}, kKey, 0), digest);
  CHECK_EQ(scatter_digest({&empty, 1}, arena.data(), kKey, 0), digest);
  CHECK(arena.guard_holds());
}

TEST(copy_path_is_the_best_of_the_processor_unless_one_is_named) {
  for (const CopyRoutines* path : paths_here()) CHECK(&choose_copy_routines(path->name) == path);
  const CopyRoutines& best = choose_copy_routines(nullptr);
  CHECK(&choose_copy_routines("") == &best);
  for (const CopyPath path : {CopyPath::avx512, CopyPath::avx2})
    if (copy_routines(path) != nullptr) {
      CHECK(best.path == path);
      break;
    }
  CHECK_EQ(std::string(copy_path_name()), copy_routines(copy_path())->name);
}

TEST(copy_path_is_refused_with_the_known_names_when_it_is_unknown) {
  CHECK_THROWS(choose_copy_routines("sse9"), "copy_path");
  try {
    choose_copy_routines("sse9");
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("portable") != std::string::npos);
    CHECK(std::string(error.what()).find("sse9") != std::string::npos);
  }
}

}  // namespace kvw
