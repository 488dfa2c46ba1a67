// Walks the records of a segment without a table of contents. A damaged or torn header costs its
// own record: the walk goes on at the next header of this life and place. So does a sector that the
// device cannot read. Payloads are verified: nobody else has flushed them for us. Used by recovery;
// blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "nvme/aligned_buffer.h"
#include "nvme/format.h"
#include "nvme/segment.h"

namespace kvw::nvme {

struct ScanResult {
  uint64_t refused = 0;     // a good header over a bad payload, or one that cannot be read, or a
                            // stretch without a good header between two records
  uint32_t next_block = 1;  // behind the last record
  int error = 0;            // the device's last one; what was found before and behind it stands
};

// Reads exactly to.size() bytes at offset; 0 or an errno.
using ReadSegment = std::function<int(uint64_t offset, std::span<std::byte> to)>;

class SegmentScan {
 public:
  SegmentScan(const Key& warehouse, const Segment& segment, ReadSegment read);
  ScanResult run(const std::function<void(RecordHeader&&)>& found);

 private:
  // Bytes of the segment, read in windows; empty at its end, or where they cannot be read.
  std::span<const std::byte> view(uint64_t offset, uint64_t bytes);
  bool fill_window(uint64_t offset, uint64_t bytes);
  bool read_window(uint64_t offset, uint64_t bytes);
  bool given_up() const;
  std::optional<RecordHeader> header_at(uint32_t block);
  std::optional<RecordHeader> next_header(uint32_t block);

  Key warehouse_;
  const Segment& segment_;
  ReadSegment read_;
  AlignedBuffer window_;
  uint64_t window_offset_ = 0, window_bytes_ = 0;
  uint64_t exact_until_ = 0;  // end of the last window that could not be read as a whole
  uint64_t errors_ = 0;       // of what was read alone
  int error_ = 0;
};

}  // namespace kvw::nvme
