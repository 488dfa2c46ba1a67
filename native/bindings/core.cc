// CoreOptions and Core.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/pages.h"
#include "bindings/report.h"
#include "server/feed_reader.h"
#include "server/inbox.h"
#include "server/keep_prompt.h"
#include "server/server.h"
#include "server/why_report.h"
#include "warehouse/operator_eviction.h"

namespace kvw::bindings {

namespace {

constexpr int kPatienceMs = 10000;
constexpr int kLongMs = 120000;  // for work over the whole index
constexpr size_t kSweptPerCall = 1024;

uint64_t ns_of(double seconds) { return static_cast<uint64_t>(seconds * 1e9); }

struct CoreOptions {
  std::string socket_path, arena_dir, nvme_dir, policy = "lru", io_engine = "auto", remote_write;
  uint64_t dram_bytes = 0, nvme_capacity_bytes = 0, nvme_segment_bytes = 0, index_pages = 0;
  nb::bytes warehouse_id{"", 0}, secret{"", 0}, remote_fleet{"", 0};
  uint64_t epoch = 0, epoch_floor = 0, log_end = 0, write_queue_bytes = 0, keep_bytes = 0;
  uint64_t nvme_bytes_per_day = 0;
  double nvme_bytes_left = 0;
  uint64_t hbm_bytes = 0;
  int hbm_device = 0;
  bool inspect = false, remote_read = false;
  double limbo_after_s = 30, grace_s = 5, flush_interval_s = 1, nvme_retry_s = 30;
  double nvme_answer_s = 0;

  WarehouseOptions warehouse() const {
    WarehouseOptions made = unnamed();
    made.warehouse_id = key_from(warehouse_id);
    if (made.remote_write != RemoteWrite::none) made.remote_fleet = key_from(remote_fleet);
    const auto* bytes = static_cast<const std::byte*>(secret.data());
    made.secret.assign(bytes, bytes + secret.size());
    return made;
  }

  // Without its id, secret and fleet, which may not exist yet.
  WarehouseOptions unnamed() const {
    WarehouseOptions made;
    made.arena_dir = arena_dir;
    made.dram_bytes = dram_bytes;
    made.nvme_dir = nvme_dir;
    made.nvme_capacity_bytes = nvme_capacity_bytes;
    made.nvme_segment_bytes = nvme_segment_bytes;
    made.index_pages = index_pages;
    made.epoch = epoch;
    made.epoch_floor = epoch_floor;
    made.log_end = log_end;
    made.inspect = inspect;
    made.policy = policy;
    made.io_engine = io_engine;
    made.limbo_after_ns = ns_of(limbo_after_s);
    made.grace_ns = ns_of(grace_s);
    made.flush_interval_ns = ns_of(flush_interval_s);
    made.nvme_retry_ns = ns_of(nvme_retry_s);
    if (nvme_answer_s > 0) made.nvme_answer_ns = ns_of(nvme_answer_s);
    made.write_queue_bytes = write_queue_bytes;
    made.nvme_bytes_per_day = nvme_bytes_per_day;
    made.nvme_bytes_left = nvme_bytes_left;
    made.keep_bytes = keep_bytes;
    made.remote_write = remote_write_from(remote_write);
    made.remote_read = remote_read;
    made.hbm.bytes = hbm_bytes;
    made.hbm.device = hbm_device;
    return made;
  }
};

nb::list list_of(const std::vector<std::pair<Key, uint64_t>>& tombstones) {
  nb::list made;
  for (const auto& [key, position] : tombstones)
    made.append(nb::make_tuple(bytes_of(key), position));
  return made;
}

// The server and what start() found. Before start() its warehouse is driven from the caller's
// thread.
class Core {
 public:
  explicit Core(const CoreOptions& options) : server_(options.warehouse(), options.socket_path) {}

  template <class Work>
  auto on_core(Work work, int patience_ms = kPatienceMs) {
    WithoutGil release;
    return server_.call(std::move(work), patience_ms);
  }

