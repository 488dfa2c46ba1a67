#include "warehouse/keeps.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/clock.h"
#include "warehouse/warehouse.h"

namespace kvw {

namespace {

constexpr uint64_t kLookNs = kSecondNs;  // from one look at all keeps to the next

}  // namespace

const char* keep_refusal_name(KeepRefusal refusal) {
  static constexpr const char* kNames[] = {"", "keeps", "ends", "pages", "bytes", "gone"};
  return kNames[static_cast<size_t>(refusal)];
}

Keeps::Keeps(const Catalog& catalog, uint64_t limit_bytes, std::function<uint64_t(PageId)> bytes_of)
    : catalog_(catalog), limit_bytes_(limit_bytes), bytes_of_(std::move(bytes_of)) {}

KeepRefusal Keeps::begin(KeepId id, KeepTime time) {
  if (keeps_.size() >= kMostKeeps || keeps_.contains(id)) return KeepRefusal::keeps;
  keeps_[id].time = time;
  return KeepRefusal::none;
}

KeepRefusal Keeps::add(KeepId id, PageId page) {
  const auto found = keeps_.find(id);
  if (found == keeps_.end()) return KeepRefusal::gone;
  Keep& keep = found->second;
  const Hold last = keep.ends.empty() ? Hold{} : keep.ends.back();
  const bool is_behind = find(last) != nullptr && catalog_.parent(page) == last.page;
  if (!is_behind && (ends_ >= kMostKeepEnds || keep.ends.size() >= kMostEndsOfKeep))
    return KeepRefusal::ends;
  Hold own{page, 0};
  if (has(page)) {
    KeptPage& kept = pages_.of(page).at(page);
    own.serial = kept.serial;
    ++kept.holders;
    // The page holds the one above already, or one that has left from there and is back.
    if (is_behind) let_go_.push_back({last.page, std::exchange(kept.above, last.serial)});
  } else {
    const uint64_t bytes = bytes_of_(page);
    if (const KeepRefusal full = room_for(bytes); full != KeepRefusal::none) return full;
    own = insert(page, bytes, is_behind ? last : Hold{});
  }
  if (is_behind)
    keep.ends.back() = own;
  else
    add_end(keep, own);
  keep.used_at = catalog_.node(page).used_at;
  return KeepRefusal::none;
}

KeepRefusal Keeps::add_prompt(KeepId id, PageId last) {
  const auto found = keeps_.find(id);
  if (found == keeps_.end()) return KeepRefusal::gone;
  if (ends_ >= kMostKeepEnds) return KeepRefusal::ends;
  std::vector<PageId> fresh;
  PageId page = last;
  for (; page != kNoPage && !has(page); page = catalog_.parent(page)) fresh.push_back(page);
  if (page == kNoPage && (fresh.empty() || catalog_.is_orphan(fresh.back())))
    return KeepRefusal::gone;
  Hold above;
  if (page != kNoPage) {
    KeptPage& kept = pages_.of(page).at(page);
    ++kept.holders;
    above = {page, kept.serial};
  }
  for (auto next = fresh.rbegin(); next != fresh.rend(); ++next) {
    const uint64_t bytes = bytes_of_(*next);
    if (const KeepRefusal full = room_for(bytes); full != KeepRefusal::none) {
      let_go_.push_back(above);
      return full;
    }
    above = insert(*next, bytes, above);
  }
  add_end(found->second, above);
  found->second.used_at = catalog_.node(last).used_at;
  return KeepRefusal::none;
}

bool Keeps::follows(KeepId id, PageId page, bool begins) const {
  if (begins) return catalog_.node(page).position == 0;
  const auto found = keeps_.find(id);
  if (found == keeps_.end()) return true;  // add() says that it is gone
  const std::vector<Hold>& ends = found->second.ends;
  return !ends.empty() && find(ends.back()) != nullptr && catalog_.parent(page) == ends.back().page;
}

bool Keeps::set_time(KeepId id, KeepTime time) {
  const auto found = keeps_.find(id);
  if (found == keeps_.end()) return false;
  found->second.time = time;
  return true;
}

bool Keeps::end(KeepId id) {
  const auto found = keeps_.find(id);
  if (found == keeps_.end()) return false;
  const std::vector<Hold>& ends = found->second.ends;
  let_go_.insert(let_go_.end(), ends.begin(), ends.end());
  ends_ -= ends.size();
  keeps_.erase(found);
  return true;
}

void Keeps::left(PageId page) {
  if (!has(page)) return;
  const KeptPage kept = pages_.of(page).at(page);
  lost_[kept.serial] = {kept.holders, {catalog_.parent(page), kept.above}};
  erase(page);
}

void Keeps::tick(uint64_t boot_ns) {
  if (keeps_.empty() || boot_ns < next_look_ns_) return;
  next_look_ns_ = boot_ns + kLookNs;
  settle();
  std::vector<KeepId> over;
  for (auto& [id, keep] : keeps_)
    if (is_over(keep, boot_ns)) over.push_back(id);
  for (const KeepId id : over) end(id);
}

bool Keeps::is_over(Keep& keep, uint64_t boot_ns) {
  if (keep.had_pages && keep.ends.empty()) return true;
  if (keep.time.renewed_ns != 0 && !keep.ends.empty() && find(keep.ends.back()) != nullptr) {
    const uint16_t used_at = catalog_.node(keep.ends.back().page).used_at;
    if (std::exchange(keep.used_at, used_at) != used_at)
      keep.time.until_ns = std::max(keep.time.until_ns, boot_ns + keep.time.renewed_ns);
  }
  return keep.time.until_ns <= boot_ns;
}

// What many ends have above them is gone through once.
void Keeps::settle() {
  if (lost_.empty()) return;
  std::unordered_map<uint32_t, Hold> known;  // by the serial of one that left: what is above it
  size_t looks = kLostPerLook;
  const auto above = [&](Hold hold) {
    std::vector<uint32_t> passed;
    for (auto lost = lost_.find(hold.serial); lost != lost_.end(); lost = lost_.find(hold.serial)) {
      const auto at = known.find(hold.serial);
      if (at == known.end() && looks == 0) break;
      hold = at != known.end() ? at->second : lost->second.above;
      if (at != known.end()) break;
      passed.push_back(lost->first);
      --looks;
      ++looks_at_lost_;
    }
    for (const uint32_t serial : passed) known[serial] = hold;
    return hold;
  };
  for (auto& [id, keep] : keeps_) {
    for (Hold& end : keep.ends) {
      const Hold there = above(end);
      if (there.serial == end.serial) continue;
      take(there);
      let_go_.push_back(std::exchange(end, there));
    }
    ends_ -= std::erase_if(keep.ends, [](const Hold& end) { return end.serial == 0; });
  }
}

std::optional<KeepReport> Keeps::report(KeepId id) const {
  const auto found = keeps_.find(id);
  if (found == keeps_.end()) return std::nullopt;
  return report_of(id, found->second);
}

std::vector<KeepReport> Keeps::reports() const {
  std::vector<KeepReport> made;
  made.reserve(keeps_.size());
  for (const auto& [id, keep] : keeps_) made.push_back(report_of(id, keep));
  return made;
}

// Of each prompt as many as the position of its last page says, so that nobody has to go up there.
KeepReport Keeps::report_of(KeepId id, const Keep& keep) const {
  KeepReport made{id, keep.time};
  for (const Hold& end : keep.ends) {
    if (find(end) == nullptr) continue;
    const uint64_t pages = uint64_t{catalog_.node(end.page).position} + 1;
    made.pages += pages;
    made.bytes += pages * bytes_of_(end.page);
  }
  return made;
}

std::vector<Key> Keeps::ends(KeepId id) const {
  std::vector<Key> made;
  const auto found = keeps_.find(id);
  if (found == keeps_.end()) return made;
  for (const Hold& end : found->second.ends)
    if (find(end) != nullptr) made.push_back(catalog_.key(end.page));
  return made;
}

Keeps::KeptPage* Keeps::find(Hold hold) {
  if (hold.serial == 0 || hold.page == kNoPage) return nullptr;
  auto& shard = pages_.of(hold.page);
  const auto found = shard.find(hold.page);
  return found != shard.end() && found->second.serial == hold.serial ? &found->second : nullptr;
}

KeepRefusal Keeps::room_for(uint64_t bytes) const {
  if (used_bytes_ + bytes > limit_bytes_) return KeepRefusal::bytes;
  const uint64_t most = std::min(kMostKeptPages, catalog_.capacity() / 2);
  return used_pages_ + lost_.size() < most ? KeepRefusal::none : KeepRefusal::pages;
}

Keeps::Hold Keeps::insert(PageId page, uint64_t bytes, Hold above) {
  serial_ = std::max<uint32_t>(serial_ + 1, 1);
  pages_.of(page).emplace(page, KeptPage{serial_, 1, above.serial});
  ++used_pages_;
  used_bytes_ += bytes;
  return {page, serial_};
}

void Keeps::add_end(Keep& keep, Hold end) {
  keep.ends.push_back(end);
  keep.had_pages = true;
  ++ends_;
}

void Keeps::erase(PageId page) {
  pages_.of(page).erase(page);
  --used_pages_;
  used_bytes_ -= bytes_of_(page);
}

void Keeps::go_on() {
  for (size_t step = 0; step < kLetGoPerStep && !let_go_.empty(); ++step) {
    const Hold hold = let_go_.back();
    let_go_.pop_back();
    give_up(hold);
  }
}

void Keeps::take(Hold hold) {
  if (KeptPage* kept = find(hold); kept != nullptr)
    ++kept->holders;
  else if (const auto lost = lost_.find(hold.serial); lost != lost_.end())
    ++lost->second.holders;
}

void Keeps::give_up(Hold hold) {
  if (KeptPage* kept = find(hold); kept != nullptr) {
    if (--kept->holders != 0) return;
    if (kept->above != 0) let_go_.push_back({catalog_.parent(hold.page), kept->above});
    erase(hold.page);
  } else if (const auto lost = lost_.find(hold.serial); lost != lost_.end()) {
    if (--lost->second.holders != 0) return;
    if (lost->second.above.serial != 0) let_go_.push_back(lost->second.above);
    lost_.erase(lost);
  }
}

// --- as the warehouse is told
// ------------------------------------------------------------------------

KeepStep Warehouse::keep(KeepId id, const Key& namespace_id, std::span<const PageOfRun> pages,
                         bool is_broken) {
  const uint16_t ordinal = ordinal_to_ask(namespace_id);
  KeepStep step;
  step.is_broken = is_broken;
  for (const PageOfRun& each : pages) {
    step.is_broken = step.is_broken && !each.begins;
    if (step.is_broken) continue;
    const auto view = state_.catalog.find(each.key);
    step.is_broken = !view || view->space != ordinal || state_.is_cleared(*view) ||
                     !state_.keeps.follows(id, view->page, each.begins);
    if (step.is_broken) continue;
    step.refusal = state_.keeps.add(id, view->page);
    if (step.refusal != KeepRefusal::none) break;
    if (!view->in_dram()) step.on_nvme.push_back(each.key);
  }
  return step;
}

KeepRefusal Warehouse::restore_keep(KeepId id, KeepTime time, std::span<const Key> marks,
                                    bool is_lone) {
  KeepRefusal refusal = state_.keeps.begin(id, time);
  if (refusal != KeepRefusal::none) return refusal;
  for (const Key& mark : marks) {
    const PageId page = state_.catalog.page_of(mark);
    refusal = page == kNoPage ? KeepRefusal::gone : state_.keeps.add_prompt(id, page);
    if (refusal == KeepRefusal::gone) continue;
    if (refusal != KeepRefusal::none || !is_lone) break;
  }
  const bool has_room = refusal == KeepRefusal::none || refusal == KeepRefusal::gone;
  if (has_room && state_.keeps.report(id)->pages != 0) return KeepRefusal::none;
  state_.keeps.end(id);
  while (state_.keeps.goes_on()) state_.keeps.go_on();  // the next one may have room
  return has_room ? KeepRefusal::gone : refusal;
}

nvme::RecordUse Warehouse::use_of(const Key& key, const nvme::Extent& extent) {
  const auto view = state_.catalog.find(key);
  if (!view || !view->in_nvme() || !(view->extent == extent)) return nvme::RecordUse::dead;
  if (state_.catalog.is_orphan(view->page)) return nvme::RecordUse::dead;
  // With more than that, reclaim might find no segment that it gains by. A record has a header,
  // too.
  const uint64_t records = state_.keeps.used_bytes() + state_.keeps.used_pages() * kBlockBytes;
  const bool may_stay = records <= state_.options.nvme_capacity_bytes / 2;
  if (may_stay && state_.keeps.has(view->page)) return nvme::RecordUse::kept;
  return state_.catalog.node(view->page).used ? nvme::RecordUse::hot : nvme::RecordUse::cold;
}

}  // namespace kvw
