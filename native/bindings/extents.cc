// Extents: pages on NVMe that the caller reads by itself.
#include "client/extents.h"

#include <sys/stat.h>

#include <nanobind/stl/string.h>

#include "base/clock.h"
#include "bindings/bindings.h"

namespace kvw::bindings {

namespace {

nb::list files_of(const Extents& extents) {
  nb::list made;
  for (const Extents::File& file : extents.files()) {
    struct stat info{};
    if (::fstat(file.descriptor.get(), &info) != 0)
      throw storage_error("cannot stat a segment", errno);
    made.append(nb::make_tuple(file.path(), file.descriptor.get(), file.direct,
                               nb::make_tuple(info.st_dev, info.st_ino)));
  }
  return made;
}

nb::list plan_of(Extents& extents, uint64_t stage_bytes, uint64_t gap_bytes) {
  nb::list made;
  for (const Extents::Read& read : extents.plan(stage_bytes, gap_bytes))
    made.append(nb::make_tuple(read.round, read.file, read.offset_bytes, read.bytes, read.stage_at,
                               read.first, read.pages));
  return made;
}

void check_range(const Extents& extents, uint64_t first, uint64_t count) {
  const uint64_t pages = extents.pages().size();
  if (first > pages || count > pages - first)
    throw Error(ErrorKind::usage, "bad_pages",
                "pages " + std::to_string(first) + " to " + std::to_string(first + count) +
                    " of a hold of " + std::to_string(pages));
}

using Stage = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::string place_of(int ordinal) {
  return ordinal < 0 ? "host memory" : "the memory of device " + std::to_string(ordinal);
}

// `ordinal`: of the stage's device, -1 for the host's memory.
void check_delivery(const Extents& extents, uint64_t stage_bytes, int ordinal, uint64_t first,
                    uint64_t count, const Regions& to) {
  check_range(extents, first, count);
  if (to.page_bytes() != extents.page_bytes() || to.count() < first + count || !to.writable())
    throw Error(ErrorKind::usage, "bad_pages",
                "the regions have " + std::to_string(to.count()) + " pages of " +
                    std::to_string(to.page_bytes()) + " bytes, the hold pages of " +
                    std::to_string(extents.page_bytes()) + "; pass writable ones of its size");
  const int there = to.device() == nullptr ? -1 : to.device()->ordinal;
  if (there != ordinal)
    throw Error(ErrorKind::usage, "bad_pages",
                "the pages are wanted in " + place_of(there) + " and land in " + place_of(ordinal) +
                    "; use a staging area of the place that they are wanted in");
  for (uint64_t at = first; at < first + count; ++at)
    if (extents.pages()[at].staged_at + extents.page_bytes() > stage_bytes)
      throw Error(ErrorKind::usage, "stage_too_small",
                  "the stage has " + std::to_string(stage_bytes) +
                      " bytes, fewer than it was planned with");
}

uint64_t deliver(Extents& extents, const Stage& stage, uint64_t first, uint64_t count,
                 const Regions& to) {
  check_delivery(extents, stage.size(), -1, first, count, to);
  const auto* from = reinterpret_cast<const std::byte*>(stage.data());
  WithoutGil release;
  return extents.deliver(from, first, count, to);
}

uint64_t deliver_on_device(OwnedStage& stage, Extents& extents, uint64_t first, uint64_t count,
                           const Regions& to, double timeout_s) {
  check_delivery(extents, stage->bytes(), stage->ordinal(), first, count, to);
  WithoutGil release;
  return stage->deliver(extents, first, count, to, system_clock().boot_ns() + to_ns(timeout_s));
}

}  // namespace

void bind_extents(nb::module_& m) {
  using nb::arg;
  nb::class_<Extents>(m, "Extents")
      .def_prop_ro("pages", [](const Extents& extents) { return extents.pages().size(); })
      .def_prop_ro("page_bytes", &Extents::page_bytes)
      .def_prop_ro("shard", &Extents::shard)
      .def_prop_ro("ended", [](const Extents& extents) { return reason_name(extents.ended()); })
      .def("files", &files_of)
      .def("plan", &plan_of, arg("stage_bytes"), arg("gap_bytes"))
      .def("deliver", &deliver, arg("stage"), arg("first"), arg("count"), arg("regions"))
      .def("release", &Extents::release, nb::call_guard<WithoutGil>());
  nb::class_<OwnedStage>(m, "DeviceStage")
      .def_prop_ro("ordinal", [](const OwnedStage& stage) { return stage->ordinal(); })
      .def_prop_ro("bytes", [](const OwnedStage& stage) { return stage->bytes(); })
      .def_prop_ro("address", [](const OwnedStage& stage) { return stage->address(); })
      .def("deliver", &deliver_on_device, arg("extents"), arg("first"), arg("count"),
           arg("regions"), arg("timeout_s"));
}

}  // namespace kvw::bindings
