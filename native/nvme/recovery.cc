#include "nvme/recovery.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "nvme/segment_scan.h"

namespace kvw::nvme {
namespace {

constexpr uint64_t kTailBytes = 64ull << 10;  // holds the footer and most tables whole
constexpr int kLookMs = 100;                  // at the deadline
constexpr uint64_t kSmallestSegment = 4 * kBlockBytes;

bool is_zero(std::span<const std::byte> bytes) {
  return std::ranges::all_of(bytes, [](std::byte each) { return each == std::byte{0}; });
}

}  // namespace

Recovery::Recovery(LogContext& context, Rotation& rotation)
    : context_(context), rotation_(rotation), engine_(context.make_engine()) {}

int Recovery::acquire(uint32_t segment) {
  const int fd = context_.files.acquire(segment);
  if (is_shortage(-fd))
    throw storage_error("cannot open " + context_.files.path(segment) +
                            "; let the daemon have more descriptors (LimitNOFILE, ulimit -n)",
                        -fd);
  return fd;
}

int64_t Recovery::wait_for(IoOp op) {
  engine_->submit(std::move(op));
  const auto begin = std::chrono::steady_clock::now();
  std::vector<IoDone> done;
  while (done.empty()) {
    engine_->wait(done, kLookMs);
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - begin;
    if (done.empty() && static_cast<uint64_t>(waited.count()) >= context_.options.answer_ns)
      give_up();
  }
  return done.front().result;
}

void Recovery::give_up() {
  // What the device may yet write to stays for as long as the process does, and so does the engine,
  // whose destruction would wait for it.
  static auto& abandoned = *new std::vector<std::pair<std::unique_ptr<IoEngine>, AlignedBuffer>>;
  abandoned.emplace_back(std::move(engine_), std::move(landing_));
  throw Error(ErrorKind::storage, "nvme_no_answer", "the disk stopped answering at the start");
}

int Recovery::read(uint32_t segment, uint64_t offset, std::span<std::byte> to) {
  const int fd = acquire(segment);
  if (fd < 0) return -fd;
  if (landing_.bytes() < to.size()) landing_ = AlignedBuffer(to.size());
  const int64_t result = wait_for({IoKind::read, fd, offset, {{landing_.data(), to.size()}}, 0});
  context_.files.release(segment);
  if (result < 0) return static_cast<int>(-result);
  if (static_cast<uint64_t>(result) != to.size()) return EIO;
  std::memcpy(to.data(), landing_.data(), to.size());
  return 0;
}

int Recovery::sync(uint32_t segment) {
  const int fd = acquire(segment);
  if (fd < 0) return -fd;
  const int64_t result = wait_for({IoKind::sync, fd, 0, {}, 0});
  // A write that failed, and whose error another process was told, leaves bytes in the page cache
  // that the device never got. The scan is to see what the device has.
  if (!context_.files.direct()) ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  context_.files.release(segment);
  return static_cast<int>(-result);
}

RecoveryReport Recovery::run(const Found& found) {
  for (const auto& file : context_.files.list()) classify(file.number, file.bytes);
  context_.table.saw_life(context_.options.life_floor);
  if (!context_.options.inspect) shrink_to_capacity();
  for (auto& [number, segment] : context_.table.all())
    if (segment.state == SegmentState::closed) load(segment, found);
  if (context_.options.inspect) return report_;
  for (auto& [number, segment] : context_.table.all())
    if (segment.state == SegmentState::free) rotation_.give_back(segment);
  return report_;
}

// After this, a segment with a good header is closed (to be loaded), foreign, bad or free.
void Recovery::classify(uint32_t number, uint64_t bytes) {
  AlignedBuffer block(kBlockBytes);
  if (bytes < kSmallestSegment) return classify_headless(number, bytes);
  if (const int error = read(number, 0, block.span()); error != 0) {
    context_.table.add(number, bytes, SegmentState::bad).has_file = true;
    ++report_.unreadable_segments;
    context_.host.on_event("nvme_bad_segment", event_detail(number, error));
    return;
  }
  const auto header = decode_segment_header(block.span());
  if (header && header->warehouse != context_.options.warehouse_id)
    return mark_foreign(number, bytes, "header");
  if (header) {
    context_.table.saw_life(header->life);
    report_.epoch_seen = std::max(report_.epoch_seen, header->clear_epoch);
  }
  if (!header || header->segment != number || header->segment_bytes != bytes)
    return classify_headless(number, bytes);
  ++report_.segments;
  Segment& segment = context_.table.add(number, bytes, SegmentState::closed);
  segment.life = segment.file_life = header->life;
  segment.has_file = true;
}

// A crash can cut a header or a file short, so that such a file of ours is free again; but not
// before everything in it that could name another owner has been looked at.
void Recovery::classify_headless(uint32_t number, uint64_t bytes) {
  const Content content = content_of(number, bytes);
  if (content == Content::others) return mark_foreign(number, bytes, "content");
  ++report_.segments;
  const uint64_t grown = std::max(bytes, context_.options.segment_bytes);
  context_.table.add(number, grown, SegmentState::free).has_file = true;
  // A file that was made and never begun has nothing to lose.
  if (content == Content::blank) return;
  ++report_.bad_headers;
  context_.host.on_event("nvme_bad_header", "segment=" + std::to_string(number) + " reused=1");
}

Recovery::Content Recovery::content_of(uint32_t number, uint64_t bytes) {
  const Key& ours = context_.options.warehouse_id;
  if (bytes == 0) return Content::blank;
  if (bytes % kBlockBytes != 0 || bytes < kSmallestSegment) return Content::ours;
  Content content = Content::ours;
  AlignedBuffer block(kBlockBytes);
  if (read(number, 0, block.span()) == 0 && is_zero(block.span())) content = Content::blank;
  if (read(number, bytes - kBlockBytes, block.span()) == 0) {
    if (const auto footer = decode_toc_footer(block.span())) {
      if (footer->warehouse != ours) return Content::others;
      context_.table.saw_life(footer->life);
      content = Content::ours;
    }
  }
  AlignedBuffer first(std::min<uint64_t>(kMaxHeaderBytes, bytes - kBlockBytes));
  if (read(number, kBlockBytes, first.span()) == 0) {
    if (const auto record = decode_record_header(first.span())) {
      if (record->warehouse != ours) return Content::others;
      context_.table.saw_life(record->extent.life);
      content = Content::ours;
    }
  }
  return content;
}

void Recovery::mark_foreign(uint32_t number, uint64_t bytes, const char* why) {
  ++report_.foreign_segments;
  context_.table.add(number, bytes, SegmentState::foreign).has_file = true;
  context_.host.on_event("nvme_foreign_segment",
                         "segment=" + std::to_string(number) + " seen_in=" + why);
}

// One that stood by, or was closed empty, has none behind its header.
bool Recovery::has_record(const Segment& segment) {
  AlignedBuffer first(std::min<uint64_t>(kMaxHeaderBytes, segment.bytes - kBlockBytes));
  if (read(segment.number, kBlockBytes, first.span()) != 0) return true;
  const auto record = decode_record_header(first.span());
  return record && record->extent.life == segment.life;
}

// The capacity may have been lowered. What has no record goes first, then the oldest; a file counts
// until it is gone, so it stays in the table as bad until then.
void Recovery::shrink_to_capacity() {
  uint64_t bound = context_.options.capacity_bytes;
  if (context_.table.bytes() <= bound) return;
  std::set<std::tuple<bool, uint32_t, uint32_t>> order;
  for (const auto& [number, segment] : context_.table.all()) {
    const bool closed = segment.state == SegmentState::closed;
    if (closed || segment.state == SegmentState::free)
      order.emplace(closed && has_record(segment), segment.life, number);
  }
  uint64_t others = context_.table.bytes();
  for (const auto& [full, life, number] : order) others -= context_.table.find(number)->bytes;
  // Where what is not ours to remove fills the capacity, no removal reaches it.
  if (others >= bound) bound += others;
  uint32_t lost = 0;
  for (const auto& [full, life, number] : order) {
    if (context_.table.bytes() <= bound) break;
    lost += full;
    Segment* segment = context_.table.find(number);
    --report_.segments;
    context_.files.forget(number);
    const int error = context_.files.remove(number);
    context_.host.on_event("nvme_segment_removed", event_detail(number, error));
    if (error == 0)
      context_.table.erase(number);
    else
      segment->state = SegmentState::bad;
  }
  if (lost != 0)
    context_.host.on_event("nvme_shrunk", "segments_with_pages=" + std::to_string(lost) +
                                              " capacity=" + std::to_string(bound));
}

void Recovery::load(Segment& segment, const Found& found) {
  if (!load_toc(segment, found)) scan(segment, found);
  if (segment.records.empty() && segment.state == SegmentState::closed)
    segment.state = SegmentState::free;
  else
    context_.host.set_segment_word(segment.number, segment.life, false);
  report_.records += segment.records.size();
}

bool Recovery::load_toc(Segment& segment, const Found& found) {
  const uint64_t tail_bytes = std::min(kTailBytes, segment.bytes);
  AlignedBuffer tail(tail_bytes);
  if (read(segment.number, segment.bytes - tail_bytes, tail.span()) != 0) return false;
  const auto footer = decode_toc_footer(tail.part(tail_bytes - kBlockBytes, kBlockBytes));
  if (!footer || footer->warehouse != context_.options.warehouse_id) return false;
  if (footer->segment != segment.number || footer->life != segment.life) return false;
  if (footer->segment_bytes != segment.bytes) return false;
  const uint64_t entry_bytes = toc_entry_bytes(footer->entries);
  AlignedBuffer whole;
  auto padded = tail.span();
  if (entry_bytes + kBlockBytes <= tail_bytes) {
    padded = tail.part(tail_bytes - kBlockBytes - entry_bytes, entry_bytes);
  } else {
    whole = AlignedBuffer(entry_bytes);
    padded = whole.span();
    if (read(segment.number, segment.bytes - kBlockBytes - entry_bytes, padded) != 0) return false;
  }
  const auto entries = decode_toc_entries(*footer, padded);
  if (!entries) return false;
  adopt(segment, *entries, found);
  return true;
}

void Recovery::adopt(Segment& segment, std::span<const TocEntry> entries, const Found& found) {
  segment.records.reserve(entries.size());
  for (const TocEntry& entry : entries) {
    RecordRef ref{entry.key, entry.offset_blocks, 0, 0};
    ref.blocks = entry.blocks & kMaxRecordBlocks;
    ref.header_blocks = entry.header_blocks() & 0xff;
    segment.records.push_back(ref);
    found({segment.extent_of(ref), entry.facts()});
  }
  segment.flushed_records = entries.size();
}

void Recovery::scan(Segment& segment, const Found& found) {
  ++report_.scanned_segments;
  // A killed process leaves what it wrote for this one to read, synced or not; what is found counts
  // as durable from here on, so it has to be.
  if (const int error = sync(segment.number); error != 0) {
    segment.state = SegmentState::bad;
    context_.host.on_event("nvme_bad_segment", event_detail(segment.number, error));
    return;
  }
  SegmentScan scan(context_.options.warehouse_id, segment,
                   [this, &segment](uint64_t offset, std::span<std::byte> to) {
                     return read(segment.number, offset, to);
                   });
  const ScanResult result = scan.run([&](RecordHeader&& header) {
    segment.add(header.facts, header.extent);
    found({header.extent, std::move(header.facts)});
  });
  report_.refused_records += result.refused;
  if (result.refused != 0)
    context_.host.on_event(
        "nvme_records_refused",
        "segment=" + std::to_string(segment.number) + " records=" + std::to_string(result.refused));
  segment.next_block = result.next_block;
  segment.placed = segment.records.size();
  if (result.error != 0)
    context_.host.on_event("nvme_scan_cut_short", event_detail(segment.number, result.error));
  // It is closed with a table, so that the next start need not scan it again; not after a read
  // error, which may pass and would then have cost what lies behind it.
  const bool room =
      uint64_t{segment.next_block} * kBlockBytes + toc_bytes(segment.placed) <= segment.bytes;
  const bool close = result.error == 0 && room && !context_.options.inspect;
  if (close && !segment.records.empty()) {
    segment.flushed_records = segment.records.size();
    rotation_.close(segment);
  } else {
    segment.toc.clear();
    segment.flushed_records = segment.records.size();
  }
}

}  // namespace kvw::nvme
