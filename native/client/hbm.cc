#include "client/hbm.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "client/daemon_link.h"

namespace kvw {

namespace {

constexpr uint64_t kAskAgainNs = 1000 * kMillisecondNs;  // where a daemon had no pool
// What a load may spend on the question: a quarter of its time, within these bounds.
constexpr uint64_t kLeastNs = 20 * kMillisecondNs;
constexpr uint64_t kMostNs = 500 * kMillisecondNs;

// One round trip, and a mapping. The pages are in DRAM as well, so trouble is no error here.
std::shared_ptr<const HbmView> ask(const std::shared_ptr<gpu::Device>& device, DaemonLink& link,
                                   uint64_t deadline_ns) {
  try {
    Writer message(MessageType::hbm);
    const Connection::Reply reply = link.ask(message, MessageType::hbm_shared, deadline_ns);
    if (reply.descriptors.size() != 2) return nullptr;
    return HbmView::open(device, reply.descriptors[0], reply.descriptors[1]);
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace

std::unique_ptr<HbmView> HbmView::open(const std::shared_ptr<const gpu::Device>& device,
                                       const ParentFd& table, const ParentFd& pool) {
  struct stat info{};
  constexpr const char* kWhat = "table of its HBM tier";
  require_whole(
      ::fstat(table.get(), &info) == 0 && static_cast<size_t>(info.st_size) >= kBlockBytes, kWhat);
  std::unique_ptr<HbmView> made(
      new HbmView(Mapping(table.get(), static_cast<size_t>(info.st_size), false)));
  const auto* header = made->table_.at<const HbmHeader>(0);
  require_format(header->magic == kHbmMagic && header->version == kHbmVersion &&
                     hbm_table_bytes(header->slots) <= made->table_.bytes(),
                 made->table_, kWhat);
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

std::shared_ptr<const HbmView> HbmCopies::of(const std::shared_ptr<gpu::Device>& device,
                                             DaemonLink& link, uint64_t deadline_ns) {
  if (!has_tier_) return nullptr;
  const uint64_t now = system_clock().boot_ns();
  {
    const std::lock_guard lock(mutex_);
    const auto [known, fresh] = answers_.try_emplace(device->ordinal());
    Answer& answer = known->second;
    if (answer.view != nullptr) return answer.view->serving() ? answer.view : nullptr;
    if (!fresh && now < answer.ask_again_ns) return nullptr;
    answer.ask_again_ns = now + kAskAgainNs;
  }
  const uint64_t left_ns = deadline_ns > now ? deadline_ns - now : 0;
  auto found = ask(device, link, now + std::clamp(left_ns / 4, kLeastNs, kMostNs));
  if (found == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  auto& kept = answers_[device->ordinal()].view;
  if (kept == nullptr) kept = std::move(found);
  return kept;
}

const HbmView* HbmCopies::mapped() {
  if (!has_tier_) return nullptr;
  const std::lock_guard lock(mutex_);
  for (const auto& [ordinal, answer] : answers_)
    if (answer.view != nullptr && answer.view->serving()) return answer.view.get();
  return nullptr;
}

}  // namespace kvw
