// Objects of the remote tier: pages come back as they went, and whatever is damaged, cut, foreign
// or a lie costs the page that it is in and those behind it, and gives no other page.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "digest/digest.h"
#include "nvme/aligned_buffer.h"
#include "nvme/format.h"
#include "remote/object.h"
#include "tests/check.h"

using namespace kvw;
using namespace kvw::remote;
using kvw::nvme::AlignedBuffer;

namespace {

const Key kFleet{11, 13};
constexpr uint64_t kEpoch = 5;

struct Shape {
  uint32_t pages = 4, tokens = 16, shards = 2;
  uint64_t shard_bytes = 5000;
  WitnessKind kind = WitnessKind::tokens;
  uint32_t first_position = 8;
};

// Pages of one chain as a host has them, with noise as padding, and the object that they make.
class Scene {
 public:
  explicit Scene(const Shape& shape = {}, uint64_t seed = 1)
      : random_(seed), secret_(kSecretBytes) {
    std::mt19937_64 secret(1);  // one fleet
    for (std::byte& byte : secret_) byte = static_cast<std::byte>(secret());
    spec_.emplace(ObjectSpec{kFleet,
                             Secret(secret_),
                             {{7, 9}, shape.tokens, shape.shards, shape.shard_bytes},
                             shape.kind,
                             kEpoch,
                             {},
                             shape.first_position,
                             shape.pages});
    Key parent =
        shape.first_position == 0 ? root_key(Secret(secret_), {7, 9}) : Key{random_(), random_()};
    for (uint32_t page = 0; page < shape.pages; ++page) {
      add(shape, page, parent);
      parent = pages_.back().facts.key;
    }
    spec_->key = parent;
  }

  const ObjectSpec& spec() const { return *spec_; }
  ObjectSpec& spec() { return *spec_; }
  std::vector<ObjectPage>& pages() { return pages_; }
  std::byte* payload(size_t page) { return payloads_[page].data(); }

  AlignedBuffer packed() const {
    AlignedBuffer object(spec().bytes());
    std::memset(object.data(), 0xee, object.bytes());
    CHECK(pack_object(spec(), pages_, object.span()).fault == ObjectFault::none);
    return object;
  }
  // How many pages of the object are had, each of them as it went.
  size_t had(const ObjectRead& read, uint32_t from = 0) const {
    AlignedBuffer to(spec().shape.slot_bytes());
    for (size_t i = 0; i < read.pages.size(); ++i) {
      const PageFacts& facts = read.pages[i].facts;
      const ObjectPage& sent = pages_[from + i];
      CHECK(facts.key == sent.facts.key && facts.parent == sent.facts.parent &&
            facts.position == sent.facts.position && facts.witness == sent.facts.witness &&
            facts.digests == sent.facts.digests);
      if (!copy_payload(read.pages[i], to.data())) return i;
      for (uint32_t shard = 0; shard < facts.shards; ++shard) {
        const uint64_t at = shard * spec().shape.shard_stride();
        CHECK_EQ(std::memcmp(to.data() + at, sent.payload + at, facts.shard_bytes), 0);
      }
    }
    return read.pages.size();
  }
  size_t had(std::span<const std::byte> bytes) const { return had(read_object(spec(), 0, bytes)); }

 private:
  void add(const Shape& shape, uint32_t page, const Key& parent) {
    PageFacts facts;
    facts.parent = parent;
    facts.namespace_id = {7, 9};
    facts.position = shape.first_position + page;
    facts.shards = shape.shards;
    facts.page_tokens = shape.tokens;
    facts.shard_bytes = shape.shard_bytes;
    facts.clear_epoch = 99;  // the host's
    facts.stored_at_ns = page;
    facts.witness_kind = shape.kind;
    const bool tokens = shape.kind == WitnessKind::tokens;
    facts.witness.resize(tokens ? shape.tokens * 4 : 1 + random_() % kMaxEngineKeyBytes);
    for (std::byte& byte : facts.witness) byte = static_cast<std::byte>(random_());
    const auto* ids = reinterpret_cast<const uint32_t*>(facts.witness.data());
    facts.key = tokens ? chain_key(spec_->secret, parent, {ids, shape.tokens})
                       : engine_key(spec_->secret, facts.namespace_id, facts.witness);
    AlignedBuffer payload(facts.payload_bytes());
    for (std::byte& byte : payload.span()) byte = static_cast<std::byte>(random_());
    const uint64_t stride = spec_->shape.shard_stride();
    for (uint32_t shard = 0; shard < shape.shards; ++shard)
      facts.digests.push_back(
          page_digest(payload.data() + shard * stride, shape.shard_bytes, facts.key, shard));
    pages_.push_back({std::move(facts), payload.data()});
    payloads_.push_back(std::move(payload));
  }

