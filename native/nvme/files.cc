#include "nvme/files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "nvme/aligned_buffer.h"
#include "nvme/log.h"

namespace kvw::nvme {
namespace {

constexpr size_t kMostOpenFiles = 1024;
constexpr size_t kNameDigits = 8;
constexpr std::string_view kSuffix = ".seg";

constexpr uint64_t kZeroBytes = 1ull << 20;  // in one write

int allocate_blocks(int fd, uint64_t bytes) {
  return ::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}

// posix_fallocate() would write single bytes, which O_DIRECT refuses.
int write_zeros(int fd, uint64_t bytes) {
  const AlignedBuffer zeros(std::min(bytes, kZeroBytes));
  for (uint64_t at = 0; at < bytes;) {
    const size_t part = std::min<uint64_t>(bytes - at, zeros.bytes());
    const ssize_t written = ::pwrite(fd, zeros.data(), part, static_cast<off_t>(at));
    if (written < 0 && errno != EINTR) return errno;
    if (written > 0) at += static_cast<uint64_t>(written);
  }
  return 0;
}

// A quarter of those that the process may have: clients take two each.
size_t most_open_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
  return std::clamp<rlim_t>(limit.rlim_cur / 4, 1, kMostOpenFiles);
}

// UINT32_MAX: not a name of ours.
uint32_t number_of(std::string_view name) {
  if (name.size() != kNameDigits + kSuffix.size() || !name.ends_with(kSuffix)) return UINT32_MAX;
  uint32_t number = 0;
  const std::string digits(name.substr(0, kNameDigits));
  const char* end = digits.c_str() + digits.size();
  const auto [stopped, error] = std::from_chars(digits.c_str(), end, number);
  return error == std::errc() && stopped == end ? number : UINT32_MAX;
}

}  // namespace

SegmentFiles::SegmentFiles(const std::string& directory, Allocate allocate)
    : directory_(directory + "/segments"),
      allocate_(allocate ? std::move(allocate) : Allocate(allocate_blocks)) {
  std::error_code failed;
  std::filesystem::create_directories(directory_, failed);
  if (!std::filesystem::is_directory(directory_))
    throw storage_error(
        "cannot create the NVMe tier's directory " + directory_ + "; choose another --nvme-dir",
        failed ? failed.value() : ENOTDIR);
  write_error_ = probe_writing();
  // A process that was killed may have made what is found here, and its name is not there for good.
  for (const std::string& each : {directory_, directory})
    if (write_error_ == 0) write_error_ = sync_directory(each);
}

std::string SegmentFiles::path(uint32_t segment) const {
  if (segment == kProbeFile) return directory_ + "/probe";
  char name[16];
  std::snprintf(name, sizeof name, "%08u.seg", segment);
  return directory_ + "/" + name;
}

// Also finds out whether direct writes work: some filesystems accept the flag and then refuse.
int SegmentFiles::probe_writing() {
  int error = write_probe();
  if (error == EINVAL && direct()) {
    direct_ = false;
    error = write_probe();
  }
  return error;
}

int SegmentFiles::write_probe() {
  int error = prepare(kProbeFile, kBlockBytes);
  if (error == 0) {
    const int fd = acquire(kProbeFile);
    error = fd < 0 ? -fd : write_zeros(fd, kBlockBytes);
    if (fd >= 0) release(kProbeFile);
  }
  forget(kProbeFile);
  remove(kProbeFile);
  return error;
}

std::vector<SegmentFiles::Listed> SegmentFiles::list() const {
  std::vector<Listed> found;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(directory_, failed)) {
    const uint32_t number = number_of(entry.path().filename().string());
    if (number >= kMaxSegments) continue;
    if (!entry.is_regular_file(failed) || entry.is_symlink(failed)) continue;
    const uint64_t bytes = entry.file_size(failed);
    if (!failed) found.push_back({number, bytes});
  }
  if (failed) throw storage_error("cannot list " + directory_, failed.value());
  std::ranges::sort(found, {}, &Listed::number);
  return found;
}

// Returns a descriptor or -errno. Falls back to buffered I/O, and to reading alone.
int SegmentFiles::open_file(uint32_t segment, int extra_flags) {
  const std::string name = path(segment);
  int access = O_RDWR;
  while (true) {
    const int direct_flag = direct() ? O_DIRECT : 0;
    const int fd =
        ::open(name.c_str(), access | direct_flag | extra_flags | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd >= 0) return fd;
    if (is_shortage(errno)) ++shortages_;
    if (errno == EINVAL && direct_flag != 0) {
      direct_ = false;
      continue;
    }
    const bool forbidden = errno == EROFS || errno == EACCES || errno == EPERM;
    if (!forbidden || access == O_RDONLY || extra_flags != 0) return -errno;
    access = O_RDONLY;
  }
}

int SegmentFiles::acquire(uint32_t segment) {
  auto found = open_.find(segment);
  if (found == open_.end()) {
    while (open_.size() >= most_open_files() && close_idle()) {
    }
    int fd = open_file(segment, 0);
    while (is_shortage(-fd) && close_idle()) fd = open_file(segment, 0);
    if (fd < 0) return fd;
    ages_.push_back(segment);
    found = open_.emplace(segment, Open{Fd(fd), 0, std::prev(ages_.end())}).first;
  }
  Open& open = found->second;
  ++open.users;
  ages_.splice(ages_.end(), ages_, open.age);
  return open.fd.get();
}

void SegmentFiles::release(uint32_t segment) {
  const auto found = open_.find(segment);
  if (found != open_.end()) --found->second.users;
}

void SegmentFiles::forget(uint32_t segment) {
  const auto found = open_.find(segment);
  if (found == open_.end() || found->second.users > 0) return;
  ages_.erase(found->second.age);
  open_.erase(found);
}

bool SegmentFiles::close_idle() {
  const auto oldest = std::ranges::find_if(
      ages_, [this](uint32_t segment) { return open_.at(segment).users == 0; });
  if (oldest == ages_.end()) return false;
  forget(*oldest);
  return true;
}

int SegmentFiles::grow(int fd, uint64_t bytes) const {
  struct stat facts{};
  if (::fstat(fd, &facts) != 0) return errno;
  if (static_cast<uint64_t>(facts.st_size) >= bytes) return 0;
  const int error = allocate_(fd, bytes);
  return error == EOPNOTSUPP ? write_zeros(fd, bytes) : error;
}

int SegmentFiles::sync_directory(const std::string& directory) {
  const Fd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) {
    if (is_shortage(errno)) ++shortages_;
    return errno;
  }
  // Some filesystems cannot sync directories, and need not.
  return ::fsync(fd.get()) == 0 || errno == EINVAL ? 0 : errno;
}

int SegmentFiles::prepare(uint32_t segment, uint64_t bytes) {
  int fd = open_file(segment, O_CREAT | O_EXCL);
  const bool created = fd >= 0;
  if (fd == -EEXIST) fd = open_file(segment, O_CREAT);
  if (fd < 0) return -fd;
  int error = grow(fd, bytes);
  ::close(fd);
  if (error == 0 && created) error = sync_directory(directory_);
  // A short one is left by a crash in here; what it has of a full disk is better given back.
  if (error != 0) ::unlink(path(segment).c_str());
  return error;
}

int SegmentFiles::cut(uint32_t segment, uint64_t bytes) {
  const int fd = acquire(segment);
  if (fd < 0) return -fd;
  const int error = ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  release(segment);
  return error;
}

int SegmentFiles::remove(uint32_t segment) {
  return ::unlink(path(segment).c_str()) == 0 || errno == ENOENT ? 0 : errno;
}

}  // namespace kvw::nvme
