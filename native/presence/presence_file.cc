#include "presence/presence_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/files.h"

namespace kvw {

namespace {

constexpr uint64_t kMostObjects = 1ull << 32;  // 10 GB of filter

void check_wanted(const PresenceFile::Wanted& wanted) {
  if (wanted.objects == 0 || wanted.objects > kMostObjects)
    throw Error(ErrorKind::usage, "bad_objects",
                "a presence filter has room for 1 to " + std::to_string(kMostObjects) +
                    " objects, not for " + std::to_string(wanted.objects));
  if (wanted.days == 0 || wanted.days > kPresenceDays)
    throw Error(ErrorKind::usage, "bad_days",
                "objects count for 1 to " + std::to_string(kPresenceDays) + " days, not for " +
                    std::to_string(wanted.days));
}

// Invalid: there is no regular file.
Fd open_regular(const std::string& path, int flags) {
  Fd fd(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat info{};
  if (fd.valid() && (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode))) fd.reset();
  return fd;
}

}  // namespace

PresenceFile::PresenceFile(const Wanted& wanted) : path_(wanted.path) {
  check_wanted(wanted);
  if (!open(wanted)) make(wanted);
  writer_->advance(wanted.today);
}

bool PresenceFile::open(const Wanted& wanted) {
  fd_ = open_regular(path_, O_RDWR);
  const uint64_t buckets = presence_buckets(wanted.objects);
  if (!fd_.valid() || size_of(fd_.get(), path_) != presence_bytes(buckets)) return false;
  attach(wanted.fleet);
  if (!table_ || table_->days() != wanted.days ||
      table_->cells() != buckets * uint64_t{kPresenceCells})
    return false;
  const uint32_t newest = writer_->newest();
  return newest <= wanted.today && wanted.today - newest <= wanted.days;
}

void PresenceFile::make(const Wanted& wanted) {
  const uint64_t buckets = presence_buckets(wanted.objects);
  const uint64_t bytes = presence_bytes(buckets);
  create_file(path_, [&](int fd) {
    allocate_or_throw(fd, bytes, path_);
    Presence::format(Mapping(fd, bytes, true), wanted.fleet, buckets, wanted.days);
  });
  fd_ = open_file(path_, O_RDWR);
  attach(wanted.fleet);
  made_anew_ = true;
  check();
}

void PresenceFile::attach(const Key& fleet) {
  mapping_ = Mapping(fd_.get(), size_of(fd_.get(), path_), true);
  table_ = Presence::attach(mapping_, fleet);
  if (table_) writer_.emplace(*table_);
}

void PresenceFile::check() const {
  if (table_ && !mapping_.lost() && size_of(fd_.get(), path_) >= mapping_.bytes()) return;
  throw Error(ErrorKind::storage, "presence_lost",
              path_ + " has lost some of its bytes; open it again, which makes it anew");
}

Fd open_presence(const std::string& path) { return open_regular(path, O_RDONLY); }

std::optional<PresenceReader> PresenceReader::open(const std::string& path, const Key& fleet) {
  const Fd fd = open_presence(path);
  if (!fd.valid()) return std::nullopt;
  return map(fd.get(), size_of(fd.get(), path), &fleet);
}

std::optional<PresenceReader> PresenceReader::of(int fd) {
  struct stat info{};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
  return map(fd, static_cast<uint64_t>(info.st_size), nullptr);
}

// `fleet`: whose it is to be; null: anybody's.
std::optional<PresenceReader> PresenceReader::map(int fd, uint64_t bytes, const Key* fleet) {
  if (bytes < kBlockBytes) return std::nullopt;
  PresenceReader reader;
  reader.mapping_ = Mapping(fd, bytes, false);
  const Key of = fleet != nullptr ? *fleet : reader.mapping_.at<const PresenceHeader>(0)->fleet;
  reader.table_ = Presence::attach(reader.mapping_, of);
  if (!reader.table_) return std::nullopt;
  return reader;
}

}  // namespace kvw
