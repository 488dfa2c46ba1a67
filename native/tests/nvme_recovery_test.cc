// What a new process finds: everything that was flushed, nothing that is wrong, and nobody else's.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/fd.h"
#include "nvme/format.h"
#include "tests/descriptor_limit.h"
#include "tests/nvme_world.h"

using namespace kvw;
using namespace kvw::nvme;

namespace {

void flip(const std::string& path, uint64_t offset) {
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  std::byte value{};
  CHECK_EQ(::pread(fd.get(), &value, 1, static_cast<off_t>(offset)), 1);
  value ^= std::byte{0x40};
  CHECK_EQ(::pwrite(fd.get(), &value, 1, static_cast<off_t>(offset)), 1);
}

std::vector<char> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Three closed segments and an open one.
void fill(World& world) {
  world.open();
  world.append_all(0, 160);
  world.flush();
  world.until([&] { return world.log->stats().closed_segments == 3; });
}

std::vector<std::string>& dropped_from_cache() {
  static std::vector<std::string> paths;
  return paths;
}

}  // namespace

// In the place of the C library's.
extern "C" int posix_fadvise(int fd, off_t offset, off_t bytes, int advice) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (advice == POSIX_FADV_DONTNEED && offset == 0 && bytes == 0)
    dropped_from_cache().push_back(std::filesystem::read_symlink(link).string());
  return static_cast<int>(::syscall(SYS_fadvise64, fd, offset, bytes, advice));
}

// What is in the page cache may be there although its write failed.
TEST(recovery_believes_the_device_and_not_the_page_cache) {
  World world;
  world.options.allocate = [](int fd, uint64_t bytes) {
    if ((::fcntl(fd, F_GETFL) & O_DIRECT) != 0) return EINVAL;  // a filesystem without direct I/O
    return ::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  };
  fill(world);
  world.kill();
  dropped_from_cache().clear();
  const auto report = world.open();
  CHECK_EQ(report.records, 160);
  CHECK_EQ(report.scanned_segments, 1);
  CHECK_EQ(dropped_from_cache().size(), 1);
}

TEST(recovery_of_an_empty_directory_finds_nothing) {
  World world;
  const auto report = world.open();
  CHECK_EQ(report.segments, 0);
  CHECK_EQ(report.records, 0);
  world.stop();
  CHECK_EQ(world.bytes_on_disk(), 0);
}

TEST(recovery_finds_every_flushed_page_after_a_kill) {
  World world;
  fill(world);
  world.kill();
  const auto report = world.open();
  CHECK_EQ(report.records, 160);
  CHECK_EQ(report.scanned_segments, 1);
  CHECK_EQ(report.refused_records, 0);
  for (uint64_t number = 0; number < 160; ++number) CHECK(world.read(number));
}

TEST(recovery_scans_a_segment_that_was_open_only_once) {
  World world;
  fill(world);
  world.kill();
  CHECK_EQ(world.open().scanned_segments, 1);
  world.until([&] { return world.log->stats().closed_segments == 4; });
  world.kill();
  const auto report = world.open();
  CHECK_EQ(report.scanned_segments, 0);
  CHECK_EQ(report.records, 160);
  for (uint64_t number = 0; number < 160; ++number) CHECK(world.read(number));
}

TEST(recovery_scans_a_closed_segment_whose_table_is_damaged) {
  World world;
  fill(world);
  world.kill();
  flip(world.segment_path(0), (1 << 20) - 100);
  flip(world.segment_path(1), (1 << 20) - kBlockBytes - 4000);
  const auto report = world.open();
  CHECK_EQ(report.scanned_segments, 3);
  CHECK_EQ(report.records, 160);
  for (uint64_t number = 0; number < 160; ++number) CHECK(world.read(number));
}

// The daemon waited for it without a bound, and its DRAM tier was as far away.
TEST(recovery_ends_when_the_device_stops_answering_and_the_next_one_finds_all) {
  World world;
  fill(world);
  for (uint64_t reads = 0; reads < 8; ++reads) {
    world.kill();
    world.faults->stall_after(reads);
    world.options.answer_ns = 1;
    CHECK_THROWS(world.open(), "nvme_no_answer");
    world.kill();
    world.faults->stall_after(UINT64_MAX);
    world.options.answer_ns = UINT64_MAX;
    CHECK_EQ(world.open().records, 160);
  }
  for (uint64_t number = 0; number < 160; ++number) CHECK(world.read(number));
}

