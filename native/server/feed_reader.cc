#include "server/feed_reader.h"

namespace kvw {

FeedReader::FeedReader(Server& server, const FeedRequest& request, int patience_ms)
    : server_(server),
      patience_ms_(patience_ms),
      queue_(std::make_shared<FeedQueue>(Feeds::kQueueBytes)) {
  try {
    id_ = server_.call([request, queue = queue_](
                           Warehouse& warehouse) { return warehouse.feeds().open(request, queue); },
                       patience_ms_);
  } catch (...) {
    queue_->close();  // a core that was busy opens it yet, and is to let it go again
    throw;
  }
}

FeedBatch FeedReader::take(std::chrono::milliseconds timeout) {
  FeedBatch batch = queue_->take(timeout);
  if (batch.more && !batch.closed) {
    server_.call(
        [id = id_](Warehouse& warehouse) {
          warehouse.feeds().advance(id);
          return 0;
        },
        patience_ms_);
  }
  return batch;
}

void FeedReader::restart() {
  server_.call(
      [id = id_](Warehouse& warehouse) {
        warehouse.feeds().restart(id);
        return 0;
      },
      patience_ms_);
}

}  // namespace kvw
