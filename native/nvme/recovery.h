// Reads what a directory of segments holds. Runs on the core thread before the disk thread starts,
// blocks for the device, and reads in large pieces: headers of all files, then the tables of
// contents, and whole segments only where a crash left them open.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "nvme/aligned_buffer.h"
#include "nvme/context.h"
#include "nvme/rotation.h"

namespace kvw::nvme {

class Recovery {
 public:
  using Found = std::function<void(RecoveredRecord&&)>;

  Recovery(LogContext& context, Rotation& rotation);
  RecoveryReport run(const Found& found);

 private:
  // Of a file without a header that can be believed.
  enum class Content { blank, ours, others };

  void classify(uint32_t number, uint64_t bytes);
  void classify_headless(uint32_t number, uint64_t bytes);
  Content content_of(uint32_t number, uint64_t bytes);
  void mark_foreign(uint32_t number, uint64_t bytes, const char* why);
  void shrink_to_capacity();
  bool has_record(const Segment& segment);
  void load(Segment& segment, const Found& found);
  bool load_toc(Segment& segment, const Found& found);
  void adopt(Segment& segment, std::span<const TocEntry> entries, const Found& found);
  void scan(Segment& segment, const Found& found);

  // As SegmentFiles::acquire(). Throws Error (storage) where descriptors are short: a start that
  // takes files for unreadable would serve without what the disk has.
  int acquire(uint32_t segment);
  // Throws Error storage "nvme_no_answer" after LogOptions::answer_ns.
  int64_t wait_for(IoOp op);
  [[noreturn]] void give_up();
  // Reads exactly to.size() bytes; 0 or an errno.
  int read(uint32_t segment, uint64_t offset, std::span<std::byte> to);
  // Makes durable what any process wrote to it; 0 or an errno.
  int sync(uint32_t segment);

  LogContext& context_;
  Rotation& rotation_;
  std::unique_ptr<IoEngine> engine_;
  AlignedBuffer landing_;  // of reads: a caller's buffer may go before a late answer comes
  RecoveryReport report_;
};

}  // namespace kvw::nvme
