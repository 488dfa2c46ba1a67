#include "client/view.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/sequence_point.h"

namespace kvw {

namespace {

constexpr uint64_t kFaultBytes = 2ull << 20;

struct stat stat_of(const ParentFd& fd) {
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) throw storage_error("cannot stat a file of the daemon", errno);
  return info;
}

uint64_t file_bytes(const ParentFd& fd) { return static_cast<uint64_t>(stat_of(fd).st_size); }

}  // namespace

void require_whole(bool whole, const char* what) {
  if (!whole)
    throw Error(ErrorKind::storage, "memory_lost",
                std::string("the daemon's ") + what +
                    " lacks memory that it was made with: its file was cut, or its filesystem is "
                    "full; see memory_lost in the daemon's log, and start the daemon again");
}

void require_format(bool good, const Mapping& mapping, const char* what) {
  if (good) return;
  require_whole(!mapping.lost(), what);
  throw Error(ErrorKind::storage, "bad_files",
              std::string("the daemon's ") + what +
                  " is not in this version's format; use the same kvwarehouse on both sides");
}

MappedArena::MappedArena(const ParentFd& file, const Id& id)
    : id_(id),
      mapping_(file.get(), id.bytes, id.writable),
      faulted_((id.bytes + kFaultBytes - 1) / kFaultBytes) {}

std::shared_ptr<const MappedArena> MappedArena::of(
    const ParentFd& file, size_t bytes, bool writable,
    const std::shared_ptr<const MappedArena>& before) {
  const struct stat info = stat_of(file);
  const Id id{info.st_dev, info.st_ino, bytes, writable};
  if (before != nullptr && before->id_ == id && !before->lost()) return before;
  return std::shared_ptr<const MappedArena>(new MappedArena(file, id));
}

