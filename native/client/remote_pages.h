// Which pages of a call the remote store probably has, by the presence filter alone: behind the
// first page that no tier here has, run by run of pages that are one object each, until one is
// missing. A prompt that ends inside a run does not have its last key, by which it is named: those
// pages are missing. Nothing is sure before a load has them. Belongs to one call.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>

#include "client/call.h"

namespace kvw {

class RemotePages {
 public:
  explicit RemotePages(const ClientCall& call) : call_(call) {}

  // Behind the last page that may be fetched from `gap` on, the first page of its chain that no
  // tier here has; `gap` itself where there is none.
  size_t reach(size_t gap);
  // The object that a page is in, wanted from that page on; also one that the filter has lost since
  // this call first found it. Nothing: the store does not seem to have it. Whether the store is
  // read now is another question.
  std::optional<FetchRun> run(size_t page);
  // The page behind that object.
  size_t end_of(size_t page) const { return last_of(page) + 1; }
  // Whether the store is read now, for this namespace.
  bool served() const;
  uint32_t pages() const { return pages_; }  // of an object, once run() has found one

 private:
  bool look();
  size_t last_of(size_t page) const;

  const ClientCall& call_;
  bool looked_ = false;
  std::shared_ptr<const PresenceReader> filter_;
  std::optional<Presence::Look> look_;  // nothing: there is no filter, or nothing of the namespace
  uint64_t epoch_ = 0;                  // that it looks for, + 1
  uint32_t pages_ = 0;
  std::unordered_map<size_t, uint32_t> found_;  // days of objects, by their last page
};

}  // namespace kvw
