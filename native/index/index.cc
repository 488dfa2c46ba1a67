#include "index/index.h"

#include <thread>

namespace kvw {

namespace {

constexpr int kReadTries = 4;  // one after the other, before others are let go first

}  // namespace

Index::Index(const Mapping& mapping)
    : table_(mapping.at<IndexEntry>(kBlockBytes)),
      mask_(mapping.at<const IndexHeader>(0)->entries - 1) {}

// What `take` took of the entry is of one moment. False: the entry stays odd.
template <class Take>
bool Index::taken_whole(const IndexEntry& entry, Take take) {
  const auto taken = [&] {
    const uint32_t before = entry.sequence.load(std::memory_order_acquire);
    if (before & 1) return false;
    take();
    acquire_fence();
    return entry.sequence.load(kWordLoad) == before;
  };
  for (int attempt = 0; attempt < kReadTries; ++attempt)
    if (taken()) return true;
  const uint64_t until_ns = system_clock().boot_ns() + kWriterPatienceNs;
  do {
    std::this_thread::yield();
    if (taken()) return true;
  } while (system_clock().boot_ns() < until_ns);
  return false;
}

bool Index::read(PageId page, EntryView& view) const {
  const IndexEntry& entry = table_[page];
  const auto take = [&] {
    const uint32_t flags_space = entry.flags_space.load(kWordLoad);
    view.page = page;
    view.flags = static_cast<uint16_t>(flags_space);
    view.space = static_cast<uint16_t>(flags_space >> 16);
    view.key.lo = entry.key_lo.load(kWordLoad);
    view.key.hi = entry.key_hi.load(kWordLoad);
    view.slot = entry.slot.load(kWordLoad);
    view.generation = entry.generation.load(kWordLoad);
    view.extent.segment = entry.segment.load(kWordLoad);
    view.extent.offset_blocks = entry.offset_blocks.load(kWordLoad);
    view.extent.blocks = entry.blocks.load(kWordLoad);
    view.extent.life = entry.life.load(kWordLoad);
    view.clear_epoch = entry.clear_epoch.load(kWordLoad);
  };
  return taken_whole(entry, take) && (view.flags & kEntryUsed) != 0;
}

EntrySummary Index::peek(const Key& key) const {
  for (uint32_t step = 0; step < kIndexWindow; ++step) {
    const IndexEntry& entry = table_[(key.lo + step) & mask_];
    if (entry.key_lo.load(kWordLoad) != key.lo) continue;
    uint32_t flags_space = 0, slot = 0, generation = 0;
    uint64_t lo = 0, hi = 0, clear_epoch = 0;
    const auto take = [&] {
      flags_space = entry.flags_space.load(kWordLoad);
      lo = entry.key_lo.load(kWordLoad);
      hi = entry.key_hi.load(kWordLoad);
      slot = entry.slot.load(kWordLoad);
      generation = entry.generation.load(kWordLoad);
      clear_epoch = entry.clear_epoch.load(kWordLoad);
    };
    if (taken_whole(entry, take) && (flags_space & kEntryUsed) != 0 && lo == key.lo && hi == key.hi)
      return {static_cast<uint16_t>(flags_space), static_cast<uint16_t>(flags_space >> 16), slot,
              generation, clear_epoch};
  }
  return peek_second(key);
}

// Not inlined: nearly all hits are in the first window, and half as fast beside this.
[[gnu::noinline]] EntrySummary Index::peek_second(const Key& key) const {
  EntryView view;
  if (!find_from(key.hi, key, view)) return {};
  return {view.flags, view.space, view.slot, view.generation, view.clear_epoch};
}

bool Index::find_from(uint64_t home, const Key& key, EntryView& view) const {
  for (uint32_t step = 0; step < kIndexWindow; ++step) {
    const auto page = static_cast<PageId>((home + step) & mask_);
    // A cheap look first: most entries of a window are somebody else's.
    if (table_[page].key_lo.load(kWordLoad) != key.lo) continue;
    if (read(page, view) && view.key == key) return true;
  }
  return false;
}

std::optional<EntryView> Index::find(const Key& key) const {
  std::optional<EntryView> found(std::in_place);
  if (!find_from(key.lo, key, *found) && !find_from(key.hi, key, *found)) found.reset();
  return found;
}

std::optional<EntryView> Index::at(PageId page) const {
  EntryView view;
  if (page > mask_ || !read(page, view)) return std::nullopt;
  return view;
}

PageId Index::empty_place(const Key& key) const {
  for (uint32_t place = 0; place < kIndexPlaces; ++place) {
    const PageId page = index_place(key, place, mask_);
    if ((table_[page].flags_space.load(kWordLoad) & kEntryUsed) == 0) return page;
  }
  return kNoPage;
}

void Index::write(const EntryView& view) {
  IndexEntry& entry = table_[view.page];
  const uint32_t sequence = entry.sequence.load(std::memory_order_relaxed);
  const uint32_t odd = sequence | 1;
  entry.sequence.store(odd, std::memory_order_relaxed);
  release_fence();
  entry.flags_space.store(uint32_t{view.flags} | uint32_t{view.space} << 16, kWordStore);
  entry.key_lo.store(view.key.lo, kWordStore);
  entry.key_hi.store(view.key.hi, kWordStore);
  entry.slot.store(view.slot, kWordStore);
  entry.generation.store(view.generation, kWordStore);
  entry.segment.store(view.extent.segment, kWordStore);
  entry.offset_blocks.store(view.extent.offset_blocks, kWordStore);
  entry.blocks.store(view.extent.blocks, kWordStore);
  entry.life.store(view.extent.life, kWordStore);
  entry.clear_epoch.store(view.clear_epoch, kWordStore);
  entry.sequence.store(odd + 1, std::memory_order_release);
}

void Index::erase(PageId page) {
  EntryView empty;
  empty.page = page;
  write(empty);
}

}  // namespace kvw
