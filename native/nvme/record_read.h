// Reading a record back: header and payload in one operation, verified on the disk thread. What is
// not exactly the record that was asked for is a mismatch, whatever the reason. Core thread only.
#pragma once

#include "nvme/context.h"

namespace kvw::nvme {

// Counts itself in segment.reads_in_flight until `end` is called, inside Disk::deliver().
// `payload` must have room for the record's payload, 4 KiB aligned, until then; null: the read has
// its own buffer, for one who only wants to know whether the record is good.
void post_record_read(LogContext& context, Segment& segment, const RecordRef& ref,
                      std::byte* payload, ReadEnd end);

}  // namespace kvw::nvme
