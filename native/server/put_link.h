// The core's end of the link with a worker of the remote tier (remote/link.h). Core thread only;
// never waits for the worker, and nothing that one says or does harms anybody else.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "remote/link.h"
#include "warehouse/warehouse.h"

namespace kvw {

class PutLink {
 public:
  // Throws Error usage "bad_link".
  PutLink(Fd fd, Warehouse& warehouse) : end_(std::move(fd)), warehouse_(warehouse) {}
  // What is under way is nobody's then: its next use offers it again.
  ~PutLink();
  PutLink(const PutLink&) = delete;
  PutLink& operator=(const PutLink&) = delete;

  int fd() const { return end_.fd(); }
  // Takes what has come, and gives what there is room for. False: the link is over.
  bool serve();
  // The latter alone.
  bool give();

 private:
  bool take(const remote::LinkBuffer& message);
  bool ready(const remote::LinkReady& message);
  bool refuse(const char* reason);

  remote::LinkEnd end_;
  Warehouse& warehouse_;
  uint32_t puts_ = 0;  // that the worker wants at a time
  uint64_t last_number_ = 0;
  std::unordered_map<uint64_t, Key> under_way_;  // by number
};

}  // namespace kvw
