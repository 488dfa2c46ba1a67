// The bytes of the NVMe tier: they come back as they went, no damaged byte is believed, and no
// number of a hostile file leads outside its buffer.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "nvme/format.h"
#include "tests/nvme_world.h"

using namespace kvw;
using namespace kvw::nvme;

namespace {

const Key kWarehouse{11, 13};

void reseal(std::span<std::byte> bytes) {
  const uint64_t checksum = XXH3_64bits(bytes.data() + 8, bytes.size() - 8);
  std::memcpy(bytes.data(), &checksum, 8);
}

AlignedBuffer record_header(const PageFacts& facts, const Extent& extent) {
  AlignedBuffer buffer(header_blocks(facts) * kBlockBytes);
  encode_record_header(kWarehouse, extent, facts, buffer.span());
  return buffer;
}

std::vector<TocEntry> some_entries(size_t count) {
  std::vector<TocEntry> entries;
  uint32_t offset = 1;
  for (size_t i = 0; i < count; ++i) {
    const PageFacts facts = make_page(i).facts;
    const uint32_t blocks = record_blocks(facts);
    entries.push_back(toc_entry(facts, {5, offset, blocks, 9}));
    offset += blocks;
  }
  return entries;
}

AlignedBuffer toc_of(const std::vector<TocEntry>& entries, uint64_t segment_bytes) {
  AlignedBuffer buffer(toc_bytes(entries.size()));
  encode_toc(entries, {kWarehouse, 5, 9, 0, 0, segment_bytes}, buffer.span());
  return buffer;
}

bool toc_is_believed(const AlignedBuffer& toc) {
  const auto footer = decode_toc_footer(toc.part(toc.bytes() - kBlockBytes, kBlockBytes));
  if (!footer) return false;
  const uint64_t bytes = toc_entry_bytes(footer->entries);
  if (bytes + kBlockBytes > toc.bytes()) return false;
  return decode_toc_entries(*footer, toc.part(toc.bytes() - kBlockBytes - bytes, bytes))
      .has_value();
}

}  // namespace

TEST(segment_header_comes_back_as_it_went) {
  AlignedBuffer block(kBlockBytes);
  encode_segment_header({kWarehouse, 5, 77, 1234567890123, 256ull << 20}, block.span());
  const auto header = decode_segment_header(block.span());
  CHECK(header.has_value());
  CHECK(header->warehouse == kWarehouse);
  CHECK_EQ(header->segment, 5);
  CHECK_EQ(header->life, 77);
  CHECK_EQ(header->clear_epoch, 1234567890123);
  CHECK_EQ(header->segment_bytes, 256ull << 20);
}

TEST(segment_header_is_refused_when_any_byte_is_flipped) {
  AlignedBuffer block(kBlockBytes);
  encode_segment_header({kWarehouse, 5, 77, 1, 256ull << 20}, block.span());
  auto random = check::random("segment header flips");
  for (size_t i = 0; i < block.bytes(); ++i) {
    const auto flip = static_cast<std::byte>(1 + random() % 255);
    block.data()[i] ^= flip;
    CHECK(!decode_segment_header(block.span()));
    block.data()[i] ^= flip;
  }
  CHECK(decode_segment_header(block.span()).has_value());
}

TEST(record_header_comes_back_as_it_went_whatever_its_size) {
  for (uint32_t tokens : {0u, 16u, 900u, 1000u, kMaxPageTokens})
    for (uint32_t shards : {1u, 2u, kMaxShards}) {
      const Page page = make_page(42, 100, shards, tokens);
      const Extent extent{5, 17, record_blocks(page.facts), 9};
      const auto bytes = record_header(page.facts, extent);
      const auto header = decode_record_header(bytes.span());
      CHECK(header.has_value());
      CHECK(header->warehouse == kWarehouse);
      CHECK(header->extent == extent);
      CHECK_EQ(header->header_blocks, header_blocks(page.facts));
      CHECK(same_facts(header->facts, page.facts));
      CHECK_EQ(*record_header_bytes(bytes.span()), bytes.bytes());
      CHECK(payload_matches(header->facts, page.payload.data()));
    }
}

TEST(record_header_is_refused_when_any_byte_is_flipped) {
  const Page page = make_page(42, 100, 3, 1500);
  const auto bytes = record_header(page.facts, {5, 17, record_blocks(page.facts), 9});
  CHECK_EQ(bytes.bytes(), 2 * kBlockBytes);
  auto random = check::random("record header flips");
  for (size_t i = 0; i < bytes.bytes(); ++i) {
    const auto flip = static_cast<std::byte>(1 + random() % 255);
    bytes.data()[i] ^= flip;
    CHECK(!decode_record_header(bytes.span()));
    bytes.data()[i] ^= flip;
  }
}

TEST(record_payload_is_refused_when_a_byte_of_a_shard_is_flipped) {
  const Page page = make_page(42, 5000, 2);
  for (size_t at : {0u, 4095u, 4096u, 4999u, 8192u, 8192u + 4999u}) {
    page.payload.data()[at] ^= std::byte{1};
    CHECK(!payload_matches(page.facts, page.payload.data()));
    page.payload.data()[at] ^= std::byte{1};
  }
  CHECK(payload_matches(page.facts, page.payload.data()));
}

