// NativeClient and Pins.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings/bindings.h"
#include "bindings/pages.h"
#include "client/client.h"
#include "client/extents.h"

namespace kvw::bindings {

namespace {

// Ends without the GIL where nobody closed it: it may wait for the driver of a device.
class OwnedClient : public kvw::Client {
 public:
  using kvw::Client::Client;
  ~OwnedClient() {
    WithoutGil release;
    close();
  }
};
using Client = OwnedClient;

nb::dict dict_of(const std::map<std::string, uint64_t>& counts) {
  nb::dict made;
  for (const auto& [name, count] : counts) made[name.c_str()] = count;
  return made;
}

nb::tuple lookup(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  auto result = pages.without_gil([&](Prompt& prompt) { return client.lookup(space, prompt); });
  return nb::make_tuple(result.hbm, result.dram, result.nvme, result.remote);
}

// An array of them, which keeps them. Number: what an array calls a T.
template <class Number, class T>
nb::object array_of(std::vector<T> found) {
  static_assert(sizeof(Number) == sizeof(T));
  auto* kept = new std::vector<T>(std::move(found));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  auto* numbers = reinterpret_cast<Number*>(kept->data());
  return nb::cast(nb::ndarray<nb::numpy, Number>(numbers, {kept->size()}, owner));
}

nb::object tiers(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys,
                 bool counted) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  auto found =
      pages.without_gil([&](Prompt& prompt) { return client.tiers(space, prompt, counted); });
  return array_of<uint8_t>(std::move(found));
}

size_t release(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys,
               size_t first) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  return pages.without_gil([&](Prompt& prompt) { return client.release(space, prompt, first); });
}

nb::object tags(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  auto found = pages.without_gil([&](Prompt& prompt) { return client.tags(space, prompt); });
  return array_of<uint64_t>(std::move(found));
}

nb::tuple load(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys,
               size_t first, const Regions& regions, uint32_t shard, double timeout_s) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  auto report = pages.without_gil([&](Prompt& prompt) {
    return client.load(space, prompt, first, regions, shard, to_ns(timeout_s));
  });
  return nb::make_tuple(report.pages, dict_of(report.reasons));
}

nb::tuple store(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys,
                size_t first, const Regions& regions, uint32_t shard, double timeout_s,
                std::optional<uint64_t> since) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  auto report = pages.without_gil([&](Prompt& prompt) {
    return client.store(space, prompt, first, regions, shard, to_ns(timeout_s), since);
  });
  return nb::make_tuple(report.stored, report.already, dict_of(report.dropped));
}

std::unique_ptr<Pins> pin(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys,
                          size_t first, double timeout_s) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  return pages.without_gil(
      [&](Prompt& prompt) { return client.pin(space, prompt, first, to_ns(timeout_s)); });
}

std::unique_ptr<Extents> hold(Client& client, const nb::bytes& id, nb::handle tokens,
                              nb::handle keys, const nb::tuple& window, double timeout_s) {
  const Key space = key_from(id);
  const Pages held(tokens, keys);
  const auto first = nb::cast<size_t>(window[0]), pages = nb::cast<size_t>(window[1]);
  const auto shard = nb::cast<uint32_t>(window[2]);
  return held.without_gil([&](Prompt& prompt) {
    return client.hold(space, prompt, first, pages, shard, to_ns(timeout_s));
  });
}

using Body = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

FilledRun fill_run(Client& client, const remote::RunToGet& run, const Body& body,
                   const nb::bytes& fleet, double within_s) {
  const std::span bytes(reinterpret_cast<const std::byte*>(body.data()), body.size());
  const Key own = key_from(fleet);
  const WithoutGil release;
  return client.fill_run(run, bytes, own, to_ns(within_s));
}

nb::dict control_of(Client& client) {
  const auto view = client.view();
  const ControlPage& page = view->control();
  nb::dict made;
  const auto put = [&made](const char* name, const auto& word) {
    made[name] = word.value.load(std::memory_order_acquire);
  };
  made["warehouse_id"] = bytes_of(page.warehouse_id).attr("hex")();
  put("incarnation", page.incarnation);
  put("heartbeat_ns", page.heartbeat_ns);
  put("state", page.state);
  put("clear_epoch", page.clear_epoch);
  put("durable", page.durable);
  put("nvme_read_bytes_per_s", page.nvme_read_bytes_per_s);
  put("nvme_write_bytes_per_s", page.nvme_write_bytes_per_s);
  put("nvme_reads_queued", page.nvme_reads_queued);
  put("nvme_write_queue_bytes", page.nvme_write_queue_bytes);
  put("pin_limit_bytes", page.pin_limit_bytes);
  put("reserve_limit_bytes", page.reserve_limit_bytes);
  put("remote_serving", page.remote.serving);
  put("remote_read_bytes_per_s", page.remote.read_bytes_per_s);
  put("remote_first_byte_ns", page.remote.first_byte_ns);
  put("remote_queued_bytes", page.remote.queued_bytes);
  const uint64_t beat = page.heartbeat_ns.value.load();
  const uint64_t now = system_clock().boot_ns();
  made["heartbeat_age_s"] = now > beat ? static_cast<double>(now - beat) / 1e9 : 0.0;
  return made;
}

