// The log after a crash at any moment of any life of it: under appends, flushes, reclaim with
// relocation, rotation, and recovery itself, crash after crash. Each moment is cut in each way that
// the medium allows (tests/crash_disk.h). What a new process finds: nothing wrong; everything that
// was reported durable and not dropped since; all of its room; and lives above every earlier one.
#include "tests/crash_disk.h"

#include <array>
#include <mutex>

#include "nvme/format.h"
#include "tests/inline_engine.h"
#include "tests/nvme_world.h"
#include "tests/tally.h"

using namespace kvw;
using namespace kvw::nvme;

namespace {

constexpr uint64_t kTinySegment = 16 * kBlockBytes;
constexpr uint64_t kSegments = 6;
constexpr uint64_t kRoom = kSegments * 8;   // more pages than fit
constexpr uint64_t kAfterwards = 1u << 20;  // numbers of pages that are stored to see that it works

constexpr std::array kLosses{Loss::all_unsynced, Loss::some, Loss::torn, Loss::kill};

const char* name_of(Loss loss) {
  switch (loss) {
    case Loss::all_unsynced:
      return "power lost at a moment of the NVMe log: nothing unsynced is left";
    case Loss::some:
      return "power lost at a moment of the NVMe log: any subset of unsynced writes is left";
    case Loss::torn:
      return "power lost at a moment of the NVMe log: unsynced writes are torn at 512 bytes";
    case Loss::kill:
      return "process killed at a moment of the NVMe log: writes in flight are torn";
  }
  return "";
}

// Thousands of directories: in memory, unless told otherwise.
[[maybe_unused]] const int in_memory = ::setenv("KVW_TEST_DIR", "/dev/shm", 0);

uint64_t shard_bytes_of(uint64_t number) { return number % 5 == 0 ? 9000 : 3000; }

const Page& page_of(uint64_t number) {
  static std::map<uint64_t, Page> made;
  const auto found = made.find(number);
  if (found != made.end()) return found->second;
  return made.emplace(number, make_page(number, shard_bytes_of(number), 1)).first->second;
}

// What must survive a crash from moment `moment` on: `number` is there; or, not `kept`, need not.
struct Promise {
  size_t moment;
  uint64_t number;
  bool kept;
};

// A world in memory whose pages are read many at a time, and whose life is recorded.
class CrashWorld : public World {
 public:
  explicit CrashWorld(uint64_t seed) : World(kSegments, kTinySegment), seeds_(seed) {
    options.make_engine = [this] {
      return make_faulty_engine(std::make_unique<InlineEngine>(options.depth + 2, seeds_()),
                                faults);
    };
    options.allocate = [this](int fd, uint64_t bytes) {
      char path[4096];
      const std::string link = "/proc/self/fd/" + std::to_string(fd);
      const ssize_t length = ::readlink(link.c_str(), path, sizeof path);
      const std::string whole(path, static_cast<size_t>(length));
      const std::string name = whole.substr(whole.rfind('/') + 1);
      // Before the file has it: who comes later sees at least this much.
      const std::lock_guard lock(mutex_);
      if (name.ends_with(".seg")) growths_.push_back({faults->journal_size(), name, bytes});
      return ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    };
  }

  // Before what a file that is being made is noted in.
  ~CrashWorld() override {
    faults->hold(false);
    log.reset();
  }

  std::string folder() const { return dir.path() + "/segments"; }

  std::vector<Growth> growths() {
    const std::lock_guard lock(mutex_);
    return growths_;
  }

  bool append_page(uint64_t number) { return append(number, shard_bytes_of(number), 1); }

