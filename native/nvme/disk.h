// The disk thread: runs jobs on segment files and posts them back.
//
// Threading: post(), deliver(), signal() and stop() belong to the core thread; the disk thread owns
// the engine, the open files and every job between post() and deliver(), but for those that make or
// remove a file: the file thread has them. A job's check() runs on the disk thread, its done() on
// the core thread inside deliver().
//
// The device's queue stays full while the processor digests: between any two checks what has
// completed is taken and what waits is submitted.
//
// Neighbours: reads that wait and lie one behind the other in their segment go to the device as one
// operation, as long as every place of the lane has something to do. An operation of several that
// fails is done again read by read, so that each is judged by itself.
//
// Fairness: reads and writes wait in lanes of their own, and whenever both wait, the lane with less
// in flight goes next; neither ever takes all of the depth. A sync is a write to this rule.
// Descriptors that are short are no fault of the disk: what has none waits, in its place.
// Bounds are the callers': the log has at most depth batches, kMaxReads reads, a few relocations
// and one step of each opening and closing segment under way.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "io/io_engine.h"
#include "nvme/disk_job.h"
#include "nvme/file_thread.h"
#include "nvme/files.h"
#include "nvme/rate.h"

namespace kvw::nvme {

// Of the engine's depth, what neither reads nor writes may take from the other.
inline constexpr unsigned kReservedDepth = 2;

class Disk {
 public:
  Disk(std::unique_ptr<IoEngine> engine, SegmentFiles& files, const Clock& clock);
  ~Disk();  // stop(), and calls nobody

  void start();
  void post(std::unique_ptr<DiskJob> job);
  // Readable when deliver() has something to do, or after signal().
  int event_fd() const { return event_.get(); }
  void signal();
  // Calls done() of every finished job. True if there was any.
  bool deliver();
  // Waits for what the engine has; jobs that it does not have yet end with ECANCELED.
  // deliver() then hands out the last ones.
  void stop();

  const char* engine_name() const { return engine_->name(); }
  uint64_t read_rate() const { return reads_.rate.value(); }
  uint64_t write_rate() const { return writes_.rate.value(); }

 private:
  struct Lane {
    std::deque<JobPtr> waiting;
    unsigned in_flight = 0;
    uint64_t bytes_in_flight = 0;
    Rate rate;
  };
  // Of the device: one job, or reads that are neighbours.
  struct Operation {
    std::vector<JobPtr> jobs;
    uint64_t bytes = 0;

    const DiskJob& first() const { return *jobs.front(); }
    // Whether `job` begins where they end, and is of their kind.
    bool continues_with(const DiskJob& job) const;
    void add(JobPtr job);
  };
  struct Finished {
    JobPtr job;
    int error;
  };

  void serve();
  bool ended();
  void take_posted();
  void accept(JobPtr job);
  void give_up_idle();
  void submit_waiting();
  Lane* next_lane();
  bool may_begin(const Lane& lane) const;
  Operation take(Lane& lane) const;
  bool submit(Lane& lane);
  void collect(int timeout_ms);
  void finish(const IoDone& done);
  static void put_back(Lane& lane, Operation operation);
  int wait_ms() const;
  bool register_next();
  void check_next();
  void checked(Finished finished);
  void publish_due();
  void publish_checked();
  uint64_t group_left_ns() const;
  void tell(std::span<Finished> finished);
  void cancel_waiting();
  Lane& lane_of(const DiskJob& job);

  std::unique_ptr<IoEngine> engine_;
  SegmentFiles& files_;
  const Clock& clock_;
  Fd event_;

  std::mutex mutex_;  // guards posted_, finished_, stopping_
  std::vector<JobPtr> posted_;
  std::vector<Finished> finished_;
  bool stopping_ = false;

  // Of the disk thread.
  Lane reads_, writes_;
  std::unordered_map<uint64_t, Operation> running_;
  std::vector<IoDone> done_;
  std::deque<JobPtr> registering_;  // one between two looks at the device: each takes long
  std::deque<Finished> unchecked_;
  std::vector<Finished> checked_;  // not yet told to the core thread
  uint64_t checked_bytes_ = 0;
  bool all_grouped_ = true;  // of those that are checked
  uint64_t checked_since_ns_ = 0;
  uint64_t next_id_ = 1;
  uint64_t shortages_ = 0;  // of the files, as they were last seen
  bool starved_ = false;    // of a descriptor for what waits
  unsigned lane_limit_;

  FileThread file_thread_;
  std::thread thread_;
};

}  // namespace kvw::nvme
