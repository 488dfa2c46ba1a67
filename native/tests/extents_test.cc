// Holds on NVMe through a real daemon core: what is held is not reclaimed, what does not fit the
// prompt is not held, and a session holds no more than its share.
#include "client/extents.h"

#include <fcntl.h>

#include <filesystem>

#include "tests/check.h"
#include "tests/daemon_world.h"

namespace kvw {
namespace {

constexpr uint64_t kShard = 60'000;
constexpr uint32_t kPages = 40;
constexpr uint64_t kSegment = 1 * kMiB;
constexpr uint64_t kLong = uint64_t{kPatienceMs} * kMillisecondNs;

struct Scene {
  Scene() : daemon(shape_of(kShard), 32 * kMiB), chain(daemon.shape(), 1, kPages) {
    daemon.options.nvme_dir = daemon.directory.path() + "/nvme";
    std::filesystem::create_directory(daemon.options.nvme_dir);
    daemon.options.nvme_capacity_bytes = 16 * kSegment;
    daemon.options.nvme_segment_bytes = kSegment;
    daemon.options.grace_ns = kMillisecondNs;
    daemon.start();
    Client client(daemon.client_options());
    chain.store_all(client);
    CHECK_EQ(daemon.flush().pending, 0);
  }
  std::unique_ptr<Extents> hold(Client& client, const Chain& of, size_t first = 0) {
    Prompt prompt = of.prompt();
    return client.hold(daemon.shape().id, prompt, first, kPages, 1, kLong);
  }
  EntryView entry(uint32_t page) {
    return *daemon.call(
        [key = chain.pages[page].key](Warehouse& w) { return w.arena().index().find(key); });
  }

  Daemon daemon;
  Chain chain;
};

TEST(sessions_of_a_process_hold_no_more_segments_than_its_share) {
  Scene scene;
  Client client(scene.daemon.client_options());
  const auto held = scene.hold(client, scene.chain);
  CHECK_EQ(held->files().size(), 4);  // a quarter of sixteen
  CHECK(held->ended() == Reason::later);
  CHECK(held->pages().size() < kPages);
  // The share is the process's, not the call's or the session's.
  const auto more = scene.hold(client, scene.chain, held->pages().size());
  CHECK_EQ(more->pages().size(), 0);
  CHECK_EQ(scene.daemon.status().pins, 4);
  Client other(scene.daemon.client_options());
  CHECK_EQ(scene.hold(other, scene.chain)->pages().size(), 0);
  held->release();
  CHECK(scene.hold(client, scene.chain, 1)->pages().size() > 0);
}

TEST(holds_end_with_the_object_and_with_the_session) {
  Scene scene;
  {
    Client client(scene.daemon.client_options());
    {
      const auto held = scene.hold(client, scene.chain);
    }
    CHECK_EQ(scene.daemon.status().pins, 0);
    auto held = scene.hold(client, scene.chain);
    client.close();
    CHECK_EQ(scene.daemon.status().pins, 4);  // its lock lives as long as the hold
  }
  while (scene.daemon.status().pins != 0) scene.daemon.tick();
}

TEST(a_page_whose_record_is_another_is_not_held) {
  Scene scene;
  Client client(scene.daemon.client_options());
  const auto held = scene.hold(client, scene.chain);
  const size_t before = held->pages().size();
  CHECK(before > 3);
  held->release();
  const nvme::Extent extent = scene.entry(2).extent;
  char name[32];
  std::snprintf(name, sizeof name, "/segments/%08u.seg", extent.segment);
  const Fd fd(::open((scene.daemon.options.nvme_dir + name).c_str(), O_RDWR | O_CLOEXEC));
  const auto at = static_cast<off_t>(uint64_t{extent.offset_blocks} * kBlockBytes);
  std::array<std::byte, 200> header{};
  CHECK_EQ(::pread(fd.get(), header.data(), header.size(), at), ssize_t{200});
  for (const size_t flipped : {size_t{0}, size_t{44}, size_t{56}, size_t{104}, size_t{199}}) {
    auto damaged = header;
    damaged[flipped] ^= std::byte{1};
    CHECK_EQ(::pwrite(fd.get(), damaged.data(), damaged.size(), at), ssize_t{200});
    const auto now = scene.hold(client, scene.chain);
    CHECK_EQ(now->pages().size(), 2);
    CHECK(now->ended() == Reason::mismatch);
  }
  CHECK_EQ(::pwrite(fd.get(), header.data(), header.size(), at), ssize_t{200});
  CHECK_EQ(scene.hold(client, scene.chain)->pages().size(), before);
}

TEST(a_plan_covers_every_page_once_and_keeps_to_its_stage) {
  Scene scene;
  Client client(scene.daemon.client_options());
  const auto held = scene.hold(client, scene.chain);
  const uint64_t stride = scene.daemon.shape().shard_stride();
  for (const uint64_t stage : {stride, 3 * stride + 4096, 64 * stride})
    for (const uint64_t gap : {uint64_t{0}, 2 * stride}) {
      uint64_t page = 0;
      for (const Extents::Read& read : held->plan(stage, gap)) {
        CHECK_EQ(read.first, page);
        CHECK(read.stage_at + read.bytes <= stage);
        CHECK(read.bytes >= read.pages * stride);
        for (uint64_t each = 0; each < read.pages; ++each, ++page) {
          const Extents::Page& of = held->pages()[page];
          CHECK_EQ(of.staged_at - read.stage_at, of.offset_bytes - read.offset_bytes);
          CHECK_EQ(of.file, read.file);
          CHECK(of.staged_at + stride <= read.stage_at + read.bytes);
        }
      }
      CHECK_EQ(page, held->pages().size());
    }
  CHECK_THROWS(held->plan(stride - 1, 0), "stage_too_small");
}

}  // namespace
}  // namespace kvw
