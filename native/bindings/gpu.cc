// What Python asks of NVIDIA's driver before it gives a client pages on a device.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "base/clock.h"
#include "bindings/bindings.h"
#include "client/device_gather.h"
#include "gpu/device.h"
#include "gpu/recorded.h"

namespace kvw::bindings {

namespace {

int cuda_version() {
  const gpu::Driver& cuda = gpu::driver();
  int version = 0;
  cuda.check(cuda.cuDriverGetVersion(&version), "cuDriverGetVersion");
  return version;
}

nb::tuple capability_of(int ordinal) {
  const gpu::Driver& cuda = gpu::driver();
  gpu::CUdevice device = 0;
  int major = 0, minor = 0;
  cuda.check(cuda.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  cuda.check(cuda.cuDeviceGetAttribute(&major, gpu::kAttributeCapabilityMajor, device),
             "cuDeviceGetAttribute");
  cuda.check(cuda.cuDeviceGetAttribute(&minor, gpu::kAttributeCapabilityMinor, device),
             "cuDeviceGetAttribute");
  return nb::make_tuple(major, minor);
}

// Of an engine's event, in any thread: a framework's own query of it would break a graph that is
// captured meanwhile. The device's context is the engine's, and there already.
bool wait_event(int ordinal, uint64_t event, double timeout_s) {
  const auto device = gpu::device_at_hand(ordinal);
  const uint64_t deadline_ns = system_clock().boot_ns() + to_ns(timeout_s);
  return device->wait(reinterpret_cast<gpu::CUevent>(event), deadline_ns);  // NOLINT: CUDA's
}

// For a with statement of one thread's: what a framework does in it breaks no graph of another's.
// With the context of the device that has the memory at an address, where one is given.
class RelaxedCaptureMode {
 public:
  explicit RelaxedCaptureMode(std::optional<uint64_t> address)
      : cuda_(gpu::driver()), address_(address) {}
  void enter() {
    if (address_) {
      device_ = gpu::device_at_hand(gpu::device_of(*address_));
      current_.emplace(*device_);
    }
    beside_.emplace(cuda_);  // last: what throws has left the thread's mode as it was
  }
  void exit(const nb::args&) {
    beside_.reset();
    current_.reset();
    device_.reset();
  }

 private:
  const gpu::Driver& cuda_;
  std::optional<uint64_t> address_;
  std::shared_ptr<const gpu::Device> device_;
  std::optional<gpu::Device::Current> current_;
  std::optional<gpu::BesideCaptures> beside_;
};

std::vector<uint64_t> events_of(const gpu::Recorded& recorded) {
  std::vector<uint64_t> addresses;
  for (const gpu::CUevent event : recorded.events())
    addresses.push_back(reinterpret_cast<uint64_t>(event));
  return addresses;
}

}  // namespace

void bind_gpu(nb::module_& m) {
  m.def("device_of", &gpu::device_of, nb::arg("address"));
  m.def("cuda_version", &cuda_version);
  m.def("device_capability", &capability_of, nb::arg("ordinal"));
  m.def("wait_event", &wait_event, nb::arg("ordinal"), nb::arg("event"), nb::arg("timeout_s"),
        nb::call_guard<WithoutGil>());
  nb::class_<gpu::Recorded>(m, "Recorded")
      .def(nb::init<int, const std::vector<uint64_t>&>(), nb::arg("ordinal"), nb::arg("streams"),
           nb::call_guard<WithoutGil>())
      .def_prop_ro("events", &events_of);
  nb::class_<GatherPlan>(m, "GatherPlan")
      .def(nb::init<const Regions&, uint64_t>(), nb::arg("regions"), nb::arg("to"),
           nb::call_guard<WithoutGil>())
      .def_prop_ro("table_bytes", &GatherPlan::table_bytes)
      .def_prop_ro("device_bytes", &GatherPlan::device_bytes)
      .def(
          "write",
          [](const GatherPlan& plan, uint64_t address) {
            plan.write(reinterpret_cast<std::byte*>(address));  // NOLINT: the caller's
          },
          nb::arg("address"), nb::call_guard<WithoutGil>());
  nb::class_<DeviceGather>(m, "DeviceGather")
      .def(
          "__init__",
          [](DeviceGather* self, int ordinal, const nb::bytes& image) {
            const std::string given(image.c_str(), image.size());  // a cubin has zeros within
            const WithoutGil release;
            new (self) DeviceGather(ordinal, given);
          },
          nb::arg("ordinal"), nb::arg("image"))
      .def(
          "launch",
          [](const DeviceGather& gather, const GatherPlan& plan, uint64_t tables, uint64_t stream) {
            // NOLINTNEXTLINE(performance-no-int-to-ptr): how array libraries say it
            gather.launch(plan, tables, reinterpret_cast<gpu::CUstream>(stream));
          },
          nb::arg("plan"), nb::arg("tables"), nb::arg("stream"), nb::call_guard<WithoutGil>());
  nb::class_<RelaxedCaptureMode>(m, "RelaxedCaptureMode")
      .def(nb::init<std::optional<uint64_t>>(), nb::arg("address") = nb::none())
      .def("__enter__", &RelaxedCaptureMode::enter, nb::call_guard<WithoutGil>())
      .def("__exit__", &RelaxedCaptureMode::exit, nb::call_guard<WithoutGil>());
}

}  // namespace kvw::bindings
