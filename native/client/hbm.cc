#include "client/hbm.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "client/client.h"

namespace kvw {

namespace {

constexpr uint64_t kAskAgainNs = 1000 * kMillisecondNs;  // where a daemon had no pool
// What a load may spend on the question: a quarter of its time, within these bounds.
constexpr uint64_t kLeastNs = 20 * kMillisecondNs;
constexpr uint64_t kMostNs = 500 * kMillisecondNs;

}  // namespace

std::unique_ptr<HbmView> HbmView::open(const std::shared_ptr<const gpu::Device>& device,
                                       const ParentFd& table, const ParentFd& pool) {
  struct stat info{};
  const auto bad = [] {
    return Error(ErrorKind::storage, "bad_files",
                 "the daemon's table of its HBM tier is not in this version's format; use the same "
                 "kvwarehouse on both sides");
  };
  if (::fstat(table.get(), &info) != 0 || static_cast<size_t>(info.st_size) < kBlockBytes)
    throw bad();
  std::unique_ptr<HbmView> made(
      new HbmView(Mapping(table.get(), static_cast<size_t>(info.st_size), false)));
  const auto* header = made->table_.at<const HbmHeader>(0);
  if (header->magic != kHbmMagic || header->version != kHbmVersion ||
      hbm_table_bytes(header->slots) > made->table_.bytes())
    throw bad();
  made->header_ = header;
  made->slots_ = header->slots;
  const gpu::CUuuid own = device->uuid();
  if (std::memcmp(own.bytes, header->device, sizeof own.bytes) != 0) return nullptr;
  made->pool_ = gpu::SharedMemory::import(device, pool.get(), header->pool_bytes);
  return made;
}

std::optional<uint64_t> HbmView::find(SlotId slot, uint32_t generation) const {
  if (slot >= slots_) return std::nullopt;
  const auto* words = table_.at<const std::atomic<uint64_t>>(kBlockBytes);
  const auto offset = hbm_offset(words[slot].load(std::memory_order_acquire), generation);
  if (!offset || *offset >= pool_->bytes()) return std::nullopt;
  return pool_->address() + *offset;
}

std::shared_ptr<const HbmView> Client::hbm(const std::shared_ptr<gpu::Device>& device,
                                           uint64_t deadline_ns) {
  const uint64_t now = system_clock().boot_ns();
  std::shared_ptr<const View> asked;
  {
    const std::lock_guard lock(state_mutex_);
    if (!has_hbm_) return nullptr;
    const auto known = hbm_.find(device->ordinal());
    if (known != hbm_.end() && known->second.view != nullptr)
      return known->second.view->serving() ? known->second.view : nullptr;
    if (known != hbm_.end() && now < known->second.ask_again_ns) return nullptr;
    hbm_[device->ordinal()] = {nullptr, now + kAskAgainNs};
    asked = view_;
  }
  const uint64_t left_ns = deadline_ns > now ? deadline_ns - now : 0;
  std::shared_ptr<const HbmView> found =
      ask_hbm(device, now + std::clamp(left_ns / 4, kLeastNs, kMostNs));
  if (found != nullptr) {
    const std::lock_guard lock(state_mutex_);
    if (view_ == asked && has_hbm_) hbm_[device->ordinal()].view = found;
  }
  return found;
}

std::shared_ptr<const HbmView> Client::mapped_hbm() {
  const std::lock_guard lock(state_mutex_);
  for (const auto& [ordinal, answer] : hbm_)
    if (answer.view != nullptr && answer.view->serving()) return answer.view;
  return nullptr;
}

// One round trip, and a mapping. The pages are in DRAM as well, so trouble is no error here.
std::shared_ptr<const HbmView> Client::ask_hbm(const std::shared_ptr<gpu::Device>& device,
                                               uint64_t deadline_ns) {
  try {
    Writer message(MessageType::hbm);
    const Connection::Reply reply = ask(message, MessageType::hbm_shared, deadline_ns);
    if (reply.descriptors.size() != 2) return nullptr;
    return HbmView::open(device, reply.descriptors[0], reply.descriptors[1]);
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace kvw
