#include "io/io_engine.h"

#include <algorithm>

#include "base/error.h"
#include "io/engines.h"

namespace kvw {

const char* probe_io_engine() {
  static const bool uring = [] {
    std::string why;
    return make_uring_engine(1, why) != nullptr;
  }();
  return uring ? "io_uring" : "pread";
}

std::unique_ptr<IoEngine> make_io_engine(std::string_view name, unsigned depth) {
  depth = std::clamp(depth, 1u, kMaxIoDepth);
  if (name == "pread") return make_pread_pool(depth);
  if (name != "auto" && name != "io_uring")
    throw Error(ErrorKind::usage, "io_engine",
                "unknown I/O engine \"" + std::string(name) +
                    "\"; use \"auto\", \"io_uring\" or \"pread\"");
  std::string why;
  if (auto engine = make_uring_engine(depth, why)) return engine;
  if (name == "auto") return make_pread_pool(depth);
  throw Error(ErrorKind::storage, "io_uring_refused",
              "io_uring cannot be used here: " + why + "; use \"auto\" or \"pread\"");
}

}  // namespace kvw
