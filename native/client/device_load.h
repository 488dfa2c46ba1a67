// A load into the memory of a GPU: pages are pinned, copied by the device and digested there, and
// count when the device's digest is the one that was sealed. Two batches are on their way at a
// time, and three of pages that are in the device's own memory.
//
// A pin is dropped when the device has finished with its page; where nobody can tell, it is held
// for as long as the process lives. A page with a copy in the device's own memory is moved from
// there, under the pin on its slot; where that copy turns out to be damaged, from DRAM. Belongs to
// one call.
#pragma once

#include <deque>
#include <vector>

#include "client/client.h"
#include "client/gpus.h"
#include "client/pins.h"
#include "client/promotion_window.h"
#include "gpu/mover.h"

namespace kvw {

class DeviceLoad {
 public:
  DeviceLoad(const ClientCall& call, Gpus& gpus, size_t first, const Regions& regions,
             uint32_t shard);
  ~DeviceLoad();
  DeviceLoad(const DeviceLoad&) = delete;
  DeviceLoad& operator=(const DeviceLoad&) = delete;

  // Throws Error storage "gpu_error" and "gpu_stalled", capacity "gpu_memory", pin "pin_budget".
  LoadReport run();

 private:
  struct Flight {
    gpu::Batch* batch;
    size_t first;  // page
    std::vector<PinnedPage> held;
    std::vector<uint64_t> digests;  // as sealed
    std::vector<bool> from_hbm;
  };

  bool launch();
  bool fill(Flight& flight);
  size_t in_hbm(size_t most) const;
  bool verified(const Flight& flight, size_t number);
  void land();
  void drain();
  void failed(const EntryView& entry);
  void doubted();
  void drop(std::vector<PinnedPage>& held);

  const ClientCall& call_;
  size_t first_;
  const Regions& regions_;
  uint32_t shard_;
  size_t end_, next_, good_;  // pages: to load, to launch, verified
  PromotionWindow promotions_;
  Gpus::Use gpu_;
  gpu::Device::Borrowed mover_;
  size_t launched_ = 0;  // batches
  std::deque<Flight> flights_;
  bool trust_hbm_ = true;      // a copy of it was damaged: not again in this call
  Reason why_ = Reason::none;  // why `next_` will not come
  int stale_ = 0;
};

}  // namespace kvw