  uint32_t add_namespace(uint32_t wish, const nb::bytes& id, uint32_t page_tokens, uint32_t shards,
                         uint64_t shard_bytes, uint64_t clear_epoch) {
    const NamespaceShape shape{key_from(id), page_tokens, shards, shard_bytes};
    if (!started_) return server_.warehouse_before_start().add_namespace(wish, shape, clear_epoch);
    return on_core(
        [=](Warehouse& warehouse) { return warehouse.add_namespace(wish, shape, clear_epoch); });
  }

  nb::bytes forget_namespace(int ordinal) {
    const uint32_t wanted = ordinal < 0 ? kMaxNamespaces : static_cast<uint32_t>(ordinal);
    const auto gone =
        on_core([=](Warehouse& warehouse) { return warehouse.forget_namespace(wanted); });
    return gone ? bytes_of(*gone) : nb::bytes("", 0);
  }

  void add_tombstone(const nb::bytes& key, uint64_t position) {
    if (started_) throw Error(ErrorKind::usage, "started", "tombstones are given before start()");
    server_.warehouse_before_start().add_tombstone(key_from(key), position);
  }

  uint64_t log_end() {
    if (!started_) return server_.warehouse_before_start().log_end();
    return on_core([](Warehouse& warehouse) { return warehouse.log_end(); });
  }

  nb::dict recover() {
    {
      WithoutGil release;
      recovery_ = server_.recover();
    }
    return dict_of(recovery_);
  }

  nb::dict start() {
    if (started_) throw Error(ErrorKind::usage, "started", "this core was started before");
    {
      WithoutGil release;
      recovery_ = server_.start();
    }
    started_ = true;
    return dict_of(recovery_);
  }

  void listen_again() {
    WithoutGil release;
    server_.listen_again(kPatienceMs);
  }

