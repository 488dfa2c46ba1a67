// A start with a smaller capacity keeps the pages that fit it, and says how many went.
#include <sys/stat.h>

#include <filesystem>
#include <thread>

#include "nvme/format.h"
#include "tests/nvme_world.h"

using namespace kvw;
using namespace kvw::nvme;

namespace {

constexpr uint64_t kOldSegment = 4 << 20, kNewSegment = 1 << 19;
constexpr uint64_t kNewCapacity = kOldSegment;
constexpr uint64_t kPages = 60;  // 1.2 MiB

void shrink_options(World& world, uint64_t capacity = kNewCapacity) {
  world.options.capacity_bytes = capacity;
  world.options.segment_bytes = kNewSegment;
}

// One old segment with so many pages, as a kill leaves it: open, or closed by one more start.
void fill(World& world, uint64_t pages, bool closed) {
  world.open();
  world.append_all(0, pages);
  world.flush();
  world.kill();
  if (!closed) return;
  world.open();
  world.until([&] { return world.log->stats().closed_segments == 1; });
  world.kill();
}

// The log has done all that it does by itself.
void settle(World& world) {
  world.until([&] {
    const LogStats stats = world.log->stats();
    return stats.free_segments >= 2 && stats.reclaimed_segments + stats.reads_in_flight == 0;
  });
  world.append_all(9000, 9001);
  world.flush();
}

// The sum of `pages=` in the events that tell of it.
uint64_t pages_told(const World& world) {
  uint64_t pages = 0;
  for (const auto& event : world.events) {
    const size_t at = event.find(" pages=");
    if (event.starts_with("nvme_shrunk") && at != std::string::npos)
      pages += std::stoull(event.substr(at + 7));
  }
  return pages;
}

void check_pages(World& world, uint64_t pages) {
  for (uint64_t number = 0; number < pages; ++number) CHECK(world.read(number));
}

struct Step {
  IoKind kind;
  uint64_t offset, file_bytes;
  std::vector<std::byte> data;
};

// Keeps a copy of the directory before every write and flush of the thread that made it.
class WatchedEngine final : public IoEngine {
 public:
  struct Seen {
    std::string directory;
    std::thread::id thread = std::this_thread::get_id();
    std::vector<Step> steps;
    std::vector<std::unique_ptr<TempDir>> copies;

    void copy() {
      copies.push_back(std::make_unique<TempDir>());
      std::filesystem::copy(directory + "/segments", copies.back()->path() + "/segments");
    }
  };

  WatchedEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<Seen> seen)
      : inner_(std::move(inner)), seen_(std::move(seen)) {}
  const char* name() const override { return inner_->name(); }
  unsigned depth() const override { return inner_->depth(); }
  unsigned in_flight() const override { return inner_->in_flight(); }
  void wait(std::vector<IoDone>& done, int timeout_ms) override { inner_->wait(done, timeout_ms); }
  void wake() override { inner_->wake(); }
  void submit(IoOp op) override {
    if (op.kind != IoKind::read && std::this_thread::get_id() == seen_->thread) {
      struct stat facts{};
      CHECK_EQ(::fstat(op.fd, &facts), 0);
      Step step{op.kind, op.offset, static_cast<uint64_t>(facts.st_size), {}};
      for (const iovec& piece : op.pieces) {
        const auto* data = static_cast<const std::byte*>(piece.iov_base);
        step.data.insert(step.data.end(), data, data + piece.iov_len);
      }
      seen_->steps.push_back(std::move(step));
      seen_->copy();
    }
    inner_->submit(std::move(op));
  }

 private:
  std::unique_ptr<IoEngine> inner_;
  std::shared_ptr<Seen> seen_;
};

// Opens it with a smaller capacity, and gives what each step of that left on disk.
std::shared_ptr<WatchedEngine::Seen> watch_shrinking(World& world) {
  auto seen = std::make_shared<WatchedEngine::Seen>();
  seen->directory = world.dir.path();
  const auto inner = world.options.make_engine;
  shrink_options(world);
  world.options.make_engine = [inner, seen] {
    return std::make_unique<WatchedEngine>(inner(), seen);
  };
  world.open();
  seen->thread = {};
  return seen;
}

void start_from(World& world, const TempDir& copy) {
  std::filesystem::remove_all(world.dir.path() + "/segments");
  std::filesystem::copy(copy.path() + "/segments", world.dir.path() + "/segments");
  world.open();
}

}  // namespace

