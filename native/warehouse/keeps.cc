#include "warehouse/keeps.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "warehouse/warehouse.h"

namespace kvw {

namespace {

constexpr uint64_t kLookNs = kSecondNs;  // from one look at all keeps to the next

}  // namespace

Keeps::Keeps(const Catalog& catalog, uint64_t limit_bytes, std::function<uint64_t(PageId)> bytes_of)
    : catalog_(catalog), limit_bytes_(limit_bytes), bytes_of_(std::move(bytes_of)) {}

bool Keeps::begin(KeepId id, KeepTime time) {
  if (keeps_.size() >= kMostKeeps || keeps_.contains(id)) return false;
  keeps_[id].time = time;
  return true;
}

bool Keeps::add(KeepId id, PageId page) {
  const auto found = keeps_.find(id);
  if (found == keeps_.end()) return false;
  Keep& keep = found->second;
  const End last = keep.ends.empty() ? End{} : keep.ends.back();
  KeptPage* above = find(last);
  if (above != nullptr && catalog_.parent(page) != last.page) above = nullptr;
  const bool ends_too = above == nullptr;
  if (ends_too && (ends_ >= kMostKeepEnds || keep.ends.size() >= kMostEndsOfKeep)) return false;
  const uint64_t bytes = bytes_of_(page);
  KeptPage* kept = find(page);
  if (kept == nullptr) {
    if (!has_room(bytes)) return false;
    serial_ = std::max<uint32_t>(serial_ + 1, 1);
    // The keep's hold on the page above becomes this page's.
    const KeptPage own{1, serial_, above == nullptr ? 0 : last.serial};
    kept = &pages_.of(page).emplace(page, own).first->second;
    ++used_pages_;
    used_bytes_ += bytes;
  } else {
    ++kept->holders;
    if (above != nullptr && kept->above == last.serial)
      --above->holders;  // which this page holds already
    else if (above != nullptr)
      kept->above = last.serial;  // it had left, and is back
  }
  if (ends_too) {
    keep.ends.emplace_back();
    ++ends_;
  }
  keep.ends.back() = {page, kept->serial};
  keep.used_at = catalog_.node(page).used_at;
  ++keep.pages;
  keep.bytes += bytes;
  return true;
}

bool Keeps::add_prompt(KeepId id, PageId last) {
  std::vector<PageId> prompt;
  for (PageId page = last; page != kNoPage; page = catalog_.parent(page)) prompt.push_back(page);
  if (prompt.empty() || catalog_.is_orphan(prompt.back())) return true;
  return std::all_of(prompt.rbegin(), prompt.rend(), [&](PageId page) { return add(id, page); });
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
  const std::vector<End>& ends = found->second.ends;
  let_go_.insert(let_go_.end(), ends.begin(), ends.end());
  ends_ -= ends.size();
  keeps_.erase(found);
  go_on();
  return true;
}

void Keeps::left(PageId page) {
  if (!has(page)) return;
  if (const uint32_t above = find(page)->above; above != 0)
    let_go_.push_back({catalog_.parent(page), above});
  erase(page);
  // As many as come in are done with, on the average, and one more.
  let_go(2);
}

void Keeps::tick(uint64_t boot_ns) {
  if (keeps_.empty() || boot_ns < next_look_ns_) return;
  next_look_ns_ = boot_ns + kLookNs;
  std::vector<KeepId> over;
  for (auto& [id, keep] : keeps_)
    if (is_over(keep, boot_ns)) over.push_back(id);
  for (const KeepId id : over) end(id);
}

bool Keeps::is_over(Keep& keep, uint64_t boot_ns) const {
  if (!keep.ends.empty() && !is_there(keep)) return true;
  if (keep.time.renewed_ns != 0 && !keep.ends.empty()) {
    const PageId page = keep.ends.back().page;
    const uint16_t used_at = catalog_.has(page) ? catalog_.node(page).used_at : keep.used_at;
    if (std::exchange(keep.used_at, used_at) != used_at)
      keep.time.until_ns = std::max(keep.time.until_ns, boot_ns + keep.time.renewed_ns);
  }
  return keep.time.until_ns <= boot_ns;
}

std::optional<KeepReport> Keeps::report(KeepId id) const {
  const auto found = keeps_.find(id);
  if (found == keeps_.end()) return std::nullopt;
  KeepReport made = report_of(id, found->second);
  for (const End& end : found->second.ends)
    if (catalog_.has(end.page)) made.ends.push_back(catalog_.key(end.page));
  return made;
}

std::vector<KeepReport> Keeps::reports() const {
  std::vector<KeepReport> made;
  made.reserve(keeps_.size());
  for (const auto& [id, keep] : keeps_) made.push_back(report_of(id, keep));
  return made;
}

KeepReport Keeps::report_of(KeepId id, const Keep& keep) {
  return {id, keep.time, keep.pages, keep.bytes, {}};
}

const Keeps::KeptPage* Keeps::find(PageId page) const {
  const auto& shard = pages_.of(page);
  const auto found = shard.find(page);
  return found == shard.end() ? nullptr : &found->second;
}

const Keeps::KeptPage* Keeps::find(End end) const {
  if (end.page == kNoPage) return nullptr;
  const KeptPage* kept = find(end.page);
  return kept != nullptr && kept->serial == end.serial ? kept : nullptr;
}

bool Keeps::has_room(uint64_t bytes) const {
  return used_bytes_ + bytes <= limit_bytes_ &&
         used_pages_ < std::min(kMostKeptPages, catalog_.capacity() / 2);
}

bool Keeps::is_there(const Keep& keep) const {
  return std::any_of(keep.ends.rbegin(), keep.ends.rend(),
                     [&](const End& end) { return find(end) != nullptr; });
}

void Keeps::erase(PageId page) {
  pages_.of(page).erase(page);
  --used_pages_;
  used_bytes_ -= bytes_of_(page);
}

void Keeps::let_go(size_t steps) {
  for (; steps > 0 && !let_go_.empty(); --steps) {
    const End end = let_go_.back();
    let_go_.pop_back();
    KeptPage* kept = find(end);
    if (kept == nullptr || --kept->holders != 0) continue;
    if (kept->above != 0) let_go_.push_back({catalog_.parent(end.page), kept->above});
    erase(end.page);
  }
}

KeptRun Warehouse::keep(KeepId id, const Key& namespace_id, std::span<const PageOfRun> pages,
                        const KeptRun& before) {
  const uint16_t ordinal = ordinal_to_ask(namespace_id);
  KeptRun kept{true, before.is_broken, {}};
  for (const PageOfRun& each : pages) {
    kept.is_broken = kept.is_broken && !each.begins;
    if (kept.is_broken) continue;
    const auto view = state_.catalog.find(each.key);
    kept.is_broken = !view || view->space != ordinal || state_.is_cleared(*view);
    if (kept.is_broken) continue;
    kept.has_room = state_.keeps.add(id, view->page);
    if (!kept.has_room) break;
    if (!view->in_dram()) kept.on_nvme.push_back(each.key);
  }
  return kept;
}

bool Warehouse::restore_keep(KeepId id, KeepTime time, std::span<const Key> ends) {
  if (!state_.keeps.begin(id, time)) return false;
  const bool restored = std::ranges::all_of(ends, [&](const Key& key) {
    const PageId page = state_.catalog.page_of(key);
    return page == kNoPage || state_.keeps.add_prompt(id, page);
  });
  if (!restored) state_.keeps.end(id);
  return restored;
}

}  // namespace kvw
