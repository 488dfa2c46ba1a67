// What the worker of the remote tier uses: the presence filter's file, its link with the daemon,
// and objects.
#include <nanobind/stl/optional.h>

#include <array>
#include <mutex>
#include <optional>

#include "bindings/bindings.h"
#include "client/fill_run.h"
#include "client/pack_run.h"
#include "presence/presence_file.h"
#include "remote/get_link.h"
#include "remote/link.h"

namespace kvw::bindings {

namespace {

using Keys = nb::bytes;
using Epochs = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Days = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One writer for all threads.
class SharedPresence {
 public:
  explicit SharedPresence(const PresenceFile::Wanted& wanted) : file_(wanted) {}

  template <class Work>
  auto with(Work work) {
    WithoutGil release;
    const std::lock_guard lock(mutex_);
    if (!file_) throw Error(ErrorKind::usage, "closed", "this presence filter was closed");
    file_->check();
    return work(*file_);
  }
  nb::dict put(const Keys& keys, const Epochs& epochs, const Days& days) {
    constexpr std::array kNames = {"added", "renewed", "already", "replaced", "no_room", "outside"};
    std::array<uint64_t, kNames.size()> counts{};
    const size_t count = epochs.size();
    if (keys.size() != count * sizeof(Key) || days.size() != count)
      throw Error(
          ErrorKind::usage, "bad_size",
          std::to_string(keys.size()) + " bytes of keys, " + std::to_string(count) +
              " epochs and " + std::to_string(days.size()) +
              " days do not go together: give 16 bytes, an epoch and a day for each object");
    const char* bytes = keys.c_str();
    const uint64_t* epoch = epochs.data();
    const uint32_t* day = days.data();
    with([&](PresenceFile& file) {
      for (size_t i = 0; i < count; ++i) {
        Key key;
        std::memcpy(&key, bytes + i * sizeof key, sizeof key);
        ++counts[static_cast<size_t>(file.writer().put(key, epoch[i], day[i]))];
      }
      file.check();
    });
    nb::dict made;
    for (size_t i = 0; i < kNames.size(); ++i) made[kNames[i]] = counts[i];
    return made;
  }
  void close() {
    WithoutGil release;
    const std::lock_guard lock(mutex_);
    file_.reset();
  }

