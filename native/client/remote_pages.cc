#include "client/remote_pages.h"

#include <algorithm>

#include "remote/get_link.h"
#include "remote/object.h"

namespace kvw {

namespace {

constexpr size_t kRunsAhead = 16;  // that are prefetched, at most

}  // namespace

size_t RemotePages::reach(size_t gap) {
  if (!look() || !served()) return gap;
  Prompt& prompt = call_.prompt;
  const size_t end = prompt.run_end(gap), first = last_of(gap);
  if (first >= end) return gap;
  // What a call begins with in the middle of a prompt hangs on a page that it does not ask for. An
  // object of that one's name says that the store has the chain before as well.
  if (!call_.follows_stored(gap) &&
      !(first - gap + 1 == pages_ && look_->day_of(prompt.parent(gap))))
    return gap;
  const auto last = [&](size_t run) { return first + run * pages_; };
  size_t runs = 0;
  // Keys are made as far as somebody asks: as far ahead again as was found.
  for (size_t prefetched = 0; last(runs) < end; ++runs) {
    const size_t ahead = runs + std::min(runs, kRunsAhead);
    for (; prefetched <= ahead && last(prefetched) < end; ++prefetched)
      look_->prefetch(prompt.key(last(prefetched)));
    if (!look_->day_of(prompt.key(last(runs)))) break;
  }
  return runs == 0 ? gap : last(runs - 1) + 1;
}

std::optional<FetchRun> RemotePages::run(size_t page) {
  if (!look()) return std::nullopt;
  const size_t last = last_of(page);
  if (last >= call_.prompt.run_end(page)) return std::nullopt;
  const Key& key = call_.prompt.key(last);
  auto day = look_->day_of(key);
  if (day)
    found_[last] = *day;
  else if (const auto found = found_.find(last); found != found_.end())
    day = found->second;  // taken out since: the daemon knows why
  if (!day) return std::nullopt;
  const uint32_t from = call_.prompt.position(page) % pages_;
  return FetchRun{key, *day, call_.prompt.position(page) - from, pages_, from, 0};
}

bool RemotePages::served() const {
  const ControlPage& control = call_.view().control();
  const uint64_t beat = control.heartbeat_ns.value.load(std::memory_order_relaxed);
  return control.remote.serving.value.load(std::memory_order_acquire) == 1 &&
         control.namespaces[call_.row.ordinal].remote_epoch.load(std::memory_order_acquire) ==
             epoch_ &&
         now_ns() < beat + remote::kStateOldNs;  // a daemon that died serves nothing
}

bool RemotePages::look() {
  if (looked_) return look_.has_value();
  looked_ = true;
  filter_ = call_.daemon->remote.mapped();
  pages_ = remote::object_pages(call_.shape());
  epoch_ = call_.view().control().namespaces[call_.row.ordinal].remote_epoch.load(
      std::memory_order_acquire);
  if (filter_ != nullptr && pages_ != 0 && epoch_ != 0) look_ = filter_->table().look(epoch_ - 1);
  return look_.has_value();
}

// By which the object is named that has the page.
size_t RemotePages::last_of(size_t page) const {
  return page + pages_ - 1 - call_.prompt.position(page) % pages_;
}

}  // namespace kvw
