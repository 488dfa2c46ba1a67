// Extents: pages on NVMe that the caller reads by itself.
#include "client/extents.h"

#include <sys/stat.h>

#include <nanobind/stl/string.h>

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

uint64_t deliver(Extents& extents, const Stage& stage, uint64_t first, uint64_t count,
                 const Regions& to) {
  check_range(extents, first, count);
  if (to.page_bytes() != extents.page_bytes() || to.count() < first + count || !to.writable())
    throw Error(ErrorKind::usage, "bad_pages",
                "the regions have " + std::to_string(to.count()) + " pages of " +
                    std::to_string(to.page_bytes()) + " bytes, the hold pages of " +
                    std::to_string(extents.page_bytes()) + "; pass writable ones of its size");
  for (uint64_t at = first; at < first + count; ++at)
    if (extents.pages()[at].staged_at + extents.page_bytes() > stage.size())
      throw Error(ErrorKind::usage, "stage_too_small",
                  "the stage has " + std::to_string(stage.size()) +
                      " bytes, fewer than it was planned with");
  const auto* from = reinterpret_cast<const std::byte*>(stage.data());
  nb::gil_scoped_release release;
  return extents.deliver(from, first, count, to);
}

// What a device's kernel needs to verify pages: keys (n, 16), digests and places in the stage (n,).
nb::tuple expected(const Extents& extents, uint64_t first, uint64_t count) {
  check_range(extents, first, count);
  struct Arrays {
    std::vector<Key> keys;
    std::vector<uint64_t> digests, staged;
  };
  auto* made = new Arrays;
  nb::capsule owner(made, [](void* p) noexcept { delete static_cast<Arrays*>(p); });
  for (uint64_t at = first; at < first + count; ++at) {
    const Extents::Page& page = extents.pages()[at];
    made->keys.push_back(page.entry.key);
    made->digests.push_back(page.digest);
    made->staged.push_back(page.staged_at);
  }
  auto* keys = reinterpret_cast<uint8_t*>(made->keys.data());
  return nb::make_tuple(nb::ndarray<nb::numpy, uint8_t>(keys, {count, sizeof(Key)}, owner),
                        nb::ndarray<nb::numpy, uint64_t>(made->digests.data(), {count}, owner),
                        nb::ndarray<nb::numpy, uint64_t>(made->staged.data(), {count}, owner));
}

void count_delivered(Extents& extents, uint64_t first, uint64_t count, bool mismatch) {
  check_range(extents, first, count);
  extents.count_delivered(first, count, mismatch);
}

bool current(const Extents& extents, uint64_t page) {
  check_range(extents, page, 1);
  return extents.current(page);
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
      .def("expected", &expected, arg("first"), arg("count"))
      .def("count_delivered", &count_delivered, arg("first"), arg("count"), arg("mismatch"))
      .def("current", &current, arg("page"))
      .def("release", &Extents::release, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace kvw::bindings
