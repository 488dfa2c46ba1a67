#include "io/faulty_engine.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <map>

namespace kvw {
namespace {

uint64_t bytes_of(const IoOp& op) {
  uint64_t bytes = 0;
  for (const iovec& piece : op.pieces) bytes += piece.iov_len;
  return bytes;
}

}  // namespace

void Faults::add(Fault fault) {
  std::lock_guard lock(mutex_);
  faults_.push_back(std::move(fault));
}

void Faults::clear() {
  std::lock_guard lock(mutex_);
  faults_.clear();
}

uint64_t Faults::struck() const {
  std::lock_guard lock(mutex_);
  return struck_;
}

void Faults::keep_journal() {
  std::lock_guard lock(mutex_);
  journaling_ = true;
}

std::vector<IoMoment> Faults::journal() const {
  std::lock_guard lock(mutex_);
  return journal_;
}

size_t Faults::journal_size() const {
  std::lock_guard lock(mutex_);
  return journal_.size();
}

void Faults::hold(bool held) {
  std::lock_guard lock(mutex_);
  held_ = held;
}

void Faults::hold_reads(bool held) {
  std::lock_guard lock(mutex_);
  reads_held_ = held;
}

bool Faults::held(IoKind kind) const {
  std::lock_guard lock(mutex_);
  return held_ || (reads_held_ && kind == IoKind::read);
}

Fault Faults::strike(const IoOp& op, const std::string& path) {
  std::lock_guard lock(mutex_);
  const uint64_t end = op.offset + std::max<uint64_t>(bytes_of(op), 1);
  for (Fault& fault : faults_) {
    if (fault.kind != op.kind || fault.count == 0) continue;
    if (path.find(fault.path) == std::string::npos) continue;
    if (op.offset >= fault.end || end <= fault.begin) continue;
    if (fault.skip > 0) {
      --fault.skip;
      continue;
    }
    --fault.count;
    ++struck_;
    return fault;
  }
  return {};
}

void Faults::stall_after(uint64_t reads) {
  std::lock_guard lock(mutex_);
  reads_allowed_ = reads == UINT64_MAX ? reads : reads_ + reads;
}

uint64_t Faults::number_read() {
  std::lock_guard lock(mutex_);
  return reads_++;
}

bool Faults::stalls(uint64_t read) const {
  std::lock_guard lock(mutex_);
  return read >= reads_allowed_;
}

void Faults::note(IoMoment moment) {
  std::lock_guard lock(mutex_);
  if (journaling_) journal_.push_back(std::move(moment));
}

namespace {

std::string path_of(int fd) {
  char path[PATH_MAX];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = ::readlink(link.c_str(), path, sizeof path);
  return length > 0 ? std::string(path, static_cast<size_t>(length)) : std::string();
}

std::vector<std::byte> copy_of(const IoOp& op) {
  std::vector<std::byte> data;
  for (const iovec& piece : op.pieces) {
    const auto* from = static_cast<const std::byte*>(piece.iov_base);
    data.insert(data.end(), from, from + piece.iov_len);
  }
  return data;
}

void cut(IoOp& op, uint64_t bytes) {
  for (iovec& piece : op.pieces) {
    piece.iov_len = std::min<uint64_t>(piece.iov_len, bytes);
    bytes -= piece.iov_len;
  }
  std::erase_if(op.pieces, [](const iovec& piece) { return piece.iov_len == 0; });
}

}  // namespace

class FaultyEngine final : public IoEngine {
 public:
  FaultyEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<Faults> faults)
      : inner_(std::move(inner)), faults_(std::move(faults)) {}

  const char* name() const override { return inner_->name(); }
  unsigned depth() const override { return inner_->depth(); }
  unsigned in_flight() const override { return static_cast<unsigned>(ops_.size()); }
  void wake() override { inner_->wake(); }
  int register_memory(std::span<std::byte> memory) override {
    return inner_->register_memory(memory);
  }

  void submit(IoOp op) override {
    Op mine{op.kind, path_of(op.fd), op.user, bytes_of(op), {}, 0};
    if (op.kind == IoKind::read) mine.read = faults_->number_read();
    mine.fault = faults_->strike(op, mine.path);
    const uint64_t id = next_++;
    const bool struck = mine.fault.error != 0 || mine.fault.tear_bytes >= 0;
    if (struck)
      cut(op, mine.fault.tear_bytes > 0 ? static_cast<uint64_t>(mine.fault.tear_bytes) : 0);
    if (op.kind == IoKind::write)
      faults_->note({op.kind, false, id, mine.path, op.offset, copy_of(op)});
    if (op.kind == IoKind::sync && !struck)
      faults_->note({op.kind, false, id, mine.path, op.offset, {}});
    ops_.emplace(id, std::move(mine));
    if (struck && (op.kind == IoKind::sync || op.pieces.empty())) return ready_.push_back(id);
    op.user = id;
    inner_->submit(std::move(op));
  }

  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    std::vector<IoDone> inner;
    inner_->wait(inner, ready_.empty() && held_.empty() ? timeout_ms : 0);
    for (const IoDone& each : inner) held_.push_back(each);
    for (uint64_t id : ready_) held_.push_back({id, 0});
    ready_.clear();
    std::vector<IoDone> still;
    for (const IoDone& each : held_) {
      const Op& op = ops_.at(each.user);
      const bool stalls = op.kind == IoKind::read && faults_->stalls(op.read);
      if (stalls || faults_->held(op.kind))
        still.push_back(each);
      else
        finish(each, done);
    }
    held_ = std::move(still);
    if (done.empty() && !held_.empty()) wait_for_wake(timeout_ms);
  }

 private:
  struct Op {
    IoKind kind;
    std::string path;
    uint64_t user;
    uint64_t bytes;
    Fault fault;
    uint64_t read;  // its number, of a read
  };

  void wait_for_wake(int timeout_ms) {
    std::vector<IoDone> more;
    inner_->wait(more, std::min(timeout_ms, 5));
    for (const IoDone& each : more) held_.push_back(each);
  }

  void finish(const IoDone& each, std::vector<IoDone>& done) {
    auto node = ops_.extract(each.user);
    const Op& op = node.mapped();
    int64_t result = each.result;
    if (op.fault.error != 0)
      result = -op.fault.error;
    else if (op.fault.tear_bytes >= 0)
      result = static_cast<int64_t>(op.bytes);
    if (op.kind != IoKind::read && result >= 0)
      faults_->note({op.kind, true, each.user, op.path, 0, {}});
    done.push_back({op.user, result});
  }

  std::unique_ptr<IoEngine> inner_;
  std::shared_ptr<Faults> faults_;
  std::map<uint64_t, Op> ops_;
  std::vector<uint64_t> ready_;  // struck, nothing to do
  std::vector<IoDone> held_;
  uint64_t next_ = 1;
};

std::unique_ptr<IoEngine> make_faulty_engine(std::unique_ptr<IoEngine> inner,
                                             std::shared_ptr<Faults> faults) {
  return std::make_unique<FaultyEngine>(std::move(inner), std::move(faults));
}

}  // namespace kvw
