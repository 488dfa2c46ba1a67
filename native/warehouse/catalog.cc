#include "warehouse/catalog.h"

#include <algorithm>

namespace kvw {

Catalog::Catalog(Index& index) : index_(index), table_(index.entries()), spaces_(kMaxNamespaces) {}

bool Catalog::has_room(const Key& key) const {
  return !full() && table_.empty_in_window(key) != kNoPage;
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

PageId Catalog::insert(EntryView view, const Key& parent, uint32_t position,
                       std::vector<PageId>& adopted) {
  if (view.page == kNoPage) view.page = table_.empty_in_window(view.key);
  view.flags |= kEntryUsed;
  table_.add(view);
  node(view.page).position = position;
  ++pages_;
  ++spaces_[view.space].pages;
  count(view, +1);
  index_.write(view);
  if (position > 0) {
    if (const PageId above = table_.find(parent); above != kNoPage)
      link(view.page, above);
    else
      make_orphan(view.page, parent);
  }
  for (auto first = first_orphans_.find(view.key); first != first_orphans_.end();
       first = first_orphans_.find(view.key)) {
    const PageId child = first->second;
    end_orphan(child);
    link(child, view.page);
    adopted.push_back(child);
  }
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
  index_.rewrite(view);
  if (watcher_ != nullptr) watcher_->came(view);
}

void Catalog::update_with_digest(const EntryView& view) {
  change(view);
  index_.write(view);
  if (watcher_ != nullptr) watcher_->came(view);
}

void Catalog::remove(const EntryView& view) {
  if (watcher_ != nullptr) watcher_->left(view);
  if (node(view.page).orphan()) end_orphan(view.page);
  unlink(view.page);
  for (PageId child = node(view.page).first_child; child != kNoPage;) {
    const PageId next = node(child).next;
    node(child).parent = node(child).next = node(child).previous = kNoPage;
    make_orphan(child, view.key);
    child = next;
  }
  count(table_.view(view.page), -1);
  table_.remove(view.page);
  index_.erase(view.page);
  --pages_;
  --spaces_[view.space].pages;
}

std::vector<PageId> Catalog::orphans_to_drop(size_t limit,
                                             const std::function<bool(const Key&)>& awaited) {
  std::vector<PageId> pages;
  const size_t looks = std::min<size_t>(limit, orphans());
  for (size_t look = 0; look < looks; ++look) {
    if (!awaited(orphan_parents_.at(next_orphan_))) pages.push_back(next_orphan_);
    next_orphan_ = node(next_orphan_).next;
  }
  return pages;
}

void Catalog::link(PageId page, PageId parent) {
  PageNode& own = node(page);
  PageNode& above = node(parent);
  own.parent = parent;
  own.previous = kNoPage;
  own.next = above.first_child;
  if (own.next != kNoPage) node(own.next).previous = page;
  above.first_child = page;
}

void Catalog::unlink(PageId page) {
  PageNode& own = node(page);
  if (own.parent == kNoPage) return;
  if (own.previous != kNoPage)
    node(own.previous).next = own.next;
  else
    node(own.parent).first_child = own.next;
  if (own.next != kNoPage) node(own.next).previous = own.previous;
  own.parent = own.next = own.previous = kNoPage;
}

void Catalog::make_orphan(PageId page, const Key& parent) {
  orphan_parents_.emplace(page, parent);
  const auto [first, alone] = first_orphans_.try_emplace(parent, page);
  PageNode& own = node(page);
  if (next_orphan_ == kNoPage) {
    own.next = own.previous = next_orphan_ = page;
    return;
  }
  // Behind the first of its siblings; or before all of those whose turn it is, not between them.
  own.next = alone ? first_orphans_.at(orphan_parents_.at(next_orphan_)) : node(first->second).next;
  own.previous = node(own.next).previous;
  node(own.previous).next = node(own.next).previous = page;
}

void Catalog::end_orphan(PageId page) {
  const auto parent = orphan_parents_.find(page);
  PageNode& own = node(page);
  if (const auto first = first_orphans_.find(parent->second); first->second == page) {
    const auto sibling = orphan_parents_.find(own.next);
    if (own.next != page && sibling->second == parent->second)
      first->second = own.next;
    else
      first_orphans_.erase(first);
  }
  if (next_orphan_ == page) next_orphan_ = own.next == page ? kNoPage : own.next;
  node(own.previous).next = own.next;
  node(own.next).previous = own.previous;
  own.next = own.previous = kNoPage;
  orphan_parents_.erase(parent);
}

}  // namespace kvw
