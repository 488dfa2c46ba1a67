// Damage to the NVMe tier's files, one fault at a time: a new log opens what is left and reads
// every page. What must hold: a page is right or a miss, never wrong; a page that the damage did
// not touch is there; and the damage is counted, by the start or by the read that met it.
//
// What may be lost is exactly this: the pages of a segment whose header, number or size cannot be
// believed; and each page whose record has a block that changed. A table of contents may go without
// any loss: the records are then scanned.
#include <bit>

#include "nvme/format.h"
#include "tests/check.h"
#include "tests/segment_image.h"
#include "tests/tally.h"

using namespace kvw;
using namespace kvw::nvme;

namespace {

using Random = std::mt19937_64;

struct Fault {
  const char* name;
  Image image;
  std::set<uint64_t> may_lose;
  bool counted = true;  // or harmless: it is in bytes that nothing depends on
  uint64_t foreign = 0;
};

const Stored& stored() {
  static const Stored made = make_stored();
  return made;
}

template <class Container>
auto any_of(const Container& all, Random& random) {
  return *std::next(all.begin(), static_cast<ptrdiff_t>(random() % all.size()));
}

uint64_t byte_of(const Extent& extent) { return uint64_t{extent.offset_blocks} * kBlockBytes; }

void flip(SegmentBytes& bytes, uint64_t at, Random& random) {
  bytes[at] ^= std::byte{1} << static_cast<int>(random() % 8);
}

void merge(std::set<uint64_t>& into, const std::set<uint64_t>& more) {
  into.insert(more.begin(), more.end());
}

// All that lies in the blocks in which the two differ.
std::set<uint64_t> changed_pages(uint32_t segment, const SegmentBytes& before,
                                 const SegmentBytes& after) {
  std::set<uint64_t> pages;
  for (uint64_t at = 0; at < kImageSegmentBytes; at += kBlockBytes)
    if (std::memcmp(before.data() + at, after.data() + at, kBlockBytes) != 0)
      merge(pages, stored().touched(segment, at, at + kBlockBytes));
  return pages;
}

// --- one fault of each class

Fault segment_header(Random& random) {
  Fault fault{"segment header flipped", stored().segments, {}};
  auto& [number, bytes] = *fault.image.find(any_of(stored().segments, random).first);
  flip(bytes, random() % kBlockBytes, random);
  fault.may_lose = stored().in_segment(number);
  return fault;
}

Fault record_header(Random& random) {
  Fault fault{"record header, digests or witness flipped", stored().segments, {}};
  const auto [page, extent] = any_of(stored().pages, random);
  // Half of them in what has a meaning; the rest is under the checksum as well.
  const uint64_t bytes = random() % 2 == 0 ? kBlockBytes : kRecordFixedBytes + 8 + 16 * 4;
  flip(fault.image.at(extent.segment), byte_of(extent) + random() % bytes, random);
  fault.may_lose = {page};
  fault.counted = !stored().is_end(page);
  return fault;
}

Fault payload(Random& random) {
  Fault fault{"record payload flipped", stored().segments, {}};
  const auto [page, extent] = any_of(stored().pages, random);
  const uint64_t at = byte_of(extent) + kBlockBytes + random() % kImageShardBytes;
  flip(fault.image.at(extent.segment), at, random);
  fault.may_lose = {page};
  return fault;
}

Fault padding(Random& random) {
  Fault fault{"padding of a record flipped", stored().segments, {}, false};
  const auto [page, extent] = any_of(stored().pages, random);
  const uint64_t end = byte_of(extent) + uint64_t{extent.blocks} * kBlockBytes;
  const uint64_t padding_bytes = round_up(kImageShardBytes, kBlockBytes) - kImageShardBytes;
  flip(fault.image.at(extent.segment), end - 1 - random() % padding_bytes, random);
  return fault;
}

Fault table_entry(Random& random) {
  Fault fault{"table of contents flipped", stored().segments, {}};
  auto& bytes = fault.image.at(any_of(stored().closed, random));
  const auto footer = decode_toc_footer(std::span(bytes).last(kBlockBytes));
  const uint64_t entries = toc_entry_bytes(footer->entries);
  flip(bytes, kImageSegmentBytes - kBlockBytes - entries + random() % entries, random);
  return fault;
}

Fault footer(Random& random) {
  Fault fault{"footer of a table of contents flipped", stored().segments, {}};
  auto& bytes = fault.image.at(any_of(stored().closed, random));
  flip(bytes, kImageSegmentBytes - 1 - random() % kBlockBytes, random);
  return fault;
}

Fault free_space(Random& random) {
  Fault fault{"free space of a segment flipped", stored().segments, {}, false};
  // Closed segments may be full to the last block; the one that was open never is.
  const uint32_t number = any_of(fault.image, random).first;
  auto& bytes = fault.image.at(number);
  const auto footer = decode_toc_footer(std::span(bytes).last(kBlockBytes));
  uint64_t begin = kBlockBytes;
  for (const uint64_t page : stored().in_segment(number)) {
    const Extent& extent = stored().pages.at(page);
    begin = std::max(begin, byte_of(extent) + uint64_t{extent.blocks} * kBlockBytes);
  }
  const uint64_t end = kImageSegmentBytes - (footer ? toc_bytes(footer->entries) : 0);
  if (begin == end) return padding(random);
  flip(bytes, begin + random() % (end - begin), random);
  return fault;
}

Fault truncation(Random& random) {
  Fault fault{"segment cut at a random length", stored().segments, {}};
  auto& [number, bytes] = *fault.image.find(any_of(stored().segments, random).first);
  bytes.resize(random() % kImageSegmentBytes);
  fault.may_lose = stored().in_segment(number);
  fault.counted = !bytes.empty();  // an empty file is one that a crash left before its first life
  return fault;
}

// A record over another, from this segment, another one, or an earlier life; whole or cut off.
Fault misplaced(Random& random) {
  Fault fault{"good record copied over another", stored().segments, {}};
  const auto [page, to] = any_of(stored().pages, random);
  auto& bytes = fault.image.at(to.segment);
  const SegmentBytes before = bytes;
  const bool old = random() % 3 == 0;
  const auto [other, from] = any_of(stored().pages, random);
  const SegmentBytes& source = (old ? stored().earlier : stored().segments).contains(from.segment)
                                   ? (old ? stored().earlier : stored().segments).at(from.segment)
                                   : before;
  const uint64_t length = random() % 4 == 0 ? kBlockBytes : uint64_t{to.blocks} * kBlockBytes;
  std::memcpy(bytes.data() + byte_of(to), source.data() + byte_of(from), length);
  fault.may_lose = changed_pages(to.segment, before, bytes);
  const auto& lost = fault.may_lose;
  fault.counted = std::ranges::any_of(lost, [](uint64_t each) { return !stored().is_end(each); });
  return fault;
}

Fault exchanged(Random& random) {
  Fault fault{"payloads of two records exchanged", stored().segments, {}};
  const auto [page, one] = any_of(stored().pages, random);
  const auto [other, two] = any_of(stored().pages, random);
  const uint64_t length = round_up(kImageShardBytes, kBlockBytes);
  std::byte* first = fault.image.at(one.segment).data() + byte_of(one) + kBlockBytes;
  std::byte* second = fault.image.at(two.segment).data() + byte_of(two) + kBlockBytes;
  if (page != other) std::swap_ranges(first, first + length, second);
  fault.may_lose = {page, other};
  fault.counted = page != other;
  return fault;
}

Fault older_version(Random& random) {
  Fault fault{"whole segment as it was before", stored().segments, {}, false};
  const uint32_t number = any_of(stored().earlier, random).first;
  fault.image[number] = stored().earlier.at(number);
  fault.may_lose = stored().in_segment(number);
  return fault;
}

// Blocks of the older version here and there: a disk that lost some of its writes.
Fault lost_writes(Random& random) {
  Fault fault{"some blocks of a segment as they were before", stored().segments, {}, false};
  const uint32_t number = any_of(stored().earlier, random).first;
  auto& bytes = fault.image.at(number);
  const SegmentBytes before = bytes;
  for (uint64_t at = 0; at < kImageSegmentBytes; at += kBlockBytes)
    if (random() % 3 == 0)
      std::memcpy(bytes.data() + at, stored().earlier.at(number).data() + at, kBlockBytes);
  fault.may_lose = changed_pages(number, before, bytes);
  const bool header = std::memcmp(before.data(), bytes.data(), kBlockBytes) != 0;
  if (header) merge(fault.may_lose, stored().in_segment(number));
  return fault;
}

Fault stranger(Random& random) {
  Fault fault{"segment of another warehouse copied in", stored().segments, {}};
  const bool beside = random() % 2 == 0;
  const uint32_t number =
      beside ? 8 + static_cast<uint32_t>(random() % 1000) : any_of(stored().segments, random).first;
  fault.image[number] = stored().stranger;
  if (!beside) fault.may_lose = stored().in_segment(number);
  fault.foreign = 1;
  // A damaged header must not turn it into one of ours.
  if (random() % 2 == 0) flip(fault.image[number], random() % kBlockBytes, random);
  return fault;
}

Fault wrong_number(Random& random) {
  Fault fault{"segment copied to another number", stored().segments, {}};
  const uint32_t from = any_of(stored().segments, random).first;
  const uint32_t to = static_cast<uint32_t>(random() % 12);
  fault.image[to] = stored().segments.at(from);
  if (to != from) fault.may_lose = stored().in_segment(to);
  fault.counted = to != from;
  return fault;
}

Fault noise(Random& random) {
  Fault fault{"stretch of a segment overwritten with noise", stored().segments, {}, false};
  auto& [number, bytes] = *fault.image.find(any_of(stored().segments, random).first);
  const uint64_t at = random() % kImageSegmentBytes;
  const uint64_t end = std::min(kImageSegmentBytes, at + 1 + random() % (3 * kBlockBytes));
  for (uint64_t i = at; i < end; ++i) bytes[i] = static_cast<std::byte>(random());
  fault.may_lose =
      at < kBlockBytes ? stored().in_segment(number) : stored().touched(number, at, end);
  return fault;
}

constexpr Fault (*kClasses[])(Random&) = {segment_header, record_header, payload,       padding,
                                          table_entry,    footer,        free_space,    truncation,
                                          misplaced,      exchanged,     older_version, lost_writes,
                                          stranger,       wrong_number,  noise};

// --- what must hold

uint64_t counted(const RecoveryReport& report, const Reopened& world, uint64_t usual_scans) {
  return report.bad_headers + report.foreign_segments + report.refused_records +
         report.unreadable_segments +
         (std::max(report.scanned_segments, usual_scans) - usual_scans) +
         world.log->stats().mismatches;
}

void check_fault(Reopened& world, const Fault& fault, Random& random) {
  const uint64_t usual_scans = stored().segments.size() - stored().closed.size();
  world.fill(fault.image);
  world.options.inspect = random() % 2 == 0;
  const RecoveryReport report = world.open();
  const std::set<uint64_t> right = world.read_all();
  for (const auto& [page, extent] : stored().pages)
    if (!fault.may_lose.contains(page) && !right.contains(page))
      check::fail(__FILE__, __LINE__,
                  std::string(fault.name) + ": page " + std::to_string(page) + " in segment " +
                      std::to_string(extent.segment) + " is lost, and was not touched");
  CHECK_EQ(report.foreign_segments, fault.foreign);
  if (fault.counted && counted(report, world, usual_scans) == 0)
    check::fail(__FILE__, __LINE__, std::string(fault.name) + ": was counted nowhere");
  if (world.options.inspect) {
    // A look changes nothing.
    world.kill();
    CHECK(read_image(world.dir.path()) == fault.image);
  } else if (random() % 16 == 0) {
    // It goes on from there: what is stored now is there after the next start as well.
    for (uint64_t number = 150; number < 160; ++number)
      world.until([&] { return world.append(number, kImageShardBytes, kImageShards); });
    world.until([&] { return world.waiting.empty(); });
    world.flush();
    world.kill();
    world.open();
    const std::set<uint64_t> again = world.read_all();
    for (uint64_t number = 155; number < 160; ++number) CHECK(again.contains(number));
  }
  check::tally(fault.name);
}

}  // namespace

TEST(image_is_read_back_whole_when_nothing_is_damaged) {
  Reopened world;
  CHECK(stored().pages.size() >= 30);
  CHECK(stored().closed.size() >= 2);
  CHECK(stored().closed.size() < stored().segments.size());
  CHECK(!stored().earlier.empty());
  for (const bool inspect : {true, false}) {
    world.fill(stored().segments);
    world.options.inspect = inspect;
    const RecoveryReport report = world.open();
    CHECK_EQ(counted(report, world, stored().segments.size() - stored().closed.size()), 0);
    CHECK_EQ(world.read_all().size(), stored().pages.size());
  }
}

TEST(segments_with_any_damage_give_right_pages_or_misses_and_keep_what_was_not_touched) {
  auto random = check::random("segment damage");
  Reopened world;
  for (uint64_t round = 0; round < check::rounds(90); ++round)
    for (const auto make : kClasses) check_fault(world, make(random), random);
}
