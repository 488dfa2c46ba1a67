// The devices that a client copies to and from, and the registration of the arena that it has
// mapped now. Thread-safe.
#pragma once

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
  // What one call works with. The registration's mapping is the view's.
  struct Use {
    std::shared_ptr<gpu::Device> device;
    std::shared_ptr<const gpu::Registration> arena;
    std::shared_ptr<const HbmView> hbm;  // null: nothing is in HBM for this device
  };

  // Keeps what the device may still read or write, and the session that holds its slots, for as
  // long as this process lives: nobody can tell that the device is done.
  static void keep(const Use& use, const std::shared_ptr<ClientSession>& session);

  void add(int ordinal, const std::string& image);
  bool has(int ordinal);
  // Throws Error usage "gpu_not_ready" where it was not added.
  std::shared_ptr<gpu::Device> device(int ordinal);
  // Begins to register a view's arena when it is first used; an older view's registration is undone
  // after the last call that works with it. Throws as device().
  Use use(int ordinal, const std::shared_ptr<const View>& view);
  RegistrationReport report();
  void close();

 private:
  const std::shared_ptr<gpu::Device>& found(int ordinal) const;  // under the lock

  std::mutex mutex_;
  std::map<int, std::shared_ptr<gpu::Device>> devices_;
  std::shared_ptr<const View> view_;  // the one that arena_ registers
  std::shared_ptr<const gpu::Registration> arena_;
};

}  // namespace kvw
