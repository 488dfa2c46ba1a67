// An object is judged by its bytes, its name and the secret, without its namespace's shape.
#include "digest/digest.h"
#include "nvme/aligned_buffer.h"
#include "nvme/format.h"
#include "remote/check_object.h"
#include "tests/check.h"

using namespace kvw;
using namespace kvw::remote;
using kvw::nvme::AlignedBuffer;

namespace {

const Key kFleet{11, 13}, kSpace{7, 9};
constexpr uint64_t kEpoch = 5;

struct Made {
  std::vector<std::byte> secret;
  ObjectName name;
  AlignedBuffer object;
  uint32_t pages = 0;

  Secret key() const { return Secret(secret); }
  std::span<std::byte> bytes() const { return object.span(); }
  ObjectCheck check() const { return check_object(kFleet, key(), name, bytes()); }
};

PageFacts page_facts(const NamespaceShape& shape, uint32_t position, const Key& parent,
                     Secret secret, std::mt19937_64& random) {
  PageFacts facts;
  facts.parent = parent;
  facts.namespace_id = shape.id;
  facts.position = position;
  facts.shards = shape.shards;
  facts.page_tokens = shape.page_tokens;
  facts.shard_bytes = shape.shard_bytes;
  facts.witness_kind = WitnessKind::tokens;
  facts.witness.resize(shape.page_tokens * 4);
  for (std::byte& byte : facts.witness) byte = static_cast<std::byte>(random());
  const auto* ids = reinterpret_cast<const uint32_t*>(facts.witness.data());
  facts.key = chain_key(secret, parent, {ids, shape.page_tokens});
  return facts;
}

// `pages` of them from page `position` on.
Made made(uint32_t pages, uint32_t position, uint32_t tokens = 64) {
  std::mt19937_64 random(3);
  Made result{std::vector<std::byte>(kSecretBytes), {kSpace, kEpoch, {}}, AlignedBuffer(), pages};
  for (std::byte& byte : result.secret) byte = static_cast<std::byte>(random());
  const NamespaceShape shape{kSpace, tokens, 2, 5000};
  std::vector<AlignedBuffer> payloads;
  std::vector<ObjectPage> run;
  Key parent = position == 0 ? root_key(result.key(), kSpace) : Key{random(), random()};
  for (uint32_t page = 0; page < pages; ++page) {
    PageFacts facts = page_facts(shape, position + page, parent, result.key(), random);
    AlignedBuffer payload(facts.payload_bytes());
    for (std::byte& byte : payload.span()) byte = static_cast<std::byte>(random());
    for (uint32_t shard = 0; shard < shape.shards; ++shard)
      facts.digests.push_back(page_digest(payload.data() + shard * shape.shard_stride(),
                                          shape.shard_bytes, facts.key, shard));
    parent = facts.key;
    run.push_back({std::move(facts), payload.data()});
    payloads.push_back(std::move(payload));
  }
  result.name.key = parent;
  const ObjectSpec spec{kFleet, result.key(), shape,    WitnessKind::tokens,
                        kEpoch, parent,       position, pages};
  result.object = AlignedBuffer(spec.bytes());
  CHECK(pack_object(spec, run, result.object.span()).fault == ObjectFault::none);
  return result;
}

}  // namespace

TEST(object_is_good_whose_namespace_nobody_told) {
  for (const uint32_t position : {0u, 4u, 8u}) {
    const Made whole = made(4, position);
    const ObjectCheck check = whole.check();
    CHECK(check.fault == ObjectFault::none);
    CHECK_EQ(check.pages, 4);
    CHECK_EQ(check.record_bytes * 4, whole.bytes().size());
  }
  CHECK(made(1, 3).check().fault == ObjectFault::none);  // a page that stands alone
  CHECK(made(1, 7, 4096).check().fault == ObjectFault::none);
}

TEST(object_of_another_name_fleet_or_secret_is_not) {
  const Made whole = made(4, 4);
  const auto fault = [&](const Key& fleet, const ObjectName& name) {
    return check_object(fleet, whole.key(), name, whole.bytes()).fault;
  };
  const ObjectName& name = whole.name;
  CHECK(fault({11, 14}, name) == ObjectFault::place);
  CHECK(fault(kFleet, {{7, 8}, kEpoch, name.key}) == ObjectFault::shape);
  CHECK(fault(kFleet, {kSpace, 6, name.key}) == ObjectFault::epoch);
  CHECK(fault(kFleet, {kSpace, kEpoch, {1, 2}}) == ObjectFault::chain);
  std::vector<std::byte> other = whole.secret;
  other[20] ^= std::byte{1};
  CHECK(check_object(kFleet, Secret(other), name, whole.bytes()).fault == ObjectFault::chain);
}

TEST(object_has_a_length_that_its_namespace_may_have) {
  const Made whole = made(4, 4);
  const uint64_t record_bytes = whole.check().record_bytes;
  auto random = check::random("lengths of objects");
  for (int i = 0; i < 2000; ++i) {
    const uint64_t cut = random() % whole.bytes().size();
    const ObjectCheck check =
        check_object(kFleet, whole.key(), whole.name, whole.bytes().first(cut));
    // One record is an object of its own, of another name.
    CHECK(check.fault != ObjectFault::none);
    if (cut > kBlockBytes && cut != record_bytes) CHECK(check.fault == ObjectFault::size);
  }
  CHECK(made(2, 4).check().fault == ObjectFault::size);
  CHECK(made(4, 2).check().fault == ObjectFault::size);  // no run begins there
  CHECK(check_object(kFleet, whole.key(), whole.name, {}).fault == ObjectFault::size);
}

TEST(object_that_begins_in_another_place_is_not) {
  const Made whole = made(4, 4);
  std::vector<std::byte> turned(whole.bytes().begin(), whole.bytes().end());
  std::rotate(turned.begin(), turned.begin() + turned.size() / 4, turned.end());
  CHECK(check_object(kFleet, whole.key(), whole.name, turned).fault == ObjectFault::place);
}

TEST(flip_anywhere_is_found_and_pages_before_it_are_good) {
  const Made whole = made(4, 4);
  const uint64_t record_bytes = whole.check().record_bytes;
  const uint64_t head = record_bytes - 4 * kBlockBytes;
  auto random = check::random("flips in objects");
  for (uint64_t at = 0; at < whole.bytes().size(); at += 1 + random() % 13) {
    const auto flip = static_cast<std::byte>(1 << random() % 8);
    whole.bytes()[at] ^= flip;
    const uint64_t in_record = at % record_bytes;
    const bool padding = in_record >= head && (in_record - head) % (2 * kBlockBytes) >= 5000;
    const ObjectCheck check = whole.check();
    CHECK_EQ(check.fault == ObjectFault::none, padding);
    CHECK_EQ(check.pages, padding ? 4 : at / record_bytes);
    whole.bytes()[at] ^= flip;
  }
}
