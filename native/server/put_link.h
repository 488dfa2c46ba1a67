// The core's end of the link on which a worker of the remote tier is given runs to put.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "server/core_link.h"

namespace kvw {

class PutLink final : public CoreLink {
 public:
  using CoreLink::CoreLink;
  // What is under way is nobody's then: its next use offers it again.
  ~PutLink() override;

  bool give() override;

 private:
  bool take(const remote::LinkBuffer& message) override;
  bool ready(const remote::LinkReady& message);

  uint32_t puts_ = 0;  // that the worker wants at a time
  uint64_t last_number_ = 0;
  std::unordered_map<uint64_t, Key> under_way_;  // by number
};

}  // namespace kvw
