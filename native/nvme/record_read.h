// Reading a record back: header and payload in one operation, verified on the disk thread. What is
// not exactly the record that was asked for is a mismatch, whatever the reason. Core thread only.
#pragma once

#include <functional>
#include <memory>

#include "nvme/context.h"

namespace kvw::nvme {

using ReadEnd = std::function<void(ReadResult, PageFacts&&)>;

// Counts itself in segment.reads_in_flight until `end` is called, inside Disk::deliver().
// `payload` must have room for the record's payload, 4 KiB aligned, until then.
void post_record_read(LogContext& context, Segment& segment, const RecordRef& ref,
                      std::byte* payload, ReadEnd end);

}  // namespace kvw::nvme
