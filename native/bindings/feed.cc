#include "bindings/feed.h"

#include <algorithm>
#include <chrono>

namespace kvw::bindings {

namespace {

constexpr int kPatienceMs = 10000;

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

}  // namespace

FeedReader::FeedReader(Server& server, const FeedRequest& request)
    : server_(server), queue_(std::make_shared<FeedQueue>(Feeds::kQueueBytes)) {
  WithoutGil release;
  id_ = server_.call([request, queue = queue_](
                         Warehouse& warehouse) { return warehouse.feeds().open(request, queue); },
                     kPatienceMs);
}

FeedReader::~FeedReader() {
  try {
    close();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
    // The core is too busy to hear of it: the feed fills up, falls silent, and costs its memory.
  }
}

nb::dict FeedReader::take(double timeout_s) {
  FeedBatch batch;
  {
    WithoutGil release;
    const double ms = std::clamp(timeout_s, 0.0, 3600.0) * 1000;
    batch = queue_->take(std::chrono::milliseconds(static_cast<int64_t>(ms)));
    if (batch.more && !batch.closed) {
      server_.call(
          [id = id_](Warehouse& warehouse) {
            warehouse.feeds().advance(id);
            return 0;
          },
          kPatienceMs);
    }
  }
  nb::dict made;
  made["items"] = items_of(batch);
  made["lost"] = batch.lost;
  made["closed"] = batch.closed;
  return made;
}

void FeedReader::restart() {
  WithoutGil release;
  server_.call(
      [id = id_](Warehouse& warehouse) {
        warehouse.feeds().restart(id);
        return 0;
      },
      kPatienceMs);
}

void FeedReader::close() {
  if (closed_.exchange(true)) return;
  WithoutGil release;
  queue_->close();
  try {
    server_.call(
        [id = id_](Warehouse& warehouse) {
          warehouse.feeds().close(id);
          return 0;
        },
        kPatienceMs);
  } catch (const Error& error) {
    if (error.code() != std::string("stopped")) throw;  // it went with the core
  }
}

void bind_feed(nb::module_& m) {
  nb::class_<FeedReader>(m, "Feed")
      .def("take", &FeedReader::take, nb::arg("timeout_s"))
      .def("restart", &FeedReader::restart)
      .def("close", &FeedReader::close);
}

}  // namespace kvw::bindings
