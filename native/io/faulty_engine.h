// A double for tests, around a real engine: fails chosen operations, tears writes, and keeps a
// journal of all writes and syncs from which a crash at any moment can be replayed.
// Faults is thread-safe and shared between the test and the engine; FaultyEngine is an IoEngine.
#pragma once

#include <cstddef>
#include <mutex>

#include "io/io_engine.h"

namespace kvw {

// Which operations a fault strikes: of a kind, on paths that contain `path`, after `skip` others.
struct Fault {
  IoKind kind = IoKind::write;
  std::string path;  // empty: any
  uint64_t skip = 0;
  uint64_t count = UINT64_MAX;  // how many are struck
  int error = 0;                // errno to report; 0 with tear_bytes: reports success
  int64_t tear_bytes = -1;      // writes: this much reaches the file all the same; -1: nothing
  uint64_t begin = 0, end = UINT64_MAX;  // bytes of the file; all others are spared
};

// A moment of the journal: a write or sync was submitted, or has completed well.
struct IoMoment {
  IoKind kind;
  bool completed;
  uint64_t op;  // joins submission and completion
  std::string path;
  uint64_t offset;
  std::vector<std::byte> data;  // of a submitted write
};

class Faults {
 public:
  void add(Fault fault);
  void clear();
  uint64_t struck() const;

  void keep_journal();
  std::vector<IoMoment> journal() const;
  size_t journal_size() const;

  // While held, nothing completes: operations pile up as on a stalled device.
  void hold(bool held);
  // While held, reads do not complete, and other operations pass them.
  void hold_reads(bool held);
  bool held(IoKind kind) const;
  // As if the device stalled behind the next `reads` reads, in the order of their submission, until
  // the next call; UINT64_MAX: it goes on.
  void stall_after(uint64_t reads);

 private:
  friend class FaultyEngine;
  // The fault that strikes this operation, with its count used up; error and tear both unset if
  // none.
  Fault strike(const IoOp& op, const std::string& path);
  void note(IoMoment moment);
  uint64_t number_read();
  bool stalls(uint64_t read) const;

  mutable std::mutex mutex_;
  std::vector<Fault> faults_;
  std::vector<IoMoment> journal_;
  bool journaling_ = false, held_ = false, reads_held_ = false;
  uint64_t struck_ = 0;
  uint64_t reads_ = 0, reads_allowed_ = UINT64_MAX;
};

std::unique_ptr<IoEngine> make_faulty_engine(std::unique_ptr<IoEngine> inner,
                                             std::shared_ptr<Faults> faults);

}  // namespace kvw
