#include "server/get_link.h"

namespace kvw {

GetLink::~GetLink() {
  if (Fetches* fetches = warehouse_.fetches()) fetches->off();
}

bool GetLink::take(const remote::LinkBuffer& message) {
  if (const auto* gets = message.as<remote::LinkGets>()) return this->gets(*gets);
  if (const auto* state = message.as<remote::LinkState>()) return this->state(*state);
  if (const auto* got = message.as<remote::LinkGot>()) return this->got(*got);
  return refuse("message");
}

bool GetLink::gets(const remote::LinkGets& message) {
  if (message.gets == 0 || message.gets > remote::kMostGets) return refuse("message");
  gets_ = message.gets;
  return true;
}

bool GetLink::state(const remote::LinkState& message) {
  if (message.until_ns != 0 && gets_ == 0) return refuse("message");
  if (Fetches* fetches = warehouse_.fetches()) fetches->state(message);
  return true;
}

bool GetLink::got(const remote::LinkGot& message) {
  const auto run = under_way_.find(message.number);
  if (run == under_way_.end() || message.end >= static_cast<uint32_t>(remote::GetEnd::count) ||
      message.pages > run->second.pages - run->second.from)
    return refuse("message");
  warehouse_.fetches()->done(run->second, static_cast<remote::GetEnd>(message.end));
  under_way_.erase(run);
  return true;
}

bool GetLink::give() {
  Fetches* fetches = warehouse_.fetches();
  while (fetches != nullptr && under_way_.size() < gets_) {
    const auto run = fetches->next();
    if (!run) return true;
    under_way_[run->number] = *run;
    if (!end_.send(remote::link_get(*run))) return false;
  }
  return true;
}

}  // namespace kvw
