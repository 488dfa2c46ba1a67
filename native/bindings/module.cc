// The Python face of the core: conversions, the GIL, and nothing else.
// kvwarehouse/core/_native.pyi documents every name.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "bindings/bindings.h"
#include "chain/chain.h"
#include "copy/copy.h"
#include "digest/digest.h"
#include "io/io_engine.h"

namespace kvw::bindings {

namespace {

// kvwarehouse.errors decides which class an Error becomes. In plain C: no frame of C++ is between
// the interpreter, where this may wait for the GIL, and what holds the thread then.
void raise(const Error& error) {
  StaysIfUnwound call;
  PyObject* errors = PyImport_ImportModule("kvwarehouse.errors");
  PyObject* made = errors
                       ? PyObject_CallMethod(errors, "from_native", "sss", kind_name(error.kind()),
                                             error.code().c_str(), error.what())
                       : nullptr;
  if (made) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made)), made);
  Py_XDECREF(made);
  Py_XDECREF(errors);
  call.returned();
}

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::object chain_keys_of(const nb::bytes& secret, const nb::bytes& id, nb::handle tokens,
                         uint32_t page_tokens) {
  const Secret key = secret_from(secret);
  if (page_tokens == 0)
    throw Error(ErrorKind::usage, "bad_page_tokens", "page_tokens must be at least 1");
  const Tokens held(tokens);
  const size_t pages = held.view().size() / page_tokens;
  auto* keys = new std::vector<Key>(pages);
  nb::capsule owner(keys, [](void* p) noexcept { delete static_cast<std::vector<Key>*>(p); });
  chain_keys(key, root_key(key, key_from(id)), held.view(), page_tokens, *keys);
  return nb::cast(nb::ndarray<nb::numpy, uint8_t>(keys->data(), {pages, 16}, owner));
}

}  // namespace

Key key_from(const nb::bytes& bytes) {
  Key key;
  if (bytes.size() != sizeof key)
    throw Error(ErrorKind::usage, "bad_id",
                "an id has 16 bytes, got " + std::to_string(bytes.size()));
  std::memcpy(&key, bytes.data(), sizeof key);
  return key;
}

nb::bytes bytes_of(const Key& key) { return nb::bytes(&key, sizeof key); }

Secret secret_from(const nb::bytes& bytes) {
  if (bytes.size() != kSecretBytes)
    throw Error(ErrorKind::usage, "bad_secret",
                "a secret has " + std::to_string(kSecretBytes) + " bytes, got " +
                    std::to_string(bytes.size()));
  return Secret(static_cast<const std::byte*>(bytes.data()), kSecretBytes);
}

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      raise(error);
    }
  });
  m.attr("VERSION") = KVW_VERSION;
  m.attr("SECRET_BYTES") = kSecretBytes;
  m.attr("MAX_SHARDS") = kMaxShards;
  m.attr("MAX_PAGE_TOKENS") = kMaxPageTokens;
  m.attr("MAX_NAMESPACES") = kMaxNamespaces;
  m.attr("MAX_ENGINE_KEY_BYTES") = kMaxEngineKeyBytes;
  m.def("copy_path", [] { return std::string(copy_path_name()); });
  m.def("io_engine_probe", [] { return std::string(make_io_engine("auto", 1)->name()); });
  m.def("page_digest", [](const ReadBytes& data, const nb::bytes& key, uint32_t shard) {
    const Key own = key_from(key);
    const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
    const size_t size = data.size();
    WithoutGil release;
    return page_digest(bytes, size, own, shard);
  });
  m.def("copy_streaming", [](const Bytes& to, const ReadBytes& from) {
    if (to.size() != from.size())
      throw Error(ErrorKind::usage, "bad_size", "both buffers must have the same size");
    auto* target = reinterpret_cast<std::byte*>(to.data());
    const auto* source = reinterpret_cast<const std::byte*>(from.data());
    const size_t size = to.size();
    WithoutGil release;
    copy_streaming(target, source, size);
  });
  m.def("chain_keys", &chain_keys_of);
  bind_feed(m);
  bind_core(m);
  bind_regions(m);
  bind_client(m);
  bind_gpu(m);
  bind_extents(m);
  bind_replay(m);
  bind_objects(m);
  bind_bench(m);
  bind_remote(m);
}

}  // namespace kvw::bindings
