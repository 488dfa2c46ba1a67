// The core's end of a link with a worker of the remote tier (remote/link.h): what the links for
// puts and for gets do alike. Core thread only; never waits for the worker, and nothing that one
// says or does harms anybody else.
#pragma once

#include "remote/link.h"
#include "warehouse/warehouse.h"

namespace kvw {

class CoreLink {
 public:
  // Throws Error usage "bad_link".
  CoreLink(Fd fd, Warehouse& warehouse) : end_(std::move(fd)), warehouse_(warehouse) {}
  virtual ~CoreLink() = default;
  CoreLink(const CoreLink&) = delete;
  CoreLink& operator=(const CoreLink&) = delete;

  int fd() const { return end_.fd(); }
  // Takes what has come, and gives what there is room for. False: the link is over.
  bool serve();
  // The latter alone.
  virtual bool give() = 0;

 protected:
  virtual bool take(const remote::LinkBuffer& message) = 0;
  // The worker has said what it cannot mean.
  bool refuse(const char* reason);

  remote::LinkEnd end_;
  Warehouse& warehouse_;
};

}  // namespace kvw
