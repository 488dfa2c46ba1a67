#include "server/put_link.h"

namespace kvw {

PutLink::~PutLink() {
  Puts* puts = warehouse_.puts();
  if (puts == nullptr) return;
  for (const auto& [number, key] : under_way_) puts->done(key);
  puts->close_filter();
}

bool PutLink::take(const remote::LinkBuffer& message) {
  if (const auto* ready = message.as<remote::LinkReady>()) return this->ready(*ready);
  const auto* done = message.as<remote::LinkDone>();
  if (done == nullptr) return refuse("message");
  const auto run = under_way_.find(done->number);
  if (run == under_way_.end()) return refuse("message");
  warehouse_.puts()->done(run->second);
  under_way_.erase(run);
  return true;
}

bool PutLink::ready(const remote::LinkReady& message) {
  if (message.puts == 0 || message.puts > remote::kMostPuts) return refuse("message");
  Puts* puts = warehouse_.puts();
  if (puts == nullptr) return true;  // nothing is written: there will be no runs
  if (!puts->open_filter()) return refuse("filter");
  puts_ = message.puts;
  return true;
}

bool PutLink::give() {
  Puts* puts = warehouse_.puts();
  while (under_way_.size() < puts_) {
    const auto run = puts->next();
    if (!run) return true;
    under_way_[++last_number_] = run->key;
    if (!end_.send(remote::link_run(*run, last_number_))) return false;
  }
  return true;
}

}  // namespace kvw
