// A good object of the remote tier with an input's patches in it, cut where the input says, through
// what judges it at arrival: each page that is had lies inside, is of the right namespace and
// place, has the key that its tokens make, and its bytes are judged without a step outside.
#include <algorithm>
#include <optional>
#include <vector>

#include "digest/digest.h"
#include "fuzz/target.h"
#include "nvme/aligned_buffer.h"
#include "remote/object.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvw::fuzz {
namespace {

using nvme::AlignedBuffer;
using remote::ObjectFault;
using remote::ObjectSpec;

constexpr uint32_t kPages = 4;

struct Made {
  std::vector<std::byte> secret = std::vector<std::byte>(kSecretBytes);
  AlignedBuffer object;
  std::optional<ObjectSpec> spec;
};

PageFacts facts_of(const ObjectSpec& spec, uint32_t page, const Key& parent) {
  PageFacts facts;
  facts.parent = parent;
  facts.namespace_id = spec.shape.id;
  facts.position = spec.first_position + page;
  facts.shards = spec.shape.shards;
  facts.page_tokens = spec.shape.page_tokens;
  facts.shard_bytes = spec.shape.shard_bytes;
  facts.witness_kind = spec.witness_kind;
  facts.witness.assign(spec.witness_kind == WitnessKind::tokens ? spec.shape.page_tokens * 4 : 32,
                       static_cast<std::byte>(page + 1));
  const auto* tokens = reinterpret_cast<const uint32_t*>(facts.witness.data());
  facts.key = spec.witness_kind == WitnessKind::tokens
                  ? chain_key(spec.secret, parent, {tokens, spec.shape.page_tokens})
                  : engine_key(spec.secret, spec.shape.id, facts.witness);
  return facts;
}

Made make_object(WitnessKind kind) {
  Made made;
  for (size_t i = 0; i < kSecretBytes; ++i)
    made.secret[i] = static_cast<std::byte>(i * 37 + (i * i >> 3));
  made.spec.emplace(
      ObjectSpec{{11, 13}, Secret(made.secret), {{7, 9}, 4, 2, 5000}, kind, 5, {}, 0, kPages});
  const uint64_t stride = made.spec->shape.shard_stride();
  AlignedBuffer payload(made.spec->shape.slot_bytes());
  for (size_t i = 0; i < payload.bytes(); ++i) payload.data()[i] = static_cast<std::byte>(i * 31);
  std::vector<remote::ObjectPage> pages;
  Key parent = root_key(made.spec->secret, made.spec->shape.id);
  for (uint32_t page = 0; page < kPages; ++page) {
    PageFacts facts = facts_of(*made.spec, page, parent);
    for (uint32_t shard = 0; shard < facts.shards; ++shard)
      facts.digests.push_back(
          page_digest(payload.data() + shard * stride, facts.shard_bytes, facts.key, shard));
    parent = facts.key;
    pages.push_back({std::move(facts), payload.data()});
  }
  made.spec->key = parent;
  made.object = AlignedBuffer(made.spec->bytes());
  require(pack_object(*made.spec, pages, made.object.span()).fault == ObjectFault::none, "packed");
  return made;
}

// Each patch: where (mostly in a header), how many bytes, which. Headers may get a checksum that
// holds, so that the numbers behind it are what is tried.
void patch(const ObjectSpec& spec, std::span<std::byte> object, Input& input, bool whole) {
  while (!input.empty()) {
    const auto where = input.number<uint16_t>();
    const uint64_t page = where % kPages, in_record = where / kPages;
    const uint64_t at = page * spec.record_bytes() + in_record % spec.record_bytes();
    const auto bytes =
        input.take(std::min<uint64_t>(input.number<uint8_t>() % 16, object.size() - at));
    if (!bytes.empty()) std::memcpy(object.data() + at, bytes.data(), bytes.size());
  }
  for (uint32_t page = 0; whole && page < kPages; ++page) {
    const auto header = object.subspan(page * spec.record_bytes(), kBlockBytes);
    const uint64_t checksum = XXH3_64bits(header.data() + 8, header.size() - 8);
    std::memcpy(header.data(), &checksum, sizeof checksum);
  }
}

void judge(const ObjectSpec& spec, uint32_t from, std::span<const std::byte> bytes) {
  const auto read = read_object(spec, from, bytes);
  require(read.pages.size() <= spec.pages, "no more pages than it has");
  AlignedBuffer slot(spec.shape.slot_bytes());
  Key before = from == 0 ? root_key(spec.secret, spec.shape.id) : Key{};
  for (size_t i = 0; i < read.pages.size(); ++i) {
    const PageFacts& facts = read.pages[i].facts;
    const std::byte* payload = read.pages[i].payload;
    require(
        payload >= bytes.data() && payload + facts.payload_bytes() <= bytes.data() + bytes.size(),
        "payloads lie inside");
    require(facts.payload_bytes() == spec.shape.slot_bytes(), "and fit a slot");
    require(facts.namespace_id == spec.shape.id && facts.clear_epoch == spec.epoch, "ours");
    require(facts.position == spec.first_position + from + i, "in their order");
    require((i == 0 && from != 0) || facts.parent == before, "of one chain");
    before = facts.key;
    copy_payload(read.pages[i], slot.data());
  }
  require(read.fault != ObjectFault::none || before == spec.key, "what was asked for");
  require((read.fault == ObjectFault::none) == (read.pages.size() == spec.pages - from) ||
              from >= spec.pages,
          "all of them, or why not");
}

}  // namespace
}  // namespace kvw::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvw;
  static const fuzz::Made made[] = {fuzz::make_object(WitnessKind::tokens),
                                    fuzz::make_object(WitnessKind::engine_key)};
  fuzz::Input input(data, size);
  const auto what = input.number<uint8_t>();
  const fuzz::Made& good = made[what & 1];
  const auto from = static_cast<uint32_t>(what >> 1 & 7);
  if ((what & 0x10) != 0) {
    fuzz::judge(*good.spec, from, std::as_bytes(input.take(size)));
    return 0;
  }
  // A buffer of its own length, so that a step outside is seen.
  const auto lost = (what & 0x20) != 0 ? input.number<uint16_t>() : uint16_t{0};
  std::vector<std::byte> object(good.object.data(), good.object.data() + good.object.bytes());
  fuzz::patch(*good.spec, object, input, (what & 0x80) == 0);
  const uint64_t first = std::min<uint64_t>(from, fuzz::kPages) * good.spec->record_bytes();
  object.erase(object.begin(), object.begin() + static_cast<ptrdiff_t>(first));
  object.resize(object.size() - std::min<size_t>(lost, object.size()));
  object.shrink_to_fit();
  fuzz::judge(*good.spec, from, object);
  return 0;
}