  std::mt19937_64 random_;
  std::vector<std::byte> secret_;
  std::optional<ObjectSpec> spec_;
  std::vector<ObjectPage> pages_;
  std::vector<AlignedBuffer> payloads_;
};

std::span<std::byte> record(const Scene& scene, const AlignedBuffer& object, size_t page) {
  return object.part(page * scene.spec().record_bytes(), scene.spec().record_bytes());
}

uint64_t header_bytes(const Scene& scene) {
  return scene.spec().record_bytes() - scene.spec().shape.slot_bytes();
}

// With a checksum that holds, so that what the numbers say is what is judged.
template <class T>
void lie(const Scene& scene, const AlignedBuffer& object, size_t page, size_t at, const T& value) {
  const auto header = record(scene, object, page).first(header_bytes(scene));
  std::memcpy(header.data() + at, &value, sizeof value);
  const uint64_t checksum = XXH3_64bits(header.data() + 8, header.size() - 8);
  std::memcpy(header.data(), &checksum, 8);
}

// The object with that lie in one page: why it ends there, and that those before are had.
ObjectFault fault_of(const Scene& scene, const AlignedBuffer& object, size_t page) {
  const ObjectRead read = read_object(scene.spec(), 0, object.span());
  CHECK_EQ(read.pages.size(), page);
  CHECK_EQ(scene.had(read), page);
  return read.fault;
}

template <class T>
ObjectFault fault_of_lie(size_t page, size_t at, const T& value) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  lie(scene, object, page, at, value);
  return fault_of(scene, object, page);
}

}  // namespace

TEST(object_comes_back_as_it_went_whatever_its_shape) {
  for (const WitnessKind kind : {WitnessKind::tokens, WitnessKind::engine_key})
    for (const Shape& shape :
         {Shape{}, Shape{1, 16, 1, 1}, Shape{2, 1000, 3, 4096}, Shape{1, kMaxPageTokens, 64, 100},
          Shape{16, 16, 1, 65536}, Shape{4, 1, 2, 4097, WitnessKind::tokens, 0}}) {
      Shape made = shape;
      made.kind = kind;
      const Scene scene(made);
      const AlignedBuffer object = scene.packed();
      const ObjectRead read = read_object(scene.spec(), 0, object.span());
      CHECK(read.fault == ObjectFault::none);
      CHECK_EQ(scene.had(read), shape.pages);
      CHECK_EQ(read.pages[0].facts.clear_epoch, kEpoch);
    }
}

// Hosts of other releases read it: another value is another version of objects.
TEST(object_of_version_1_has_the_bytes_that_it_always_had) {
  const AlignedBuffer object = Scene().packed();
  CHECK_EQ(XXH3_64bits(object.data(), object.bytes()), 0xa3eddecb0c8c0456ull);
}

TEST(range_of_an_object_is_read_without_the_rest_of_it) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  for (uint32_t from = 0; from < 4; ++from) {
    const auto range = object.span().subspan(from * scene.spec().record_bytes());
    const ObjectRead read = read_object(scene.spec(), from, range);
    CHECK(read.fault == ObjectFault::none);
    CHECK_EQ(scene.had(read, from), 4 - from);
  }
}

// A body of a network is wherever its library put it.
TEST(object_is_read_at_any_address) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  for (size_t shift : {1, 3, 8}) {
    std::vector<std::byte> body(object.bytes() + shift);
    std::memcpy(body.data() + shift, object.data(), object.bytes());
    CHECK_EQ(scene.had(std::span(body).subspan(shift)), 4);
  }
}