  // Every page of the index, but those that reclaim moved or dropped meanwhile, is right.
  void check_everything() {
    const auto asked = index;
    results_.clear();
    std::vector<std::pair<uint64_t, AlignedBuffer>> buffers;
    buffers.reserve(asked.size());
    for (const auto& [number, extent] : asked) {
      const uint64_t ticket = next_ticket++;
      buffers.emplace_back(number, AlignedBuffer(page_of(number).facts.payload_bytes()));
      tickets_[ticket] = number;
      reading.insert(ticket);
      std::byte* into = buffers.back().second.data();
      until([&] { return log->read(ticket, extent, key_of(number), into); });
    }
    until([&] { return reading.empty(); });
    for (const auto& [number, into] : buffers) {
      const auto now = index.find(number);
      const bool unmoved = now != index.end() && now->second == asked.at(number);
      if (unmoved) CHECK(results_.at(number));
      if (!results_.at(number)) continue;
      // What pads it to a block may be torn: nobody is given that.
      const std::byte* expected = page_of(number).payload.data();
      CHECK(std::memcmp(into.data(), expected, shard_bytes_of(number)) == 0);
    }
  }

  void on_read(uint64_t ticket, ReadResult result, PageFacts&& facts) override {
    CHECK_EQ(reading.erase(ticket), 1u);
    const uint64_t number = tickets_.at(ticket);
    tickets_.erase(ticket);
    results_[number] = result == ReadResult::ok;
    if (result == ReadResult::ok) CHECK(same_facts(facts, page_of(number).facts));
  }

 private:
  std::mt19937_64 seeds_;
  std::mutex mutex_;  // the disk thread makes files
  std::vector<Growth> growths_;
  std::map<uint64_t, uint64_t> tickets_;
  std::map<uint64_t, bool> results_;
};

// All that happened until now, over lives and crashes, and what it promises.
class Story {
 public:
  const CrashDisk& disk() const { return disk_; }
  size_t begin() const { return disk_.begin(); }

  std::set<uint64_t> promised(size_t cut) const {
    std::set<uint64_t> kept = promised_before_;
    for (const Promise& promise : promises_) {
      if (promise.moment > cut) continue;
      if (promise.kept)
        kept.insert(promise.number);
      else
        kept.erase(promise.number);
    }
    return kept;
  }

  Story after(size_t cut, Loss loss, std::mt19937_64& random) const {
    Story story;
    story.disk_ = disk_.after(cut, loss, random);
    story.promised_before_ = promised(cut);
    story.next_ = next_;
    return story;
  }

  // Recovery, and some traffic. `pages`: how many are stored.
  void live(uint64_t pages, std::mt19937_64& random);

 private:
  void traffic(CrashWorld& world, uint64_t pages, std::mt19937_64& random);
  void flush(CrashWorld& world);