TEST(table_of_contents_comes_back_as_it_went) {
  for (size_t count : {0u, 1u, 42u, 43u, 500u}) {
    const auto entries = some_entries(count);
    const auto toc = toc_of(entries, 64 << 20);
    const auto footer = decode_toc_footer(toc.part(toc.bytes() - kBlockBytes, kBlockBytes));
    CHECK(footer.has_value());
    CHECK_EQ(footer->entries, count);
    CHECK_EQ(footer->life, 9);
    const auto back = decode_toc_entries(*footer, toc.part(0, toc.bytes() - kBlockBytes));
    CHECK(back.has_value());
    for (size_t i = 0; i < count; ++i) {
      PageFacts expected = make_page(i).facts;
      CHECK_EQ((*back)[i].header_blocks(), header_blocks(expected));
      expected.witness.clear();
      expected.digests.clear();
      CHECK(same_facts((*back)[i].facts(), expected));
    }
  }
}

TEST(table_of_contents_is_refused_when_any_byte_is_flipped) {
  const auto toc = toc_of(some_entries(100), 64 << 20);
  auto random = check::random("toc flips");
  CHECK(toc_is_believed(toc));
  for (size_t i = 0; i < toc.bytes(); ++i) {
    const auto flip = static_cast<std::byte>(1 + random() % 255);
    toc.data()[i] ^= flip;
    CHECK(!toc_is_believed(toc));
    toc.data()[i] ^= flip;
  }
}

TEST(table_of_contents_is_refused_when_its_entries_overlap_or_leave_the_segment) {
  const auto refused = [](std::vector<TocEntry> entries, uint64_t segment_bytes) {
    return !toc_is_believed(toc_of(entries, segment_bytes));
  };
  const auto good = some_entries(10);
  CHECK(!refused(good, 1 << 20));
  auto overlap = good;
  overlap[4].offset_blocks -= 1;
  CHECK(refused(overlap, 1 << 20));
  auto outside = good;
  outside[9].offset_blocks = (1 << 20) / kBlockBytes - 3;
  CHECK(refused(outside, 1 << 20));
  auto on_header = good;
  on_header[0].offset_blocks = 0;
  CHECK(refused(on_header, 1 << 20));
  auto wrong_blocks = good;
  wrong_blocks[9].blocks -= 1;
  CHECK(refused(wrong_blocks, 1 << 20));
  auto no_shards = good;
  no_shards[9].shards = 0;
  CHECK(refused(no_shards, 1 << 20));
  auto huge = good;
  huge[9].shard_bytes = UINT64_MAX - 5;
  CHECK(refused(huge, 1 << 20));
  CHECK(refused(good, 4 * kBlockBytes));
}

// With good checksums over arbitrary numbers: only the bounds stand between them and the memory.
TEST(decoding_stays_inside_its_buffer_when_numbers_are_hostile) {
  auto random = check::random("hostile numbers");
  const Page page = make_page(42, 100, 3, 1500);
  const auto record = record_header(page.facts, {5, 17, record_blocks(page.facts), 9});
  const auto toc = toc_of(some_entries(50), 1 << 20);
  for (uint64_t round = 0; round < check::rounds(20000); ++round) {
    AlignedBuffer bytes(2 * kBlockBytes);
    std::memcpy(bytes.data(), record.data(), bytes.bytes());
    const uint64_t value = random() >> (random() % 64);
    std::memcpy(bytes.data() + 16 + random() % 140, &value, 4 + random() % 5);
    const size_t shown = random() % 2 == 0 ? kBlockBytes : 2 * kBlockBytes;
    if (const auto size = record_header_bytes(bytes.span()); size && *size <= shown)
      reseal(bytes.part(0, *size));
    if (const auto header = decode_record_header(bytes.part(0, shown))) {
      CHECK(facts_are_sound(header->facts) || header->facts.shard_bytes > (1ull << 30));
      CHECK_EQ(header->facts.digests.size(), header->facts.shards);
    }
    AlignedBuffer table(toc.bytes());
    std::memcpy(table.data(), toc.data(), toc.bytes());
    const auto footer_block = table.part(toc.bytes() - kBlockBytes, kBlockBytes);
    std::memcpy(footer_block.data() + 16 + random() % 40, &value, 8);
    reseal(footer_block);
    toc_is_believed(table);
  }
}

TEST(decoding_refuses_short_and_empty_spans) {
  const Page page = make_page(42, 100, 3, 1500);
  const auto bytes = record_header(page.facts, {5, 17, record_blocks(page.facts), 9});
  for (size_t size : {0u, 1u, 8u, 159u, 4095u, 4096u, 8191u})
    CHECK(!decode_record_header(bytes.part(0, size)));
  CHECK(!decode_segment_header(bytes.part(0, 100)));
  CHECK(!decode_toc_footer(bytes.part(0, 0)));
  CHECK(!decode_toc_entries({kWarehouse, 5, 9, 1, 0, 1 << 20}, bytes.part(0, 8)));
}
