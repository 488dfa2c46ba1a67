#include "warehouse/catalog.h"

#include <algorithm>

namespace kvw {

Catalog::Catalog(Index& index) : index_(index), table_(index.entries()), spaces_(kMaxNamespaces) {}

PageId Catalog::claim(const Key& key) {
  if (pages_ + claimed_ >= table_.capacity()) return kNoPage;
  const PageId page = table_.empty_place(key);
  if (page == kNoPage) return kNoPage;
  table_.claim(page);
  ++claimed_;
  return page;
}

void Catalog::unclaim(PageId page) {
  table_.unclaim(page);
  --claimed_;
}

void Catalog::count(const EntryView& view, int sign) {
  SpaceCounts& space = spaces_[view.space];
  const auto add = [sign](uint64_t& value) { value += static_cast<uint64_t>(sign); };
  if (view.in_dram()) {
    add(dram_);
    add(space.dram);
  }
  if (view.in_nvme()) {
    add(nvme_);
    add(space.nvme);
  }
}

PageId Catalog::insert(EntryView view, const Key& parent, uint32_t position) {
  if (view.page == kNoPage) view.page = table_.empty_place(view.key);
  if (table_.claimed(view.page)) --claimed_;
  view.flags |= kEntryUsed;
  const PageNumber before = lost_at(view.key, position);
  if (before != kNoNumber) find_again(before);
  table_.add(view, before);
  node(view.page).position = position;
  ++pages_;
  ++spaces_[view.space].pages;
  count(view, +1);
  index_.write(view);
  if (position > 0) link(table_.number_at(view.page), number_of(parent, position - 1));
  if (watcher_ != nullptr) watcher_->came(view);
  return view.page;
}

void Catalog::change(const EntryView& view) {
  count(table_.view(view.page), -1);
  count(view, +1);
  table_.change(view);
}

void Catalog::update(const EntryView& view) {
  change(view);
  index_.write(view);
  if (watcher_ != nullptr) watcher_->came(view);
}

void Catalog::remove(const EntryView& view) {
  if (watcher_ != nullptr) watcher_->left(view);
  const PageNumber number = table_.number_at(view.page);
  unlink(number);
  count(table_.view(view.page), -1);
  table_.leave(view.page);
  if (children_of(number) == 0)
    table_.forget(number);
  else
    lose(number);
  index_.erase(view.page);
  --pages_;
  --spaces_[view.space].pages;
}

std::vector<PageId> Catalog::orphans_to_drop(size_t limit,
                                             const std::function<bool(const Key&)>& awaited) {
  std::vector<PageId> pages;
  const size_t looks = std::min<size_t>(limit, orphans_);
  for (size_t look = 0; look < looks; ++look) {
    if (turn_child_ == kNoNumber) {
      turn_ = table_.numbered(turn_).next;
      turn_child_ = table_.numbered(turn_).first_child;
    }
    if (!awaited(table_.key(turn_))) pages.push_back(page_at(turn_child_));
    turn_child_ = table_.numbered(turn_child_).next;
  }
  return pages;
}

void Catalog::remove_those_above(PageId page, std::vector<PageId>& others, size_t first) const {
  PageNumber number = table_.number_at(page);
  const auto position = [this](PageNumber of) { return table_.numbered(of).position; };
  size_t kept = first;
  for (size_t at = first; at < others.size(); ++at) {
    const PageNumber other = table_.number_at(others[at]);
    while (number != kNoNumber && position(number) > position(other))
      number = table_.numbered(number).parent;
    if (number != other) others[kept++] = others[at];
  }
  others.resize(kept);
}

// Of a page in a tier or in none; new where it is not known at this position.
PageNumber Catalog::number_of(const Key& key, uint32_t position) {
  if (const PageId there = table_.find(key);
      there != kNoPage && table_.node(there).position == position)
    return table_.number_at(there);
  if (const PageNumber lost = lost_at(key, position); lost != kNoNumber) return lost;
  const PageNumber number = table_.add_left(key);
  table_.numbered(number).position = position;
  lose(number);
  return number;
}

PageNumber Catalog::lost_at(const Key& key, uint32_t position) const {
  const auto& lost = lost_.of(key);
  const auto at = lost.find(key);
  return at != lost.end() && table_.numbered(at->second).position == position ? at->second
                                                                              : kNoNumber;
}

uint64_t Catalog::children_of(PageNumber parent) const {
  const PageNumber first = table_.numbered(parent).first_child;
  if (first == kNoNumber) return 0;
  return table_.numbered(first).next == kNoNumber ? 1 : many_.of(parent).at(parent);
}

void Catalog::link(PageNumber page, PageNumber parent) {
  PageNode& own = table_.numbered(page);
  PageNode& above = table_.numbered(parent);
  own.parent = parent;
  own.previous = kNoNumber;
  own.next = above.first_child;
  above.first_child = page;
  if (own.next != kNoNumber) {
    table_.numbered(own.next).previous = page;
    ++many_.of(parent).try_emplace(parent, 1).first->second;
  }
  if (table_.has_left(parent)) ++orphans_;
}

void Catalog::unlink(PageNumber page) {
  PageNode& own = table_.numbered(page);
  const PageNumber parent = own.parent;
  if (parent == kNoNumber) return;
  if (turn_child_ == page) turn_child_ = own.next;
  if (own.previous != kNoNumber || own.next != kNoNumber) {
    auto& many = many_.of(parent);
    if (const auto at = many.find(parent); --at->second == 1) many.erase(at);
  }
  if (own.previous != kNoNumber)
    table_.numbered(own.previous).next = own.next;
  else
    table_.numbered(parent).first_child = own.next;
  if (own.next != kNoNumber) table_.numbered(own.next).previous = own.previous;
  own.parent = own.next = own.previous = kNoNumber;
  if (!table_.has_left(parent)) return;
  --orphans_;
  if (children_of(parent) != 0) return;
  find_again(parent);
  table_.forget(parent);
}

// At the ring's end: before the one whose turn it is.
void Catalog::lose(PageNumber parent) {
  const Key& key = table_.key(parent);
  lost_.of(key).insert_or_assign(key, parent);
  orphans_ += children_of(parent);
  if (turn_ == kNoNumber) turn_ = table_.numbered(parent).previous = parent;
  PageNode& own = table_.numbered(parent);
  own.next = turn_;
  own.previous = table_.numbered(turn_).previous;
  table_.numbered(own.previous).next = table_.numbered(own.next).previous = parent;
}

void Catalog::find_again(PageNumber parent) {
  auto& lost = lost_.of(table_.key(parent));
  if (const auto at = lost.find(table_.key(parent)); at != lost.end() && at->second == parent)
    lost.erase(at);
  orphans_ -= children_of(parent);
  PageNode& own = table_.numbered(parent);
  if (turn_ == parent) {
    turn_ = own.previous == parent ? kNoNumber : own.previous;
    turn_child_ = kNoNumber;
  }
  table_.numbered(own.previous).next = own.next;
  table_.numbered(own.next).previous = own.previous;
  own.next = own.previous = kNoNumber;
}

}  // namespace kvw
