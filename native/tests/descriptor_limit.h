// The soft limit of this process's descriptors, lowered while a test looks.
#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/check.h"

namespace kvw {

class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t soft) {
    CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit now = before_;
    now.rlim_cur = soft;
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &now), 0);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

  // With it as the limit there is room for `spare` more.
  static rlim_t at_present(unsigned spare) {
    const int lowest = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::close(lowest);
    return static_cast<rlim_t>(lowest) + spare;
  }

 private:
  rlimit before_{};
};

}  // namespace kvw
