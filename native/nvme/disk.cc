#include "nvme/disk.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/quiet_thread.h"

namespace kvw::nvme {
namespace {

constexpr int kIdleWaitMs = 1000;

IoKind io_kind(DiskJob::Kind kind) {
  switch (kind) {
    case DiskJob::Kind::read:
      return IoKind::read;
    case DiskJob::Kind::write:
      return IoKind::write;
    default:
      return IoKind::sync;
  }
}

bool is_timed(const DiskJob& job) { return job.timed && job.kind != DiskJob::Kind::sync; }

}  // namespace

Disk::Disk(std::unique_ptr<IoEngine> engine, SegmentFiles& files, const Clock& clock)
    : engine_(std::move(engine)),
      files_(files),
      clock_(clock),
      event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      lane_limit_(engine_->depth() > kReservedDepth ? engine_->depth() - kReservedDepth : 1) {
  if (!event_.valid()) throw storage_error("cannot make an eventfd for the disk thread", errno);
}

Disk::~Disk() { stop(); }

void Disk::start() {
  thread_ = quiet_thread("kvw-disk", [this] { serve(); });
}

void Disk::post(JobPtr job) {
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) {
      finished_.push_back({std::move(job), ECANCELED});
      return;
    }
    first = posted_.empty();
    posted_.push_back(std::move(job));
  }
  if (first) engine_->wake();
}

void Disk::signal() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
}

bool Disk::deliver() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof count);
  std::vector<Finished> finished;
  {
    std::lock_guard lock(mutex_);
    finished.swap(finished_);
  }
  for (Finished& each : finished) each.job->done(each.error);
  return !finished.empty();
}

void Disk::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) {
    engine_->wake();
    thread_.join();
  }
}

void Disk::serve() {
  std::vector<IoDone> done;
  while (true) {
    take_posted();
    submit_waiting();
    publish_finished();
    if (ended()) break;
    engine_->wait(done, done.empty() ? kIdleWaitMs : 0);
    const size_t first = fresh_.size();
    for (const IoDone& each : done) finish(each);
    done.clear();
    if (fresh_.size() == first) continue;
    // The device must not idle while the processor digests.
    submit_waiting();
    engine_->wait(done, 0);
    for (size_t i = first; i < fresh_.size(); ++i) check(fresh_[i]);
  }
  take_posted();
  publish_finished();
}

bool Disk::ended() {
  std::lock_guard lock(mutex_);
  return stopping_ && posted_.empty() && running_.empty();
}

void Disk::check(Finished& finished) {
  if (finished.error == 0 && finished.job->check) finished.job->check();
}

void Disk::take_posted() {
  std::vector<JobPtr> posted;
  bool stopping = false;
  {
    std::lock_guard lock(mutex_);
    posted.swap(posted_);
    stopping = stopping_;
  }
  for (JobPtr& job : posted) accept(std::move(job));
  if (stopping) cancel_waiting();
}

void Disk::accept(JobPtr job) {
  switch (job->kind) {
    case DiskJob::Kind::prepare: {
      const int error = files_.prepare(job->segment, job->bytes);
      return post_back(std::move(job), error);
    }
    case DiskJob::Kind::remove: {
      const int error = files_.remove(job->segment);
      return post_back(std::move(job), error);
    }
    default:
      lane_of(*job).waiting.push_back(std::move(job));
  }
}

void Disk::cancel_waiting() {
  for (Lane* lane : {&reads_, &writes_}) {
    for (JobPtr& job : lane->waiting) post_back(std::move(job), ECANCELED);
    lane->waiting.clear();
  }
}

Disk::Lane& Disk::lane_of(const DiskJob& job) {
  return job.kind == DiskJob::Kind::read ? reads_ : writes_;
}

Disk::Lane* Disk::next_lane() {
  const bool reads = !reads_.waiting.empty() && reads_.in_flight < lane_limit_;
  const bool writes = !writes_.waiting.empty() && writes_.in_flight < lane_limit_;
  if (reads && (!writes || reads_.in_flight <= writes_.in_flight)) return &reads_;
  return writes ? &writes_ : nullptr;
}

void Disk::submit_waiting() {
  while (engine_->in_flight() < engine_->depth()) {
    Lane* lane = next_lane();
    if (lane == nullptr) return;
    submit(*lane);
  }
}

void Disk::submit(Lane& lane) {
  JobPtr job = std::move(lane.waiting.front());
  lane.waiting.pop_front();
  const int fd = files_.acquire(job->segment);
  if (fd < 0) return post_back(std::move(job), -fd);
  ++lane.in_flight;
  if (is_timed(*job)) lane.rate.began(clock_.boot_ns());
  const uint64_t id = next_id_++;
  IoOp op{io_kind(job->kind), fd, job->offset, job->pieces, id};
  running_.emplace(id, std::move(job));
  engine_->submit(std::move(op));
}

void Disk::finish(const IoDone& done) {
  auto node = running_.extract(done.user);
  JobPtr job = std::move(node.mapped());
  files_.release(job->segment);
  Lane& lane = lane_of(*job);
  --lane.in_flight;
  int error = done.result < 0 ? static_cast<int>(-done.result) : 0;
  if (is_timed(*job)) lane.rate.ended(clock_.boot_ns(), error == 0 ? job->bytes : 0);
  const bool moves = job->kind != DiskJob::Kind::sync;
  if (moves && error == 0 && static_cast<uint64_t>(done.result) != job->bytes) error = EIO;
  post_back(std::move(job), error);
}

void Disk::post_back(JobPtr job, int error) { fresh_.push_back({std::move(job), error}); }

void Disk::publish_finished() {
  if (fresh_.empty()) return;
  {
    std::lock_guard lock(mutex_);
    std::ranges::move(fresh_, std::back_inserter(finished_));
  }
  fresh_.clear();
  signal();
}

}  // namespace kvw::nvme
