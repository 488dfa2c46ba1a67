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

namespace kvw::nvme {
namespace {

constexpr uint64_t kTailBytes = 64ull << 10;  // holds the footer and most tables whole
constexpr int kLookMs = 100;                  // at the deadline
constexpr uint64_t kSmallestSegment = 4 * kBlockBytes;

bool is_zero(std::span<const std::byte> bytes) {
  return std::ranges::all_of(bytes, [](std::byte each) { return each == std::byte{0}; });
}

// Of a segment with these records and their table, without free space.
uint64_t length_of(std::span<const TocEntry> entries) {
  const TocEntry& last = entries.back();
  return (uint64_t{last.offset_blocks} + last.blocks) * kBlockBytes + toc_bytes(entries.size());
}

// How many of the first records fit with their table.
size_t fitting(std::span<const TocEntry> entries, uint64_t bytes) {
  while (!entries.empty() && length_of(entries) > bytes)
    entries = entries.first(entries.size() - 1);
  return entries.size();
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

int Recovery::write(uint32_t segment, uint64_t offset, std::span<const std::byte> from) {
  const int fd = acquire(segment);
  if (fd < 0) return -fd;
  if (landing_.bytes() < from.size()) landing_ = AlignedBuffer(from.size());
  std::memcpy(landing_.data(), from.data(), from.size());
  const int64_t result = wait_for({IoKind::write, fd, offset, {{landing_.data(), from.size()}}, 0});
  context_.files.release(segment);
  if (result < 0) return static_cast<int>(-result);
  return static_cast<uint64_t>(result) == from.size() ? 0 : EIO;
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
  if (report_.unreadable_segments != 0) context_.table.saw_life(context_.options.life_ahead);
  if (!context_.options.inspect) cut_tails();
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
  if (!header || header->segment != number) return classify_headless(number, bytes);
  const bool shortened = header->segment_bytes != bytes;
  if (shortened && !is_cut(*header, bytes)) return classify_headless(number, bytes);
  ++report_.segments;
  Segment& segment = context_.table.add(number, bytes, SegmentState::closed);
  segment.life = segment.file_life = header->life;
  segment.has_file = true;
  if (shortened && !context_.options.inspect) write_length(segment);
}

// A crash may come between the second and the third step of a cut.
bool Recovery::is_cut(const SegmentHeader& header, uint64_t bytes) {
  if (header.segment_bytes < bytes || bytes % kBlockBytes != 0) return false;
  AlignedBuffer block(kBlockBytes);
  if (read(header.segment, bytes - kBlockBytes, block.span()) != 0) return false;
  return footer_of(block.span(), header.segment, header.life, bytes).has_value();
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

// One that stood by, or was closed empty, has none. A record behind the header says enough; where
// there is none that can be believed, others may be behind it.
bool Recovery::has_record(const Segment& segment) {
  if (const auto entries = read_toc(segment)) return !entries->empty();
  AlignedBuffer first(std::min<uint64_t>(kMaxHeaderBytes, segment.bytes - kBlockBytes));
  if (read(segment.number, kBlockBytes, first.span()) != 0) return true;
  const auto record = decode_record_header(first.span());
  if (record && record->extent.life == segment.life) return true;
  bool found = false;
  const ScanResult result = scan_records(segment, [&found](const RecordHeader&) { found = true; });
  return found || result.error != 0;
}

bool Recovery::is_larger(const Segment& segment) const {
  return segment.state == SegmentState::closed && segment.bytes > context_.options.segment_bytes;
}

// Nothing after an error of the device, which may pass.
std::optional<Recovery::Contents> Recovery::contents_of(const Segment& segment) {
  if (auto entries = read_toc(segment)) return Contents{std::move(*entries)};
  if (sync(segment.number) != 0) return std::nullopt;
  Contents contents;
  contents.scanned = true;
  const ScanResult result = scan_records(segment, [&contents](RecordHeader&& header) {
    contents.entries.push_back(toc_entry(header.facts, header.extent));
  });
  contents.refused = result.refused;
  if (result.error != 0) return std::nullopt;
  return contents;
}

// A cut is worth its flushes where a new segment finds room in what it frees.
void Recovery::cut_tails() {
  const uint64_t segment_bytes = context_.options.segment_bytes;
  for (auto& [number, segment] : context_.table.all()) {
    if (!is_larger(segment) || !has_record(segment)) continue;
    auto contents = contents_of(segment);
    if (!contents || contents->entries.empty()) continue;
    const uint64_t wanted = std::max(length_of(contents->entries), segment_bytes);
    if (wanted + segment_bytes <= segment.bytes) cut(segment, *contents, wanted);
  }
}

// Keeps the first records of the contents, as many as fit. False: the file is as it was.
bool Recovery::cut(Segment& segment, Contents& contents, uint64_t bytes) {
  const std::span kept(contents.entries.data(), fitting(contents.entries, bytes));
  AlignedBuffer toc(toc_bytes(kept.size()));
  encode_toc(kept, {context_.options.warehouse_id, segment.number, segment.life, 0, 0, bytes},
             toc.span());
  int error = write(segment.number, bytes - toc.bytes(), toc.span());
  if (error == 0) error = sync(segment.number);
  if (error == 0) error = context_.files.cut(segment.number, bytes);
  if (error != 0) {
    context_.host.on_event("nvme_cut_failed", event_detail(segment.number, error));
    context_.health.become_read_only(error);  // so that reclaim does not take it before a probe
    return false;
  }
  context_.table.resize(segment, bytes);
  contents.entries.resize(kept.size());
  if (contents.scanned) ++report_.scanned_segments;
  tell_refused(segment.number, contents.refused);
  // As long as the header says the old length, the table at the end of the file speaks for it.
  if (sync(segment.number) == 0) write_length(segment);
  return true;
}

// Another start does it where this one cannot.
void Recovery::write_length(const Segment& segment) {
  AlignedBuffer block(kBlockBytes);
  if (read(segment.number, 0, block.span()) != 0) return;
  auto header = decode_segment_header(block.span());
  if (!header) return;
  header->segment_bytes = segment.bytes;
  encode_segment_header(*header, block.span());
  if (write(segment.number, 0, block.span()) == 0) sync(segment.number);
}

uint64_t Recovery::bytes_of_larger() const {
  uint64_t bytes = 0;
  for (const auto& [number, segment] : context_.table.all())
    if (is_larger(segment)) bytes += segment.bytes;
  return bytes;
}

// The capacity may have been lowered. What has no record goes first, then the oldest. Beside
// segments that are larger than the options say, there has to be room for an open one and for spare
// ones: to make it, reclaim would take a larger one as a whole.
void Recovery::shrink_to_capacity() {
  uint64_t bound = context_.options.capacity_bytes;
  const uint64_t larger = bytes_of_larger();
  const uint64_t spare = larger == 0 ? 0 : (1 + kSpareWanted) * context_.options.segment_bytes;
  if (context_.table.bytes() <= bound && larger + spare <= bound) return;
  context_.shrinking = true;
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
  bound -= spare;
  uint32_t lost = 0;
  uint64_t pages = 0;
  for (const auto& [full, life, number] : order) {
    if (context_.table.bytes() <= bound) break;
    Segment& segment = *context_.table.find(number);
    auto contents = full ? contents_of(segment) : std::nullopt;
    const uint64_t before = contents ? contents->entries.size() : 0;
    if (!shrink(segment, contents, context_.table.bytes() - bound)) continue;
    lost += full;
    pages += before - (contents ? contents->entries.size() : 0);
  }
  if (lost != 0)
    context_.host.on_event("nvme_shrunk", "segments_with_pages=" + std::to_string(lost) +
                                              " pages=" + std::to_string(pages) + " capacity=" +
                                              std::to_string(context_.options.capacity_bytes));
}

// Leaves in `contents` what stays. False: all of it, because the disk refused.
bool Recovery::shrink(Segment& segment, std::optional<Contents>& contents, uint64_t excess) {
  const uint64_t kept = segment.bytes - std::min(segment.bytes, round_up(excess, kBlockBytes));
  if (is_larger(segment) && contents && fitting(contents->entries, kept) != 0) {
    if (cut(segment, *contents, kept)) return true;
    // Only for the sake of spare segments, it is left to reclaim.
    if (context_.table.bytes() <= context_.options.capacity_bytes) return false;
  }
  remove(segment);
  if (contents) contents->entries.clear();
  return true;
}

// A file counts until it is gone, so it stays in the table as bad until then.
void Recovery::remove(Segment& segment) {
  const uint32_t number = segment.number;
  --report_.segments;
  context_.files.forget(number);
  if (const int error = context_.files.remove(number); error != 0) {
    segment.state = SegmentState::bad;
    context_.host.on_event("nvme_remove_failed", event_detail(number, error));
    return;
  }
  context_.table.erase(number);
  context_.host.on_event("nvme_segment_removed", "segment=" + std::to_string(number));
}

void Recovery::load(Segment& segment, const Found& found) {
  if (const auto entries = read_toc(segment))
    adopt(segment, *entries, found);
  else
    scan(segment, found);
  if (segment.records.empty() && segment.state == SegmentState::closed)
    segment.state = SegmentState::free;
  else
    context_.host.set_segment_word(segment.number, segment.life, false);
  report_.records += segment.records.size();
}

// Nothing where the block ends no table of this file in this life and of this length.
std::optional<TocFooter> Recovery::footer_of(std::span<const std::byte> block, uint32_t segment,
                                             uint32_t life, uint64_t bytes) const {
  auto footer = decode_toc_footer(block);
  if (!footer || footer->warehouse != context_.options.warehouse_id) return std::nullopt;
  if (footer->segment != segment || footer->life != life) return std::nullopt;
  if (footer->segment_bytes != bytes) return std::nullopt;
  return footer;
}

std::optional<std::vector<TocEntry>> Recovery::read_toc(const Segment& segment) {
  const uint64_t tail_bytes = std::min(kTailBytes, segment.bytes);
  AlignedBuffer tail(tail_bytes);
  if (read(segment.number, segment.bytes - tail_bytes, tail.span()) != 0) return std::nullopt;
  const auto footer = footer_of(tail.part(tail_bytes - kBlockBytes, kBlockBytes), segment.number,
                                segment.life, segment.bytes);
  if (!footer) return std::nullopt;
  const uint64_t entry_bytes = toc_entry_bytes(footer->entries);
  AlignedBuffer whole;
  auto padded = tail.span();
  if (entry_bytes + kBlockBytes <= tail_bytes) {
    padded = tail.part(tail_bytes - kBlockBytes - entry_bytes, entry_bytes);
  } else {
    whole = AlignedBuffer(entry_bytes);
    padded = whole.span();
    const uint64_t offset = segment.bytes - kBlockBytes - entry_bytes;
    if (read(segment.number, offset, padded) != 0) return std::nullopt;
  }
  const auto entries = decode_toc_entries(*footer, padded);
  if (!entries) return std::nullopt;
  return std::vector<TocEntry>(entries->begin(), entries->end());
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
  const ScanResult result = scan_records(segment, [&](RecordHeader&& header) {
    segment.add(header.facts, header.extent);
    found({header.extent, std::move(header.facts)});
  });
  tell_refused(segment.number, result.refused);
  segment.next_block = result.next_block;
  segment.placed = segment.records.size();
  if (result.error != 0) tell_unread(segment, result.error);
  // It is closed with a table, so that the next start need not scan it again; not after a read
  // error, which may pass and would then have cost what could not be read.
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

// What could not be read may be there all the same, so the segment is not used again by this run.
void Recovery::tell_unread(Segment& segment, int error) {
  segment.unread = true;
  context_.host.on_event("nvme_scan_cut_short", event_detail(segment.number, error));
  if (!segment.records.empty()) return;
  segment.state = SegmentState::bad;
  ++report_.unreadable_segments;
}

ScanResult Recovery::scan_records(const Segment& segment,
                                  const std::function<void(RecordHeader&&)>& found) {
  SegmentScan scan(context_.options.warehouse_id, segment,
                   [this, &segment](uint64_t offset, std::span<std::byte> to) {
                     return read(segment.number, offset, to);
                   });
  return scan.run(found);
}

void Recovery::tell_refused(uint32_t segment, uint64_t records) {
  report_.refused_records += records;
  if (records == 0) return;
  context_.host.on_event("nvme_records_refused", "segment=" + std::to_string(segment) +
                                                     " records=" + std::to_string(records));
}

}  // namespace kvw::nvme
