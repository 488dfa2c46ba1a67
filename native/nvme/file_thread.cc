#include "nvme/file_thread.h"

#include <cerrno>
#include <utility>

#include "base/start_thread.h"

namespace kvw::nvme {

void FileThread::start() {
  thread_ = start_thread("kvw-files", [this] { serve(); });
}

void FileThread::post(JobPtr job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_one();
}

void FileThread::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void FileThread::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    JobPtr job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    const int error = run(*job);
    ended_(std::move(job), error);
    lock.lock();
  }
}

int FileThread::run(const DiskJob& job) {
  return job.kind == DiskJob::Kind::prepare ? prepare(job) : files_.remove(job.segment);
}

int FileThread::prepare(const DiskJob& job) {
  int error = files_.prepare(job.segment, job.bytes);
  while (is_shortage(error)) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, kShortageWait, [this] { return stopping_; })) return ECANCELED;
    lock.unlock();
    error = files_.prepare(job.segment, job.bytes);
  }
  return error;
}

}  // namespace kvw::nvme