  uint64_t clear(const std::vector<uint32_t>& ordinals, uint64_t epoch) {
    // All at once: what is reserved behind the new epoch is not taken, and must not be older.
    on_core([ordinals, epoch](Warehouse& warehouse) {
      warehouse.raise_epoch(epoch);
      for (const uint32_t ordinal : ordinals) warehouse.begin_clear(ordinal, epoch);
      return 0;
    });
    uint64_t cleared = 0;
    for (const uint32_t ordinal : ordinals) cleared += clear_begun(ordinal, epoch);
    return cleared;
  }
  uint64_t clear_begun(uint32_t ordinal, uint64_t epoch) {
    uint64_t cleared = 0;
    PageId cursor = 0;
    // A stretch of the index at a time: others are served in between.
    while (cursor != kNoPage) {
      const auto [count, next] = on_core([=](Warehouse& warehouse) {
        PageId at = cursor;
        const uint64_t left = warehouse.clear_some(ordinal, epoch, at);
        return std::pair(left, at);
      });
      cleared += count;
      cursor = next;
    }
    return cleared;
  }
  void raise_epoch(uint64_t epoch) {
    on_core([=](Warehouse& warehouse) {
      warehouse.raise_epoch(epoch);
      return 0;
    });
  }
  nb::tuple evict(int ordinal, uint64_t pages, const std::string& tiers) {
    const auto eviction = on_core([=](Warehouse& warehouse) {
      return std::make_shared<OperatorEviction>(warehouse.begin_eviction(ordinal, pages, tiers));
    });
    while (on_core([=](Warehouse&) { return eviction->step(); })) continue;
    return nb::make_tuple(eviction->left(), list_of(eviction->take_tombstones()));
  }
  nb::dict flush(double timeout_s) {
    FlushReport report;
    {
      WithoutGil release;
      report = server_.flush(static_cast<int>(std::clamp(timeout_s, 0.0, 1e6) * 1000));
    }
    nb::dict made;
    made["flushed"] = report.flushed;
    made["not_admitted"] = report.not_admitted;
    made["pending"] = report.pending;
    return made;
  }
  void drain() {
    on_core([](Warehouse& warehouse) {
      warehouse.drain();
      return 0;
    });
  }
  void undrain() {
    on_core([](Warehouse& warehouse) {
      warehouse.undrain();
      return 0;
    });
  }
  uint64_t sweep() {
    uint64_t dropped = 0;
    for (uint64_t some = 1; some != 0; dropped += some)
      some = on_core([](Warehouse& warehouse) { return warehouse.sweep(kSweptPerCall); });
    return dropped;
  }
  nb::dict status() {
    const WarehouseStatus now = on_core([](Warehouse& warehouse) { return warehouse.status(); });
    const Key id = server_.warehouse_before_start().arena().control().warehouse_id;
    return dict_of(now, recovery_, id, server_.connections());
  }
  nb::dict miss_ratio(int ordinal) {
    return dict_of(on_core([=](Warehouse& warehouse) { return warehouse.miss_ratio(ordinal); }));
  }
  nb::list pages(int ordinal, uint32_t after, size_t limit) {
    nb::list made;
    for (PageId cursor = after; cursor != kNoPage && made.size() < limit;) {
      const auto [some, next] = on_core([=, left = limit - made.size()](Warehouse& warehouse) {
        PageId at = cursor;
        auto found = warehouse.pages(ordinal, at, left);
        return std::pair(std::move(found), at);
      });
      for (const PageInfo& page : some) made.append(dict_of(page));
      cursor = next;
    }
    return made;
  }
  nb::dict why(const nb::bytes& id, uint32_t page_tokens, nb::handle tokens, nb::handle keys,
               bool searches, uint64_t as_of_ns) {
    const WhyQuestion question{key_from(id), as_of_ns, searches};
    WhyReport report;
    Pages(tokens, keys).without_gil([&](Prompt& prompt) {
      prompt.bind(server_.warehouse_before_start().secret(), question.namespace_id, page_tokens);
      report = kvw::why(server_, question, prompt, kPatienceMs);
    });
    return dict_of(report);
  }
  nb::dict keep(uint64_t id, const nb::bytes& namespace_id, uint32_t page_tokens, nb::handle tokens,
                nb::handle keys, double ttl_s, bool is_renewed, double promote_s) {
    const KeepRequest request{id, key_from(namespace_id), ns_of(ttl_s), is_renewed,
                              ns_of(promote_s)};
    KeepOutcome outcome;
    Pages(tokens, keys).without_gil([&](Prompt& prompt) {
      prompt.bind(server_.warehouse_before_start().secret(), request.namespace_id, page_tokens);
      outcome = kvw::keep_prompt(server_, request, prompt, kPatienceMs);
    });
    nb::list marks;
    for (const Key& mark : outcome.marks) marks.append(bytes_of(mark));
    nb::dict made = dict_of(outcome.report);
    made["refusal"] = keep_refusal_name(outcome.refusal);
    made["marks"] = marks;
    return made;
  }
  const char* restore_keep(uint64_t id, const std::vector<nb::bytes>& marks, bool is_lone,
                           double left_s, double renewed_s) {
    if (started_) throw Error(ErrorKind::usage, "started", "keeps are restored before start()");
    const uint64_t until_ns = system_clock().boot_ns() + ns_of(left_s);
    std::vector<Key> keys;
    keys.reserve(marks.size());
    for (const nb::bytes& mark : marks) keys.push_back(key_from(mark));
    return keep_refusal_name(server_.warehouse_before_start().restore_keep(
        id, {until_ns, ns_of(renewed_s)}, keys, is_lone));
  }
  bool end_keep(uint64_t id) {
    return on_core([id](Warehouse& warehouse) { return warehouse.keeps().end(id); });
  }
  nb::list keeps() {
    nb::list made;
    for (const KeepReport& report :
         on_core([](Warehouse& warehouse) { return warehouse.keeps().reports(); }))
      made.append(dict_of(report));
    return made;
  }
  nb::dict check(int ordinal, uint32_t after, size_t limit, bool repair) {
    CheckReport report;
    {
      WithoutGil release;
      report = server_.check({ordinal, after, limit, repair}, kLongMs);
    }
    return dict_of(report);
  }
  nb::list take_tombstones() {
    return list_of(taken(tombstones_, [](Warehouse& w) { return w.take_tombstones(); }));
  }
  nb::list events() {
    nb::list made;
    for (const auto& [name, detail] : taken(events_, [](Warehouse& w) { return w.take_events(); }))
      made.append(nb::make_tuple(name, fields_of(detail)));
    return made;
  }
  FeedReader* watch(int ordinal, bool tokens_only) {  // Python owns it
    WithoutGil release;
    return new FeedReader(server_, FeedRequest{ordinal, tokens_only}, kPatienceMs);
  }
  void attach_remote(int fd) {
    Fd own(fd);
    WithoutGil release;
    server_.attach_remote(std::move(own), kPatienceMs);
  }
  void attach_remote_gets(int fd) {
    Fd own(fd);
    WithoutGil release;
    server_.attach_remote_gets(std::move(own), kPatienceMs);
  }
  bool set_remote_epoch(const nb::bytes& namespace_id, uint64_t fleet_epoch, uint64_t clear_epoch) {
    const Key id = key_from(namespace_id);
    const auto set = [=](Warehouse& warehouse) {
      return warehouse.set_remote_epoch(id, fleet_epoch, clear_epoch);
    };
    return started_ ? on_core(set) : set(server_.warehouse_before_start());
  }
  void stop_remote(const nb::bytes& namespace_id) {
    const auto stop = [id = key_from(namespace_id)](Warehouse& warehouse) {
      warehouse.stop_remote(id);
      return 0;
    };
    started_ ? on_core(stop) : stop(server_.warehouse_before_start());
  }
  nb::list stop() {
    std::vector<std::pair<Key, uint64_t>> tombstones;
    {
      WithoutGil release;
      tombstones = server_.stop();
    }
    nb::list made = list_of(tombstones_.rest());
    made.extend(list_of(tombstones));
    return made;
  }