 private:
  std::mutex mutex_;
  std::optional<PresenceFile> file_;
};

void bind_presence(nb::module_& m) {
  using nb::arg;
  nb::class_<SharedPresence>(m, "PresenceFile")
      .def(
          "__init__",
          [](SharedPresence* self, std::string path, const nb::bytes& fleet, uint64_t objects,
             uint32_t days, uint32_t today) {
            const PresenceFile::Wanted wanted{std::move(path), key_from(fleet), objects, days,
                                              today};
            WithoutGil release;
            new (self) SharedPresence(wanted);
          },
          arg("path"), arg("fleet"), arg("objects"), arg("days"), arg("today"))
      .def_prop_ro("made_anew",
                   [](SharedPresence& shared) {
                     return shared.with([](PresenceFile& file) { return file.made_anew(); });
                   })
      .def_prop_ro("newest",
                   [](SharedPresence& shared) {
                     return shared.with([](PresenceFile& file) { return file.writer().newest(); });
                   })
      .def_prop_ro("objects",
                   [](SharedPresence& shared) {
                     return shared.with([](PresenceFile& file) { return file.writer().objects(); });
                   })
      .def_prop_ro("cells",
                   [](SharedPresence& shared) {
                     return shared.with([](PresenceFile& file) { return file.table().cells(); });
                   })
      .def(
          "objects_of",
          [](SharedPresence& shared, uint32_t day) {
            return shared.with([=](PresenceFile& file) { return file.writer().objects(day); });
          },
          arg("day"))
      .def(
          "advance",
          [](SharedPresence& shared, uint32_t newest, uint32_t today) {
            shared.with([=](PresenceFile& file) { file.writer().advance(newest, today); });
          },
          arg("newest"), arg("today"))
      .def("put", &SharedPresence::put, arg("keys"), arg("epochs"), arg("days"))
      .def(
          "remove",
          [](SharedPresence& shared, const nb::bytes& key, uint64_t epoch, uint32_t day) {
            const Key own = key_from(key);
            return shared.with(
                [&](PresenceFile& file) { return file.writer().remove(own, epoch, day); });
          },
          arg("key"), arg("epoch"), arg("day"))
      .def(
          "day_of",
          [](SharedPresence& shared, const nb::bytes& key, uint64_t epoch) {
            const Key own = key_from(key);
            return shared.with(
                [&](PresenceFile& file) { return file.table().look(epoch).day_of(own); });
          },
          arg("key"), arg("epoch"))
      .def("close", &SharedPresence::close);
}

remote::RunToPut made_run(const nb::bytes& namespace_id, const nb::bytes& key,
                          uint32_t first_position, uint32_t pages, uint64_t epoch,
                          std::optional<uint32_t> day, uint64_t record_bytes) {
  return {0,           key_from(namespace_id), key_from(key), first_position, pages, epoch, day,
          record_bytes};
}

void bind_runs(nb::module_& m) {
  using nb::arg;
  using remote::RunToPut;
  nb::class_<RunToPut>(m, "RunToPut")
      .def(
          "__init__",
          [](RunToPut* self, const nb::bytes& namespace_id, const nb::bytes& key,
             uint32_t first_position, uint32_t pages, uint64_t epoch, std::optional<uint32_t> day,
             uint64_t record_bytes) {
            new (self) RunToPut(
                made_run(namespace_id, key, first_position, pages, epoch, day, record_bytes));
          },
          arg("namespace_id"), arg("key"), arg("first_position"), arg("pages"), arg("epoch"),
          arg("day").none(), arg("record_bytes"))
      .def_prop_ro("namespace_id", [](const RunToPut& run) { return bytes_of(run.namespace_id); })
      .def_prop_ro("key", [](const RunToPut& run) { return bytes_of(run.key); })
      .def_ro("first_position", &RunToPut::first_position)
      .def_ro("pages", &RunToPut::pages)
      .def_ro("epoch", &RunToPut::epoch)
      .def_ro("day", &RunToPut::day)
      .def_ro("record_bytes", &RunToPut::record_bytes)
      .def_prop_ro("bytes", &RunToPut::bytes);
}

void bind_link(nb::module_& m) {
  using nb::arg;
  using remote::RunToPut;
  using remote::WorkerLink;
  nb::class_<WorkerLink>(m, "RemoteLink")
      .def(
          "__init__", [](WorkerLink* self, int fd) { new (self) WorkerLink(Fd(fd)); }, arg("fd"))
      .def("ready", &WorkerLink::ready, arg("puts"), nb::call_guard<WithoutGil>())
      .def(
          "next",
          [](const WorkerLink& link, double timeout_s) {
            WithoutGil release;
            return link.next(to_ns(timeout_s));
          },
          arg("timeout_s"))
      .def("done", &WorkerLink::done, arg("run"), nb::call_guard<WithoutGil>())
      .def("close", &WorkerLink::close);
}

remote::GetEnd get_end_from(const std::string& name) {
  for (uint32_t end = 0; end < static_cast<uint32_t>(remote::GetEnd::count); ++end)
    if (name == get_end_name(remote::GetEnd(end))) return remote::GetEnd(end);
  throw Error(ErrorKind::usage, "bad_end",
              "a get does not end as '" + name + "': give one of GET_ENDS");
}

void bind_gets(nb::module_& m) {
  using nb::arg;
  using remote::RunToGet;
  nb::class_<RunToGet>(m, "RunToGet")
      .def(
          "__init__",
          [](RunToGet* self, const nb::bytes& namespace_id, const nb::bytes& key, uint64_t epoch,
             uint64_t clear_epoch, uint64_t record_bytes, double within_s, uint32_t first_position,
             uint32_t pages, uint32_t from, uint32_t day, bool engine_keys) {
            new (self) RunToGet{0,
                                key_from(namespace_id),
                                key_from(key),
                                epoch,
                                clear_epoch,
                                record_bytes,
                                to_ns(within_s),
                                first_position,
                                pages,
                                from,
                                day,
                                engine_keys ? WitnessKind::engine_key : WitnessKind::tokens};
          },
          nb::kw_only(), arg("namespace_id"), arg("key"), arg("epoch"), arg("clear_epoch"),
          arg("record_bytes"), arg("within_s"), arg("first_position"), arg("pages"),
          arg("from_page"), arg("day"), arg("engine_keys"))
      .def_prop_ro("namespace_id", [](const RunToGet& run) { return bytes_of(run.namespace_id); })
      .def_prop_ro("key", [](const RunToGet& run) { return bytes_of(run.key); })
      .def_ro("epoch", &RunToGet::epoch)
      .def_ro("clear_epoch", &RunToGet::clear_epoch)
      .def_ro("record_bytes", &RunToGet::record_bytes)
      .def_prop_ro("within_s",
                   [](const RunToGet& run) { return static_cast<double>(run.within_ns) / 1e9; })
      .def_ro("first_position", &RunToGet::first_position)
      .def_ro("pages", &RunToGet::pages)
      .def_ro("from_page", &RunToGet::from)
      .def_ro("day", &RunToGet::day)
      .def_prop_ro("engine_keys",
                   [](const RunToGet& run) { return run.witness_kind == WitnessKind::engine_key; })
      .def_prop_ro("begin", &RunToGet::begin)
      .def_prop_ro("end", &RunToGet::end);
  using remote::WorkerGetLink;
  nb::class_<WorkerGetLink>(m, "RemoteGetLink")
      .def(
          "__init__", [](WorkerGetLink* self, int fd) { new (self) WorkerGetLink(Fd(fd)); },
          arg("fd"))
      .def("ready", &WorkerGetLink::ready, arg("gets"), nb::call_guard<WithoutGil>())
      .def("state", &WorkerGetLink::state, arg("until_ns"), arg("read_bytes_per_s"),
           arg("first_byte_ns"), nb::call_guard<WithoutGil>())
      .def(
          "next",
          [](const WorkerGetLink& link, double timeout_s) {
            WithoutGil release;
            return link.next(to_ns(timeout_s));
          },
          arg("timeout_s"))
      .def(
          "done",
          [](const WorkerGetLink& link, const RunToGet& run, const std::string& end,
             uint32_t pages) { link.done(run, get_end_from(end), pages); },
          arg("run"), arg("end"), arg("pages"), nb::call_guard<WithoutGil>())
      .def("close", &WorkerGetLink::close);
  nb::list ends;
  for (uint32_t end = 0; end < static_cast<uint32_t>(remote::GetEnd::count); ++end)
    ends.append(get_end_name(remote::GetEnd(end)));
  m.attr("GET_ENDS") = nb::tuple(ends);
}

// The buffer protocol: an object's bytes, read-only, for as long as somebody looks at them.
int packed_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
  const PackedRun& packed = *nb::inst_ptr<PackedRun>(self);
  if (!packed.reason.empty()) {
    PyErr_Format(PyExc_BufferError, "there is no object: %s", packed.reason.c_str());
    return -1;
  }
  return PyBuffer_FillInfo(view, self, packed.object->data(),
                           static_cast<Py_ssize_t>(packed.object->bytes()), 1, flags);
}

PyType_Slot packed_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(packed_buffer)},
                              {0, nullptr}};

}  // namespace

void bind_remote(nb::module_& m) {
  bind_presence(m);
  bind_runs(m);
  bind_link(m);
  bind_gets(m);
  nb::class_<PackedRun>(m, "PackedRun", nb::type_slots(packed_slots))
      .def_ro("reason", &PackedRun::reason);
  nb::class_<FilledRun>(m, "FilledRun")
      .def_prop_ro("end",
                   [](const FilledRun& filled) { return std::string(get_end_name(filled.end)); })
      .def_ro("pages", &FilledRun::pages)
      .def_ro("fault", &FilledRun::fault)
      .def_prop_ro("parent", [](const FilledRun& filled) { return bytes_of(filled.parent); });
}

}  // namespace kvw::bindings