// Incident: 20 MiB in one segment of 64 MiB, and a capacity of 64 MiB: the segment was taken as a
// whole to make room for smaller ones. All pages were gone, and no line said so.
TEST(start_with_a_smaller_capacity_keeps_the_pages_of_a_larger_segment_that_is_not_full) {
  for (const bool closed : {false, true}) {
    World world(4, kOldSegment);
    fill(world, kPages, closed);
    shrink_options(world);
    const auto report = world.open();
    CHECK_EQ(report.records, kPages);
    CHECK_EQ(report.scanned_segments, closed ? 0 : 1);
    CHECK(world.bytes_on_disk() <= kNewCapacity);
    settle(world);
    check_pages(world, kPages);
    CHECK(!world.saw_event("nvme_shrunk"));
    CHECK_EQ(world.log->stats().dropped_records, 0);
    world.append_all(1000, 1400);
    CHECK(world.bytes_on_disk() <= kNewCapacity);
    world.check_all_readable();
    world.kill();
    world.open();
    world.check_all_readable();
  }
}

TEST(start_with_a_smaller_capacity_cuts_to_a_whole_segment_that_is_used_again) {
  World world(4, kOldSegment);
  fill(world, 5, true);
  shrink_options(world);
  CHECK_EQ(world.open().records, 5);
  CHECK_EQ(std::filesystem::file_size(world.segment_path(0)), kNewSegment);
  world.append_all(1000, 1400);
  CHECK(world.words.at(0).first > 1);  // it has begun another life
  CHECK(!world.saw_event("nvme_segment_removed"));
}

// The order makes it safe against power loss too: the header never says the new length before the
// file has it for good, and differs from the old one in its first sector alone.
TEST(cut_segment_is_whole_after_a_crash_at_any_step) {
  for (const bool closed : {false, true}) {
    World world(4, kOldSegment);
    fill(world, kPages, closed);
    const auto seen = watch_shrinking(world);
    seen->copy();
    const uint64_t cut = std::filesystem::file_size(world.segment_path(0));
    CHECK(cut < kOldSegment);
    auto steps = std::span(seen->steps);
    if (!closed) {  // what a killed process wrote is flushed before it is believed
      CHECK(steps[0].kind == IoKind::sync);
      steps = steps.subspan(1);
    }
    CHECK_EQ(steps.size(), 5);
    constexpr IoKind kKinds[] = {IoKind::write, IoKind::sync, IoKind::sync, IoKind::write,
                                 IoKind::sync};
    for (size_t i = 0; i < 5; ++i) {
      CHECK(steps[i].kind == kKinds[i]);
      CHECK_EQ(steps[i].file_bytes, i < 2 ? kOldSegment : cut);
    }
    CHECK_EQ(steps[0].offset + steps[0].data.size(), cut);
    CHECK_EQ(steps[3].offset, 0);
    std::vector<std::byte> before(kBlockBytes);
    {
      std::FILE* file =
          std::fopen((seen->copies[0]->path() + "/segments/00000000.seg").c_str(), "rb");
      CHECK_EQ(std::fread(before.data(), 1, kBlockBytes, file), kBlockBytes);
      std::fclose(file);
    }
    CHECK(
        std::ranges::equal(std::span(before).subspan(512), std::span(steps[3].data).subspan(512)));

    for (const auto& copy : seen->copies) {
      World before_cut(4, kOldSegment), again(4, kOldSegment), looked_at(4, kOldSegment);
      start_from(before_cut, *copy);
      check_pages(before_cut, kPages);
      shrink_options(again);
      start_from(again, *copy);
      check_pages(again, kPages);
      CHECK_EQ(std::filesystem::file_size(again.segment_path(0)), cut);
      looked_at.options.inspect = true;
      start_from(looked_at, *copy);
      check_pages(looked_at, kPages);
      CHECK_EQ(std::filesystem::file_size(looked_at.segment_path(0)),
               std::filesystem::file_size(copy->path() + "/segments/00000000.seg"));
    }
  }
}

