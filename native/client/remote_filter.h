// A client's share of the remote tier: the presence filter, which the daemon hands out.
// Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "base/fork.h"
#include "client/connection.h"
#include "presence/presence_file.h"

namespace kvw {

class RemoteFilter {
 public:
  // One round trip of `presence` until then (boot clock); throws as Connection::ask().
  using Ask = std::function<Connection::Reply(Writer& message, uint64_t deadline_ns)>;

  explicit RemoteFilter(bool has_tier) : has_tier_(has_tier) {}
  // Null: none is mapped. No call; good for as long as it is held.
  std::shared_ptr<const PresenceReader> mapped() const;
  // Maps it where it is not mapped yet, or where its writer has made another in its place; a second
  // later at the earliest where that was tried. `deadline_ns`: of the call, which spends a part of
  // its time on it. Without a filter nothing is remote, so trouble is no error.
  void renew(const Ask& ask, uint64_t deadline_ns);

 private:
  struct Mapped {
    ParentFd file;
    PresenceReader reader;
  };
  static std::shared_ptr<const Mapped> take(const Ask& ask, uint64_t deadline_ns);
  static bool current(const Mapped& mapped);

  const bool has_tier_;
  mutable std::mutex mutex_;
  std::shared_ptr<const Mapped> mapped_;
  uint64_t ask_again_ns_ = 0;
};

}  // namespace kvw
