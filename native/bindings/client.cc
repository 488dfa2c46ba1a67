// NativeClient, Pins and Regions.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings/bindings.h"
#include "client/client.h"

namespace kvw::bindings {

namespace {

uint64_t to_ns(double seconds) {
  return seconds <= 0 ? 0 : static_cast<uint64_t>(std::min(seconds, 1e9) * 1e9);
}

// One contiguous row a page.
class PageRows final : public Regions {
 public:
  PageRows(nb::object owner, std::byte* data, size_t count, size_t page_bytes, bool writable)
      : owner_(std::move(owner)),
        data_(data),
        count_(count),
        page_bytes_(page_bytes),
        writable_(writable) {}
  size_t count() const override { return count_; }
  size_t page_bytes() const override { return page_bytes_; }
  bool writable() const override { return writable_; }
  void pieces(size_t page, std::vector<Piece>& out) const override {
    out.assign(1, Piece{data_ + page * page_bytes_, page_bytes_});
  }

 private:
  nb::object owner_;
  std::byte* data_;
  size_t count_, page_bytes_;
  bool writable_;
};

// A paged cache: bases[j] + blocks[p][b] * strides[j], piece_bytes[j] long, block by block.
class StridedBlocks final : public Regions {
 public:
  StridedBlocks(nb::object owners, std::vector<uint64_t> bases, std::vector<int64_t> strides,
                std::vector<uint64_t> bytes, std::vector<int64_t> blocks, size_t pages)
      : owners_(std::move(owners)),
        bases_(std::move(bases)),
        strides_(std::move(strides)),
        bytes_(std::move(bytes)),
        blocks_(std::move(blocks)),
        pages_(pages),
        blocks_per_page_(pages == 0 ? 0 : blocks_.size() / pages) {
    for (const uint64_t piece : bytes_) page_bytes_ += piece;
    page_bytes_ *= blocks_per_page_;
  }
  size_t count() const override { return pages_; }
  size_t page_bytes() const override { return page_bytes_; }
  bool writable() const override { return true; }
  void pieces(size_t page, std::vector<Piece>& out) const override {
    out.clear();
    for (size_t block = 0; block < blocks_per_page_; ++block) {
      const int64_t number = blocks_[page * blocks_per_page_ + block];
      for (size_t j = 0; j < bases_.size(); ++j)
        out.push_back(
            {reinterpret_cast<std::byte*>(  // NOLINT(performance-no-int-to-ptr): numpy's addresses
                 bases_[j] + static_cast<uint64_t>(number * strides_[j])),
             bytes_[j]});
    }
  }