TEST(object_has_as_many_pages_as_its_namespace_gives) {
  const auto pages = [](uint32_t tokens, uint32_t shards, uint64_t shard_bytes) {
    return object_pages({{1, 2}, tokens, shards, shard_bytes});
  };
  CHECK_EQ(pages(16, 1, 64 << 10), 16);  // by tokens
  CHECK_EQ(pages(16, 1, 2 << 20), 8);    // by bytes
  CHECK_EQ(pages(16, 1, 3 << 20), 4);    // a power of two
  CHECK_EQ(pages(80, 1, 1 << 20), 2);    // likewise
  CHECK_EQ(pages(4096, 1, 1 << 20), 1);
  CHECK_EQ(pages(16, 1, 17 << 20), 1);
  CHECK_EQ(pages(16, 1, 64 << 20), 1);
  CHECK_EQ(pages(16, 1, (64 << 20) + 1), 0);
  CHECK_EQ(pages(16, 64, 1ull << 30), 0);
}

TEST(object_has_nothing_of_its_host_but_its_pages) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  const uint64_t stride = scene.spec().shape.shard_stride();
  for (size_t page = 0; page < 4; ++page)
    for (uint32_t shard = 0; shard < 2; ++shard) {
      const auto part = record(scene, object, page).subspan(header_bytes(scene) + shard * stride);
      for (size_t at = 5000; at < stride; ++at) CHECK(part[at] == std::byte{0});
    }
  // Behind the witness of sixteen tokens, which is behind two digests.
  const auto header = record(scene, object, 3).first(header_bytes(scene));
  for (size_t at = 160 + 2 * 8 + 16 * 4; at < header.size(); ++at)
    CHECK(header[at] == std::byte{0});
}

TEST(record_of_an_object_is_no_record_of_a_segment_nor_the_other_way_round) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  const auto header = nvme::decode_record_header(record(scene, object, 1));
  CHECK(header->extent.segment == kObjectSegment);
  AlignedBuffer of_segment(header_bytes(scene));
  nvme::encode_record_header(kFleet, {3, 9, header->extent.blocks, 1}, header->facts,
                             of_segment.span());
  std::memcpy(record(scene, object, 1).data(), of_segment.data(), of_segment.bytes());
  CHECK(fault_of(scene, object, 1) == ObjectFault::place);
}

TEST(flip_anywhere_costs_its_page_and_those_behind_it) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  auto random = check::random("object flips");
  const uint64_t record_bytes = scene.spec().record_bytes(), head = header_bytes(scene);
  const uint64_t stride = scene.spec().shape.shard_stride();
  for (uint64_t at = 0; at < object.bytes(); at += 1 + random() % 7) {
    const auto flip = static_cast<std::byte>(1 << random() % 8);
    object.data()[at] ^= flip;
    const uint64_t in_record = at % record_bytes;
    const bool padding = in_record >= head && (in_record - head) % stride >= 5000;
    CHECK_EQ(scene.had(object.span()), padding ? 4 : at / record_bytes);
    object.data()[at] ^= flip;
  }
  CHECK_EQ(scene.had(object.span()), 4);
}

TEST(object_of_another_length_is_no_page) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  std::vector<std::byte> longer(object.bytes() + kBlockBytes);
  std::memcpy(longer.data(), object.data(), object.bytes());
  auto random = check::random("object cuts");
  for (int round = 0; round < 200; ++round) {
    const size_t bytes = random() % longer.size();
    if (bytes == object.bytes()) continue;
    const ObjectRead read = read_object(scene.spec(), 0, std::span(longer).first(bytes));
    CHECK(read.fault == ObjectFault::size && read.pages.empty());
  }
  CHECK(read_object(scene.spec(), 1, object.span()).fault == ObjectFault::size);
  CHECK(read_object(scene.spec(), 4, {}).fault == ObjectFault::size);
  CHECK(read_object(scene.spec(), UINT32_MAX, object.span()).fault == ObjectFault::size);
}

