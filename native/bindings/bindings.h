// Conversions that several bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/types.h"
#include "bindings/gil.h"
#include "chain/chain.h"
#include "client/device_stage.h"

#ifndef KVW_VERSION
#define KVW_VERSION "0"
#endif

namespace kvw::bindings {

namespace nb = nanobind;

inline uint64_t to_ns(double seconds) {
  return seconds <= 0 ? 0 : static_cast<uint64_t>(std::min(seconds, 1e9) * 1e9);
}

Key key_from(const nb::bytes& bytes);
nb::bytes bytes_of(const Key& key);
// A view of its bytes. Throws Error usage "bad_secret" unless they are as many as a secret has.
Secret secret_from(const nb::bytes& bytes);

// Token ids of a one-dimensional integer array as 32-bit words: a view where the array already is
// that, else a copy. Throws Error usage "bad_tokens" that names the first id out of range.
class Tokens {
 public:
  explicit Tokens(nb::handle array);
  std::span<const uint32_t> view() const { return view_; }

 private:
  nb::ndarray<nb::ro, nb::device::cpu> array_;  // keeps the memory
  std::vector<uint32_t> copy_;
  std::span<const uint32_t> view_;
};

// A stage that ends without the GIL: freeing its memory may wait for the device.
class OwnedStage {
 public:
  explicit OwnedStage(std::unique_ptr<DeviceStage> stage) : stage_(std::move(stage)) {}
  ~OwnedStage() {
    WithoutGil release;
    stage_.reset();
  }
  DeviceStage* operator->() const { return stage_.get(); }

 private:
  std::unique_ptr<DeviceStage> stage_;
};

void bind_core(nb::module_& m);
void bind_feed(nb::module_& m);
void bind_client(nb::module_& m);
void bind_gpu(nb::module_& m);
void bind_extents(nb::module_& m);
void bind_regions(nb::module_& m);
void bind_replay(nb::module_& m);
void bind_objects(nb::module_& m);
void bind_bench(nb::module_& m);
void bind_remote(nb::module_& m);

}  // namespace kvw::bindings