 private:
  nb::object owners_;
  std::vector<uint64_t> bases_;
  std::vector<int64_t> strides_;
  std::vector<uint64_t> bytes_;
  std::vector<int64_t> blocks_;
  size_t pages_, blocks_per_page_;
  size_t page_bytes_ = 0;
};

Error bad_buffer(const std::string& what) {
  return Error(ErrorKind::usage, "bad_buffer",
               what + "; pages are a C-contiguous uint8 array of shape (pages, page_bytes)");
}

std::unique_ptr<Regions> rows_of(nb::object array, bool writable) {
  nb::ndarray<nb::ro, nb::device::cpu> rows;
  if (!nb::try_cast(array, rows)) throw bad_buffer("the buffer is no array in host memory");
  if (rows.dtype() != nb::dtype<uint8_t>()) throw bad_buffer("the buffer's dtype is not uint8");
  if (rows.ndim() != 2)
    throw bad_buffer("the buffer has " + std::to_string(rows.ndim()) + " dimensions");
  const size_t count = rows.shape(0), bytes = rows.shape(1);
  const bool contiguous = (bytes <= 1 || rows.stride(1) == 1) &&
                          (count <= 1 || rows.stride(0) == static_cast<int64_t>(bytes));
  if (!contiguous) throw bad_buffer("the buffer is not contiguous");
  if (writable) {
    nb::ndarray<nb::device::cpu> probe;
    if (!nb::try_cast(array, probe)) throw bad_buffer("the buffer to load into is read-only");
  }
  auto* data = const_cast<std::byte*>(static_cast<const std::byte*>(rows.data()));
  return std::make_unique<PageRows>(std::move(array), data, count, bytes, writable);
}

template <class T>
using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;

std::unique_ptr<Regions> strided_of(nb::object owners, const Array<uint64_t>& bases,
                                    const Array<int64_t>& strides, const Array<uint64_t>& bytes,
                                    const Array<int64_t>& blocks) {
  const size_t pieces = bases.size();
  if (bases.ndim() != 1 || strides.size() != pieces || bytes.size() != pieces || blocks.ndim() != 2)
    throw Error(ErrorKind::usage, "bad_regions",
                "bases, strides and piece_bytes must be one-dimensional and equally long, blocks "
                "(pages, blocks per page)");
  return std::make_unique<StridedBlocks>(
      std::move(owners), std::vector<uint64_t>(bases.data(), bases.data() + pieces),
      std::vector<int64_t>(strides.data(), strides.data() + pieces),
      std::vector<uint64_t>(bytes.data(), bytes.data() + pieces),
      std::vector<int64_t>(blocks.data(), blocks.data() + blocks.size()), blocks.shape(0));
}

// Tokens or keys, held for the length of a call that runs without the GIL. `keys` is a list of
// bytes, or a tuple (keys of all runs, pages, positions and parents by run).
class Pages {
 public:
  Pages(nb::handle tokens, nb::handle keys) {
    if (tokens.is_none() == keys.is_none())
      throw Error(ErrorKind::usage, "bad_tokens", "give either tokens or keys");
    if (!tokens.is_none())
      tokens_.emplace(tokens);
    else if (nb::isinstance<nb::tuple>(keys))
      hold_runs(nb::borrow<nb::tuple>(keys));
    else
      hold(keys);
  }
  Prompt prompt() const {
    if (tokens_) return Prompt::of_tokens(tokens_->view());
    return runs_ ? Prompt::of_runs(spans_, *runs_) : Prompt::of_keys(spans_);
  }

 private:
  void hold(nb::handle keys) {
    const size_t count = nb::len(keys);
    held_.reserve(count);
    spans_.reserve(count);
    for (nb::handle item : nb::cast<nb::sequence>(keys)) spans_.push_back(held(item));
  }

  void hold_runs(const nb::tuple& runs) {
    if (runs.size() != 4)
      throw Error(ErrorKind::usage, "bad_runs", "runs are (keys, pages, positions, parents)");
    hold(runs[0]);
    const auto pages = nb::cast<std::vector<size_t>>(runs[1]);
    const auto positions = nb::cast<std::vector<uint32_t>>(runs[2]);
    const auto parents = nb::cast<nb::list>(runs[3]);
    if (positions.size() != pages.size() || parents.size() != pages.size())
      throw Error(ErrorKind::usage, "bad_runs", "each run has its pages, position and parent");
    runs_.emplace();
    runs_->reserve(pages.size());
    for (size_t i = 0; i < pages.size(); ++i) {
      const nb::handle parent = parents[i];
      runs_->push_back(
          {pages[i], positions[i], parent.is_none() ? std::span<const std::byte>() : held(parent)});
    }
  }

  std::span<const std::byte> held(nb::handle item) {
    if (!nb::isinstance<nb::bytes>(item))
      throw Error(ErrorKind::usage, "bad_keys", "keys must be bytes objects");
    const nb::bytes& key = held_.emplace_back(nb::borrow<nb::bytes>(item));
    if (key.size() == 0 || key.size() > kMaxEngineKeyBytes)
      throw Error(ErrorKind::usage, "bad_keys",
                  "key " + std::to_string(held_.size() - 1) + " has " + std::to_string(key.size()) +
                      " bytes; keys have 1 to " + std::to_string(kMaxEngineKeyBytes));
    return {static_cast<const std::byte*>(key.data()), key.size()};
  }

