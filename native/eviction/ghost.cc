#include "eviction/ghost.h"

namespace kvw {

void Ghost::remember(uint64_t identity, size_t limit) {
  order_.push_back({identity, next_stamp_});
  stamps_[identity] = next_stamp_++;
  while (order_.size() > limit) {
    const Entry oldest = order_.front();
    order_.pop_front();
    const auto found = stamps_.find(oldest.identity);
    if (found != stamps_.end() && found->second == oldest.stamp) stamps_.erase(found);
  }
}

bool Ghost::recall(uint64_t identity) { return stamps_.erase(identity) != 0; }

}  // namespace kvw