TEST(object_of_another_fleet_namespace_epoch_or_position_is_no_page) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  const auto fault = [&](auto change) {
    ObjectSpec spec = scene.spec();
    change(spec);
    const ObjectRead read = read_object(spec, 0, object.span());
    CHECK(read.pages.empty());
    return read.fault;
  };
  CHECK(fault([](auto& spec) { spec.fleet.lo ^= 1; }) == ObjectFault::place);
  CHECK(fault([](auto& spec) { spec.shape.id.hi ^= 1; }) == ObjectFault::shape);
  CHECK(fault([](auto& spec) { spec.shape.page_tokens = 15; }) == ObjectFault::shape);
  CHECK(fault([](auto& spec) { spec.shape.shard_bytes -= 1; }) == ObjectFault::shape);
  CHECK(fault([](auto& spec) { spec.shape.shards = 1; }) == ObjectFault::size);
  CHECK(fault([](auto& spec) { spec.witness_kind = WitnessKind::engine_key; }) ==
        ObjectFault::shape);
  CHECK(fault([](auto& spec) { spec.epoch += 1; }) == ObjectFault::epoch);
  CHECK(fault([](auto& spec) { spec.epoch -= 1; }) == ObjectFault::epoch);
  CHECK(fault([](auto& spec) { spec.first_position += 4; }) == ObjectFault::shape);
  CHECK(fault([](auto& spec) { spec.key.lo ^= 1; }) == ObjectFault::chain);
}

// All of it is good, and it is not what the name stands for.
TEST(object_under_the_name_of_another_is_no_page) {
  const Scene asked({}, 1), other({}, 2);
  const AlignedBuffer object = other.packed();
  const ObjectRead read = read_object(asked.spec(), 0, object.span());
  CHECK(read.fault == ObjectFault::chain && read.pages.empty());
}

TEST(object_of_a_fleet_with_another_secret_is_no_page) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  std::vector<std::byte> secret(kSecretBytes);
  std::mt19937_64 random(2);
  for (std::byte& byte : secret) byte = static_cast<std::byte>(random());
  ObjectSpec spec = scene.spec();
  const ObjectSpec other{spec.fleet, Secret(secret), spec.shape,          spec.witness_kind,
                         spec.epoch, spec.key,       spec.first_position, spec.pages};
  CHECK(read_object(other, 0, object.span()).fault == ObjectFault::chain);
}

TEST(records_in_another_order_are_no_pages) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  const auto first = record(scene, object, 1), second = record(scene, object, 2);
  std::swap_ranges(first.begin(), first.end(), second.begin());
  CHECK(fault_of(scene, object, 1) == ObjectFault::place);
  // And with places and positions that say so.
  const uint32_t blocks = scene.spec().record_blocks();
  lie(scene, object, 1, 48, uint32_t{blocks});
  CHECK(fault_of(scene, object, 1) == ObjectFault::shape);
  lie(scene, object, 1, 104, uint32_t{9});
  CHECK(fault_of(scene, object, 1) == ObjectFault::chain);
}

TEST(page_of_another_chain_is_no_page) {
  const Scene scene({}, 1), other({}, 2);
  const AlignedBuffer object = scene.packed(), foreign = other.packed();
  const auto from = record(other, foreign, 2), to = record(scene, object, 2);
  std::memcpy(to.data(), from.data(), to.size());
  CHECK(fault_of(scene, object, 2) == ObjectFault::chain);
}

