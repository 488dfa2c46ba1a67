// What the worker of the remote tier uses: the presence filter's file, its link with the daemon,
// and objects. Placeholders: nothing of it can be made yet.
#include "bindings/bindings.h"

namespace kvw::bindings {

namespace {

struct PresenceFile {};
struct RunToPut {};
struct RemoteLink {};
struct PackedRun {};

}  // namespace

void bind_remote(nb::module_& m) {
  nb::class_<PresenceFile>(m, "PresenceFile");
  nb::class_<RunToPut>(m, "RunToPut");
  nb::class_<RemoteLink>(m, "RemoteLink");
  nb::class_<PackedRun>(m, "PackedRun");
}

}  // namespace kvw::bindings
