#include "remote/check_object.h"

#include <optional>

#include "nvme/format.h"

namespace kvw::remote {

namespace {

// What the first record says of the object; its pages are as many as there are bytes for.
std::optional<ObjectSpec> told_by(const nvme::RecordHeader& first, const Key& fleet, Secret secret,
                                  const ObjectName& name, uint64_t bytes) {
  const PageFacts& facts = first.facts;
  ObjectSpec spec{fleet,
                  secret,
                  {name.namespace_id, facts.page_tokens, facts.shards, facts.shard_bytes},
                  facts.witness_kind,
                  name.epoch,
                  name.key,
                  facts.position,
                  1};
  const uint64_t pages = bytes / spec.record_bytes();
  const uint32_t run = object_pages(spec.shape);
  if (pages != 1 && pages != run) return std::nullopt;  // 1: it stands alone
  if (run == 0 || bytes % spec.record_bytes() != 0 || facts.position % pages != 0)
    return std::nullopt;
  spec.pages = static_cast<uint32_t>(pages);
  return spec;
}

// Before its numbers are believed.
bool begins_an_object(const nvme::RecordHeader& first, const Key& fleet) {
  const nvme::Extent& at = first.extent;
  return first.warehouse == fleet && at.segment == kObjectSegment && at.life == kObjectVersion &&
         at.offset_blocks == 0;
}

}  // namespace

ObjectCheck check_object(const Key& fleet, Secret secret, const ObjectName& name,
                         std::span<const std::byte> bytes) {
  const auto first = nvme::decode_record_header(bytes);
  if (!first) return {bytes.empty() ? ObjectFault::size : ObjectFault::header, 0, 0};
  if (!begins_an_object(*first, fleet)) return {ObjectFault::place, 0, 0};
  const auto spec = told_by(*first, fleet, secret, name, bytes.size());
  if (!spec) return {ObjectFault::size, 0, 0};
  const ObjectRead read = read_object(*spec, 0, bytes);
  ObjectCheck check{read.fault, 0, spec->record_bytes()};
  for (const ObjectPage& page : read.pages) {
    if (!nvme::payload_matches(page.facts, page.payload)) {
      check.fault = ObjectFault::digest;
      break;
    }
    ++check.pages;
  }
  return check;
}

}  // namespace kvw::remote
