// An object of the remote tier, made of pages in DRAM: Client::pack_run(). Plain value.
#pragma once

#include <memory>
#include <string>

#include "nvme/aligned_buffer.h"

namespace kvw {

struct PackedRun {
  // Empty: the object is whole. Else "not_in_dram", "cleared", "damaged", "pin_budget",
  // "unknown_namespace", or a fault's name (remote/object.h): what its pages are not.
  std::string reason;
  std::shared_ptr<nvme::AlignedBuffer> object;  // null: there is none
};

}  // namespace kvw
