#include "warehouse/state.h"

#include <algorithm>

namespace kvw {

namespace {

constexpr uint32_t kAdopted = 1024;  // children of one page that comes

// Before anything is opened: what opens also writes.
WarehouseOptions checked(WarehouseOptions options) {
  check_options(options);
  return options;
}

}  // namespace

void Events::add(std::string_view name, std::string_view detail) {
  if (full())
    ++dropped_;
  else
    kept_.emplace_back(name, detail);
}

WarehouseState::WarehouseState(WarehouseOptions warehouse_options, const Clock& warehouse_clock)
    : options(checked(std::move(warehouse_options))),
      clock(warehouse_clock),
      arena(arena_options_for(options)),
      pool(arena, options.policy),
      catalog(arena.index()),
      absences(catalog.capacity()),
      keeps(catalog, options.keep_bytes, [this](PageId page) { return slot_bytes(page); }),
      sessions(arena.sessions_directory(), options.warehouse_id, clock, options.grace_ns,
               arena.slots().header().slab_max * arena.slots().slot_id(1, 0),
               [this] { return groups.writers(); }),
      waiters(arena.control().promoted),
      spaces(kMaxNamespaces),
      // An arena that survived knows the clears of its time, whatever became of the ledger.
      epoch(std::max(options.epoch, arena.control().clear_epoch.value.load())),
      now{clock.boot_ns(), clock.wall_ns()} {
  if (options.write_queue_bytes == 0)
    options.write_queue_bytes = std::min<uint64_t>(arena.bytes() / 4, 1024ull << 20);
}

int WarehouseState::ordinal_of(const Key& namespace_id) const {
  const auto found = ordinals.find(namespace_id);
  return found == ordinals.end() ? -1 : found->second;
}

bool WarehouseState::fits_namespace(const EntryView& view, const PageFacts& facts) const {
  const Space& space = spaces[view.space];
  return facts.clear_epoch >= space.clear_epoch && facts.namespace_id == space.shape.id &&
         facts.shards == space.shape.shards && facts.shard_bytes == space.shape.shard_bytes &&
         facts.witness.size() <= space.shape.witness_capacity();
}

uint64_t WarehouseState::slot_bytes(PageId page) const {
  return spaces[catalog.node(page).space].shape.slot_bytes();
}

bool WarehouseState::has_good_header(SlotId slot) const {
  const SlotMeta* meta = pool.meta(slot);
  const SlabLayout& layout = pool.layout_of(slot);
  return meta_fits(*meta, layout.meta_bytes(), layout.slot_bytes()) &&
         meta->checksum == meta_checksum(*meta, pool.load(slot).generation);
}

uint64_t WarehouseState::heat(const EntryView& view) const {
  if (!view.in_dram()) return 0;
  return 1 + pool.class_of(view.slot).policy->heat(pool.resident(view.slot));
}

void WarehouseState::touch(PageId page) {
  if (page == kNoPage) return;
  catalog.node(page).used = true;
  const auto view = catalog.at(page);
  if (view && view->in_dram()) pool.class_of(view->slot).policy->touched(pool.resident(view->slot));
}

void WarehouseState::release(const EntryView& view) {
  catalog.node(view.page).used = false;
  if (!view.in_dram()) return;
  pool.class_of(view.slot).policy->released(pool.resident(view.slot));
  if (hbm) hbm->released(view);
}

void WarehouseState::make_resident(SlotId slot, const EntryView& view) {
  // The policy learns of parents and children that are resident too.
  SlotClass& cls = pool.class_of(slot);
  pool.page_at(slot) = view.page;
  const auto resident_of = [&](PageId page) -> uint32_t {
    if (page == kNoPage) return kNoPage;
    const auto other = catalog.at(page);
    if (!other || !other->in_dram() || &pool.class_of(other->slot) != &cls) return kNoPage;
    return pool.resident(other->slot);
  };
  const uint32_t own = pool.resident(slot);
  cls.policy->announced(own, view.key.lo);
  cls.policy->inserted(own, resident_of(catalog.parent(view.page)));
  // The use of a page is its parent's too, so of what is not told here most leaves before it all
  // the same; the rest is seen when its turn comes.
  PageId child = catalog.first_child(view.page);
  for (uint32_t looks = 0; child != kNoPage && looks < kAdopted; ++looks) {
    if (const uint32_t resident = resident_of(child); resident != kNoPage)
      cls.policy->adopt(own, resident);
    child = catalog.next_sibling(child);
  }
}

}  // namespace kvw
