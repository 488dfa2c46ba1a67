// A process of its own that has the kernel put memory of files in huge pages.
//
// The kernel first drains the lists of every processor (lru_add_drain_all), and waits there for
// each to come to it while it holds the address space of whoever asked. Beside an engine that kept
// both processors of a host busy that took seconds, and a minute at worst: the daemon's disk thread
// read nothing meanwhile, and every thread stood that wanted memory. So another address space asks.
//
// The process is a copy of this one that runs no code but its own: it opens, locks and allocates
// nothing, and ends when its socket does, with this process at the latest.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "base/fd.h"

namespace kvw {

class HugePageProcess {
 public:
  // Starts it. Where the kernel refuses, every request is late.
  HugePageProcess();
  // Of one that was started already, which answers each request with a byte.
  explicit HugePageProcess(Fd socket);
  ~HugePageProcess();
  HugePageProcess(const HugePageProcess&) = delete;
  HugePageProcess& operator=(const HugePageProcess&) = delete;

  // Asks for huge pages in the memory of a file, those that are whole in it, and waits. False:
  // there was no answer within that time, or there still is none to an earlier request, which is
  // then not waited for again.
  bool take(int file, uint64_t offset, uint64_t bytes, uint64_t within_ns);

  // Tells it to end, and waits a moment for that. False: it has not, and is a child that somebody
  // has to wait for, by calling this again.
  bool end();

  pid_t pid() const { return pid_; }  // -1: it was not started here, or has ended
  // Whether this process is a forked child of the one that started it.
  bool forked() const;

 private:
  bool answered(uint64_t until_ns);

  Fd socket_;
  pid_t pid_ = -1;
  uint64_t forks_;
  uint64_t owed_ = 0;  // answers
};

}  // namespace kvw
