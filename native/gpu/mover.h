// Three batches, each on a stream of its own: one is filled or read while others are under way, and
// while both are, copies of one and kernels of the other overlap. Nothing orders them: they have
// memory of their own and touch pages of their own. Borrowed from a Device by one call at a time.
#pragma once

#include <algorithm>
#include <array>

#include "gpu/batch.h"
#include "gpu/device.h"

namespace kvw::gpu {

class Mover {
 public:
  explicit Mover(const Device& device) : batches_{Batch(device), Batch(device), Batch(device)} {}
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  static constexpr size_t kBatches = 3;
  // Under way at a time where the bus is what is waited for: it needs no more.
  static constexpr size_t kBatchesOnBus = 2;
  Batch& batch(size_t number) { return batches_[number % kBatches]; }
  void take_memory() {
    for (Batch& batch : batches_) batch.take_memory();
  }
  bool idle() const { return std::ranges::all_of(batches_, &Batch::idle); }

 private:
  std::array<Batch, kBatches> batches_;
};

}  // namespace kvw::gpu
