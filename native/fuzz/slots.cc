// The slots file of an earlier daemon, with an input's patches in its words, cuts and metadata:
// recovery refuses it or serves from it; no page is ever wrong, and none is lost that was not hit.
#include <fcntl.h>

#include <algorithm>

#include "fuzz/target.h"
#include "tests/warehouse_world.h"

namespace kvw::fuzz {
namespace {

constexpr uint64_t kPages = 12;

// A warehouse at rest, and the parts of its slots file that recovery reads.
class Rest {
 public:
  Rest() : world(shape_of(3000)) {
    world.start();
    kvw::Peer peer(world);
    for (uint64_t chain = 0; chain < kPages; ++chain)
      require(peer.store(world.page(chain)), "it is stored");
    peer.reserve(world.page(900));  // and one that nobody will finish
    const Slots& slots = world.slots();
    words = slots.header().words_offset;
    metas = slots.header().metas_offset;
    layout = slots.layout(0);
    world.kill();
    file = Fd(::open((world.options.arena_dir + "/slots").c_str(), O_RDWR | O_CLOEXEC));
    kept.resize(words + 4ull * 4096);
    read(0, kept);
    kept_metas.resize((kPages + 4) * layout.meta_bytes());
    read(metas, kept_metas);
  }
  void restore() {
    write(0, kept);
    write(metas, kept_metas);
  }
  void write(uint64_t at, std::span<const std::byte> bytes) {
    require(::pwrite(file.get(), bytes.data(), bytes.size(), static_cast<off_t>(at)) ==
                static_cast<ssize_t>(bytes.size()),
            "the file is written");
  }
  void read(uint64_t at, std::span<std::byte> bytes) {
    require(::pread(file.get(), bytes.data(), bytes.size(), static_cast<off_t>(at)) ==
                static_cast<ssize_t>(bytes.size()),
            "the file is read");
  }

  World world;
  uint64_t words = 0, metas = 0;
  SlabLayout layout;
  Fd file;
  std::vector<std::byte> kept, kept_metas;
};

// Metadata of a slot with a checksum that holds, if what it counts stays inside.
void seal(Rest& rest, uint64_t place) {
  std::vector<std::byte> bytes(rest.layout.meta_bytes());
  const uint64_t at = rest.metas + place * rest.layout.meta_bytes();
  rest.read(at, bytes);
  alignas(SlotMeta) std::array<std::byte, 4096> room{};
  std::memcpy(room.data(), bytes.data(), bytes.size());
  auto* meta = reinterpret_cast<SlotMeta*>(room.data());
  if (!meta_fits(*meta, rest.layout.meta_bytes(), rest.layout.slot_bytes())) return;
  meta->checksum = meta_checksum(*meta, 1);  // their first generation
  std::memcpy(bytes.data(), room.data(), bytes.size());
  rest.write(at, bytes);
}

void patch(Rest& rest, Input input) {
  while (!input.empty()) {
    const auto where = input.number<uint8_t>();
    const auto at = input.number<uint16_t>();
    const auto bytes = input.take(1 + where / 4 % 8);
    uint64_t offset = 0;
    switch (where % 4) {
      case 0:
        offset = rest.words + at % (kPages + 4) * 8;
        break;
      case 1:
        offset = at % 64 == 0 ? at / 64 % 96 : kBlockBytes + at % 32;  // header, or cuts
        break;
      default:
        offset = rest.metas + at % rest.kept_metas.size();
    }
    rest.write(offset, std::as_bytes(bytes));
    if (where % 4 == 2) seal(rest, at % rest.kept_metas.size() / rest.layout.meta_bytes());
  }
}

void check_pages(World& world) {
  const auto view = view_of(world->arena());
  std::vector<std::byte> data(world.shape().shard_bytes);
  const std::array<Piece, 1> pieces{{{data.data(), data.size()}}};
  for (uint64_t chain = 0; chain < kPages; ++chain) {
    const TestPage page = world.page(chain);
    const auto entry = view->index().find(page.key);
    if (!entry || !entry->in_dram()) continue;
    const Expected expected{world.shape().id,    page.key,      page.parent, page.position,
                            WitnessKind::tokens, page.witness()};
    for (uint32_t shard = 0; shard < 2; ++shard)
      if (view->load(*entry, expected, world.shape(), shard, pieces, true) == LoadResult::ok)
        require(data == bytes_of(page.key, shard, data.size()), "what is loaded is right");
  }
}

}  // namespace
}  // namespace kvw::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvw;
  static auto* rest = new fuzz::Rest();
  rest->restore();
  fuzz::patch(*rest, fuzz::Input(data, size));
  World& world = rest->world;
  try {
    world.start();
    fuzz::check_pages(world);
    world.pass(10 * kSecondNs);
    world.check_no_slot_leaks();
    uint64_t left = 0;
    world->evict(-1, UINT64_MAX, "all", left);
    world.pass(10 * kSecondNs);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
    // Refused: as good.
  }
  world.kill();
  return 0;
}
