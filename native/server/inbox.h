// What the core gives away once, such as lines for the log, on its way to whoever asked for it and
// may have given up by then.
#pragma once

#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "server/server.h"

namespace kvw {

// Thread-safe. Holds what those left that gave up, until somebody takes it.
template <class Item>
class Inbox {
 public:
  // All that is kept, once `take` has run on the core thread and what it returned is there too.
  // Throws as Server::call(); what `take` comes to return after that is kept.
  template <class Take>
  std::vector<Item> take(Server& server, Take take, int timeout_ms) {
    server.call(
        [kept = kept_, take = std::move(take)](Warehouse& warehouse) {
          kept->add(take(warehouse));
          return 0;
        },
        timeout_ms);
    return rest();
  }
  // All that is kept.
  std::vector<Item> rest() { return kept_->all(); }

 private:
  // Of the commands too, which may run when nobody waits for them.
  class Kept {
   public:
    void add(std::vector<Item> items) {
      const std::lock_guard lock(mutex_);
      items_.insert(items_.end(), std::make_move_iterator(items.begin()),
                    std::make_move_iterator(items.end()));
    }
    std::vector<Item> all() {
      const std::lock_guard lock(mutex_);
      return std::exchange(items_, {});
    }

   private:
    std::mutex mutex_;
    std::vector<Item> items_;
  };

  std::shared_ptr<Kept> kept_ = std::make_shared<Kept>();
};

}  // namespace kvw
