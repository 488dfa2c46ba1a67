#include "arena/arena.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.h"
#include "base/files.h"
#include "base/huge_pages.h"

namespace kvw {

namespace {

constexpr uint64_t kMiB = 1ull << 20;

// As --dram takes it.
std::string shown(uint64_t bytes) {
  if (bytes % (1024 * kMiB) == 0) return std::to_string(bytes / kMiB / 1024) + "GiB";
  return bytes % kMiB == 0 ? std::to_string(bytes / kMiB) + "MiB" : std::to_string(bytes);
}

// Up to the last one that has memory.
uint32_t populated_slabs(const Slots& slots) {
  uint32_t slabs = slots.header().slab_max;
  while (slabs > 0 && slots.layout(slabs - 1).populated == 0) --slabs;
  return slabs;
}

void punch(int fd, uint64_t from, uint64_t to, const std::string& path) {
  if (from == to) return;
  if (::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(from),
                  static_cast<off_t>(to - from)) != 0 &&
      errno != EOPNOTSUPP)
    throw storage_error("cannot give back memory of " + path, errno);
}

constexpr const char* kAnew =
    "remove the directory: what NVMe has of its pages is kept, the others are recomputed";

}  // namespace

uint64_t slab_bytes_for(uint64_t dram_bytes) {
  return std::clamp(std::bit_floor(std::max<uint64_t>(dram_bytes / 8, 1)), 2 * kMiB, 256 * kMiB);
}

uint32_t slab_max_for(uint64_t dram_bytes, uint64_t slab_bytes) {
  const uint64_t now = (dram_bytes + slab_bytes - 1) / slab_bytes;
  // Slot numbers stay below 2^31: a pin word has a bit of its own for segments.
  const uint64_t most = (1ull << 31) / (slab_bytes / kBlockBytes) - 1;
  if (now > most)
    throw Error(ErrorKind::usage, "dram_too_large",
                "a DRAM tier of " + std::to_string(dram_bytes) + " bytes is above the limit of " +
                    std::to_string(most * slab_bytes));
  return static_cast<uint32_t>(std::min(std::bit_ceil(now * 8), most));
}

void check_dram(uint64_t dram_bytes) {
  if (dram_bytes < 8 * kMiB)
    throw Error(ErrorKind::usage, "dram_too_small",
                "a DRAM tier of " + std::to_string(dram_bytes) +
                    " bytes is too small; give at least 8 MiB");
  slab_max_for(dram_bytes, slab_bytes_for(dram_bytes));
}

Arena::Arena(const ArenaOptions& options) : directory_(options.directory) {
  check_dram(options.dram_bytes);
  if (::mkdir(directory_.c_str(), 0700) != 0 && errno != EEXIST)
    throw storage_error("cannot create the arena directory " + directory_, errno);
  lock_directory();
  // What can be refused comes first: the control page of another warehouse must stay as it is.
  open_slots(options);
  open_arena();
  open_control(options);
  if (attached_) give_back();
  create_index(options);
  control_->warehouse_id = options.warehouse_id;
  control_->slab_bytes = slab_bytes();
  control_->slab_count = slab_count_;
  keep_header(control_mapping_, offsetof(ControlPage, heartbeat_ns));
  keep_header(slots_mapping_, sizeof(SlotsHeader));
  keep_header(index_mapping_, sizeof(IndexHeader));
  if (::mkdir(sessions_directory().c_str(), 0700) != 0 && errno != EEXIST)
    throw storage_error("cannot create " + sessions_directory(), errno);
}

Arena::~Arena() = default;

void Arena::lock_directory() {
  const std::string path = directory_ + "/lock";
  lock_ = open_file(path, O_RDWR | O_CREAT);
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    char pid[32] = "unknown";
    const ssize_t got = ::pread(lock_.get(), pid, sizeof pid - 1, 0);
    if (got > 0) pid[got] = '\0';
    throw Error(ErrorKind::storage, "owned",
                "the arena directory " + directory_ + " is served by another daemon (pid " +
                    std::string(pid) + "); stop it, or give this one its own --arena-dir");
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(lock_.get(), 0) != 0 ||
      ::pwrite(lock_.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size()))
    throw storage_error("cannot write " + path, errno);
}