// A daemon was killed before it had flushed, the next one said that all was durable without having
// flushed either, and the power went.
TEST(recovery_flushes_what_a_killed_process_wrote_before_it_reports_it) {
  World world;
  world.open();
  world.append_all(0, 20);
  world.kill();
  world.faults->keep_journal();
  CHECK_EQ(world.open().records, 20);
  bool flushed = false;
  for (const IoMoment& moment : world.faults->journal()) {
    CHECK(flushed || moment.kind == IoKind::sync);  // nothing else comes first
    flushed = flushed || moment.completed;
  }
  CHECK(flushed);
}

TEST(recovery_believes_nothing_in_a_scanned_segment_that_cannot_be_flushed) {
  World world;
  world.open();
  world.append_all(0, 20);
  world.kill();
  world.faults->add({IoKind::sync, ".seg", 0, 1, EIO, -1});
  CHECK_EQ(world.open().records, 0);
  CHECK(world.saw_event("nvme_bad_segment"));
  world.append_all(100, 120);
  world.check_all_readable();
}

TEST(recovery_skips_a_scanned_record_whose_payload_is_torn) {
  World world;
  world.open();
  world.append_all(0, 20);
  world.flush();
  const Extent torn = world.index.at(7);
  world.kill();
  flip(world.segment_path(torn.segment), (uint64_t{torn.offset_blocks} + 2) * kBlockBytes);
  const auto report = world.open();
  CHECK_EQ(report.refused_records, 1);
  CHECK_EQ(report.records, 19);
  CHECK(!world.index.contains(7));
  CHECK(world.read(8));
}

TEST(recovery_goes_on_behind_a_header_that_is_damaged) {
  World world;
  world.open();
  world.append_all(0, 20);
  const Extent torn = world.index.at(7);
  world.kill();
  flip(world.segment_path(torn.segment), uint64_t{torn.offset_blocks} * kBlockBytes + 70);
  const auto report = world.open();
  CHECK_EQ(report.records, 19);
  CHECK_EQ(report.refused_records, 1);
  CHECK(!world.index.contains(7));
  CHECK(world.read(8));
}

TEST(recovery_never_believes_a_record_of_an_earlier_life) {
  World world(4);
  world.open();
  world.append_all(0, 400);
  world.kill();
  world.open();
  for (const auto& [number, extent] : world.index)
    CHECK_EQ(extent.life, world.words.at(extent.segment).first);
  world.check_all_readable();
}

TEST(recovery_gives_out_lives_above_all_it_has_seen) {
  World world;
  fill(world);
  uint32_t highest = 0;
  for (const auto& [number, extent] : world.index) highest = std::max(highest, extent.life);
  world.kill();
  world.open();
  world.append_all(1000, 1001);
  CHECK(world.index.at(1000).life > highest);
  world.kill();
  world.options.life_floor = 5000;
  world.open();
  world.append_all(1001, 1002);
  CHECK(world.index.at(1001).life > 5000);
}

TEST(recovery_reports_the_highest_clear_epoch) {
  World world;
  world.open();
  world.log->set_epoch(9);
  world.append_all(0, 100);
  world.kill();
  CHECK_EQ(world.open().epoch_seen, 9);
}

TEST(recovery_prefers_the_later_of_two_records_of_a_page) {
  World world;
  world.open();
  world.append_all(0, 10);
  world.append_all(5, 6);
  const Extent later = world.index.at(5);
  world.flush();
  world.kill();
  CHECK_EQ(world.open().records, 11);
  CHECK(world.index.at(5) == later);
}

TEST(recovery_never_touches_the_segments_of_another_warehouse) {
  World world(8);
  fill(world);
  world.kill();
  const auto before = bytes_of(world.segment_path(1));
  world.options.warehouse_id = {99, 99};
  const auto report = world.open();
  CHECK_EQ(report.foreign_segments, 4);
  CHECK_EQ(report.records, 0);
  CHECK(world.saw_event("nvme_foreign_segment"));
  world.append_all(1000, 1400);
  for (const auto& [number, extent] : world.index) CHECK(extent.segment >= 4);
  CHECK(world.bytes_on_disk() <= world.options.capacity_bytes);
  world.stop();
  CHECK(bytes_of(world.segment_path(1)) == before);
}

TEST(recovery_spares_another_warehouse_whose_header_is_damaged) {
  World world;
  fill(world);
  world.kill();
  flip(world.segment_path(0), 50);  // has a table of contents
  flip(world.segment_path(3), 50);  // has records only
  world.options.warehouse_id = {99, 99};
  CHECK_EQ(world.open().foreign_segments, 4);
}

