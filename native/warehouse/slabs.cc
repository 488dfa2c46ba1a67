// Slabs: those that come, and those that go from one page size to another.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/sequence_point.h"
#include "warehouse/eviction.h"

namespace kvw {

namespace {

constexpr uint64_t kMoveNs = 100 * kMillisecondNs;  // from one slab to the next
constexpr size_t kMovePages = 1024;                 // that leave in a step
// How long one that has come is kept for the page size that asked: its stores come again by then.
constexpr uint64_t kKeptNs = kSecondNs;
constexpr uint64_t kLookNs = 10 * kMillisecondNs;  // where none could be had
constexpr size_t kLooks = 16;                      // slabs of a donor, and as many victims
constexpr size_t kLookSlots = 65536;               // of either, at most, but for one slab
constexpr size_t kMostBelow = 16384;               // pages that are looked at below those of a slab
constexpr size_t kKeptWeight = 1 << 20;            // pages that are lost rather than one kept

}  // namespace

std::optional<uint32_t> Eviction::next_slab_to_populate() const {
  if (is_whole() || state_.options.inspect) return std::nullopt;
  return next_slab_;
}

void Eviction::slab_populated(uint32_t slab, int err) {
  populate_errno_ = err;
  note_growth();
  if (err != 0) return;
  state_.pool.slab_ready(slab);
  if (state_.log) state_.log->register_memory(state_.arena.slab(slab));
  skip_populated();
}

void Eviction::skip_populated() {
  while (!is_whole() && state_.arena.slots().layout(next_slab_).populated != 0) ++next_slab_;
}

std::string Eviction::health() const {
  if (!growth_error_.empty()) return growth_error_;
  return is_whole() ? "ok" : "populating";
}

bool Eviction::grow(SlotClass& cls) {
  const bool grown = state_.pool.grow(cls);
  note_growth();
  return grown;
}

bool Eviction::can_cut(uint32_t slab, const SlotClass& cls) {
  if (state_.pool.can_cut(slab, cls)) return true;
  note_growth();
  return false;
}

// A slab that came does not mend that another found no room for its metadata, nor the reverse.
void Eviction::note_growth() {
  const int err = populate_errno_ != 0 ? populate_errno_ : state_.pool.growth_errno();
  const std::string error =
      err == 0 ? "" : std::string("cannot grow the arena: ") + std::strerror(err);
  if (err != 0 && error != growth_error_) state_.events.add("arena_limited", error);
  growth_error_ = error;
}

bool Eviction::take_spare_slab(SlotClass& needy) {
  const auto slab = state_.pool.spare_slab(needy, kFreeShare, state_.clock.boot_ns());
  if (!slab || !can_cut(*slab, needy)) return false;
  state_.pool.retire(*slab);
  return grow(needy);
}

bool Eviction::take_colder_slab(SlotClass& needy) {
  if (state_.pool.classes().size() < 2 || state_.clock.boot_ns() < next_slab_move_ns_) return false;
  next_slab_move_ns_ = state_.clock.boot_ns() + kMoveNs;
  const uint64_t own = coldest_heat(needy);
  return own != UINT64_MAX && take_slab(needy, own);
}

// A look costs a millisecond where slabs are large, and a message asks for many slots.
void Eviction::take_any_slab(SlotClass& needy) {
  if (state_.clock.boot_ns() < needy.look_again_ns || take_slab(needy, UINT64_MAX)) return;
  needy.look_again_ns = state_.clock.boot_ns() + kLookNs;
}

size_t Eviction::coldest(SlotClass& cls, std::span<PageId> residents) const {
  const ExemptIf stays([&](PageId resident) {
    const SlotId slot = state_.pool.slot_of(cls, resident);
    return state_.sessions.seen_pinned(slot) || state_.keeps.has(state_.pool.page_at(slot));
  });
  return cls.policy->victims(residents, stays);
}

uint64_t Eviction::coldest_heat(SlotClass& cls) const {
  std::array<PageId, 1> resident;
  return coldest(cls, resident) == 0 ? UINT64_MAX : cls.policy->heat(resident[0]);
}

// Where its coldest pages lie, and some others, other ones each time: the coldest may be together
// in a slab that cannot move.
std::vector<uint32_t> Eviction::slabs_to_look_at(SlotClass& donor) {
  const size_t looks = std::clamp<size_t>(kLookSlots / donor.slots_per_slab, 1, kLooks);
  std::array<PageId, kLooks> residents;
  std::vector<uint32_t> slabs;
  slabs.reserve(2 * looks);
  const size_t found = coldest(donor, std::span(residents).first(looks));
  for (size_t i = 0; i < found; ++i)
    slabs.push_back(state_.arena.slots().slab_of(state_.pool.slot_of(donor, residents[i])));
  for (size_t i = 0; i < std::min(looks, donor.slabs.size()); ++i)
    if (const uint32_t slab = donor.slabs[next_slab_look_++ % donor.slabs.size()];
        slab != UINT32_MAX)
      slabs.push_back(slab);
  std::sort(slabs.begin(), slabs.end());
  slabs.erase(std::unique(slabs.begin(), slabs.end()), slabs.end());
  return slabs;
}

// The class with the coldest page, or the next one where that had no slab to give: one at a look.
SlotClass* Eviction::donor_for(const SlotClass& needy, uint64_t heat) {
  std::vector<std::pair<uint64_t, SlotClass*>> donors;
  for (const auto& cls : state_.pool.classes()) {
    if (cls.get() == &needy || cls->total() == 0) continue;
    if (const uint64_t own = coldest_heat(*cls); own < heat) donors.emplace_back(own, cls.get());
  }
  if (donors.empty()) return nullptr;
  std::ranges::sort(donors);
  return donors[next_donor_++ % donors.size()].second;
}

size_t Eviction::lost_below(const Move& move, size_t most) const {
  most = std::min(most, kMostBelow);
  size_t lost = 0;
  std::vector<PageId> above;
  const auto leaves = [&](const EntryView& page) {
    return page.in_dram() && state_.arena.slots().slab_of(page.slot) == move.slab;
  };
  for (const SlotId slot : move.live) {
    const auto leaving = state_.catalog.at(state_.pool.page_at(slot));
    if (!leaving || leaving->in_nvme()) continue;
    above.push_back(leaving->page);
    while (!above.empty() && lost < most) {
      PageId child = state_.catalog.first_child(above.back());
      above.pop_back();
      for (; child != kNoPage && lost < most; child = state_.catalog.next_sibling(child)) {
        const auto below = state_.catalog.at(child);
        if (!below || leaves(*below)) continue;  // counted by itself
        ++lost;
        above.push_back(child);
      }
    }
    above.clear();
  }
  return lost;
}

bool Eviction::take_slab(SlotClass& needy, uint64_t heat) {
  if (move_) return false;
  const PinSet& pins = state_.sessions.pins();
  SlotClass* donor = donor_for(needy, heat);
  if (donor == nullptr) return false;
  std::optional<Move> best;
  size_t fewest = 0;  // pages that are lost by it
  for (const uint32_t slab : slabs_to_look_at(*donor)) {
    // A slab with a slot that is pinned, being written, or unfinished is left alone, so that
    // nothing is evicted in vain. One with kept pages goes only to a page size that would have no
    // memory otherwise, and of several that with the fewest.
    Move own{slab, {}, &needy};
    size_t colder = 0, kept = 0;
    bool movable = true;
    for (uint32_t place = 0; place < donor->slots_per_slab && movable; ++place) {
      const SlotId slot = state_.arena.slots().slot_id(slab, place);
      const SlotState state = state_.pool.load(slot).state;
      const PageId page = state_.pool.page_at(slot);
      const bool has_page = page != kNoPage;  // whatever became of the word
      const bool is_kept = has_page && state_.keeps.has(page);
      movable = has_page
                    ? state == SlotState::live && (!is_kept || heat == UINT64_MAX) &&
                          !pins.has_slot(slot) && !writes_.is_writing(slot) && !awaits_child(slot)
                    : state == SlotState::free;
      kept += is_kept ? 1 : 0;
      if (!has_page) continue;
      own.live.push_back(slot);
      colder += donor->policy->heat(state_.pool.resident(slot)) < heat ? 1 : 0;
    }
    if (!movable || colder * 2 < own.live.size()) continue;
    const size_t lost =
        kept * kKeptWeight + own.live.size() + lost_below(own, best ? fewest : SIZE_MAX);
    if (best && lost >= fewest) continue;
    fewest = lost;
    best = std::move(own);
  }
  // Nothing leaves in vain for want of memory either.
  if (!best || !can_cut(best->slab, needy)) return false;
  next_donor_ = 0;
  move_ = std::move(best);
  state_.pool.set_aside(move_->slab);
  return step_of_move();
}

bool Eviction::step_of_move() {
  std::vector<SlotId>& live = move_->live;
  std::vector<SlotId> leaving;
  bool stays = false;
  for (; !live.empty() && leaving.size() < kMovePages; live.pop_back()) {
    if (state_.pool.page_at(live.back()) == kNoPage) continue;  // it left by itself
    stays = stays || awaits_child(live.back());
    leaving.push_back(live.back());
  }
  stays = stays || removal_.evict_slots(leaving, LeaveReason::rebalanced) != leaving.size();
  if (!stays && !live.empty()) return false;
  const Move move = *std::exchange(move_, std::nullopt);
  // In use since we looked: the pages that left are gone, the slab stays; another time.
  if (stays || !state_.pool.all_free(move.slab)) {
    state_.pool.put_back(move.slab);
    return false;
  }
  KVW_SEQUENCE_POINT("rebalance: pages out");
  state_.pool.retire(move.slab);
  move.needy->waits_until_ns = state_.clock.boot_ns() + kKeptNs;
  return grow(*move.needy);
}

}  // namespace kvw