// It was taken for an empty one, which goes first, and was counted nowhere.
TEST(start_with_a_smaller_capacity_keeps_a_new_segment_whose_first_record_is_damaged) {
  for (const bool closed : {false, true}) {
    World world(8);
    fill(world, 240, false);
    const uint32_t newest = world.index.at(239).segment;
    if (closed) {
      world.open();
      world.until([&] { return world.log->stats().closed_segments == 5; });
      world.kill();
    }
    std::FILE* file = std::fopen(world.segment_path(newest).c_str(), "r+b");
    CHECK_EQ(std::fseek(file, kBlockBytes + 70, SEEK_SET), 0);
    CHECK(std::fputc('x', file) != EOF);
    std::fclose(file);
    world.options.capacity_bytes = 4 << 20;
    world.open();
    CHECK(world.index.contains(239));
    CHECK(!world.index.contains(0));
    const uint64_t readable = closed ? 240 : 239;  // a table names the damaged one too
    CHECK_EQ(pages_told(world), readable - world.index.size());
  }
}

// As for the table of a full one: the records are scanned.
TEST(cut_segment_is_scanned_when_its_table_is_damaged) {
  World world(4, kOldSegment);
  fill(world, kPages, true);
  shrink_options(world);
  world.open();
  world.kill();
  const auto path = world.segment_path(0);
  std::FILE* file = std::fopen(path.c_str(), "r+b");
  CHECK_EQ(std::fseek(file, -100, SEEK_END), 0);
  CHECK(std::fputc('x', file) != EOF);
  std::fclose(file);
  const auto report = world.open();
  CHECK_EQ(report.scanned_segments, 1);
  CHECK_EQ(report.records, kPages);
  check_pages(world, kPages);
}

// A file of another length is believed only by a table that says so.
TEST(segment_that_somebody_else_cut_is_not_believed) {
  World world(4, kOldSegment);
  fill(world, kPages, true);
  std::filesystem::resize_file(world.segment_path(0), 2 << 20);
  CHECK_EQ(world.open().records, 0);
  CHECK(world.saw_event("nvme_bad_header"));
}

TEST(start_with_a_smaller_capacity_keeps_what_fits_of_a_full_segment_and_counts_the_rest) {
  World world(4, kOldSegment);
  fill(world, 190, true);  // 3.8 MiB
  const auto seen = watch_shrinking(world);
  seen->copy();
  const auto kept = world.index.size();
  CHECK(kept > 110);
  CHECK(kept < 190);
  CHECK_EQ(pages_told(world), 190 - kept);
  settle(world);
  check_pages(world, kept);
  CHECK_EQ(pages_told(world), 190 - kept);
  CHECK_EQ(world.log->stats().dropped_records, 0);
  CHECK(world.bytes_on_disk() <= kNewCapacity);
  world.kill();
  world.events.clear();
  world.open();
  check_pages(world, kept);  // once is enough
  CHECK(!world.saw_event("nvme_shrunk"));
  for (const auto& copy : seen->copies) {
    World old(4, kOldSegment), again(4, kOldSegment);
    start_from(old, *copy);
    check_pages(old, kept);
    shrink_options(again);
    start_from(again, *copy);
    CHECK_EQ(again.index.size(), kept);
    again.check_all_readable();
  }
}

TEST(start_with_a_smaller_capacity_is_as_before_when_the_disk_refuses_the_cut) {
  for (const IoKind kind : {IoKind::write, IoKind::sync}) {
    World world(4, kOldSegment);
    fill(world, kPages, true);
    shrink_options(world);
    world.faults->add({kind, ".seg", 0, UINT64_MAX, EIO, -1});
    CHECK_EQ(world.open().records, kPages);
    CHECK(world.saw_event("nvme_cut_failed"));
    CHECK(world.log->health() == LogHealth::read_only);
    CHECK_EQ(std::filesystem::file_size(world.segment_path(0)), kOldSegment);
    check_pages(world, kPages);
    world.kill();
    world.faults->clear();
    CHECK_EQ(world.open().records, kPages);
  }
}

// What has to go behind the start, so that there are spare segments, goes for the same reason.
TEST(reclaim_says_how_many_pages_a_smaller_capacity_cost) {
  World world(12);
  fill(world, 480, false);
  world.options.capacity_bytes = 5 << 20;
  world.open();
  CHECK(pages_told(world) < 480 - world.index.size() + 1);
  world.until([&] { return world.log->stats().free_segments >= 2; });
  CHECK(world.log->stats().dropped_records > 0);
  CHECK_EQ(pages_told(world), 480 - world.index.size());
  world.append_all(1000, 1400);
  const auto told = pages_told(world);
  world.append_all(1400, 1800);
  CHECK_EQ(pages_told(world), told);  // from then on it is a tier that is full
}
