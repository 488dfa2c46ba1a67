#include "bindings/bindings.h"
#include "remote/check_object.h"

namespace kvw::bindings {

namespace {

using Body = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::tuple check_object_of(const nb::bytes& fleet, const nb::bytes& secret,
                          const nb::bytes& namespace_id, uint64_t epoch, const nb::bytes& key,
                          const Body& data) {
  const Secret held = secret_from(secret);
  const Key of = key_from(fleet);
  const remote::ObjectName name{key_from(namespace_id), epoch, key_from(key)};
  const std::span bytes(reinterpret_cast<const std::byte*>(data.data()), data.size());
  remote::ObjectCheck check;
  {
    WithoutGil release;
    check = remote::check_object(of, held, name, bytes);
  }
  const bool good = check.fault == remote::ObjectFault::none;
  return nb::make_tuple(good ? "" : remote::fault_name(check.fault), check.pages,
                        check.record_bytes);
}

}  // namespace

void bind_objects(nb::module_& m) { m.def("check_object", &check_object_of); }

}  // namespace kvw::bindings
