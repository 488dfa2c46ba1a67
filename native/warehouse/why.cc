// What is there of a prompt, why the rest is not, and what is there in its place. Changes nothing.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "warehouse/warehouse.h"

namespace kvw {

namespace {

constexpr uint64_t kScannedPerStep = 16384;

}  // namespace

const char* page_state_name(PageWhy::State state) {
  static constexpr const char* kNames[] = {"hbm", "dram", "nvme", "storing", "absent", "unknown"};
  return kNames[static_cast<size_t>(state)];
}

uint16_t Warehouse::ordinal_to_ask(const Key& namespace_id) const {
  const int ordinal = state_.ordinal_of(namespace_id);
  if (ordinal < 0)
    throw Error(ErrorKind::usage, "namespace_unknown",
                "namespace " + to_hex(namespace_id) + " is not open here; open it again");
  return static_cast<uint16_t>(ordinal);
}

// Who asks about a moment ago may have stored what it missed by now.
bool Warehouse::was_there(const EntryView& view, uint64_t as_of_ns) const {
  if (state_.is_cleared(view)) return false;
  return as_of_ns == 0 || !view.in_dram() || state_.pool.meta(view.slot)->stored_at_ns <= as_of_ns;
}

bool Warehouse::was_being_stored(const Key& key, uint64_t as_of_ns) const {
  const SlotId slot = state_.groups.open_slot(key);
  if (slot == kNoSlot || as_of_ns == 0) return slot != kNoSlot;
  const uint64_t begun_ns = state_.groups.find(slot)->deadline_ns - state_.options.limbo_after_ns;
  const uint64_t wall_ns = state_.clock.wall_ns();
  return begun_ns + (wall_ns - std::min(wall_ns, as_of_ns)) <= state_.clock.boot_ns();
}

// The later of the two. Of a moment ago: what was refused in the same second or later may be what
// the asker stored behind its lookup; what left in the same second left before it, or it would have
// been found.
std::optional<Absence> Warehouse::absence_of(const Key& key, uint64_t as_of_ns) const {
  auto left = state_.absences.left(key), refused = state_.absences.refused(key);
  if (as_of_ns != 0) {
    const uint64_t wall_ns = state_.clock.wall_ns(), boot_ns = state_.clock.boot_ns();
    const uint64_t ago_ns = std::min(boot_ns, wall_ns - std::min(wall_ns, as_of_ns));
    const uint32_t then_s = absence_time(boot_ns - ago_ns);
    if (left && left->at_s > then_s) left.reset();
    if (refused && refused->at_s >= then_s) refused.reset();
  }
  if (!left || !refused) return left ? left : refused;
  return refused->at_s >= left->at_s ? refused : left;
}

std::vector<PageWhy> Warehouse::why(const Key& namespace_id, std::span<const Key> keys,
                                    uint64_t as_of_ns) const {
  const uint16_t ordinal = ordinal_to_ask(namespace_id);
  const auto there = [&](const EntryView& view) {
    if (!view.in_dram()) return PageWhy::State::nvme;
    return state_.hbm && state_.hbm->has(view.slot) ? PageWhy::State::hbm : PageWhy::State::dram;
  };
  std::vector<PageWhy> pages;
  pages.reserve(keys.size());
  for (const Key& key : keys) {
    PageWhy& page = pages.emplace_back();
    const auto view = state_.catalog.find(key);
    if (view && view->space == ordinal && was_there(*view, as_of_ns)) {
      page.state = there(*view);
    } else if (was_being_stored(key, as_of_ns)) {
      page.state = PageWhy::State::storing;
    } else if (view && view->space == ordinal && state_.is_cleared(*view)) {
      // The clear is yet to reach it.
      page.state = PageWhy::State::absent;
      page.absence = {.key = key,
                      .at_s = absence_time(state_.clock.boot_ns()),
                      .why = static_cast<uint8_t>(LeaveReason::cleared)};
    } else if (const auto absence = absence_of(key, as_of_ns)) {
      page.state = PageWhy::State::absent;
      page.absence = *absence;
    } else {
      page.remembered_s = state_.absences.remembers_since_s(key);
    }
  }
  return pages;
}

void Warehouse::compare(const EntryView& view, std::span<const uint32_t> tokens, uint64_t as_of_ns,
                        Branches& branches) const {
  if (branches.looks == Branches::kMostBranches) {
    branches.more = true;
    return;
  }
  ++branches.looks;
  if (!was_there(view, as_of_ns)) return;
  ++branches.pages;
  // A damaged header has no tokens to go by; the page's load will find it out.
  if (tokens.empty() || !view.in_dram() || !state_.has_good_header(view.slot)) return;
  const SlotMeta* meta = state_.pool.meta(view.slot);
  if (meta->witness_kind != static_cast<uint32_t>(WitnessKind::tokens)) return;
  std::vector<uint32_t> own(meta->witness_bytes / sizeof(uint32_t));
  std::memcpy(own.data(), witness_of(meta), own.size() * sizeof(uint32_t));
  const auto common = static_cast<uint32_t>(std::ranges::mismatch(own, tokens).in1 - own.begin());
  ++branches.compared;
  if (!branches.key.is_zero() && common <= branches.common_tokens) return;
  branches.key = view.key;
  branches.common_tokens = common;
  branches.tokens = std::move(own);
}

void Warehouse::add_branches(const Key& namespace_id, const Key& parent, uint32_t position,
                             std::span<const uint32_t> tokens, uint64_t as_of_ns,
                             Branches& branches) const {
  ordinal_to_ask(namespace_id);
  const PageId above = state_.catalog.page_of(parent);
  if (above == kNoPage || state_.catalog.node(above).position + 1 != position) return;
  for (PageId page = state_.catalog.first_child(above); page != kNoPage && !branches.more;
       page = state_.catalog.next_sibling(page))
    compare(*state_.catalog.at(page), tokens, as_of_ns, branches);
}

void Warehouse::add_first_pages(const Key& namespace_id, PageId& cursor,
                                std::span<const uint32_t> tokens, uint64_t as_of_ns,
                                Branches& branches) const {
  const uint16_t ordinal = ordinal_to_ask(namespace_id);
  const uint64_t entries = state_.catalog.index().entries();
  const uint64_t end = std::min<uint64_t>(entries, cursor + kScannedPerStep);
  for (; cursor < end && !branches.more; ++cursor)
    if (const auto view = state_.catalog.at(cursor);
        view && view->space == ordinal && state_.catalog.node(cursor).position == 0)
      compare(*view, tokens, as_of_ns, branches);
  if (cursor >= entries || branches.more) cursor = kNoPage;
}

}  // namespace kvw
