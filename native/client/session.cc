#include "client/session.h"

#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/error.h"

namespace kvw {

namespace {

struct SharesOfProcess {
  explicit SharesOfProcess(SharesOfProcess* parents) : of_parent(parents) {}

  const uint64_t forks = fork_count();
  SharesOfProcess* const of_parent;  // kept: it may be in use where the fork happened
  std::mutex mutex;
  std::unordered_map<Key, std::weak_ptr<ProcessShares>, KeyHash> of_warehouses;
};

// A forked child begins anew: its parent's threads may have held the mutex, and what they pinned is
// theirs.
SharesOfProcess& shares_of_process() {
  static std::atomic<SharesOfProcess*> current{nullptr};
  SharesOfProcess* found = current.load();
  if (found != nullptr && found->forks == fork_count()) return *found;
  auto made = std::make_unique<SharesOfProcess>(found);
  if (!current.compare_exchange_strong(found, made.get())) return *found;
  return *made.release();  // for as long as the process lives
}

std::shared_ptr<ProcessShares> shares_of(const Key& warehouse_id) {
  SharesOfProcess& all = shares_of_process();
  const std::lock_guard lock(all.mutex);
  std::weak_ptr<ProcessShares>& known = all.of_warehouses[warehouse_id];
  auto shares = known.lock();
  if (!shares) known = shares = std::make_shared<ProcessShares>();
  return shares;
}

}  // namespace

ClientSession::ClientSession(ParentFd file) : fd_(std::move(file)) {
  struct stat info{};
  const bool whole =
      ::fstat(fd_.get(), &info) == 0 && static_cast<size_t>(info.st_size) >= sizeof(SessionFile);
  if (!whole || ::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0)
    throw Error(ErrorKind::storage, "bad_files",
                "the daemon's session file is not in this version's format, or its lock is held by "
                "somebody else");
  mapping_ = Mapping(fd_.get(), sizeof(SessionFile), true);
  file_ = mapping_.at<SessionFile>(0);
  if (file_->magic != kSessionMagic || file_->version == 0 || file_->version > kSessionVersion)
    throw Error(
        ErrorKind::storage, "bad_files",
        "the daemon's session file has another version; use the same kvwarehouse on both sides");
  id_ = file_->session_id;
  pin_capacity_ = std::min(file_->pin_capacity, kPinCapacity);
  shares_ = shares_of(file_->warehouse_id);
}

ClientSession::~ClientSession() = default;  // closing the descriptor ends the lock

void ClientSession::tell(const EntryView& entry, PageId word) {
  const uint64_t at = file_->touch_head.fetch_add(1, std::memory_order_relaxed);
  file_->touches[at % kTouchCapacity].store(uint64_t{word} | (entry.key.lo & 0xffffffff) << 32,
                                            std::memory_order_relaxed);
}

int ClientSession::take_pin() {
  const std::lock_guard lock(mutex_);
  if (!free_pins_.empty()) {
    const int place = free_pins_.back();
    free_pins_.pop_back();
    return place;
  }
  if (next_pin_ == static_cast<int>(pin_capacity_)) return -1;
  const int place = next_pin_++;
  // Before any pin at or above the old mark is stored; the batch's fence orders both.
  file_->pins_high.store(static_cast<uint64_t>(next_pin_), std::memory_order_release);
  return place;
}

void ClientSession::drop_pin(int place) {
  file_->pins[place].store(0, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  free_pins_.push_back(place);
  if (free_pins_.size() < static_cast<size_t>(next_pin_)) return;
  // All are free: what the daemon reads of them at each eviction is nothing again.
  free_pins_.clear();
  next_pin_ = 0;
  file_->pins_high.store(0, std::memory_order_release);
}

}  // namespace kvw