nb::dict counters_of(Client& client) {
  const auto session = client.session();
  nb::dict made;
  for (uint32_t i = 0; i < kCounters; ++i)
    made[counter_name(Counter(i))] = session->counter(Counter(i));
  return made;
}

}  // namespace

void bind_client(nb::module_& m) {
  using nb::arg;
  nb::class_<Pins>(m, "Pins").def_prop_ro("pages", &Pins::pages).def("release", &Pins::release);
  nb::class_<Client>(m, "NativeClient")
      .def(
          "__init__",
          [](Client* self, const std::string& path, bool verify_always, double timeout_s,
             std::optional<double> patience_s, bool read_only, std::optional<uid_t> daemon_uid) {
            ClientOptions options{path, verify_always, read_only, to_ns(timeout_s), {}, daemon_uid};
            if (patience_s) options.patience_ns = to_ns(*patience_s);
            WithoutGil release;
            new (self) Client(std::move(options));
          },
          arg("socket_path"), arg("verify_always"), arg("timeout_s"),
          arg("patience_s") = nb::none(), arg("read_only") = false, arg("daemon_uid") = nb::none())
      .def("close", &Client::close, nb::call_guard<WithoutGil>())
      .def_prop_ro("connected", &Client::connected, nb::call_guard<WithoutGil>())
      .def_prop_ro("session_id", &Client::session_id)
      .def_prop_ro("incarnation", [](Client& client) { return client.view()->incarnation(); })
      .def(
          "refresh",
          [](Client& client, double timeout_s) { return client.refresh(to_ns(timeout_s)); },
          arg("timeout_s"), nb::call_guard<WithoutGil>())
      .def("sees_namespace",
           [](Client& client, const nb::bytes& id) { return client.sees_namespace(key_from(id)); })
      .def("clear_epoch",
           [](Client& client, const nb::bytes& id) { return client.clear_epoch(key_from(id)); })
      .def("has_namespace",
           [](Client& client, const nb::bytes& id) {
             const Key space = key_from(id);
             WithoutGil release;
             return client.has_namespace(space);
           })
      .def("lookup", &lookup, arg("id"), arg("tokens").none(), arg("keys").none())
      .def("tiers", &tiers, arg("id"), arg("tokens").none(), arg("keys").none(),
           arg("counted") = true)
      .def("release", &release, arg("id"), arg("tokens").none(), arg("keys").none(), arg("first"))
      .def("tags", &tags, arg("id"), arg("tokens").none(), arg("keys").none())
      .def("load", &load, arg("id"), arg("tokens").none(), arg("keys").none(), arg("first"),
           arg("regions"), arg("shard"), arg("timeout_s"))
      .def("store", &store, arg("id"), arg("tokens").none(), arg("keys").none(), arg("first"),
           arg("regions"), arg("shard"), arg("timeout_s"), arg("since") = nb::none())
      .def("pin", &pin, arg("id"), arg("tokens").none(), arg("keys").none(), arg("first"),
           arg("timeout_s"), nb::keep_alive<0, 1>())
      .def(
          "use_device",
          [](Client& client, int ordinal, const nb::bytes& image) {
            const std::string given(image.c_str(), image.size());  // a cubin has zeros within
            WithoutGil release;
            client.use_device(ordinal, given);
          },
          arg("ordinal"), arg("image"))
      .def("has_device", &Client::has_device, arg("ordinal"))
      .def(
          "device_stage",
          [](Client& client, int ordinal, size_t bytes) {
            return std::make_unique<OwnedStage>(client.device_stage(ordinal, bytes));
          },
          arg("ordinal"), arg("bytes"), nb::call_guard<WithoutGil>())
      .def("registration",
           [](Client& client) {
             const RegistrationReport report = [&] {
               const WithoutGil release;
               return client.registration();
             }();
             return nb::make_tuple(report.bytes, report.settled, report.refusal);
           })
      .def(
          "stop_registering",
          [](Client& client, double timeout_s) {
            return client.stop_registering(to_ns(timeout_s));
          },
          arg("timeout_s"), nb::call_guard<WithoutGil>())
      .def("hold", &hold, arg("id"), arg("tokens").none(), arg("keys").none(), arg("window"),
           arg("timeout_s"), nb::keep_alive<0, 1>())
      .def(
          "segments",
          [](Client& client, double timeout_s) { return client.segments(to_ns(timeout_s)); },
          arg("timeout_s"), nb::call_guard<WithoutGil>())
      .def(
          "pack_run",
          [](Client& client, const remote::RunToPut& run, const nb::bytes& fleet) {
            const Key own = key_from(fleet);
            WithoutGil release;
            return client.pack_run(run, own);
          },
          arg("run"), arg("fleet"))
      .def("fill_run", &fill_run, arg("run"), arg("body"), arg("fleet"), arg("within_s"))
      .def("control", &control_of)
      .def("counters", &counters_of);
}

}  // namespace kvw::bindings
