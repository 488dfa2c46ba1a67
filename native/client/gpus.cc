#include "client/gpus.h"

#include <utility>
#include <vector>

#include "base/error.h"

namespace kvw {

namespace {

gpu::Registrable arena_of(const std::shared_ptr<const View>& view) {
  gpu::Registrable memory;
  memory.data = view->arena();
  memory.bytes = view->arena_bytes();
  memory.slab_bytes = view->slots().header().slab_bytes;
  memory.writable = view->writable();
  memory.populated = [slots = view->slots()](size_t slab) {
    return slots.cut(static_cast<uint32_t>(slab)).populated != 0;
  };
  memory.keeper = view;
  return memory;
}

}  // namespace

void Gpus::keep(const Use& use, const std::shared_ptr<ClientSession>& session) {
  struct Kept {
    Use use;
    std::shared_ptr<ClientSession> session;
  };
  static std::mutex mutex;
  static auto* all = new std::vector<Kept>();  // never destroyed
  const std::lock_guard lock(mutex);
  all->push_back({use, session});
}

void Gpus::add(int ordinal, const std::string& image) {
  if (has(ordinal)) return;
  auto made = std::make_shared<gpu::Device>(ordinal, image);
  const std::lock_guard lock(mutex_);
  devices_.emplace(ordinal, std::move(made));
}

bool Gpus::has(int ordinal) {
  const std::lock_guard lock(mutex_);
  return devices_.contains(ordinal);
}

const std::shared_ptr<gpu::Device>& Gpus::found(int ordinal) const {
  const auto found = devices_.find(ordinal);
  if (found != devices_.end()) return found->second;
  throw Error(ErrorKind::usage, "gpu_not_ready",
              "the pages are on device " + std::to_string(ordinal) +
                  ", which this client was not given; call use_device first");
}

std::shared_ptr<gpu::Device> Gpus::device(int ordinal) {
  const std::lock_guard lock(mutex_);
  return found(ordinal);
}

Gpus::Use Gpus::use(int ordinal, const std::shared_ptr<const View>& view) {
  std::shared_ptr<const gpu::Registration> old;  // undone outside the lock
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<gpu::Device>& device = found(ordinal);
  if (view_ != view) {
    old = std::exchange(arena_, std::make_shared<gpu::Registration>(device, arena_of(view)));
    view_ = view;
  }
  return {device, arena_, nullptr};
}

RegistrationReport Gpus::report() {
  const std::lock_guard lock(mutex_);
  if (arena_ == nullptr) return {};
  return {arena_->registered_bytes(), arena_->settled(), arena_->refusal()};
}

void Gpus::close() {
  std::map<int, std::shared_ptr<gpu::Device>> devices;
  std::shared_ptr<const View> view;
  std::shared_ptr<const gpu::Registration> arena;
  {
    const std::lock_guard lock(mutex_);
    devices.swap(devices_);
    view.swap(view_);
    arena.swap(arena_);
  }
  // In this order: registrations end under the device's context, and before the mapping goes.
  arena.reset();
  view.reset();
}

}  // namespace kvw
