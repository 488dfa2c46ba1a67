// The file of the presence filter, `presence` in the arena's directory: made and written by the
// remote tier's worker, mapped read-only by whoever asks it. Not thread-safe.
//
// What the file has lost, because somebody cut it, reads as zeros (base/fd.h): nothing is there
// then, so readers need not ask, and it costs puts that the store has already. The writer does ask,
// since what it writes there would be seen by nobody.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/fd.h"
#include "presence/presence.h"

namespace kvw {

class PresenceFile {
 public:
  struct Wanted {
    std::string path;
    Key fleet;
    uint64_t objects;  // that it has room for
    uint32_t days;     // that an object counts for
    uint32_t today;
  };

  // Opens it, with today as its newest day; or makes another in its place, where it is not what is
  // wanted, damaged, or of a time that an object is not kept for, or of a time to come: its days
  // are under no checksum. Throws Error storage, usage "bad_objects", "bad_days".
  explicit PresenceFile(const Wanted& wanted);

  bool made_anew() const { return made_anew_; }
  const Presence& table() const { return *table_; }
  PresenceWriter& writer() { return *writer_; }
  // Throws Error storage "presence_lost" where the file is no longer all of it: make it anew.
  void check() const;

 private:
  bool open(const Wanted& wanted);
  void make(const Wanted& wanted);
  void attach(const Key& fleet);

  std::string path_;
  Fd fd_;
  Mapping mapping_;
  std::optional<Presence> table_;
  std::optional<PresenceWriter> writer_;
  bool made_anew_ = false;
};

// Read-only, for whoever maps it and judges what it is. Invalid: there is no regular file.
Fd open_presence(const std::string& path);

// A reader's. The file may be another's, or replaced: that one is opened again then.
class PresenceReader {
 public:
  // Nothing: there is no such file of this fleet.
  static std::optional<PresenceReader> open(const std::string& path, const Key& fleet);
  // Of a file that was handed over, whatever fleet it is of. Does not keep `fd`.
  static std::optional<PresenceReader> of(int fd);

  const Presence& table() const { return *table_; }
  // Whether the file is no longer all of it.
  bool lost() const { return mapping_.lost(); }

 private:
  PresenceReader() = default;
  static std::optional<PresenceReader> map(int fd, uint64_t bytes, const Key* fleet);

  Mapping mapping_;
  std::optional<Presence> table_;
};

}  // namespace kvw
