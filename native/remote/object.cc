#include "remote/object.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

#include "copy/copy.h"
#include "nvme/format.h"

namespace kvw::remote {

namespace {

uint64_t witness_bytes(const NamespaceShape& shape, WitnessKind kind) {
  return kind == WitnessKind::tokens ? uint64_t{shape.page_tokens} * 4 : kMaxEngineKeyBytes;
}

nvme::Extent place_of(const ObjectSpec& spec, uint32_t page) {
  const uint32_t blocks = spec.record_blocks();
  return {kObjectSegment, page * blocks, blocks, kObjectVersion};
}

bool has_shape(const ObjectSpec& spec, uint32_t page, const PageFacts& facts) {
  const bool tokens = facts.witness_kind == WitnessKind::tokens;
  const bool witness = tokens
                           ? facts.witness.size() == witness_bytes(spec.shape, facts.witness_kind)
                           : !facts.witness.empty() && facts.witness.size() <= kMaxEngineKeyBytes;
  return facts.namespace_id == spec.shape.id && facts.shards == spec.shape.shards &&
         facts.shard_bytes == spec.shape.shard_bytes &&
         facts.page_tokens == spec.shape.page_tokens && facts.witness_kind == spec.witness_kind &&
         witness && facts.digests.size() == facts.shards &&
         facts.position == spec.first_position + page;
}

Key made_key(const ObjectSpec& spec, const PageFacts& facts) {
  if (facts.witness_kind == WitnessKind::engine_key)
    return engine_key(spec.secret, spec.shape.id, facts.witness);
  const auto* tokens = reinterpret_cast<const uint32_t*>(facts.witness.data());
  return chain_key(spec.secret, facts.parent, {tokens, facts.witness.size() / 4});
}

// `before`: the page before it in the object, or null.
ObjectFault judge(const ObjectSpec& spec, uint32_t page, const PageFacts& facts,
                  const PageFacts* before) {
  if (!has_shape(spec, page, facts)) return ObjectFault::shape;
  if (facts.clear_epoch != spec.epoch) return ObjectFault::epoch;
  const bool first = facts.position == 0;
  const bool follows = before == nullptr || facts.parent == before->key;
  if (!follows || (first && facts.parent != root_key(spec.secret, spec.shape.id)) ||
      facts.key != made_key(spec, facts))
    return ObjectFault::chain;
  return ObjectFault::none;
}

}  // namespace

const char* fault_name(ObjectFault fault) {
  static constexpr const char* kNames[] = {"none",  "size",  "header", "place",
                                           "shape", "epoch", "chain",  "digest"};
  static_assert(std::size(kNames) == static_cast<size_t>(ObjectFault::count));
  return kNames[static_cast<size_t>(fault)];
}

uint32_t object_pages(const NamespaceShape& shape) {
  const uint64_t page_bytes = shape.slot_bytes();
  if (page_bytes == 0 || page_bytes > kMostPageBytes) return 0;
  const uint64_t by_tokens = kObjectTokens / std::max<uint32_t>(shape.page_tokens, 1);
  const uint64_t pages = std::min(by_tokens, kObjectBytes / page_bytes);
  return static_cast<uint32_t>(std::bit_floor(std::max<uint64_t>(pages, 1)));
}

uint32_t record_blocks(const NamespaceShape& shape, WitnessKind kind) {
  return nvme::record_blocks(shape.shards, shape.shard_bytes, witness_bytes(shape, kind));
}

ObjectPacked pack_object(const ObjectSpec& spec, std::span<const ObjectPage> pages,
                         std::span<std::byte> to) {
  assert(to.size() == spec.bytes() && reinterpret_cast<uintptr_t>(to.data()) % kBlockBytes == 0);
  if (pages.size() != spec.pages) return {ObjectFault::size, static_cast<uint32_t>(pages.size())};
  for (uint32_t page = 0; page < spec.pages; ++page) {
    PageFacts facts = pages[page].facts;
    facts.clear_epoch = spec.epoch;
    const PageFacts* before = page == 0 ? nullptr : &pages[page - 1].facts;
    const ObjectFault fault = judge(spec, page, facts, before);
    if (fault != ObjectFault::none) return {fault, page};
    const auto record = to.subspan(page * spec.record_bytes(), spec.record_bytes());
    const auto header = record.first(record.size() - facts.payload_bytes());
    std::memset(header.data(), 0, header.size());
    nvme::encode_record_header(spec.fleet, place_of(spec, page), facts, header);
    if (!copy_payload(pages[page], record.data() + header.size()))
      return {ObjectFault::digest, page};
  }
  const bool named = pages.back().facts.key == spec.key;
  return {named ? ObjectFault::none : ObjectFault::chain, spec.pages - 1};
}

ObjectRead read_object(const ObjectSpec& spec, uint32_t from, std::span<const std::byte> bytes) {
  ObjectRead read;
  const uint64_t record_bytes = spec.record_bytes();
  if (from >= spec.pages || bytes.size() != record_bytes * (spec.pages - from)) {
    read.fault = ObjectFault::size;
    return read;
  }
  read.pages.reserve(spec.pages - from);
  for (uint32_t page = from; page < spec.pages; ++page) {
    const auto record = bytes.subspan((page - from) * record_bytes, record_bytes);
    auto header = nvme::decode_record_header(record);
    const PageFacts* before = read.pages.empty() ? nullptr : &read.pages.back().facts;
    if (!header)
      read.fault = ObjectFault::header;
    else if (header->warehouse != spec.fleet || header->extent != place_of(spec, page))
      read.fault = ObjectFault::place;
    else
      read.fault = judge(spec, page, header->facts, before);
    if (read.fault != ObjectFault::none) return read;
    const uint64_t header_bytes = uint64_t{header->header_blocks} * kBlockBytes;
    read.pages.push_back({std::move(header->facts), record.data() + header_bytes});
  }
  if (read.pages.back().facts.key != spec.key) {
    read.pages.clear();
    read.fault = ObjectFault::chain;
  }
  return read;
}

bool copy_payload(const ObjectPage& page, std::byte* to) {
  bool same = true;
  for (uint32_t shard = 0; shard < page.facts.shards; ++shard)
    same = copy_shard(page, shard, to) && same;
  return same;
}

bool copy_shard(const ObjectPage& page, uint32_t shard, std::byte* to) {
  const PageFacts& facts = page.facts;
  const uint64_t stride = round_up(facts.shard_bytes, kBlockBytes);
  // Only read from: a piece serves both directions.
  const Piece piece{const_cast<std::byte*>(page.payload) + shard * stride, facts.shard_bytes};
  std::byte* part = to + shard * stride;
  const uint64_t digest = gather_digest(part, {&piece, 1}, facts.key, shard);
  std::memset(part + facts.shard_bytes, 0, stride - facts.shard_bytes);
  return digest == facts.digests[shard];
}

}  // namespace kvw::remote
