// Feed: the reader's end of a feed.
#include <algorithm>
#include <chrono>

#include "bindings/bindings.h"
#include "server/feed_reader.h"

namespace kvw::bindings {

namespace {

const char* kind_name_of(FeedKind kind) {
  static constexpr const char* kNames[] = {"cleared", "stored", "removed", "synced"};
  return kNames[static_cast<size_t>(kind)];
}

nb::list items_of(const FeedBatch& batch) {
  nb::list items;
  size_t place = 0;
  for (const FeedItem& item : batch.items) {
    const nb::bytes witness(batch.witnesses.data() + place, item.witness_bytes);
    place += item.witness_bytes;
    const bool has_parent = item.kind == FeedKind::stored && item.position > 0;
    items.append(nb::make_tuple(kind_name_of(item.kind), item.tiers, bytes_of(item.namespace_id),
                                item.position, bytes_of(item.key),
                                has_parent ? bytes_of(item.parent) : nb::bytes("", 0),
                                item.witness_kind == WitnessKind::tokens, witness));
  }
  return items;
}

// {"items": [...], "lost": bool, "closed": bool}
nb::dict take(FeedReader& reader, double timeout_s) {
  const double ms = std::clamp(timeout_s, 0.0, 3600.0) * 1000;
  FeedBatch batch;
  {
    WithoutGil release;
    batch = reader.take(std::chrono::milliseconds(static_cast<int64_t>(ms)));
  }
  nb::dict made;
  made["items"] = items_of(batch);
  made["lost"] = batch.lost;
  made["closed"] = batch.closed;
  return made;
}

}  // namespace

void bind_feed(nb::module_& m) {
  nb::class_<FeedReader>(m, "Feed")
      .def("take", &take, nb::arg("timeout_s"))
      .def("restart", &FeedReader::restart, nb::call_guard<WithoutGil>())
      .def("close", &FeedReader::close);
}

}  // namespace kvw::bindings
