// The devices that a client copies to and from, and the registration of the arena that it has
// mapped now. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "client/hbm.h"
#include "client/session.h"
#include "client/view.h"
#include "gpu/device.h"
#include "gpu/registration.h"

namespace kvw {

struct RegistrationReport {
  uint64_t bytes = 0;
  bool settled = false;
  std::string refusal;
};

class Gpus {
 public:
  // What one call works with. The registration's mapping is the view's arena.
  struct Use {
    std::shared_ptr<gpu::Device> device;
    std::shared_ptr<const gpu::Registration> arena;
    std::shared_ptr<const HbmView> hbm;  // null: nothing is in HBM for this device
  };

  // Keeps what the device may still read or write, and the session that holds its slots, for as
  // long as this process lives: nobody can tell that the device is done.
  static void keep(const Use& use, const std::shared_ptr<ClientSession>& session);

  // What makes or hands out a device throws Error usage "closed" after close().
  void add(int ordinal, const std::string& image);
  bool has(int ordinal);
  // Throws Error usage "gpu_not_ready" where it was not added.
  std::shared_ptr<gpu::Device> device(int ordinal);
  // Begins to register a view's arena when it is first used; a view of a new daemon that serves the
  // same arena finds it registered. Another arena's registration is undone in the background, after
  // the last call that works with it. Throws as device().
  Use use(int ordinal, const View& view);
  RegistrationReport report();
  // As the process ends, which unpins: nothing more is registered or undone, and nothing begins, as
  // after close(). What is mapped stays so. False: a slab is under way for longer than the time.
  bool stop(std::chrono::nanoseconds time);
  void close();

 private:
  void refuse_closed() const;  // these two under the lock
  const std::shared_ptr<gpu::Device>& found(int ordinal) const;

  std::mutex mutex_;
  bool closed_ = false;
  std::map<int, std::shared_ptr<gpu::Device>> devices_;
  std::shared_ptr<const MappedArena> arena_;
  std::shared_ptr<gpu::Registration> registration_;  // of it
};

}  // namespace kvw
