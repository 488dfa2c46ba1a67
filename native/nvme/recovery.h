// Reads what a directory of segments holds. Runs on the core thread before the disk thread starts,
// blocks for the device, and reads in large pieces: headers of all files, then the tables of
// contents, and whole segments only where a crash left them open.
//
// A segment that is larger than the options say is cut behind its records, for it could else be
// reclaimed only as a whole, perhaps at once. Order, which is the safety of it:
//   1. a table of contents is written at the new end, in front of the old one, and flushed. So far
//      the header says the old length and the file has it: what counts is the old table, or a scan.
//   2. the file is cut there, and flushed. A file shorter than its header says is believed if it
//      ends in a table of its life that says its length.
//   3. the header says the new length, and is flushed. Only its first sector changes.
// Where the capacity is too small for all, the table leaves out the records that have to go, and
// may lie on one of them. After a crash behind that the old table names it still, and a read of it
// is a mismatch; nothing that stays is ever touched.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "nvme/aligned_buffer.h"
#include "nvme/context.h"
#include "nvme/rotation.h"
#include "nvme/segment_scan.h"

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
  // Its records in their order, as a load would find them.
  struct Contents {
    std::vector<TocEntry> entries;
    bool scanned = false;
    uint64_t refused = 0;
  };

  bool is_cut(const SegmentHeader& header, uint64_t bytes);
  bool is_larger(const Segment& segment) const;
  std::optional<Contents> contents_of(const Segment& segment);
  void cut_tails();
  bool cut(Segment& segment, Contents& contents, uint64_t bytes);
  void write_length(const Segment& segment);
  uint64_t bytes_of_larger() const;
  void shrink_to_capacity();
  bool shrink(Segment& segment, std::optional<Contents>& contents, uint64_t excess);
  void remove(Segment& segment);
  bool has_record(const Segment& segment);
  void load(Segment& segment, const Found& found);
  std::optional<TocFooter> footer_of(std::span<const std::byte> block, uint32_t segment,
                                     uint32_t life, uint64_t bytes) const;
  std::optional<std::vector<TocEntry>> read_toc(const Segment& segment);
  void adopt(Segment& segment, std::span<const TocEntry> entries, const Found& found);
  void scan(Segment& segment, const Found& found);
  void tell_unread(Segment& segment, int error);
  ScanResult scan_records(const Segment& segment, const std::function<void(RecordHeader&&)>& found);
  void tell_refused(uint32_t segment, uint64_t records);

  // As SegmentFiles::acquire(). Throws Error (storage) where descriptors are short: a start that
  // takes files for unreadable would serve without what the disk has.
  int acquire(uint32_t segment);
  // Throws Error storage "nvme_no_answer" after LogOptions::answer_ns.
  int64_t wait_for(IoOp op);
  [[noreturn]] void give_up();
  // Reads exactly to.size() bytes; 0 or an errno.
  int read(uint32_t segment, uint64_t offset, std::span<std::byte> to);
  int write(uint32_t segment, uint64_t offset, std::span<const std::byte> from);
  // Makes durable what any process wrote to it; 0 or an errno.
  int sync(uint32_t segment);

  LogContext& context_;
  Rotation& rotation_;
  std::unique_ptr<IoEngine> engine_;
  AlignedBuffer landing_;  // of all I/O: a caller's buffer may go before a late answer comes
  RecoveryReport report_;
};

}  // namespace kvw::nvme
