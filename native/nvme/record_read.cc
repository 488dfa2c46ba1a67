#include "nvme/record_read.h"

#include <cerrno>

#include "nvme/format.h"

namespace kvw::nvme {
namespace {

struct Reading {
  Key warehouse, key;
  Extent extent;
  AlignedBuffer buffer;
  std::span<const std::byte> header;
  const std::byte* payload;        // null: not read
  const char* problem = "header";  // null: it is the record that was asked for
  PageFacts facts;

  void verify() {
    auto decoded = decode_record_header(header);
    if (!decoded) return;
    if (decoded->warehouse != warehouse || decoded->extent != extent) {
      problem = "place";
    } else if (decoded->facts.key != key) {
      problem = "key";
    } else if (decoded->header_blocks * kBlockBytes == header.size()) {
      const bool good = payload == nullptr || payload_matches(decoded->facts, payload);
      problem = good ? nullptr : "digest";
    }
    if (problem == nullptr) facts = std::move(decoded->facts);
  }
};

ReadResult result_of(int error, const char* problem) {
  if (error != 0) return ReadResult::io_error;
  return problem == nullptr ? ReadResult::ok : ReadResult::mismatch;
}

}  // namespace

void post_record_read(LogContext& context, Segment& segment, const RecordRef& ref,
                      ReadTarget target, ReadEnd end) {
  auto job = std::make_unique<DiskJob>();
  const uint64_t header_bytes = uint64_t{ref.header_blocks} * kBlockBytes;
  const bool whole = target.part == RecordPart::whole;
  const uint64_t payload_bytes = whole ? uint64_t{ref.blocks} * kBlockBytes - header_bytes : 0;
  std::byte* payload = target.payload;
  job->kind = DiskJob::Kind::read;
  job->segment = segment.number;
  job->offset = uint64_t{ref.offset_blocks} * kBlockBytes;
  auto reading = std::make_shared<Reading>();
  reading->buffer = context.headers.take(header_bytes + (payload == nullptr ? payload_bytes : 0));
  if (whole && payload == nullptr) payload = reading->buffer.data() + header_bytes;
  job->add_piece(reading->buffer.data(), header_bytes);
  if (whole) job->add_piece(payload, payload_bytes);
  job->timed = whole;
  reading->warehouse = context.options.warehouse_id;
  reading->key = ref.key;
  reading->extent = segment.extent_of(ref);
  reading->header = reading->buffer.part(0, header_bytes);
  reading->payload = whole ? payload : nullptr;
  job->check = [reading] { reading->verify(); };
  ++segment.reads_in_flight;
  job->done = [&context, &segment, reading, whole, bytes = job->bytes,
               end = std::move(end)](int error) {
    --segment.reads_in_flight;
    context.headers.keep(std::move(reading->buffer));
    const ReadResult result = result_of(error, reading->problem);
    if (result == ReadResult::io_error && error != ECANCELED) ++context.stats.read_errors;
    if (result == ReadResult::mismatch) ++context.stats.mismatches;
    if (result == ReadResult::ok) {
      context.stats.read_records += whole ? 1 : 0;
      context.stats.read_bytes += bytes;
    }
    const char* reason = error == ECANCELED ? "stopped" : "io_error";
    end({result, error != 0 ? reason : reading->problem, std::move(reading->facts)});
  };
  context.disk.post(std::move(job));
}

}  // namespace kvw::nvme
