#include "client/remote_filter.h"

#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace kvw {

namespace {

constexpr uint64_t kAskAgainNs = 1000 * kMillisecondNs;
// What a call may spend on the question: a quarter of its time, within these bounds.
constexpr uint64_t kLeastNs = 20 * kMillisecondNs;
constexpr uint64_t kMostNs = 500 * kMillisecondNs;

}  // namespace

std::shared_ptr<const PresenceReader> RemoteFilter::mapped() const {
  if (!has_tier_) return nullptr;
  const std::lock_guard lock(mutex_);
  return mapped_ == nullptr ? nullptr
                            : std::shared_ptr<const PresenceReader>(mapped_, &mapped_->reader);
}

void RemoteFilter::renew(const Ask& ask, uint64_t deadline_ns) {
  if (!has_tier_) return;
  const uint64_t now = system_clock().boot_ns();
  if (now >= deadline_ns) return;
  {
    const std::lock_guard lock(mutex_);
    if (now < ask_again_ns_) return;
    ask_again_ns_ = now + kAskAgainNs;
    if (mapped_ != nullptr && current(*mapped_)) return;
  }
  const uint64_t part_ns = std::clamp((deadline_ns - now) / 4, kLeastNs, kMostNs);
  auto found = take(ask, std::min(now + part_ns, deadline_ns));
  if (found == nullptr) return;
  const std::lock_guard lock(mutex_);
  mapped_.swap(found);  // the old one is unmapped after the lock
}

std::shared_ptr<const RemoteFilter::Mapped> RemoteFilter::take(const Ask& ask,
                                                               uint64_t deadline_ns) {
  try {
    Writer message(MessageType::presence);
    Connection::Reply reply = ask(message, deadline_ns);
    if (reply.descriptors.size() != 1) return nullptr;
    auto reader = PresenceReader::of(reply.descriptors.front().get());
    if (!reader) return nullptr;
    return std::make_shared<const Mapped>(
        Mapped{std::move(reply.descriptors.front()), std::move(*reader)});
  } catch (const Error&) {
    return nullptr;
  }
}

bool RemoteFilter::current(const Mapped& mapped) {
  struct stat info{};
  return ::fstat(mapped.file.get(), &info) == 0 && info.st_nlink > 0 && !mapped.reader.lost();
}

}  // namespace kvw