// What the numbers of a header say, with a checksum that holds.
TEST(header_that_lies_is_no_page) {
  CHECK(fault_of_lie(2, 8, uint64_t{0}) == ObjectFault::header);      // magic
  CHECK(fault_of_lie(2, 16, uint32_t{2}) == ObjectFault::header);     // version
  CHECK(fault_of_lie(2, 20, uint32_t{8192}) == ObjectFault::header);  // header bytes
  CHECK(fault_of_lie(2, 20, uint32_t{0}) == ObjectFault::header);
  CHECK(fault_of_lie(2, 24, uint64_t{12}) == ObjectFault::place);           // fleet
  CHECK(fault_of_lie(2, 40, uint32_t{3}) == ObjectFault::place);            // segment
  CHECK(fault_of_lie(2, 44, uint32_t{2}) == ObjectFault::place);            // version of objects
  CHECK(fault_of_lie(2, 48, uint32_t{0}) == ObjectFault::place);            // offset
  CHECK(fault_of_lie(2, 52, uint32_t{UINT32_MAX}) == ObjectFault::header);  // blocks
  CHECK(fault_of_lie(2, 56, uint64_t{1}) == ObjectFault::chain);            // key
  CHECK(fault_of_lie(2, 72, uint64_t{1}) == ObjectFault::chain);            // parent
  CHECK(fault_of_lie(0, 72, uint64_t{1}) == ObjectFault::chain);
  CHECK(fault_of_lie(2, 88, uint64_t{8}) == ObjectFault::shape);    // namespace
  CHECK(fault_of_lie(2, 104, uint32_t{11}) == ObjectFault::shape);  // position
  CHECK(fault_of_lie(2, 108, uint32_t{1}) == ObjectFault::header);  // shards
  CHECK(fault_of_lie(2, 108, uint32_t{UINT32_MAX}) == ObjectFault::header);
  CHECK(fault_of_lie(2, 112, uint32_t{17}) == ObjectFault::shape);  // tokens
  CHECK(fault_of_lie(2, 116, uint32_t{2}) == ObjectFault::shape);   // witness kind
  CHECK(fault_of_lie(2, 120, uint32_t{60}) == ObjectFault::shape);  // witness bytes
  CHECK(fault_of_lie(2, 120, uint32_t{UINT32_MAX}) == ObjectFault::header);
  CHECK(fault_of_lie(2, 128, uint64_t{5001}) == ObjectFault::shape);  // shard bytes
  CHECK(fault_of_lie(2, 128, uint64_t{UINT64_MAX}) == ObjectFault::header);
  CHECK(fault_of_lie(2, 136, uint64_t{4}) == ObjectFault::epoch);  // clear epoch
  CHECK(fault_of_lie(2, 176, uint32_t{1}) == ObjectFault::chain);  // a token
}

TEST(first_page_of_a_chain_begins_at_its_root) {
  const Scene scene({.first_position = 0});
  const AlignedBuffer object = scene.packed();
  CHECK_EQ(scene.had(object.span()), 4);
  lie(scene, object, 0, 72, Key{1, 2});
  CHECK(fault_of(scene, object, 0) == ObjectFault::chain);
  // An engine's keys do not follow from their parents: nothing but the root says so.
  const Scene engine({.kind = WitnessKind::engine_key, .first_position = 0});
  const AlignedBuffer named = engine.packed();
  lie(engine, named, 0, 72, Key{1, 2});
  CHECK(fault_of(engine, named, 0) == ObjectFault::chain);
}

TEST(payloads_of_two_pages_that_changed_places_are_refused) {
  const Scene scene;
  const AlignedBuffer object = scene.packed();
  const auto first = record(scene, object, 1).subspan(header_bytes(scene));
  const auto second = record(scene, object, 3).subspan(header_bytes(scene));
  std::swap_ranges(first.begin(), first.end(), second.begin());
  CHECK_EQ(scene.had(object.span()), 1);
}

TEST(page_that_is_not_what_was_sealed_is_not_packed) {
  Scene scene;
  scene.payload(2)[scene.spec().shape.shard_stride() + 17] ^= std::byte{1};
  AlignedBuffer object(scene.spec().bytes());
  const ObjectPacked packed = pack_object(scene.spec(), scene.pages(), object.span());
  CHECK(packed.fault == ObjectFault::digest);
  CHECK_EQ(packed.page, 2);
}

TEST(pages_that_are_not_the_objects_are_not_packed) {
  const auto fault = [](auto change) {
    Scene scene;
    AlignedBuffer object(scene.spec().bytes());
    change(scene);
    return pack_object(scene.spec(), scene.pages(), object.span()).fault;
  };
  CHECK(fault([](auto&) {}) == ObjectFault::none);
  CHECK(fault([](auto& scene) { scene.pages().pop_back(); }) == ObjectFault::size);
  CHECK(fault([](auto& scene) { std::swap(scene.pages()[1], scene.pages()[2]); }) ==
        ObjectFault::shape);
  CHECK(fault([](auto& scene) { scene.pages()[3].facts.namespace_id.lo ^= 1; }) ==
        ObjectFault::shape);
  CHECK(fault([](auto& scene) { scene.pages()[3].facts.digests.pop_back(); }) ==
        ObjectFault::shape);
  CHECK(fault([](auto& scene) { scene.pages()[3].facts.parent.lo ^= 1; }) == ObjectFault::chain);
  CHECK(fault([](auto& scene) { scene.spec().key.lo ^= 1; }) == ObjectFault::chain);
}
