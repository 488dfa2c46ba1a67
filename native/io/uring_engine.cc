// io_uring. Memory that it is told of is registered with the ring where the kernel permits it;
// files are not, which saves next to nothing at these sizes.
#include "io/engines.h"
#include "io/registered_memory.h"
#include "io/transfer.h"

#if defined(KVW_HAVE_LIBURING)

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <initializer_list>
#include <optional>

#include "base/fd.h"

namespace kvw {
namespace {

constexpr unsigned kSpareEntries = 4;  // the wake-up, and liburing's own timeout on old kernels

bool supports_all(io_uring* ring, std::initializer_list<int> ops) {
  io_uring_probe* probe = io_uring_get_probe_ring(ring);
  if (probe == nullptr) return false;
  bool all = true;
  for (const int op : ops) all = all && io_uring_opcode_supported(probe, op) != 0;
  io_uring_free_probe(probe);
  return all;
}

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(unsigned depth) : depth_(depth), transfers_(depth), memory_(depth) {
    for (unsigned i = depth; i > 0; --i) idle_.push_back(i - 1);
  }

  ~UringEngine() override {
    if (!open_) return;
    std::vector<IoDone> ignored;
    while (in_flight_ > 0) wait(ignored, 1000);
    io_uring_queue_exit(&ring_);
  }

  // 0 or an errno.
  int open() {
    wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_.valid()) return errno;
    const int failed = open_ring();
    if (failed != 0) return -failed;
    open_ = true;
    const bool usable = supports_all(
        &ring_, {IORING_OP_READV, IORING_OP_WRITEV, IORING_OP_FSYNC, IORING_OP_POLL_ADD});
    registers_ = supports_all(&ring_, {kReadvFixed, kWritevFixed});
    return usable ? 0 : ENOSYS;
  }

  const char* name() const override { return "io_uring"; }
  unsigned depth() const override { return depth_; }
  unsigned in_flight() const override { return in_flight_; }

  void submit(IoOp op) override {
    const unsigned slot = idle_.back();
    idle_.pop_back();
    ++in_flight_;
    transfers_[slot] = Transfer(std::move(op));
    prepare(slot);
  }

  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    if (!wake_armed_) arm_wake();
    __kernel_timespec limit{timeout_ms / 1000, (timeout_ms % 1000) * 1000000ll};
    io_uring_cqe* first = nullptr;
    const int answer = timeout_ms == 0
                           ? io_uring_submit(&ring_)
                           : io_uring_submit_and_wait_timeout(&ring_, &first, 1, &limit, nullptr);
    reap(done);
    // Short transfers go on without waiting for the next call.
    if (io_uring_sq_ready(&ring_) > 0) io_uring_submit(&ring_);
    if (answer < 0 && answer != -ETIME && answer != -EINTR) pause_briefly();
  }

  int register_memory(std::span<std::byte> memory) override {
    return registers_ ? memory_.add(ring_, memory) : EOPNOTSUPP;
  }

  void wake() override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
  }

 private:
  // Completions wait for the next call instead of interrupting the thread, which digests between
  // calls; kernels before 5.19 do not know that.
  int open_ring() {
    const unsigned entries = depth_ + kSpareEntries;
#if defined(IORING_SETUP_TASKRUN_FLAG)
    const unsigned quiet = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
    const int answer = io_uring_queue_init(entries, &ring_, quiet);
    if (answer != -EINVAL) return answer;
#endif
    return io_uring_queue_init(entries, &ring_, 0);
  }

  // Every operation holds one entry and the ring has more entries than operations.
  io_uring_sqe* entry() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    while (sqe == nullptr) {
      io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
    }
    return sqe;
  }

  void prepare(unsigned slot) {
    const Transfer& transfer = transfers_[slot];
    const IoOp& op = transfer.op();
    io_uring_sqe* sqe = entry();
    if (op.kind == IoKind::sync)
      io_uring_prep_fsync(sqe, op.fd, IORING_FSYNC_DATASYNC);
    else
      prepare_move(sqe, slot, transfer);
    io_uring_sqe_set_data64(sqe, slot);
  }

  void prepare_move(io_uring_sqe* sqe, unsigned slot, const Transfer& transfer) {
    const bool writes = transfer.op().kind == IoKind::write;
    const std::span<const iovec> pieces(transfer.pieces(), transfer.piece_count());
    const auto fixed = memory_.place(slot, pieces, writes);
    int code = writes ? IORING_OP_WRITEV : IORING_OP_READV;
    if (fixed) code = writes ? kWritevFixed : kReadvFixed;
    const std::span<const iovec> from = fixed ? fixed->pieces : pieces;
    io_uring_prep_rw(code, sqe, transfer.op().fd, from.data(), static_cast<unsigned>(from.size()),
                     transfer.offset());
    if (fixed) sqe->buf_index = static_cast<uint16_t>(fixed->buffer);
  }

  // Armed by the thread that waits, because the kernel completes a poll in the thread that asked.
  // A poll and not a read: nothing of ours is written to after the ring is gone.
  void arm_wake() {
    io_uring_sqe* sqe = entry();
    io_uring_prep_poll_add(sqe, wake_.get(), POLLIN);
    io_uring_sqe_set_data64(sqe, depth_);
    wake_armed_ = true;
  }

  void clear_wake() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
    wake_armed_ = false;
  }

  void reap(std::vector<IoDone>& done) {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
      const uint64_t slot = io_uring_cqe_get_data64(cqe);
      const int answer = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      if (slot == depth_) clear_wake();
      if (slot >= depth_) continue;  // the wake-up, or liburing's timeout
      finish(static_cast<unsigned>(slot), answer, done);
    }
  }

  void finish(unsigned slot, int answer, std::vector<IoDone>& done) {
    Transfer& transfer = transfers_[slot];
    if (transfer.op().kind == IoKind::read && answer > 0)
      memory_.read_back(slot, {transfer.pieces(), transfer.piece_count()},
                        static_cast<uint64_t>(answer));
    if (!transfer.advance(answer)) return prepare(slot);
    done.push_back({transfer.op().user, transfer.result()});
    transfer = Transfer();
    idle_.push_back(slot);
    --in_flight_;
  }

  // The kernel is short of memory or busy; what was submitted stays in flight and is tried again.
  static void pause_briefly() {
    const timespec pause{0, 1000000};
    ::nanosleep(&pause, nullptr);
  }

  const unsigned depth_;
  io_uring ring_{};
  bool open_ = false;
  unsigned in_flight_ = 0;
  std::vector<Transfer> transfers_;
  std::vector<unsigned> idle_;
  RegisteredMemory memory_;
  bool registers_ = false;  // the kernel can move to several pieces of registered memory
  Fd wake_;
  bool wake_armed_ = false;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(unsigned depth, std::string& why) {
  auto engine = std::make_unique<UringEngine>(depth);
  const int failed = engine->open();
  if (failed == 0) return engine;
  why = std::strerror(failed);
  return nullptr;
}

}  // namespace kvw

#else

namespace kvw {

std::unique_ptr<IoEngine> make_uring_engine(unsigned, std::string& why) {
  why = "this build has no liburing";
  return nullptr;
}

}  // namespace kvw

#endif
