// What the parts of the log share. Core thread only, but for what disk.h says.
#pragma once

#include "nvme/disk.h"
#include "nvme/files.h"
#include "nvme/health.h"
#include "nvme/log.h"
#include "nvme/segment.h"
#include "nvme/spare_buffers.h"

namespace kvw::nvme {

struct LogContext {
  LogContext(const LogOptions& log_options, LogHost& log_host, const Clock& log_clock)
      : options(log_options),
        host(log_host),
        clock(log_clock),
        epoch(log_options.epoch_now),
        files(log_options.directory, log_options.allocate),
        disk(make_engine(), files, log_clock),
        health(log_host, log_clock, log_options.retry_interval_ns) {}

  // Two deeper than asked: reads alone or writes alone have the whole depth, and what arrives of
  // the other kind need not wait for one of them.
  std::unique_ptr<IoEngine> make_engine() const {
    return options.make_engine ? options.make_engine()
                               : make_io_engine(options.io_engine, options.depth + kReservedDepth);
  }

  const LogOptions options;
  LogHost& host;
  const Clock& clock;
  uint64_t epoch;
  SegmentFiles files;
  Disk disk;
  SegmentTable table;
  uint64_t last_position = 0;  // of a record that has a place; see Log
  SpareBuffers headers;        // of reads
  // A start had to make files fewer or shorter; until there are spare segments, so does reclaim.
  bool shrinking = false;
  uint64_t untimed_bytes = 0;  // of payloads asked for since one whose digest is timed
  Health health;
  LogStats stats;  // the counters; the rest is filled in by Log::stats()
};

}  // namespace kvw::nvme
