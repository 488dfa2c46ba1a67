#include "nvme/record_read.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/clock.h"
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
  uint64_t stands_for_bytes = 0;  // of payloads, whose digests take as long as this one; 0: untimed
  uint64_t digest_ns = 0;         // of the processor, for all of them

  void verify() {
    auto decoded = decode_record_header(header);
    if (!decoded) return;
    if (decoded->warehouse != warehouse || decoded->extent != extent) {
      problem = "place";
    } else if (decoded->facts.key != key) {
      problem = "key";
    } else if (decoded->header_blocks * kBlockBytes == header.size()) {
      problem = has_digests_of(decoded->facts) ? nullptr : "digest";
    }
    if (problem == nullptr) facts = std::move(decoded->facts);
  }

  bool has_digests_of(const PageFacts& said) {
    if (payload == nullptr) return true;
    if (stands_for_bytes == 0) return payload_matches(said, payload);
    const uint64_t first = thread_cpu_ns(), before = thread_cpu_ns();
    const bool matches = payload_matches(said, payload);
    const uint64_t taken = thread_cpu_ns() - before, look = before - first;
    digest_ns = (taken - std::min(look, taken)) * stands_for_bytes / said.payload_bytes();
    return matches;
  }
};

// A look at the clock took 0.8 us where it was measured, as long as to digest 6 KiB: of small reads
// one in so many bytes is timed, less what a look takes, and stands for those before it: no
// multiple of what goes to the device as one, of which the first is digested the quickest. And the
// first ones, so that the count of a tier that has read little is not nothing.
constexpr uint64_t kTimedBytes = 7ull << 20;

uint64_t timed_with(LogContext& context, uint64_t payload_bytes) {
  context.untimed_bytes += payload_bytes;
  const bool timed = context.untimed_bytes >= kTimedBytes || context.stats.read_digest_ns == 0;
  return timed ? std::exchange(context.untimed_bytes, 0) : 0;
}

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
  job->grouped = target.grouped;
  reading->warehouse = context.options.warehouse_id;
  reading->key = ref.key;
  reading->extent = segment.extent_of(ref);
  reading->header = reading->buffer.part(0, header_bytes);
  reading->payload = whole ? payload : nullptr;
  if (whole) reading->stands_for_bytes = timed_with(context, payload_bytes);
  job->check = [reading] { reading->verify(); };
  ++segment.reads_in_flight;
  job->done = [&context, &segment, reading, whole, bytes = job->bytes,
               end = std::move(end)](int error) {
    --segment.reads_in_flight;
    context.headers.keep(std::move(reading->buffer));
    const ReadResult result = result_of(error, reading->problem);
    if (result == ReadResult::io_error && error != ECANCELED) ++context.stats.read_errors;
    if (result == ReadResult::mismatch) ++context.stats.mismatches;
    context.stats.read_digest_ns += reading->digest_ns;
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
