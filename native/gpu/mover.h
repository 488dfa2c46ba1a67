// A stream of the warehouse's own and two batches on it: one under way while the other is filled or
// read. Borrowed from a Device by one call at a time.
#pragma once

#include <array>
#include <memory>

#include "gpu/batch.h"
#include "gpu/device.h"

namespace kvw::gpu {

class Mover {
 public:
  explicit Mover(const Device& device);
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  static constexpr size_t kBatches = 2;
  Batch& batch(size_t number) { return *batches_[number % kBatches]; }
  bool idle() const { return batches_[0]->idle() && batches_[1]->idle(); }

 private:
  const Device& device_;
  CUstream stream_ = nullptr;
  std::array<std::unique_ptr<Batch>, kBatches> batches_;
};

}  // namespace kvw::gpu
