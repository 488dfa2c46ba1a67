// The engines that make_io_engine() chooses from.
#pragma once

#include <memory>

#include "io/io_engine.h"

namespace kvw {

inline constexpr unsigned kMaxIoDepth = 256;

// A bounded pool of threads that call preadv, pwritev and fdatasync.
std::unique_ptr<IoEngine> make_pread_pool(unsigned depth);

// Null when io_uring is refused here or not compiled in; `why` then says so.
std::unique_ptr<IoEngine> make_uring_engine(unsigned depth, std::string& why);

}  // namespace kvw