  CrashDisk disk_;
  std::set<uint64_t> promised_before_;
  std::vector<Promise> promises_;  // in order
  uint64_t next_ = 0;
};

void Story::live(uint64_t pages, std::mt19937_64& random) {
  CrashWorld world(random());
  CrashDisk::write_to(disk_.files(), world.folder());
  world.faults->keep_journal();
  world.hot = [](uint64_t number) { return number % 3 == 0; };
  world.on_forget = [&](uint64_t number) {
    promises_.push_back({disk_.begin() + world.faults->journal_size(), number, false});
  };
  world.open();
  if (random() % 2 == 0) flush(world);  // what was found may be asked for as well
  traffic(world, pages, random);
  world.until([&] { return world.waiting.empty(); });
  // No moment may follow what is copied here.
  world.log->stop();
  disk_.record(world.faults->journal(), world.growths());
}

void Story::traffic(CrashWorld& world, uint64_t pages, std::mt19937_64& random) {
  const uint64_t end = next_ + pages;
  std::vector<uint64_t> dropped;
  while (next_ < end) {
    const uint64_t what = random() % 64;
    if (what < 40) {
      if (world.append_page(next_)) ++next_;
    } else if (what < 44 && !world.forgotten.empty()) {
      // A page that reclaim dropped is stored again, as the warehouse would: not while it is there.
      const uint64_t number = *world.forgotten.begin();
      const bool there = world.index.contains(number);
      if (there || world.append_page(number)) world.forgotten.erase(number);
    } else if (what < 46) {
      world.pinned = {static_cast<uint32_t>(random() % kSegments)};
    } else if (what < 48) {
      world.pinned.clear();
    } else if (what < 50) {
      world.log->set_epoch(random() % 8);
    } else if (what < 56) {
      flush(world);
    } else {
      world.clock.advance_ns(100 * kMillisecondNs);
      world.log->poll();
    }
  }
  world.pinned.clear();
}

void Story::flush(CrashWorld& world) {
  const auto before = world.index;
  world.flush();
  const size_t moment = disk_.begin() + world.faults->journal_size();
  for (const auto& [number, extent] : before)
    if (world.index.contains(number)) promises_.push_back({moment, number, true});
}

// Of the headers that may have records: a file that is not a segment yet never had one.
uint32_t highest_life(const CrashDisk::Files& files) {
  uint32_t highest = 0;
  AlignedBuffer block(kBlockBytes);
  for (const auto& [name, bytes] : files) {
    if (bytes.size() < kTinySegment) continue;
    std::memcpy(block.data(), bytes.data(), kBlockBytes);
    if (const auto header = decode_segment_header(block.span()))
      highest = std::max(highest, header->life);
  }
  return highest;
}

// All of the room is used again, and nothing beyond it.
void check_room(CrashWorld& world) {
  const auto lives = world.words;
  for (uint64_t number = kAfterwards; number < kAfterwards + 2 * kRoom; ++number)
    world.until([&] { return world.append_page(number); });
  world.until([&] { return world.waiting.empty(); });
  CHECK(world.bytes_on_disk() <= world.options.capacity_bytes);
  CHECK(world.words.size() >= kSegments - 1);  // of two to spare, one may have no file yet
  for (const auto& [segment, word] : lives) CHECK(world.words.at(segment).first > word.first);
  world.check_everything();
}

void check_image(const CrashDisk::Files& files, const std::set<uint64_t>& promised, bool thorough,
                 uint64_t seed) {
  CrashWorld world(seed);
  CrashDisk::write_to(files, world.folder());
  const RecoveryReport report = world.open();
  CHECK_EQ(report.foreign_segments, 0);
  CHECK_EQ(world.log->stats().capacity_bytes, world.options.capacity_bytes);
  for (const uint64_t number : promised)
    if (!world.index.contains(number))
      check::fail(__FILE__, __LINE__,
                  "page " + std::to_string(number) + " was durable, and is lost");
  world.check_everything();
  // And it goes on from there.
  const uint64_t fresh = kAfterwards - 1;
  CHECK(world.append_page(fresh));
  world.until([&] { return world.waiting.empty(); });
  CHECK(world.failed.empty());
  CHECK(world.index.at(fresh).life > highest_life(files));
  if (thorough) check_room(world);
}

void check_cut(const Story& story, size_t cut, Loss loss, std::mt19937_64& random) {
  const auto files = story.disk().files(cut, loss, random);
  check_image(files, story.promised(cut), random() % 32 == 0, random());
  check::tally(name_of(loss));
}

// Every moment of the last life in every way, then lives after some of these crashes.
void explore(const Story& story, int more_lives, std::mt19937_64& random) {
  const size_t begin = story.begin(), end = story.disk().moments();
  for (size_t cut = begin; cut <= end; ++cut)
    for (const Loss loss : kLosses) check_cut(story, cut, loss, random);
  if (more_lives == 0) return;
  for (const Loss loss : {kLosses[1 + random() % 2], Loss::kill}) {
    Story next = story.after(begin + random() % (end - begin + 1), loss, random);
    next.live(random() % 12, random);
    explore(next, more_lives - 1, random);
  }
}

}  // namespace

TEST(crash_at_any_moment_of_any_life_loses_nothing_durable_and_brings_back_nothing_wrong) {
  auto random = check::random("crash of the log");
  for (uint64_t round = 0; round < check::rounds(2); ++round) {
    Story story;
    story.live(60 + random() % 30, random);
    CHECK(story.disk().moments() > 60);
    explore(story, 2, random);
  }
}
