// Reading a record back: header and payload in one operation, verified on the disk thread. What is
// not exactly the record that was asked for is a mismatch, whatever the reason. Core thread only.
#pragma once

#include "nvme/context.h"

namespace kvw::nvme {

enum class RecordPart { whole, header };

struct ReadTarget {
  RecordPart part = RecordPart::whole;
  // Room for the record's payload, 4 KiB aligned; null: the read has its own buffer, for one who
  // only wants to know whether the record is good.
  std::byte* payload = nullptr;
  // One of many that somebody waits for: told of together with those that end soon after.
  bool grouped = false;
};

// Counts itself in segment.reads_in_flight until `end` is called, inside Disk::deliver(); the
// target must stay until then.
void post_record_read(LogContext& context, Segment& segment, const RecordRef& ref,
                      ReadTarget target, ReadEnd end);

}  // namespace kvw::nvme