  std::optional<Tokens> tokens_;
  std::vector<nb::bytes> held_;
  std::vector<std::span<const std::byte>> spans_;
  std::optional<std::vector<KeyRun>> runs_;
};

nb::dict dict_of(const std::map<std::string, uint64_t>& counts) {
  nb::dict made;
  for (const auto& [name, count] : counts) made[name.c_str()] = count;
  return made;
}

nb::tuple lookup(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  LookupResult result;
  {
    nb::gil_scoped_release release;
    Prompt prompt = pages.prompt();
    result = client.lookup(space, prompt);
  }
  return nb::make_tuple(result.pages, result.dram, result.nvme);
}

nb::object tiers(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  std::vector<PageTier> found;
  {
    nb::gil_scoped_release release;
    Prompt prompt = pages.prompt();
    found = client.tiers(space, prompt);
  }
  auto* kept = new std::vector<PageTier>(std::move(found));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<PageTier>*>(p); });
  auto* numbers = reinterpret_cast<uint8_t*>(kept->data());
  return nb::cast(nb::ndarray<nb::numpy, uint8_t>(numbers, {kept->size()}, owner));
}

nb::tuple load(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys,
               size_t first, const Regions& regions, uint32_t shard, double timeout_s) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  LoadReport report;
  {
    nb::gil_scoped_release release;
    Prompt prompt = pages.prompt();
    report = client.load(space, prompt, first, regions, shard, to_ns(timeout_s));
  }
  return nb::make_tuple(report.pages, dict_of(report.reasons));
}

nb::tuple store(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys,
                size_t first, const Regions& regions, uint32_t shard, double timeout_s) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  StoreReport report;
  {
    nb::gil_scoped_release release;
    Prompt prompt = pages.prompt();
    report = client.store(space, prompt, first, regions, shard, to_ns(timeout_s));
  }
  return nb::make_tuple(report.stored, report.already, dict_of(report.dropped));
}

std::unique_ptr<Pins> pin(Client& client, const nb::bytes& id, nb::handle tokens, nb::handle keys,
                          size_t first, double timeout_s) {
  const Key space = key_from(id);
  const Pages pages(tokens, keys);
  nb::gil_scoped_release release;
  Prompt prompt = pages.prompt();
  return client.pin(space, prompt, first, to_ns(timeout_s));
}

nb::dict control_of(Client& client) {
  const auto view = client.view();
  const ControlPage& page = view->control();
  nb::dict made;
  const auto put = [&made](const char* name, const HotWord& word) {
    made[name] = word.value.load(std::memory_order_acquire);
  };
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
  nb::class_<Regions>(m, "Regions")
      .def_static("pages", &rows_of, arg("array"), arg("writable"))
      .def_static("strided", &strided_of, arg("owners"), arg("bases"), arg("strides"),
                  arg("piece_bytes"), arg("blocks"))
      .def_prop_ro("count", &Regions::count)
      .def_prop_ro("page_bytes", &Regions::page_bytes);
  nb::class_<Pins>(m, "Pins").def_prop_ro("pages", &Pins::pages).def("release", &Pins::release);
  nb::class_<Client>(m, "NativeClient")
      .def(
          "__init__",
          [](Client* self, const std::string& path, bool verify_always, double timeout_s) {
            nb::gil_scoped_release release;
            new (self) Client(ClientOptions{path, verify_always, false, to_ns(timeout_s)});
          },
          arg("socket_path"), arg("verify_always"), arg("timeout_s"))
      .def("close", &Client::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("connected", &Client::connected, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("session_id", &Client::session_id)
      .def_prop_ro("incarnation", [](Client& client) { return client.view()->incarnation(); })
      .def("has_namespace",
           [](Client& client, const nb::bytes& id) {
             const Key space = key_from(id);
             nb::gil_scoped_release release;
             return client.has_namespace(space);
           })
      .def("lookup", &lookup, arg("id"), arg("tokens").none(), arg("keys").none())
      .def("tiers", &tiers, arg("id"), arg("tokens").none(), arg("keys").none())
      .def("load", &load, arg("id"), arg("tokens").none(), arg("keys").none(), arg("first"),
           arg("regions"), arg("shard"), arg("timeout_s"))
      .def("store", &store, arg("id"), arg("tokens").none(), arg("keys").none(), arg("first"),
           arg("regions"), arg("shard"), arg("timeout_s"))
      .def("pin", &pin, arg("id"), arg("tokens").none(), arg("keys").none(), arg("first"),
           arg("timeout_s"), nb::keep_alive<0, 1>())
      .def("control", &control_of)
      .def("counters", &counters_of);
}

}  // namespace kvw::bindings
