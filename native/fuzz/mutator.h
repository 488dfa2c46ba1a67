// Inputs for the fuzz targets where there is no libFuzzer: those of the corpus, then changes of
// them, which follow from a seed. Knows nothing of coverage. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

namespace kvw::fuzz {

using Bytes = std::vector<uint8_t>;

inline constexpr size_t kLongest = 4096;

inline std::vector<Bytes> read_corpus(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(folder, missing))
    if (entry.is_regular_file()) paths.push_back(entry.path());
  std::ranges::sort(paths);
  std::vector<Bytes> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

class Mutator {
 public:
  Mutator(std::vector<Bytes> corpus, uint64_t seed) : corpus_(std::move(corpus)), random_(seed) {
    corpus_.emplace_back();
  }

  Bytes next() {
    Bytes made = pick();
    for (uint64_t changes = 1 + random_() % 8; changes > 0; --changes) change(made);
    if (made.size() > kLongest) made.resize(kLongest);
    return made;
  }

 private:
  const Bytes& pick() { return corpus_[random_() % corpus_.size()]; }
  size_t place(const Bytes& in) { return in.empty() ? 0 : random_() % in.size(); }

  void change(Bytes& made) {
    if (made.empty()) {
      for (uint64_t bytes = random_() % 64; bytes > 0; --bytes)
        made.push_back(static_cast<uint8_t>(random_()));
      return;
    }
    const size_t at = place(made);
    switch (random_() % 7) {
      case 0:
        made[at] ^= static_cast<uint8_t>(1 << random_() % 8);
        return;
      case 1:
        made[at] = static_cast<uint8_t>(random_());
        return;
      case 2:
        return put_number(made, at);
      case 3:
        made.erase(
            made.begin() + static_cast<ptrdiff_t>(at),
            made.begin() + static_cast<ptrdiff_t>(std::min(made.size(), at + random_() % 9)));
        return;
      case 4: {
        Bytes fresh(1 + random_() % 16);
        for (uint8_t& byte : fresh) byte = static_cast<uint8_t>(random_());
        made.insert(made.begin() + static_cast<ptrdiff_t>(at), fresh.begin(), fresh.end());
        return;
      }
      case 5: {
        const Bytes other = pick();
        const size_t from = place(other);
        made.resize(at);
        made.insert(made.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
        return;
      }
      default: {
        const Bytes piece(made.begin() + static_cast<ptrdiff_t>(at), made.end());
        made.insert(made.end(), piece.begin(), piece.end());
      }
    }
  }
  // One of those at which bounds are off by one, of a width of its own.
  void put_number(Bytes& made, size_t at) {
    static constexpr uint64_t kNumbers[] = {0,      1,      4095,       4096,       4097,
                                            0x7fff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff,
                                            ~0ull,  64,     65,         1ull << 63, 1ull << 40};
    uint64_t number = kNumbers[random_() % std::size(kNumbers)] + random_() % 3 - 1;
    for (uint64_t width = 1ull << random_() % 4; width > 0 && at < made.size(); --width, ++at) {
      made[at] = static_cast<uint8_t>(number);
      number >>= 8;
    }
  }

  std::vector<Bytes> corpus_;
  std::mt19937_64 random_;
};

}  // namespace kvw::fuzz