TEST(recovery_uses_a_file_with_a_damaged_header_again) {
  World world(6);
  fill(world);
  world.kill();
  flip(world.segment_path(0), 50);
  const auto report = world.open();
  CHECK_EQ(report.segments, 4);
  CHECK(report.records < 160);
  CHECK(world.saw_event("nvme_bad_header"));
  world.append_all(1000, 1300);
  CHECK(world.bytes_on_disk() <= world.options.capacity_bytes);
}

TEST(recovery_ignores_files_that_are_not_segments) {
  World world;
  fill(world);
  world.kill();
  const std::string folder = world.dir.path() + "/segments/";
  const std::vector<std::string> strange{"notes.txt", "1.seg", "0000000x.seg", "99999999.seg",
                                         "00000001.seg.bak"};
  for (const auto& name : strange) std::ofstream(folder + name) << "mine";
  std::filesystem::create_directory(folder + "00000009.seg");
  CHECK_EQ(world.open().records, 160);
  world.append_all(1000, 1200);
  world.stop();
  for (const auto& name : strange) CHECK_EQ(bytes_of(folder + name).size(), 4);
}

TEST(recovery_reuses_empty_short_and_garbage_files_of_ours) {
  World world(4);
  world.open();
  world.stop();
  const std::ofstream emptied(world.segment_path(0));
  std::ofstream(world.segment_path(1)) << std::string(10000, 'x');
  std::ofstream(world.segment_path(2)) << std::string(1 << 20, 'x');
  std::ofstream(world.segment_path(3)) << std::string(3 << 20, 'x');
  CHECK_EQ(world.open().records, 0);
  world.append_all(0, 400);
  CHECK(world.bytes_on_disk() <= world.options.capacity_bytes);
}

TEST(recovery_with_a_lower_capacity_keeps_the_newest_pages_within_it) {
  World world(12);
  world.open();
  world.append_all(0, 480);
  world.flush();
  world.kill();
  world.options.capacity_bytes = 5 << 20;
  world.open();
  CHECK(world.bytes_on_disk() <= 5 << 20);
  CHECK(world.index.contains(479));
  CHECK(!world.index.contains(0));
  CHECK(world.saw_event("nvme_shrunk"));
  world.append_all(1000, 1400);
  CHECK(world.bytes_on_disk() <= 5 << 20);
}

TEST(recovery_with_a_lower_capacity_removes_what_has_no_page_first) {
  World world(8);
  world.open();
  world.append_all(0, 180);
  world.until([&] { return world.bytes_on_disk() == 5 << 20; });  // one of them stands by
  world.flush();
  world.kill();
  world.options.capacity_bytes = 4 << 20;
  CHECK_EQ(world.open().records, 180);
  CHECK(world.saw_event("nvme_segment_removed"));
  CHECK(!world.saw_event("nvme_remove_failed"));
  CHECK(!world.saw_event("nvme_shrunk"));
}

// The queue took what nobody could ever write, and those pages could not leave DRAM.
TEST(append_is_refused_where_segments_that_are_left_alone_fill_the_capacity) {
  World world(4);
  world.open();
  world.append_all(0, 400);
  world.flush();
  world.kill();
  const Key ours = world.options.warehouse_id;
  world.options.warehouse_id = {99, 99};
  CHECK_EQ(world.open().foreign_segments, 4);
  CHECK(!world.append(1000));
  world.flush();
  world.kill();

  world.options.warehouse_id = ours;
  world.faults->add({IoKind::read, ".seg", 0, UINT64_MAX, EIO, -1});
  CHECK_EQ(world.open().unreadable_segments, 4);
  CHECK(!world.append(1000));
  world.kill();
  world.faults->clear();
  CHECK(world.open().records > 0);
  world.append_all(1000, 1100);
}

TEST(recovery_keeps_its_pages_where_another_warehouse_fills_the_capacity) {
  World world;
  fill(world);
  world.kill();
  for (uint32_t number = 10; number < 18; ++number) {
    std::filesystem::copy(world.segment_path(0), world.segment_path(number));
    AlignedBuffer block(kBlockBytes);
    encode_segment_header({{99, 99}, number, 1, 0, world.options.segment_bytes}, block.span());
    const Fd fd(::open(world.segment_path(number).c_str(), O_WRONLY | O_CLOEXEC));
    CHECK_EQ(::pwrite(fd.get(), block.data(), kBlockBytes, 0), kBlockBytes);
  }
  const auto report = world.open();
  CHECK_EQ(report.foreign_segments, 8);
  CHECK_EQ(report.records, 160);
}

