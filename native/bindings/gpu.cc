// What Python asks of NVIDIA's driver before it gives a client pages on a device.
#include "bindings/bindings.h"
#include "gpu/device.h"

namespace kvw::bindings {

namespace {

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

}  // namespace

void bind_gpu(nb::module_& m) {
  m.def("device_of", &gpu::device_of, nb::arg("address"));
  m.def("device_capability", &capability_of, nb::arg("ordinal"));
}

}  // namespace kvw::bindings
