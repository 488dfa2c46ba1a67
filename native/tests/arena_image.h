// A DRAM tier whose files are put back between faults: pages stored alone and in a chain, slots
// that had other pages before, and free ones. A test damages a file while no daemon is there (or
// while readers are), opens it again, and reads every page through a mapping of its own.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/warehouse_world.h"

namespace kvw {

inline constexpr uint64_t kArenaShardBytes = 5000;
inline constexpr uint32_t kArenaShards = 2;

// The stretches of a sparse file that hold something.
class FileImage {
 public:
  explicit FileImage(std::string path) : path_(std::move(path)) {
    const Fd fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    bytes_ = ::lseek(fd.get(), 0, SEEK_END);
    off_t at = 0;
    while ((at = ::lseek(fd.get(), at, SEEK_DATA)) >= 0) {
      const off_t end = ::lseek(fd.get(), at, SEEK_HOLE);
      std::vector<std::byte> data(static_cast<size_t>(end - at));
      CHECK_EQ(::pread(fd.get(), data.data(), data.size(), at), data.size());
      parts_[at] = std::move(data);
      at = end;
    }
  }

  const std::string& path() const { return path_; }
  uint64_t bytes() const { return static_cast<uint64_t>(bytes_); }
  void put_back() const {
    const Fd fd(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    CHECK_EQ(::ftruncate(fd.get(), bytes_), 0);
    for (const auto& [at, data] : parts_)
      CHECK_EQ(::pwrite(fd.get(), data.data(), data.size(), at), data.size());
  }

 private:
  std::string path_;
  off_t bytes_ = 0;
  std::map<off_t, std::vector<std::byte>> parts_;
};

// Part of a file, for damage in place.
class FilePart {
 public:
  explicit FilePart(const std::string& path) : fd_(::open(path.c_str(), O_RDWR | O_CLOEXEC)) {
    CHECK(fd_.valid());
  }
  std::vector<std::byte> read(uint64_t at, size_t bytes) const {
    std::vector<std::byte> data(bytes);
    CHECK_EQ(::pread(fd_.get(), data.data(), bytes, static_cast<off_t>(at)), bytes);
    return data;
  }
  void write(uint64_t at, const std::vector<std::byte>& data) const {
    CHECK_EQ(::pwrite(fd_.get(), data.data(), data.size(), static_cast<off_t>(at)), data.size());
  }
  void flip(uint64_t at, int bit) const {
    auto byte = read(at, 1);
    byte[0] ^= std::byte{1} << bit;
    write(at, byte);
  }
  void cut(uint64_t bytes) const { CHECK_EQ(::ftruncate(fd_.get(), static_cast<off_t>(bytes)), 0); }

 private:
  Fd fd_;
};

class ArenaImage {
 public:
  ArenaImage() : world(shape_of(kArenaShardBytes, kArenaShards)) {
    world.options.grace_ns = 0;
    world.start();
    std::vector<TestPage> old;
    for (uint64_t chain = 500; chain < 508; ++chain) old.push_back(world.page(chain));
    for (uint64_t chain = 1; chain <= 16; ++chain) pages.push_back(world.page(chain));
    for (uint32_t at = 0; at < 8; ++at) pages.push_back(world.page(100, at));
    {
      Peer peer(world);
      for (const TestPage& page : old) CHECK(peer.store(page));
      const SlotId some = world.slot_of(old[0]);
      older = metadata_of(some);
      older_word = word_bytes(some);
      uint64_t left = 0;
      world->evict(-1, old.size(), "dram", left);
      // First in, first out: all slots go round once, so that these are taken again.
      fill_round(peer);
      for (const TestPage& page : pages) CHECK(peer.store(page));
    }
    world.pass(1);
    world.pass(1);
    for (const TestPage& page : pages) slots.push_back(world.slot_of(page));
    const Slots& table = world.slots();
    const SlabLayout layout = table.layout(table.slab_of(slots[0]));
    meta_bytes = layout.meta_bytes();
    words_offset = table.header().words_offset;
    slabs = table.header().slab_max;
    per_slab = table.header().slots_per_slab;
    for (const SlotId slot : slots) {
      const SlabLayout own = table.layout(table.slab_of(slot));
      metas.push_back(table.meta_offset(slot, own));
      payloads.push_back(table.arena_offset(slot, own));
    }
    world.kill();
    files.emplace_back(path("slots"));
    files.emplace_back(path("arena"));
    files.emplace_back(path("control"));
  }

  std::string path(const char* name) const { return world.options.arena_dir + "/" + name; }
  uint64_t slots_per_slab() const { return per_slab; }
  uint64_t word_at(size_t page) const { return words_offset + 8ull * slots[page]; }

  void put_back() {
    world.kill();
    for (const FileImage& file : files) file.put_back();
  }

  // Through a mapping of its own. The pages of which all shards are right; a wrong byte ends the
  // test. `missed` is told of entries whose bytes were not the page's.
  std::set<size_t> read_all() { return read_all(*view_of(world->arena())); }
  std::set<size_t> read_all(const View& view) {
    std::set<size_t> right;
    mismatches = 0;
    for (size_t i = 0; i < pages.size(); ++i)
      if (loads(view, pages[i])) right.insert(i);
    return right;
  }

  World world;
  std::vector<TestPage> pages;
  std::vector<SlotId> slots;              // by page
  std::vector<uint64_t> metas, payloads;  // their places in `slots` and `arena`
  std::vector<std::byte> older, older_word;
  uint64_t meta_bytes = 0, words_offset = 0, per_slab = 1, mismatches = 0;
  uint32_t slabs = 0;
  std::vector<FileImage> files;

 private:
  std::vector<std::byte> metadata_of(SlotId slot) {
    const auto* from = reinterpret_cast<const std::byte*>(world.meta(slot));
    return {from, from + world.slots().layout(world.slots().slab_of(slot)).meta_bytes()};
  }
  std::vector<std::byte> word_bytes(SlotId slot) {
    const uint64_t word = world.word(slot).pack();
    const auto* from = reinterpret_cast<const std::byte*>(&word);
    return {from, from + sizeof word};
  }
  void fill_round(Peer& peer) {
    const uint64_t free = world->status().free_slots;
    for (uint64_t chain = 1000; chain < 1000 + free; ++chain) CHECK(peer.store(world.page(chain)));
    uint64_t left = 0;
    world->evict(-1, free, "dram", left);
  }
  bool loads(const View& view, const TestPage& page) {
    std::vector<std::byte> data(kArenaShardBytes);
    const std::array<Piece, 1> pieces{{{data.data(), data.size()}}};
    const Expected expected{
        kSpace, page.key, page.parent, page.position, WitnessKind::tokens, page.witness()};
    for (uint32_t shard = 0; shard < kArenaShards; ++shard) {
      const auto entry = view.index().find(page.key);
      if (!entry || !entry->in_dram()) return false;
      const LoadResult result = view.load(*entry, expected, world.shape(), shard, pieces, true);
      mismatches += result == LoadResult::mismatch ? 1 : 0;
      if (result != LoadResult::ok) return false;
      CHECK(data == bytes_of(page.key, shard, kArenaShardBytes));
    }
    return true;
  }
};

}  // namespace kvw