TEST(recovery_with_another_segment_size_serves_the_old_segments_and_replaces_them) {
  World world(8);
  fill(world);
  world.kill();
  world.options.segment_bytes = 1 << 19;
  CHECK_EQ(world.open().records, 160);
  for (uint64_t number = 0; number < 160; ++number) CHECK(world.read(number));
  world.append_all(1000, 1800);
  CHECK(world.bytes_on_disk() <= world.options.capacity_bytes);
  world.until([&] {
    return !std::filesystem::exists(world.segment_path(0)) ||
           std::filesystem::file_size(world.segment_path(0)) == 1 << 19;
  });
}

TEST(recovery_with_few_descriptors_finds_everything_or_is_refused) {
  World world;
  fill(world);
  world.kill();
  for (unsigned spare = 0;; ++spare) {
    CHECK(spare < 100);
    const DescriptorLimit tight(DescriptorLimit::at_present(spare));
    try {
      CHECK_EQ(world.open().records, 160);
      break;
    } catch (const Error& refused) {
      CHECK(refused.kind() == ErrorKind::storage);
    }
    world.kill();
  }
}

TEST(recovery_goes_on_when_a_file_cannot_be_read) {
  World world;
  fill(world);
  world.kill();
  world.faults->add({IoKind::read, "00000001.seg", 0, UINT64_MAX, EIO, -1});
  const auto report = world.open();
  CHECK(world.saw_event("nvme_bad_segment"));
  CHECK_EQ(report.segments, 3);
  CHECK(report.records > 80);
  world.faults->clear();
  world.append_all(1000, 1300);
  world.kill();
  world.open();
  CHECK(world.index.contains(60));  // was in the bad file, which was left alone
}

// One sector in the first 8 MiB made a segment without a table free, and the next to be
// overwritten.
TEST(recovery_loses_one_record_of_a_scanned_segment_to_a_sector_that_cannot_be_read) {
  for (const uint64_t block : {0, 3}) {  // its header, its payload
    World world;
    world.open();
    world.append_all(0, 40);
    world.flush();
    const Extent struck = world.index.at(7);
    world.kill();
    const uint64_t begin = (struck.offset_blocks + block) * kBlockBytes;
    Fault fault{IoKind::read, world.segment_path(struck.segment), 0, UINT64_MAX, EIO, -1};
    fault.begin = begin;
    fault.end = begin + kBlockBytes;
    world.faults->add(fault);
    const auto report = world.open();
    CHECK_EQ(report.records, 39);
    CHECK_EQ(report.refused_records, 1);
    CHECK(!world.index.contains(7));
    CHECK(world.saw_event("nvme_scan_cut_short"));
    world.check_all_readable();
    world.append_all(1000, 1600);
    CHECK(world.index.contains(8));
    world.kill();
    world.faults->clear();
    world.open();
    CHECK(world.index.contains(7));  // its segment was left alone
  }
}

TEST(recovery_leaves_alone_a_segment_of_which_it_can_read_the_header_alone) {
  World world;
  fill(world);
  world.kill();
  Fault fault{IoKind::read, "00000001.seg", 0, UINT64_MAX, EIO, -1};
  fault.begin = kBlockBytes;
  world.faults->add(fault);
  const auto report = world.open();
  CHECK_EQ(report.unreadable_segments, 1);
  CHECK(world.faults->struck() < 80);  // of 255 blocks, each of which may take seconds
  world.faults->clear();
  world.append_all(1000, 1600);
  world.kill();
  world.open();
  CHECK(world.index.contains(60));
}

// --- crash replay -------------------------------------------------------------------------------