 private:
  template <class Item, class Take>
  std::vector<Item> taken(Inbox<Item>& inbox, Take take) {
    WithoutGil release;
    return inbox.take(server_, take, kPatienceMs);
  }

  Server server_;
  Inbox<std::pair<Key, uint64_t>> tombstones_;
  Inbox<std::pair<std::string, std::string>> events_;
  RecoverySummary recovery_;
  bool started_ = false;
};

}  // namespace

void bind_core(nb::module_& m) {
  nb::class_<CoreOptions>(m, "CoreOptions")
      .def(nb::init<>())
      .def_rw("socket_path", &CoreOptions::socket_path)
      .def_rw("arena_dir", &CoreOptions::arena_dir)
      .def_rw("dram_bytes", &CoreOptions::dram_bytes)
      .def_rw("nvme_dir", &CoreOptions::nvme_dir)
      .def_rw("nvme_capacity_bytes", &CoreOptions::nvme_capacity_bytes)
      .def_rw("nvme_segment_bytes", &CoreOptions::nvme_segment_bytes)
      .def_rw("index_pages", &CoreOptions::index_pages)
      .def_rw("hbm_bytes", &CoreOptions::hbm_bytes)
      .def_rw("hbm_device", &CoreOptions::hbm_device)
      .def_rw("warehouse_id", &CoreOptions::warehouse_id)
      .def_rw("secret", &CoreOptions::secret)
      .def_rw("epoch", &CoreOptions::epoch)
      .def_rw("epoch_floor", &CoreOptions::epoch_floor)
      .def_rw("log_end", &CoreOptions::log_end)
      .def_rw("inspect", &CoreOptions::inspect)
      .def_rw("policy", &CoreOptions::policy)
      .def_rw("io_engine", &CoreOptions::io_engine)
      .def_rw("limbo_after_s", &CoreOptions::limbo_after_s)
      .def_rw("grace_s", &CoreOptions::grace_s)
      .def_rw("flush_interval_s", &CoreOptions::flush_interval_s)
      .def_rw("nvme_retry_s", &CoreOptions::nvme_retry_s)
      .def_rw("nvme_answer_s", &CoreOptions::nvme_answer_s)
      .def_rw("write_queue_bytes", &CoreOptions::write_queue_bytes)
      .def_rw("nvme_bytes_per_day", &CoreOptions::nvme_bytes_per_day)
      .def_rw("nvme_bytes_left", &CoreOptions::nvme_bytes_left)
      .def_rw("keep_bytes", &CoreOptions::keep_bytes)
      .def_rw("remote_write", &CoreOptions::remote_write)
      .def_rw("remote_read", &CoreOptions::remote_read)
      .def_rw("remote_fleet", &CoreOptions::remote_fleet);
  m.def("check_options", [](const CoreOptions& options) {
    const WarehouseOptions unnamed = options.unnamed();
    WithoutGil release;
    check_options(unnamed);
  });
  m.def("index_bytes",
        [](const CoreOptions& options) { return index_bytes_for(options.unnamed()); });
  m.def("table_bytes",
        [](const CoreOptions& options) { return table_bytes_for(options.unnamed()); });
  nb::class_<Core>(m, "Core")
      .def(nb::init<const CoreOptions&>())
      .def("add_namespace", &Core::add_namespace, nb::arg("ordinal"), nb::arg("id"),
           nb::arg("page_tokens"), nb::arg("shards"), nb::arg("shard_bytes"),
           nb::arg("clear_epoch"))
      .def("add_tombstone", &Core::add_tombstone)
      .def("log_end", &Core::log_end)
      .def("recover", &Core::recover)
      .def("start", &Core::start)
      .def("listen_again", &Core::listen_again)
      .def("forget_namespace", &Core::forget_namespace, nb::arg("ordinal"))
      .def("clear", &Core::clear, nb::arg("ordinals"), nb::arg("epoch"))
      .def("raise_epoch", &Core::raise_epoch)
      .def("evict", &Core::evict, nb::arg("ordinal"), nb::arg("pages"), nb::arg("tiers"))
      .def("flush", &Core::flush, nb::arg("timeout_s"))
      .def("drain", &Core::drain)
      .def("undrain", &Core::undrain)
      .def("sweep", &Core::sweep)
      .def("status", &Core::status)
      .def("miss_ratio", &Core::miss_ratio, nb::arg("ordinal"))
      .def("pages", &Core::pages, nb::arg("ordinal"), nb::arg("after"), nb::arg("limit"))
      .def("why", &Core::why, nb::arg("id"), nb::arg("page_tokens"), nb::arg("tokens").none(),
           nb::arg("keys").none(), nb::arg("searches"), nb::arg("as_of_ns"))
      .def("keep", &Core::keep, nb::arg("id"), nb::arg("namespace_id"), nb::arg("page_tokens"),
           nb::arg("tokens").none(), nb::arg("keys").none(), nb::arg("ttl_s"),
           nb::arg("is_renewed"), nb::arg("promote_s"))
      .def("restore_keep", &Core::restore_keep, nb::arg("id"), nb::arg("marks"), nb::arg("is_lone"),
           nb::arg("left_s"), nb::arg("renewed_s"))
      .def("end_keep", &Core::end_keep, nb::arg("id"))
      .def("keeps", &Core::keeps)
      .def("check", &Core::check, nb::arg("ordinal"), nb::arg("after"), nb::arg("limit"),
           nb::arg("repair"))
      .def("take_tombstones", &Core::take_tombstones)
      .def("events", &Core::events)
      // A reader that outlived its core would call into nothing.
      .def("watch", &Core::watch, nb::arg("ordinal"), nb::arg("tokens_only"),
           nb::keep_alive<0, 1>())
      .def("attach_remote", &Core::attach_remote, nb::arg("fd"))
      .def("attach_remote_gets", &Core::attach_remote_gets, nb::arg("fd"))
      .def("set_remote_epoch", &Core::set_remote_epoch, nb::arg("namespace_id"),
           nb::arg("fleet_epoch"), nb::arg("clear_epoch"))
      .def("stop_remote", &Core::stop_remote, nb::arg("namespace_id"))
      .def("stop", &Core::stop);
}

}  // namespace kvw::bindings
