#include "client/gpus.h"

#include <utility>
#include <vector>

#include "base/error.h"
#include "base/keep.h"

namespace kvw {

namespace {

gpu::Registrable arena_of(const View& view) {
  // Not the view itself: its index goes with its daemon.
  struct Keeper {
    std::shared_ptr<const MappedArena> arena;
    std::shared_ptr<const Mapping> slots;
  };
  gpu::Registrable memory;
  memory.data = view.arena()->data();
  memory.bytes = view.arena()->bytes();
  memory.slab_bytes = view.slots().header().slab_bytes;
  memory.writable = view.writable();
  // An arena is served with the slots that it was made with, so these are also the next daemon's.
  memory.populated = [slots = view.slots()](size_t slab) {
    return slots.layout(static_cast<uint32_t>(slab)).populated != 0;
  };
  memory.keeper = std::make_shared<const Keeper>(Keeper{view.arena(), view.slots_mapping()});
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
  made->make_ready();
  gpu::publish(made);
  const std::lock_guard lock(mutex_);
  refuse_closed();
  devices_.emplace(ordinal, std::move(made));
}

bool Gpus::has(int ordinal) {
  const std::lock_guard lock(mutex_);
  return devices_.contains(ordinal);
}

void Gpus::refuse_closed() const {
  if (closed_) throw Error(ErrorKind::usage, "closed", "this client is closed; connect again");
}

const std::shared_ptr<gpu::Device>& Gpus::found(int ordinal) const {
  refuse_closed();
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

Gpus::Use Gpus::use(int ordinal, const View& view) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<gpu::Device>& device = found(ordinal);
  if (arena_ != view.arena()) {
    // Both or none: it throws where the process may have no more threads.
    registration_ = std::make_shared<gpu::Registration>(device, arena_of(view), registration_);
    arena_ = view.arena();
  }
  return {device, registration_, nullptr};
}

RegistrationReport Gpus::report() {
  const std::lock_guard lock(mutex_);
  if (registration_ == nullptr) return {};
  return {registration_->registered_bytes(), registration_->settled(), registration_->refusal()};
}

bool Gpus::stop(std::chrono::nanoseconds time) {
  std::shared_ptr<gpu::Registration> registration;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    registration = registration_;
  }
  if (registration == nullptr) return true;
  const bool stopped = registration->stop(time);
  // Undone by nobody, whatever else of the client ends before the process does.
  keep_forever(std::make_unique<const std::shared_ptr<gpu::Registration>>(std::move(registration)));
  return stopped;
}

void Gpus::close() {
  std::map<int, std::shared_ptr<gpu::Device>> devices;
  std::shared_ptr<const MappedArena> arena;
  std::shared_ptr<gpu::Registration> registration;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    devices.swap(devices_);
    arena.swap(arena_);
    registration.swap(registration_);
  }
  // In this order: registrations end under the device's context, and before the mapping goes.
  registration.reset();
  arena.reset();
}

}  // namespace kvw
