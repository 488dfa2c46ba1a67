#include "nvme/disk.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/start_thread.h"

namespace kvw::nvme {
namespace {

constexpr int kIdleWaitMs = 1000;
// Of a lane, before another begins: what is under way together is there together, so the first of
// many large pages would be usable no sooner than the eighth. A disk of 7 GB/s has 4 ms to do with
// as much.
constexpr uint64_t kBytesInFlight = 32ull << 20;
constexpr unsigned kUnderWay = 2;  // of any size: one that hangs does not stop all others
// Of reads that go as one: their pages and headers, which fit the bounce area of registered memory
// (io/registered_memory.h). Beside digests, of the processor a GB where it was measured: pages of
// 256 KiB 71 ms alone and 42 so, of 1 MiB 30 and 20, of 2 MiB 20 and 16; 8 MiB at a time gained one
// more, and the first page of a load comes later.
constexpr size_t kNeighbours = 8;
constexpr uint64_t kNeighbourBytes = (4ull << 20) + kNeighbours * kBlockBytes;
// While more is to be checked, the core thread hears of what was in pieces of this size: often
// enough for who waits for the first page, seldom enough that waking it costs little.
constexpr uint64_t kTellBytes = 1ull << 20;
// Of grouped reads, while more are under way: a wake-up of the core thread took 34 us of the
// processor on a virtual machine, what it does for a page 5; and it wakes who waits for the page.
// Four large pages, which a disk often has at the same moment, are digested in about kGroupNs, and
// nobody waits for longer than that. Writes and the reads of reclaim are told of at once, and all
// before them: what is told late of those is done late.
constexpr size_t kGroupReads = 64;
constexpr uint64_t kGroupNs = 3 * kMillisecondNs;

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

// The kernel cancels an operation for which it could not start a worker. Of a job, ECANCELED says
// that the tier stops and it was never begun.
int error_of(const IoDone& done) {
  if (done.result >= 0) return 0;
  return done.result == -ECANCELED ? EIO : static_cast<int>(-done.result);
}

bool is_timed(const DiskJob& job) { return job.timed && job.kind != DiskJob::Kind::sync; }

}  // namespace

Disk::Disk(std::unique_ptr<IoEngine> engine, SegmentFiles& files, const Clock& clock)
    : engine_(std::move(engine)),
      files_(files),
      clock_(clock),
      event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      lane_limit_(engine_->depth() > kReservedDepth ? engine_->depth() - kReservedDepth : 1),
      file_thread_(files, [this](JobPtr job, int error) {
        Finished finished{std::move(job), error};
        tell({&finished, 1});
      }) {
  if (!event_.valid()) throw storage_error("cannot make an eventfd for the disk thread", errno);
}

Disk::~Disk() { stop(); }

void Disk::start() {
  file_thread_.start();
  // What is kept beside the arena may take its time, and nobody waits for a read yet.
  engine_->register_memory({});
  thread_ = start_thread("kvw-disk", [this] { serve(); });
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
  file_thread_.stop();
}

void Disk::serve() {
  while (true) {
    take_posted();
    give_up_idle();
    submit_waiting();
    const bool registered = register_next();
    publish_due();
    if (checked_.empty() && unchecked_.empty() && ended()) return;
    collect(registered ? 0 : wait_ms());
    submit_waiting();
    collect(0);
    // Not before the device has its next work: to wake the core's thread takes longer than that.
    publish_due();
    check_next();
    publish_due();
  }
}

// Until something completes or is posted. Nothing else looked for either since take_posted().
int Disk::wait_ms() const {
  if (!unchecked_.empty() || !registering_.empty()) return 0;
  if (checked_.empty()) return starved_ ? static_cast<int>(kShortageWait.count()) : kIdleWaitMs;
  return static_cast<int>(group_left_ns() / kMillisecondNs + 1);
}

// Told to stop since take_posted() looked, what waits is still to be cancelled.
bool Disk::ended() {
  const bool waits = !reads_.waiting.empty() || !writes_.waiting.empty() || !registering_.empty();
  std::lock_guard lock(mutex_);
  return stopping_ && posted_.empty() && running_.empty() && !waits;
}

// True if there was any, and what was posted meanwhile may have gone unheard.
bool Disk::register_next() {
  if (registering_.empty()) return false;
  collect(0);  // hands the device what it can do meanwhile
  JobPtr job = std::move(registering_.front());
  registering_.pop_front();
  const iovec& memory = job->pieces.front();
  const int error =
      engine_->register_memory({static_cast<std::byte*>(memory.iov_base), memory.iov_len});
  checked({std::move(job), error});
  return true;
}

void Disk::check_next() {
  if (unchecked_.empty()) return;
  Finished next = std::move(unchecked_.front());
  unchecked_.pop_front();
  if (next.error == 0) next.job->check();
  checked(std::move(next));
}

void Disk::checked(Finished finished) {
  if (checked_.empty()) checked_since_ns_ = system_clock().boot_ns();
  checked_bytes_ += finished.job->bytes;
  all_grouped_ = all_grouped_ && finished.job->grouped;
  checked_.push_back(std::move(finished));
}

// Groups by their own rule; all else when nothing more is to be checked, or in pieces meanwhile.
void Disk::publish_due() {
  const bool due =
      all_grouped_ ? group_left_ns() == 0 : unchecked_.empty() || checked_bytes_ >= kTellBytes;
  if (due) publish_checked();
}

// How long what is checked may wait for more of its kind. 0: not at all.
uint64_t Disk::group_left_ns() const {
  const bool waits = !checked_.empty() && all_grouped_ && reads_.in_flight + unchecked_.size() > 0;
  if (!waits || checked_.size() >= kGroupReads) return 0;
  const uint64_t waited_ns = system_clock().boot_ns() - checked_since_ns_;
  return kGroupNs - std::min(waited_ns, kGroupNs);
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
  if (job->kind == DiskJob::Kind::prepare || job->kind == DiskJob::Kind::remove) {
    files_.forget(job->segment);
    return file_thread_.post(std::move(job));
  }
  if (job->kind == DiskJob::Kind::register_memory) return registering_.push_back(std::move(job));
  lane_of(*job).waiting.push_back(std::move(job));
}

void Disk::cancel_waiting() {
  for (Lane* lane : {&reads_, &writes_}) {
    for (JobPtr& job : lane->waiting) checked({std::move(job), ECANCELED});
    lane->waiting.clear();
  }
  for (JobPtr& job : registering_) checked({std::move(job), ECANCELED});
  registering_.clear();
}

Disk::Lane& Disk::lane_of(const DiskJob& job) {
  return job.kind == DiskJob::Kind::read ? reads_ : writes_;
}

bool Disk::may_begin(const Lane& lane) const {
  return !lane.waiting.empty() && lane.in_flight < lane_limit_ &&
         (lane.in_flight < kUnderWay || lane.bytes_in_flight < kBytesInFlight);
}

Disk::Lane* Disk::next_lane() {
  const bool reads = may_begin(reads_);
  const bool writes = may_begin(writes_);
  if (reads && (!writes || reads_.in_flight <= writes_.in_flight)) return &reads_;
  return writes ? &writes_ : nullptr;
}

void Disk::submit_waiting() {
  while (engine_->in_flight() < engine_->depth()) {
    Lane* lane = next_lane();
    starved_ = lane != nullptr && !submit(*lane);
    if (lane == nullptr || starved_) return;
  }
}

// The file thread may be the one that waits for a descriptor.
void Disk::give_up_idle() {
  const uint64_t shortages = files_.shortages();
  if (shortages == shortages_) return;
  shortages_ = shortages;
  while (files_.close_idle()) {
  }
}

bool Disk::Operation::continues_with(const DiskJob& job) const {
  const DiskJob& mine = first();
  return job.kind == DiskJob::Kind::read && mine.kind == job.kind && !mine.alone && !job.alone &&
         job.segment == mine.segment && job.offset == mine.offset + bytes &&
         job.timed == mine.timed;
}

void Disk::Operation::add(JobPtr job) {
  bytes += job->bytes;
  jobs.push_back(std::move(job));
}

// What waits first, and its neighbours up to this place's share of all that wait.
Disk::Operation Disk::take(Lane& lane) const {
  const size_t places = lane_limit_ - lane.in_flight;
  const size_t share = std::min((lane.waiting.size() + places - 1) / places, kNeighbours);
  Operation operation;
  do {
    operation.add(std::move(lane.waiting.front()));
    lane.waiting.pop_front();
  } while (operation.jobs.size() < share && !lane.waiting.empty() &&
           operation.bytes + lane.waiting.front()->bytes <= kNeighbourBytes &&
           operation.continues_with(*lane.waiting.front()));
  return operation;
}

// False: there is no descriptor for it, and it goes on waiting.
bool Disk::submit(Lane& lane) {
  Operation operation = take(lane);
  const DiskJob& first = operation.first();
  const int fd = files_.acquire(first.segment);
  if (is_shortage(-fd)) {
    put_back(lane, std::move(operation));
    return false;
  }
  if (fd < 0) {
    for (JobPtr& job : operation.jobs) checked({std::move(job), -fd});
    return true;
  }
  ++lane.in_flight;
  lane.bytes_in_flight += operation.bytes;
  if (is_timed(first)) lane.rate.began(clock_.boot_ns());
  IoOp op{io_kind(first.kind), fd, first.offset, first.pieces, next_id_++};
  for (const JobPtr& job : std::span(operation.jobs).subspan(1))
    op.pieces.insert(op.pieces.end(), job->pieces.begin(), job->pieces.end());
  running_.emplace(op.user, std::move(operation));
  engine_->submit(std::move(op));
  return true;
}

// Submits what is prepared and takes what has completed.
void Disk::collect(int timeout_ms) {
  engine_->wait(done_, timeout_ms);
  for (const IoDone& each : done_) finish(each);
  done_.clear();
}

void Disk::finish(const IoDone& done) {
  auto node = running_.extract(done.user);
  Operation& operation = node.mapped();
  const DiskJob& first = operation.first();
  files_.release(first.segment);
  Lane& lane = lane_of(first);
  --lane.in_flight;
  lane.bytes_in_flight -= operation.bytes;
  int error = error_of(done);
  if (is_timed(first)) lane.rate.ended(clock_.boot_ns(), error == 0 ? operation.bytes : 0);
  const bool moves = first.kind != DiskJob::Kind::sync;
  if (moves && error == 0 && static_cast<uint64_t>(done.result) != operation.bytes) error = EIO;
  if (error != 0 && operation.jobs.size() > 1) {
    for (const JobPtr& job : operation.jobs) job->alone = true;
    return put_back(lane, std::move(operation));
  }
  for (JobPtr& job : operation.jobs) {
    if (job->check)
      unchecked_.push_back({std::move(job), error});
    else
      checked({std::move(job), error});
  }
}

// In front of all that waits, in their order.
void Disk::put_back(Lane& lane, Operation operation) {
  for (auto job = operation.jobs.rbegin(); job != operation.jobs.rend(); ++job)
    lane.waiting.push_front(std::move(*job));
}

void Disk::publish_checked() {
  tell(checked_);
  checked_.clear();
  checked_bytes_ = 0;
  all_grouped_ = true;
}

// Of the disk thread and of the file thread.
void Disk::tell(std::span<Finished> finished) {
  if (finished.empty()) return;
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    first = finished_.empty();
    std::ranges::move(finished, std::back_inserter(finished_));
  }
  // Otherwise the core thread was woken for those before, and takes all there is.
  if (first) signal();
}

}  // namespace kvw::nvme
