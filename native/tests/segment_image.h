// A log's directory kept in memory: pages in closed segments and in one that was left open, what
// the same segments held in earlier lives, and a segment of another warehouse. A test damages a
// copy of it, writes that out, and looks at what a new log makes of it.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "tests/inline_engine.h"
#include "tests/nvme_world.h"

namespace kvw::nvme {

inline constexpr uint64_t kImageSegmentBytes = 24 * kBlockBytes;
inline constexpr uint64_t kImageShardBytes = 5000;  // two blocks, the second half empty
inline constexpr uint32_t kImageShards = 1;

using SegmentBytes = std::vector<std::byte>;
using Image = std::map<uint32_t, SegmentBytes>;

// The directory of World's own segments, in shared memory: thousands of them are written.
inline void use_shared_memory() { ::setenv("KVW_TEST_DIR", "/dev/shm", 0); }

inline SegmentBytes read_segment(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  return {bytes, bytes + text.size()};
}

inline Image read_image(const std::string& directory) {
  Image image;
  for (const auto& file : std::filesystem::directory_iterator(directory + "/segments"))
    if (file.path().extension() == ".seg")
      image[static_cast<uint32_t>(std::stoul(file.path().stem()))] = read_segment(file.path());
  return image;
}

inline void write_segment(const std::string& path, const SegmentBytes& bytes) {
  const Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  CHECK_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), 0), bytes.size());
}

struct Stored {
  std::map<uint64_t, Extent> pages;  // as the log that wrote them knew them
  std::set<uint32_t> closed;         // segments with a table of contents
  Image segments;
  Image earlier;          // the same numbers, a life or more before
  SegmentBytes stranger;  // of another warehouse

  // The pages whose record has a block in [begin, end).
  std::set<uint64_t> touched(uint32_t segment, uint64_t begin, uint64_t end) const {
    std::set<uint64_t> found;
    for (const auto& [number, extent] : pages) {
      const uint64_t first = uint64_t{extent.offset_blocks} * kBlockBytes;
      const uint64_t last = first + uint64_t{extent.blocks} * kBlockBytes;
      if (extent.segment == segment && begin < last && end > first) found.insert(number);
    }
    return found;
  }
  // The last record of a segment that was left open: damage to its header is that segment's end.
  bool is_end(uint64_t page) const {
    const Extent& extent = pages.at(page);
    if (closed.contains(extent.segment)) return false;
    return std::ranges::none_of(pages, [&](const auto& other) {
      return other.second.segment == extent.segment &&
             other.second.offset_blocks > extent.offset_blocks;
    });
  }
  std::set<uint64_t> in_segment(uint32_t segment) const {
    return touched(segment, 0, kImageSegmentBytes);
  }
};

// Enough pages to go round the segments more than once, then what is there at the end.
inline Stored make_stored() {
  use_shared_memory();
  Stored stored;
  {
    World other(4, kImageSegmentBytes);
    other.options.warehouse_id = {99, 98};
    other.open();
    for (uint64_t number = 1000; number < 1005; ++number)
      other.until([&] { return other.append(number, kImageShardBytes, kImageShards); });
    other.flush();
    stored.stranger = read_segment(other.segment_path(0));
  }
  World world(8, kImageSegmentBytes);
  world.open();
  const auto store = [&](uint64_t from, uint64_t to) {
    for (uint64_t number = from; number < to; ++number)
      world.until([&] { return world.append(number, kImageShardBytes, kImageShards); });
    world.until([&] { return world.waiting.empty(); });
    world.flush();
  };
  store(0, 30);
  stored.earlier = read_image(world.dir.path());
  store(30, 113);
  world.until([&] { return world.log->stats().closed_segments >= 3; });
  stored.segments = read_image(world.dir.path());
  for (const auto& [number, bytes] : stored.segments) {
    const auto footer = decode_toc_footer(std::span(bytes).last(kBlockBytes));
    const auto header = decode_segment_header(std::span(bytes).first(kBlockBytes));
    if (footer && header && footer->life == header->life) stored.closed.insert(number);
  }
  world.kill();
  // What a start finds: also what lies in segments that were given up and not begun again.
  world.options.inspect = true;
  world.open();
  for (const auto& [number, extent] : world.index) stored.pages[number] = extent;
  return stored;
}

// A World whose directory is filled from an image, and that reads pages in batches.
class Reopened : public World {
 public:
  // Room beside the image, so that nothing is reclaimed for what a fault adds.
  Reopened() : World(16, kImageSegmentBytes) {
    options.make_engine = [] { return std::make_unique<InlineEngine>(); };
    std::filesystem::create_directories(dir.path() + "/segments");
    for (uint64_t number = 0; number < 200; ++number)
      made_.push_back(make_page(number, kImageShardBytes, kImageShards));
  }

  void fill(const Image& image) {
    kill();
    events.clear();
    forgotten.clear();
    lost.clear();
    for (const auto& file : std::filesystem::directory_iterator(dir.path() + "/segments"))
      std::filesystem::remove(file.path());
    for (const auto& [number, bytes] : image) write_segment(segment_path(number), bytes);
  }

  // Reads all of the index; the pages whose reads were good. A wrong byte or fact ends the test.
  std::set<uint64_t> read_all() {
    std::set<uint64_t> right;
    results_.clear();
    std::map<uint64_t, std::pair<uint64_t, AlignedBuffer>> asked;  // by ticket
    for (const auto& [number, extent] : std::map(index.begin(), index.end())) {
      const uint64_t ticket = next_ticket++;
      const auto placed =
          asked.emplace(ticket, std::pair(number, AlignedBuffer(round_up(kImageShardBytes, 4096))))
              .first;
      reading.insert(ticket);
      until([&, number = number, extent = extent] {
        return log->read(ticket, extent, key_of(number), placed->second.second.data());
      });
    }
    until([&] { return reading.empty(); });
    for (const auto& [ticket, page] : asked) {
      const auto& [result, facts] = results_.at(ticket);
      if (result != ReadResult::ok) continue;
      const Page& expected = made_.at(page.first);
      CHECK(same_facts(facts, expected.facts));
      CHECK(std::memcmp(page.second.data(), expected.payload.data(), kImageShardBytes) == 0);
      right.insert(page.first);
    }
    return right;
  }

  void on_read(uint64_t ticket, ReadResult result, PageFacts&& facts) override {
    CHECK_EQ(reading.erase(ticket), 1u);
    last_read = result;
    results_[ticket] = {result, std::move(facts)};
  }

 private:
  std::vector<Page> made_;
  std::map<uint64_t, std::pair<ReadResult, PageFacts>> results_;
};

}  // namespace kvw::nvme
