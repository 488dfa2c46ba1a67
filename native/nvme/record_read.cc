#include "nvme/record_read.h"

#include <cerrno>

#include "nvme/format.h"

namespace kvw::nvme {
namespace {

struct Reading {
  Key warehouse, key;
  Extent extent;
  std::span<const std::byte> header;
  const std::byte* payload;
  bool matches = false;
  PageFacts facts;

  void verify() {
    auto decoded = decode_record_header(header);
    if (!decoded || decoded->warehouse != warehouse || decoded->extent != extent) return;
    if (decoded->facts.key != key || decoded->header_blocks * kBlockBytes != header.size()) return;
    if (!payload_matches(decoded->facts, payload)) return;
    facts = std::move(decoded->facts);
    matches = true;
  }
};

}  // namespace

void post_record_read(LogContext& context, Segment& segment, const RecordRef& ref,
                      std::byte* payload, ReadEnd end) {
  auto job = std::make_unique<DiskJob>();
  const uint64_t header_bytes = uint64_t{ref.header_blocks} * kBlockBytes;
  job->kind = DiskJob::Kind::read;
  job->segment = segment.number;
  job->offset = uint64_t{ref.offset_blocks} * kBlockBytes;
  job->buffer = AlignedBuffer(header_bytes);
  job->add_piece(job->buffer.data(), header_bytes);
  job->add_piece(payload, uint64_t{ref.blocks} * kBlockBytes - header_bytes);
  auto reading = std::make_shared<Reading>();
  reading->warehouse = context.options.warehouse_id;
  reading->key = ref.key;
  reading->extent = segment.extent_of(ref);
  reading->header = job->buffer.span();
  reading->payload = payload;
  job->check = [reading] { reading->verify(); };
  ++segment.reads_in_flight;
  job->done = [&context, &segment, reading, bytes = job->bytes, end = std::move(end)](int error) {
    --segment.reads_in_flight;
    ReadResult result = reading->matches ? ReadResult::ok : ReadResult::mismatch;
    if (error != 0) result = ReadResult::io_error;
    if (result == ReadResult::io_error && error != ECANCELED) ++context.stats.read_errors;
    if (result == ReadResult::mismatch) ++context.stats.mismatches;
    if (result == ReadResult::ok) {
      ++context.stats.read_records;
      context.stats.read_bytes += bytes;
    }
    end(result, std::move(reading->facts));
  };
  context.disk.post(std::move(job));
}

}  // namespace kvw::nvme
