// The reader's end of a feed.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "bindings/bindings.h"
#include "server/server.h"
#include "warehouse/feeds.h"

namespace kvw::bindings {

// Any thread, one at a time; close() from any. The server must outlive it.
class FeedReader {
 public:
  FeedReader(Server& server, const FeedRequest& request);
  ~FeedReader();
  FeedReader(const FeedReader&) = delete;
  FeedReader& operator=(const FeedReader&) = delete;
  // {"items": [...], "lost": bool, "closed": bool}; waits at most timeout_s for something to say,
  // and has the core go on with what is still to be told.
  nb::dict take(double timeout_s);
  void restart();
  void close();

 private:
  Server& server_;
  std::shared_ptr<FeedQueue> queue_;
  uint64_t id_ = 0;
  std::atomic<bool> closed_{false};
};

}  // namespace kvw::bindings
