// The file thread: makes and removes segment files. Each may wait for a commit of the filesystem's
// journal, under a full load of writes for hundreds of milliseconds (docs/benchmarks.md), and reads
// and writes of other segments have to go on meanwhile.
//
// start() and stop() belong to the core thread, post() to the disk thread; `ended` is called on the
// file thread, once per job. Bound: the log has one file in the making and as many to remove as it
// has segments of a size that does not fit its options.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "nvme/disk_job.h"
#include "nvme/files.h"

namespace kvw::nvme {

class FileThread {
 public:
  using Ended = std::function<void(JobPtr job, int error)>;

  FileThread(SegmentFiles& files, Ended ended) : files_(files), ended_(std::move(ended)) {}
  ~FileThread() { stop(); }

  void start();
  // Precondition: Kind::prepare or Kind::remove.
  void post(JobPtr job);
  // Does what was posted, then ends; what still waits for a descriptor ends with ECANCELED. Nothing
  // is posted afterwards.
  void stop();

 private:
  void serve();
  int run(const DiskJob& job);
  int prepare(const DiskJob& job);

  SegmentFiles& files_;
  Ended ended_;
  std::mutex mutex_;  // guards jobs_, stopping_
  std::condition_variable changed_;
  std::deque<JobPtr> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace kvw::nvme
