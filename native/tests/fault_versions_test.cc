// Files of a newer core: refused by name before anything is changed, whatever else is in the
// directories; and those that only look newer because they are damaged are treated as damaged.
#include <fcntl.h>
#include <sys/stat.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "nvme/format.h"
#include "tests/check.h"
#include "tests/tally.h"
#include "tests/warehouse_world.h"
#include "warehouse/versions.h"

namespace kvw {
namespace {

constexpr uint64_t kSegmentBytes = 1 << 20;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_at(const std::string& path, size_t at, const void* data, size_t bytes) {
  const Fd file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  CHECK(::pwrite(file.get(), data, bytes, static_cast<off_t>(at)) == static_cast<ssize_t>(bytes));
}

// A warehouse with pages in both tiers, at rest.
struct Rest {
  Rest() : world(shape_of(5000)) {
    world.options.nvme_dir = disk.path();
    world.options.nvme_capacity_bytes = 8 * kSegmentBytes;
    world.options.nvme_segment_bytes = kSegmentBytes;
    world.start();
    Peer peer(world);
    for (uint64_t chain = 0; chain < 4; ++chain) CHECK(peer.store(world.page(chain)));
    const uint64_t ticket = world->request_flush();
    while (!world->flushed(ticket)) {
      world->poll_log();
      world.pass(kMillisecondNs);
    }
    world.kill();
  }
  std::string slots() const { return world.options.arena_dir + "/slots"; }
  std::string segment() const { return disk.path() + "/segments/00000000.seg"; }

  // The file's opening block with another version, its checksum made to hold or not.
  void set_slots_version(uint32_t version, bool whole) {
    SlotsHeader header{};
    std::memcpy(&header, read_file(slots()).data(), sizeof header);
    header.version = version;
    if (whole) header.checksum = XXH3_64bits(&header, offsetof(SlotsHeader, checksum));
    write_at(slots(), 0, &header, sizeof header);
  }
  void set_segment_version(uint32_t version, bool whole) {
    std::string block = read_file(segment()).substr(0, kBlockBytes);
    std::memcpy(block.data() + 16, &version, sizeof version);
    const uint64_t checksum = XXH3_64bits(block.data() + 8, kBlockBytes - 8);
    if (whole) std::memcpy(block.data(), &checksum, sizeof checksum);
    write_at(segment(), 0, block.data(), block.size());
  }

  std::map<std::string, std::string> contents() const {
    std::map<std::string, std::string> found;
    for (const std::string& root : {world.options.arena_dir, disk.path()})
      for (const auto& entry : std::filesystem::recursive_directory_iterator(root))
        if (entry.is_regular_file() && entry.path().filename() != "arena")
          found[entry.path()] = read_file(entry.path());
    return found;
  }

  void check_refused(const std::string& path, uint32_t version) {
    const auto before = contents();
    try {
      world.start();
      check::fail(__FILE__, __LINE__, "version " + std::to_string(version) + " was taken");
    } catch (const Error& error) {
      CHECK_EQ(error.code(), "newer_files");
      const std::string text = error.what();
      CHECK(text.find(path) != std::string::npos);
      CHECK(text.find("version " + std::to_string(version)) != std::string::npos);
      CHECK(text.find("start the newer kvwarehouse") != std::string::npos);
    }
    world.kill();
    CHECK(contents() == before);
  }
  void check_served() {
    const RecoverySummary summary = world.start();
    CHECK_EQ(summary.pages_dram, 4);
    CHECK_EQ(summary.pages_nvme, 4);
    Peer peer(world);
    for (uint64_t chain = 0; chain < 4; ++chain)
      CHECK_EQ(peer.load(world.page(chain), 1), Got::right);
    world.kill();
  }

  TempDir disk;
  World world;
};

constexpr const char* kClass = "segment or slots file of a newer version, opened by the core";

TEST(newer_segment_or_slots_file_is_refused_and_nothing_is_changed) {
  auto random = check::random("newer_segment_or_slots_file");
  Rest rest;
  for (uint64_t round = 0; round < check::rounds(3); ++round) {
    const auto version = static_cast<uint32_t>(round == 0 ? 2 : 2 + random() % 1000000);
    rest.set_slots_version(version, true);
    rest.check_refused(rest.slots(), version);
    rest.set_slots_version(kSlotsVersion, true);
    rest.set_segment_version(version, true);
    rest.check_refused(rest.segment(), version);
    rest.set_segment_version(nvme::kFormatVersion, true);
    rest.check_served();
    check::tally(kClass, 2);
  }
}

TEST(segment_whose_version_is_damaged_is_no_obstacle) {
  Rest rest;
  rest.set_segment_version(2, false);
  const RecoverySummary summary = rest.world.start();
  CHECK_EQ(summary.pages_dram, 4);
  CHECK_EQ(summary.pages_nvme, 0);  // as any damaged header: its file is free again
  rest.world.kill();
  check::tally(kClass);
}

TEST(files_that_are_not_ours_or_not_there_are_nobodys_newer_files) {
  Rest rest;
  const std::string segments = rest.disk.path() + "/segments";
  std::ofstream(segments + "/00000009.seg") << "short";
  std::ofstream(segments + "/notes") << std::string(kBlockBytes, 'x');
  std::filesystem::create_directory(segments + "/folder.seg");
  CHECK_EQ(::mkfifo((segments + "/pipe.seg").c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/zero", segments + "/link.seg");
  refuse_newer_files(rest.world.options.arena_dir, rest.disk.path());
  refuse_newer_files("/nowhere", "/nowhere");
  refuse_newer_files(rest.world.options.arena_dir, "");
}

}  // namespace
}  // namespace kvw
