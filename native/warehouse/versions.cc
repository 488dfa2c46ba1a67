#include "warehouse/versions.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "control/control.h"
#include "nvme/aligned_buffer.h"
#include "nvme/format.h"
#include "session/session_file.h"
#include "slots/slots.h"

namespace kvw {

namespace {

// How control page and session files open.
struct Opening {
  uint64_t magic = 0;
  uint32_t version = 0;
};
static_assert(offsetof(ControlPage, version) == offsetof(Opening, version) &&
              offsetof(SessionFile, version) == offsetof(Opening, version));

Fd open_to_read(const std::string& path) {
  return Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
}

[[noreturn]] void refuse(const std::string& path, uint32_t found, uint32_t known,
                         const std::string& instead) {
  throw Error(ErrorKind::storage, "newer_files",
              path + " has format version " + std::to_string(found) + " and this daemon reads " +
                  std::to_string(known) + "; start the newer kvwarehouse that wrote it, or " +
                  instead + ". Nothing was changed");
}

// The version of a file that opens with `magic`, if it is above `known`; else 0.
uint32_t newer_version(int fd, uint64_t magic, uint32_t known) {
  Opening opening;
  if (::pread(fd, &opening, sizeof opening, 0) != sizeof opening) return 0;
  return opening.magic == magic && opening.version > known ? opening.version : 0;
}

std::string without(const std::string& directory) {
  return "move " + directory + " away (the pages in it are then computed again)";
}

void check_slots(const std::string& directory) {
  const std::string path = directory + "/slots";
  const Fd file = open_to_read(path);
  SlotsHeader header{};
  if (!file.valid() || ::pread(file.get(), &header, sizeof header, 0) != sizeof header) return;
  if (slots_header_is_newer(header))
    refuse(path, header.version, kSlotsVersion, without(directory));
}

void check_control(const std::string& directory) {
  const std::string path = directory + "/control";
  const Fd file = open_to_read(path);
  if (!file.valid()) return;
  const uint32_t version = newer_version(file.get(), kControlMagic, kControlVersion);
  if (version != 0) refuse(path, version, kControlVersion, without(directory));
}

std::vector<std::string> files_of(const std::string& directory) {
  std::vector<std::string> paths;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(directory, failed))
    paths.push_back(entry.path().string());
  std::ranges::sort(paths);
  return paths;
}

// One whose owner is dead holds nothing any more.
void check_session(const std::string& path) {
  const Fd file = open_to_read(path);
  if (!file.valid()) return;
  const uint32_t version = newer_version(file.get(), kSessionMagic, kSessionVersion);
  if (version != 0 && ::flock(file.get(), LOCK_SH | LOCK_NB) != 0)
    refuse(path, version, kSessionVersion,
           "end the newer client that holds this session: its pins cannot be read");
}

void check_segment(const std::string& path, const std::string& directory) {
  const Fd file = open_to_read(path);
  nvme::AlignedBuffer block(kBlockBytes);
  if (!file.valid() || ::pread(file.get(), block.data(), kBlockBytes, 0) != kBlockBytes) return;
  if (const auto version = nvme::newer_segment_version(block.span()))
    refuse(path, *version, nvme::kFormatVersion,
           "name another --nvme-dir than " + directory + " and leave its pages");
}

}  // namespace

void refuse_newer_files(const std::string& arena_dir, const std::string& nvme_dir) {
  check_slots(arena_dir);
  check_control(arena_dir);
  for (const std::string& path : files_of(arena_dir + "/sessions")) check_session(path);
  if (nvme_dir.empty()) return;
  for (const std::string& path : files_of(nvme_dir + "/segments"))
    if (path.ends_with(".seg")) check_segment(path, nvme_dir);
}

}  // namespace kvw
