// The reader's end of a feed, on a thread other than the core's.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "server/server.h"
#include "warehouse/feeds.h"

namespace kvw {

// Any thread, one at a time; close() from any. The server must outlive it. What throws does so as
// Server::call(), where the core did not get to it within `patience_ms`.
class FeedReader {
 public:
  // Throws Error capacity "too_many_watchers" too.
  FeedReader(Server& server, const FeedRequest& request, int patience_ms);
  ~FeedReader() { close(); }
  FeedReader(const FeedReader&) = delete;
  FeedReader& operator=(const FeedReader&) = delete;
  // What there is to say; waits at most `timeout` for some, and has the core go on with what is
  // still to be told. Where it throws, what it took is lost: close the reader, and open another.
  FeedBatch take(std::chrono::milliseconds timeout);
  void restart();
  // Does not wait for the core, and does not throw.
  void close() { queue_->close(); }

 private:
  Server& server_;
  int patience_ms_;
  std::shared_ptr<FeedQueue> queue_;
  uint64_t id_ = 0;
};

}  // namespace kvw
