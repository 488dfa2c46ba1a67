// One operation after another, on an engine and on a file that no other test can see.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "io/io_engine.h"
#include "tests/check.h"

namespace kvw {

// Without a name: it goes with its descriptor.
inline Fd temporary_file() {
  char name[] = "/tmp/kvw-io-XXXXXX";
  Fd fd(::mkstemp(name));
  ::unlink(name);
  return fd;
}

// Of everything in flight; it ends after a bounded number of waits.
inline std::vector<IoDone> finish_all(IoEngine& engine) {
  std::vector<IoDone> done;
  for (int round = 0; engine.in_flight() > 0; ++round) {
    CHECK(round < 10000);
    engine.wait(done, 1000);
  }
  return done;
}

// Bytes that were moved, or -errno. Nothing else is in flight.
inline int64_t run_one(IoEngine& engine, IoOp op) {
  engine.submit(std::move(op));
  return finish_all(engine).at(0).result;
}

}  // namespace kvw