void Arena::open_control(const ArenaOptions& options) {
  const std::string path = directory_ + "/control";
  const uint64_t bytes = control_bytes(options.segment_words);
  control_fd_ = Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  uint64_t last_incarnation = 0, clear_epoch = 0;
  bool usable = false;
  if (control_fd_.valid() && size_of(control_fd_.get(), path) >= sizeof(ControlPage)) {
    Mapping mapping(control_fd_.get(), sizeof(ControlPage), false);
    const auto* old = mapping.at<ControlPage>(0);
    if (old->magic == kControlMagic) {
      last_incarnation = old->incarnation.value.load();
      const bool ours =
          old->version == kControlVersion && old->warehouse_id == options.warehouse_id;
      if (ours) clear_epoch = old->clear_epoch.value.load();
      usable = ours && old->bytes == bytes && size_of(control_fd_.get(), path) >= bytes;
    }
  }
  if (!usable) {
    // Old clients keep the old inode and see its heartbeat stop; they say hello again.
    create_file(path, [&](int fd) { allocate_or_throw(fd, bytes, path); });
    control_fd_ = open_file(path, O_RDWR);
  }
  control_read_ = open_file(path, O_RDONLY);
  control_mapping_ = Mapping(control_fd_.get(), bytes, true);
  control_ = control_mapping_.at<ControlPage>(0);
  control_->state.value.store(static_cast<uint64_t>(ControlState::starting));
  control_->bytes = bytes;
  control_->version = kControlVersion;
  control_->segment_words = options.segment_words;
  std::memcpy(control_->secret, options.secret.data(), kSecretBytes);
  control_->clear_epoch.value.store(clear_epoch);  // one made anew, as with another tier, keeps it
  control_->magic = kControlMagic;
  incarnation_ = last_incarnation + 1;
}

void Arena::open_slots(const ArenaOptions& options) {
  const std::string path = directory_ + "/slots";
  slots_fd_ = Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  attached_ = slots_fd_.valid();
  if (!attached_) {
    // Without its slots an old arena means nothing; and it must not be the same inode, or old
    // clients would go on writing and reading where new pages are.
    ::unlink((directory_ + "/arena").c_str());
    const uint64_t slab = slab_bytes_for(options.dram_bytes);
    const SlotsHeader header =
        slots_layout(options.warehouse_id, slab, slab_max_for(options.dram_bytes, slab));
    create_file(path, [&](int fd) {
      resize(fd, header.bytes, path);
      // Header and slab cuts are small and always there; words and metadata come with their slab.
      allocate_or_throw(fd, header.words_offset, path);
      if (::pwrite(fd, &header, sizeof header, 0) != sizeof header)
        throw storage_error("cannot write " + path, errno);
    });
    slots_fd_ = open_file(path, O_RDWR);
  }
  SlotsHeader header{};
  if (::pread(slots_fd_.get(), &header, sizeof header, 0) != sizeof header) header = {};
  check_slots_header(header, options.warehouse_id);
  if (size_of(slots_fd_.get(), path) < header.bytes)
    throw Error(ErrorKind::storage, "arena_foreign",
                path + " is shorter than its header says; move the arena directory " + directory_ +
                    " away, its pages are then recomputed");
  slots_read_ = open_file(path, O_RDONLY);
  slots_mapping_ = Mapping(slots_fd_.get(), header.bytes, true);
  slots_ = Slots(slots_mapping_);

  slab_count_ = static_cast<uint32_t>(options.dram_bytes / header.slab_bytes);
  if (slab_count_ > header.slab_max)
    throw Error(ErrorKind::usage, "arena_grown",
                "the arena in " + directory_ + " can grow to " +
                    shown(header.slab_max * header.slab_bytes) + ", and --dram is " +
                    shown(options.dram_bytes) + "; " + kAnew);
  if (const uint64_t taken = populated_slabs(slots_) * header.slab_bytes;
      slab_count_ != 0 && taken > slab_count_ * header.slab_bytes)
    if (const size_t clients = living_clients(); clients != 0)
      throw Error(ErrorKind::usage, "arena_larger",
                  "the arena in " + directory_ + " has taken " + shown(taken) +
                      " and cannot shrink to --dram " + shown(options.dram_bytes) +
                      " while clients have it mapped (" + std::to_string(clients) +
                      "); stop them, start with --dram " + shown(taken) + ", or " + kAnew);
  if (slab_count_ == 0)
    throw Error(ErrorKind::usage, "dram_too_small",
                "--dram " + shown(options.dram_bytes) + " is less than one slab (" +
                    shown(header.slab_bytes) + ") of the arena in " + directory_ + "; " + kAnew);
}

