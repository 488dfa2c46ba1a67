// The core's end of the link on which a worker of the remote tier is given runs to get
// (remote/get_link.h).
#pragma once

#include <cstdint>
#include <unordered_map>

#include "remote/get_link.h"
#include "server/core_link.h"

namespace kvw {

class GetLink final : public CoreLink {
 public:
  using CoreLink::CoreLink;
  // Nothing is served without a worker: who waits is told.
  ~GetLink() override;

  bool give() override;

 private:
  bool take(const remote::LinkBuffer& message) override;
  bool gets(const remote::LinkGets& message);
  bool state(const remote::LinkState& message);
  bool got(const remote::LinkGot& message);

  uint32_t gets_ = 0;  // that the worker wants at a time; 0: it has not said so yet
  std::unordered_map<uint64_t, remote::RunToGet> under_way_;  // by number
};

}  // namespace kvw