namespace {

constexpr uint64_t kTinySegment = 16 * kBlockBytes;

// What must survive a crash after so many moments of the journal.
struct Promise {
  size_t moment;
  uint64_t number;
  bool kept;  // flushed; or else forgotten
};

struct Recording {
  std::vector<IoMoment> journal;
  std::vector<Promise> promises;
};

Recording record_some_life(uint64_t seed) {
  std::mt19937_64 random(seed);
  World world(6, kTinySegment);
  Recording recording;
  world.faults->keep_journal();
  world.hot = [](uint64_t number) { return number % 3 == 0; };
  world.on_forget = [&](uint64_t number) {
    recording.promises.push_back({world.faults->journal_size(), number, false});
  };
  world.open();
  uint64_t next = 0;
  size_t promised = 0;
  while (next < 120) {
    if (world.append(next, 3000, 1)) ++next;
    if (random() % 4 == 0) world.log->poll();
    if (random() % 9 != 0) continue;
    world.flush();
    // In order: by then all of the first `durable` reports are durable, or forgotten before.
    const size_t durable = world.log->durable_through();
    for (; promised < durable; ++promised)
      if (world.index.contains(promised))
        recording.promises.push_back({world.faults->journal_size(), promised, true});
  }
  world.until([&] { return world.waiting.empty(); });
  recording.journal = world.faults->journal();
  return recording;
}

std::set<uint64_t> promised_by(const Recording& recording, size_t cut) {
  std::set<uint64_t> kept;
  for (const Promise& promise : recording.promises) {
    if (promise.moment > cut) break;
    if (promise.kept)
      kept.insert(promise.number);
    else
      kept.erase(promise.number);
  }
  return kept;
}

// Files as a crash after `cut` moments could leave them: what was flushed is there; what was not
// may be there, or partly, in sectors.
class Image {
 public:
  Image(const Recording& recording, size_t cut, uint64_t seed) : random_(seed) {
    std::set<uint64_t> durable = flushed(recording.journal, cut);
    for (size_t i = 0; i < cut; ++i) {
      const IoMoment& moment = recording.journal[i];
      if (moment.kind == IoKind::write && !moment.completed)
        apply(moment, durable.contains(moment.op));
    }
  }

  void write_to(const std::string& directory) const {
    std::filesystem::create_directories(directory + "/segments");
    for (const auto& [name, bytes] : files_) {
      std::ofstream file(directory + "/segments/" + name, std::ios::binary);
      file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    }
  }

 private:
  static std::set<uint64_t> flushed(const std::vector<IoMoment>& journal, size_t cut) {
    std::map<std::string, std::set<uint64_t>> completed;  // by path
    std::map<uint64_t, std::set<uint64_t>> covered;       // by flush
    std::set<uint64_t> durable;
    for (size_t i = 0; i < cut; ++i) {
      const IoMoment& moment = journal[i];
      if (moment.kind == IoKind::write && moment.completed)
        completed[moment.path].insert(moment.op);
      if (moment.kind == IoKind::sync && !moment.completed)
        covered[moment.op] = completed[moment.path];
      if (moment.kind == IoKind::sync && moment.completed)
        durable.insert(covered[moment.op].begin(), covered[moment.op].end());
    }
    return durable;
  }

  void apply(const IoMoment& write, bool durable) {
    auto& file = files_[std::filesystem::path(write.path).filename().string()];
    file.resize(kTinySegment);
    const uint64_t fate = durable ? 0 : random_() % 3;  // whole, gone, torn
    if (fate == 1) return;
    constexpr size_t kSector = 512;
    for (size_t at = 0; at < write.data.size(); at += kSector)
      if (fate == 0 || random_() % 2 == 0)
        std::memcpy(file.data() + write.offset + at, write.data.data() + at, kSector);
  }

  std::mt19937_64 random_;
  std::map<std::string, std::vector<char>> files_;
};

void check_crash(const Recording& recording, size_t cut, uint64_t seed) {
  World world(6, kTinySegment);
  Image(recording, cut, seed).write_to(world.dir.path());
  world.open();
  for (const uint64_t number : promised_by(recording, cut)) {
    if (world.index.contains(number)) continue;
    check::fail(__FILE__, __LINE__, "page " + std::to_string(number) + " was flushed and is lost");
  }
  // All of it, also what was never promised: a table names only what was flushed before it.
  world.check_all_readable([](uint64_t) { return uint64_t{3000}; }, 1);
  // And it goes on from there.
  CHECK(world.append(100000, 3000, 1));
  world.until([&] { return world.waiting.empty(); });
  CHECK_EQ(world.failed.size(), 0);
}

}  // namespace

TEST(crash_at_any_moment_loses_nothing_flushed_and_brings_back_nothing_wrong) {
  auto random = check::random("crash replay");
  const Recording recording = record_some_life(random());
  CHECK(recording.journal.size() > 200);
  for (size_t cut = 0; cut <= recording.journal.size(); ++cut)
    for (uint64_t repeat = 0; repeat < check::rounds(1); ++repeat)
      check_crash(recording, cut, random());
}