void Arena::open_arena() {
  const std::string path = directory_ + "/arena";
  const uint64_t bytes = slots_.header().slab_max * slots_.header().slab_bytes;
  if (::access(path.c_str(), F_OK) != 0) {
    if (attached_)  // the metadata outlived its payload: nothing in it can be believed
      for (uint32_t slab = 0; slab < slots_.header().slab_max; ++slab)
        if (slots_.layout(slab).populated != 0)
          throw Error(ErrorKind::storage, "arena_missing",
                      path + " is gone but its slots file is there; move the directory " +
                          directory_ + " away, its pages are then recomputed");
    create_file(path, [&](int fd) { resize(fd, bytes, path); });
  }
  arena_fd_ = open_file(path, O_RDWR);
  if (size_of(arena_fd_.get(), path) < bytes)
    throw Error(ErrorKind::storage, "arena_foreign",
                path + " is shorter than the arena; move the directory " + directory_ +
                    " away, its pages are then recomputed");
  arena_read_ = open_file(path, O_RDONLY);
  arena_mapping_ = Mapping(arena_fd_.get(), slab_count_ * slab_bytes(), true);
}

// By the locks of their sessions; one that cannot be looked at counts.
size_t Arena::living_clients() const {
  DIR* listing = ::opendir(sessions_directory().c_str());
  if (listing == nullptr) return errno == ENOENT ? 0 : 1;
  size_t living = 0;
  while (const dirent* item = ::readdir(listing)) {
    if (item->d_name[0] == '.') continue;
    const std::string path = sessions_directory() + "/" + item->d_name;
    const Fd session(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (!session.valid() || ::flock(session.get(), LOCK_EX | LOCK_NB) != 0) ++living;
  }
  ::closedir(listing);
  return living;
}

// The last one first, and each without a page before it is without memory: where this ends in
// between, the next start goes on. Generations rise, as where a slab is cut anew.
void Arena::give_back() {
  const SlotsHeader& header = slots_.header();
  for (uint32_t slab = populated_slabs(slots_); slab > slab_count_;) {
    --slab;
    ++shrunk_.slabs;
    const SlabLayout layout = slots_.layout(slab);
    for (uint32_t place = 0; place < slots_.slots_in(layout); ++place) {
      const SlotId slot = slots_.slot_id(slab, place);
      const SlotWord word = slots_.load(slot);
      shrunk_.pages += word.state == SlotState::live || word.state == SlotState::closing ? 1 : 0;
      slots_.word(slot).store(SlotWord{word.generation + 1, SlotState::free}.pack(),
                              std::memory_order_release);
    }
    slots_.layout_word(slab).store(0, std::memory_order_release);
  }
  punch(arena_fd_.get(), slab_count_ * header.slab_bytes, header.slab_max * header.slab_bytes,
        directory_ + "/arena");
  punch(slots_fd_.get(), header.metas_offset + slab_count_ * header.meta_region_bytes,
        header.metas_offset + header.slab_max * header.meta_region_bytes, directory_ + "/slots");
}

void Arena::create_index(const ArenaOptions& options) {
  DIR* listing = ::opendir(directory_.c_str());
  if (listing == nullptr) throw storage_error("cannot list " + directory_, errno);
  uint64_t newest = 0;
  std::vector<std::string> old;
  while (const dirent* item = ::readdir(listing)) {
    if (std::strncmp(item->d_name, "index.", 6) != 0) continue;
    newest = std::max<uint64_t>(newest, std::strtoull(item->d_name + 6, nullptr, 10));
    const std::string file = directory_ + "/" + item->d_name;
    // Of a start that was killed: its memory is wanted for the one that is made now.
    if (file.ends_with(".new"))
      ::unlink(file.c_str());
    else
      old.push_back(file);
  }
  ::closedir(listing);
  // Also above every file name seen: a lost control page must not give a number twice.
  incarnation_ = std::max(incarnation_, newest + 1);
  const std::string path = directory_ + "/index." + std::to_string(incarnation_);
  // Clients of the old daemon keep their mapping of it; headers validate what it names.
  const auto drop_old = [&old] {
    for (const std::string& file : old) ::unlink(file.c_str());
  };
  const auto fill = [&](int fd) {
    const uint64_t bytes = index_bytes(options.index_entries);
    resize(fd, bytes, path);
    take_huge_pages(fd, 0, bytes);
    allocate_or_throw(fd, bytes, path);
    IndexHeader header{kIndexMagic,          kIndexVersion, 0,
                       options.warehouse_id, incarnation_,  options.index_entries};
    if (::pwrite(fd, &header, sizeof header, 0) != sizeof header)
      throw storage_error("cannot write " + path, errno);
  };
  try {
    create_file(path, fill);
  } catch (const Error&) {
    if (old.empty()) throw;
    drop_old();  // room for one of them alone
    create_file(path, fill);
  }
  drop_old();
  index_fd_ = open_file(path, O_RDWR);
  index_read_ = open_file(path, O_RDONLY);
  index_mapping_ = Mapping(index_fd_.get(), index_bytes(options.index_entries), true);
  index_ = Index(index_mapping_);
  control_->index_entries.value.store(options.index_entries);
  control_->incarnation.value.store(incarnation_, std::memory_order_release);
}

int Arena::populate_slab(uint32_t slab) {
  const uint64_t offset = slab * slab_bytes();
  take_huge_pages(arena_fd_.get(), offset, slab_bytes());
  if (const int err = allocate(arena_fd_.get(), offset, slab_bytes()); err != 0) {
    // What was taken is of use to others: nothing of a slab without room is ours.
    ::fallocate(arena_fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(offset), static_cast<off_t>(slab_bytes()));
    return err;
  }
  // Ready page tables for the daemon's own copies; failing costs only speed.
  ::madvise(arena_mapping_.data() + offset, slab_bytes(), MADV_POPULATE_WRITE);
  return 0;
}

int Arena::back_metadata(uint32_t slab, const SlabLayout& layout, uint32_t first, uint32_t end) {
  const SlotsHeader& header = slots_.header();
  const auto back = [&](uint64_t begin, uint64_t bytes) {
    const uint64_t aligned = begin / kBlockBytes * kBlockBytes;
    return allocate(slots_fd_.get(), aligned, round_up(begin + bytes, kBlockBytes) - aligned);
  };
  if (first == 0)
    if (const int err = back(header.words_offset + slab * header.slots_per_slab * 8,
                             slots_.slots_in(layout) * 8ull);
        err != 0)
      return err;
  return back(header.metas_offset + slab * header.meta_region_bytes + first * layout.meta_bytes(),
              (end - first) * layout.meta_bytes());
}

Arena::Damage Arena::damage() const {
  struct File {
    const char* name;
    const Fd& fd;
    const Mapping& mapping;
  };
  const std::array<File, 4> files{{{"arena", arena_fd_, arena_mapping_},
                                   {"slots", slots_fd_, slots_mapping_},
                                   {"index", index_fd_, index_mapping_},
                                   {"control", control_fd_, control_mapping_}}};
  Damage damage;
  for (const File& file : files) {
    struct stat info{};
    if (::fstat(file.fd.get(), &info) == 0 &&
        static_cast<uint64_t>(info.st_size) < file.mapping.bytes())
      return {file.name, true};
    if (file.mapping.lost()) damage.file = file.name;
  }
  return damage;
}

void Arena::keep_header(const Mapping& mapping, size_t bytes) {
  headers_.push_back({mapping.data(), {mapping.data(), mapping.data() + bytes}});
}

int Arena::mend_headers() {
  int mended = 0;
  for (const Header& header : headers_) {
    if (std::memcmp(header.mapped, header.made.data(), header.made.size()) == 0) continue;
    std::memcpy(header.mapped, header.made.data(), header.made.size());
    ++mended;
  }
  return mended;
}

}  // namespace kvw