void MappedArena::prefault(uint64_t begin, uint64_t end, bool for_write) const {
  end = std::min<uint64_t>(end, bytes());
  const uint8_t want = for_write ? 2 : 1;
  for (uint64_t piece = begin / kFaultBytes; piece * kFaultBytes < end; ++piece) {
    if (faulted_[piece].load(std::memory_order_relaxed) >= want) continue;
    const uint64_t at = piece * kFaultBytes;
    ::madvise(data() + at, std::min(kFaultBytes, bytes() - at),
              for_write && writable() ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
    faulted_[piece].store(want, std::memory_order_relaxed);
  }
}

View::View(ParentFd control, ParentFd slots, ParentFd index, ParentFd arena, bool writable,
           const std::shared_ptr<const MappedArena>& before) {
  // No version makes any of the files shorter than this.
  require_whole(file_bytes(control) >= sizeof(ControlPage), "control page");
  control_mapping_ = Mapping(control.get(), file_bytes(control), false);
  control_ = control_mapping_.at<const ControlPage>(0);
  require_format(control_->magic == kControlMagic && control_->version == kControlVersion,
                 control_mapping_, "control page");

  if (control_mapping_.bytes() >= control_bytes(control_->segment_words))
    segment_words_ = control_->segment_words;

  require_whole(file_bytes(slots) >= kBlockBytes, "slots file");
  slots_mapping_ = std::make_shared<const Mapping>(slots.get(), file_bytes(slots), false);
  check_slots_header(*slots_mapping_->at<const SlotsHeader>(0), control_->warehouse_id);
  require_whole(slots_mapping_->bytes() >= slots_mapping_->at<const SlotsHeader>(0)->bytes,
                "slots file");
  slots_ = Slots(*slots_mapping_);

  require_whole(file_bytes(index) >= kBlockBytes, "index");
  index_mapping_ = Mapping(index.get(), file_bytes(index), false);
  const auto* header = index_mapping_.at<const IndexHeader>(0);
  require_format(header->magic == kIndexMagic && header->version == kIndexVersion &&
                     (header->entries & (header->entries - 1)) == 0,
                 index_mapping_, "index");
  require_whole(index_mapping_.bytes() >= index_bytes(header->entries), "index");
  incarnation_ = header->incarnation;
  index_ = Index(index_mapping_);

  slab_count_ = static_cast<uint32_t>(control_->slab_count);
  const uint64_t bytes = slab_count_ * slots_.header().slab_bytes;
  require_format(slab_count_ <= slots_.header().slab_max, control_mapping_, "arena");
  require_whole(file_bytes(arena) >= bytes, "arena");
  arena_ = MappedArena::of(arena, bytes, writable, before);
}

std::optional<View::SpaceRow> View::space(const Key& namespace_id) const {
  std::atomic<uint16_t>& last = last_ordinals_[namespace_id.lo % kLastOrdinals];
  const int ordinal = find_namespace(*control_, namespace_id, last.load(std::memory_order_relaxed));
  if (ordinal < 0) return std::nullopt;
  last.store(static_cast<uint16_t>(ordinal), std::memory_order_relaxed);
  const NamespaceWord& row = control_->namespaces[ordinal];
  const uint64_t ready = row.ready.load(std::memory_order_acquire);
  SpaceRow found{static_cast<uint16_t>(ordinal), {}};
  found.shape.id = {row.id_lo.load(std::memory_order_acquire),
                    row.id_hi.load(std::memory_order_acquire)};
  found.shape.page_tokens = row.page_tokens.load(std::memory_order_acquire);
  found.shape.shards = row.shards.load(std::memory_order_acquire);
  found.shape.shard_bytes = row.shard_bytes.load(std::memory_order_acquire);
  KVW_SEQUENCE_POINT("space: row read");
  // Forgotten meanwhile: what was read may be half of it and half of the next.
  const bool whole = ready != 0 && row.ready.load(std::memory_order_relaxed) == ready;
  if (!whole || !(found.shape.id == namespace_id)) return std::nullopt;
  return found;
}

bool View::is_live(SlotId slot, uint32_t generation) const {
  const SlotWord word = slots_.load(slot);
  return word.state == SlotState::live && static_cast<uint32_t>(word.generation) == generation;
}

bool View::is_open(uint32_t segment, uint32_t life) const {
  if (segment >= segment_words_) return false;
  return kvw::segment_words(control_)[segment].load(std::memory_order_acquire) ==
         segment_word(life, false);
}

std::optional<SlabLayout> View::layout_of(SlotId slot) const {
  if (!slot_in_range(slot)) return std::nullopt;
  const SlabLayout layout = slots_.layout(slots_.slab_of(slot));
  if (slots_.place_of(slot) >= slots_.slots_in(layout)) return std::nullopt;
  return layout;
}

std::optional<View::Header> View::read_header(const EntryView& entry, const Expected& expected,
                                              const NamespaceShape& shape, uint32_t shard) const {
  const auto found = layout_of(entry.slot);
  if (!found) return std::nullopt;
  const SlabLayout& layout = *found;
  const SlotWord before = slots_.load(entry.slot);
  if (!before.readable() || static_cast<uint32_t>(before.generation) != entry.generation)
    return std::nullopt;
  KVW_SEQUENCE_POINT("load: word read");

  // Everything below may be garbage until the word is seen unchanged: bounds first, belief last.
  const SlotMeta* shared = slots_.meta(entry.slot, layout);
  SlotMeta meta;
  std::memcpy(static_cast<void*>(&meta), static_cast<const void*>(shared), sizeof meta);
  const bool usable =
      meta.shards == shape.shards && meta.shard_bytes == shape.shard_bytes &&
      layout.slot_bytes() >= shape.slot_bytes() && meta.witness_bytes == expected.witness.size() &&
      sizeof(SlotMeta) + 16ull * meta.shards + meta.witness_bytes <= layout.meta_bytes();
  if (!usable) return std::nullopt;
  KVW_SEQUENCE_POINT("load: metadata read");
  const std::byte* witness =
      reinterpret_cast<const std::byte*>(digests_of(shared) + 2ull * shape.shards);
  const bool same = meta.namespace_id == expected.namespace_id && meta.key == expected.key &&
                    meta.parent == expected.parent && meta.position == expected.position &&
                    meta.witness_kind == static_cast<uint32_t>(expected.witness_kind) &&
                    std::memcmp(witness, expected.witness.data(), expected.witness.size()) == 0;
  return Header{before, digests_of(shared)[shard], same,
                payload(entry.slot, layout) + shard * shape.shard_stride()};
}

bool View::unchanged(SlotId slot, const SlotWord& before) const {
  acquire_fence();
  const SlotWord after = slots_.load(slot);
  return after.generation == before.generation && after.readable();
}

LoadResult View::load(const EntryView& entry, const Expected& expected, const NamespaceShape& shape,
                      uint32_t shard, std::span<const Piece> to, bool verify) const {
  const auto header = read_header(entry, expected, shape, shard);
  if (!header) return LoadResult::stale;
  uint64_t computed = header->digest;
  if (arena_->lost()) verify = true;
  if (header->same) {
    if (verify)
      computed = scatter_digest(to, header->payload, expected.key, shard);
    else
      scatter(to, header->payload);
  }
  KVW_SEQUENCE_POINT("load: copied");
  if (!unchanged(entry.slot, header->before) || !header->same) return LoadResult::stale;
  if (!verify && arena_->lost()) return LoadResult::stale;  // and verified when it is tried again
  return computed == header->digest ? LoadResult::ok : LoadResult::mismatch;
}

std::optional<View::Found> View::find_pinned(const EntryView& entry, const Expected& expected,
                                             const NamespaceShape& shape, uint32_t shard) const {
  const auto header = read_header(entry, expected, shape, shard);
  if (!header || !unchanged(entry.slot, header->before) || !header->same) return std::nullopt;
  return Found{header->payload, header->digest};
}

std::optional<View::Whole> View::find_whole(const EntryView& entry,
                                            const NamespaceShape& shape) const {
  const auto found = layout_of(entry.slot);
  if (!found || found->meta_bytes() < sizeof(SlotMeta)) return std::nullopt;
  const SlabLayout& layout = *found;
  // A copy, so that what was judged is what is used.
  std::vector<SlotMeta> header(layout.meta_bytes() / sizeof(SlotMeta) + 1);
  SlotMeta& meta = header.front();
  std::memcpy(static_cast<void*>(&meta), static_cast<const void*>(slots_.meta(entry.slot, layout)),
              layout.meta_bytes());
  const bool good = meta_fits(meta, layout.meta_bytes(), layout.slot_bytes()) &&
                    meta.shards == shape.shards && meta.shard_bytes == shape.shard_bytes &&
                    meta.checksum == meta_checksum(meta, slots_.load(entry.slot).generation);
  if (!good) return std::nullopt;
  return Whole{facts_of(meta), payload(entry.slot, layout)};
}

void View::prefault(SlotId slot, bool for_write) const {
  if (!slot_in_range(slot)) return;
  const SlabLayout layout = slots_.layout(slots_.slab_of(slot));
  const uint64_t begin = slots_.arena_offset(slot, layout);
  arena_->prefault(begin, begin + layout.slot_bytes(), for_write);
}

}  // namespace kvw
