#include "warehouse/catalog.h"

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
  const auto [begin, end] = orphans_.equal_range(view.key);
  const size_t first = adopted.size();
  for (auto it = begin; it != end; ++it) adopted.push_back(it->second);
  orphans_.erase(begin, end);
  for (size_t i = first; i < adopted.size(); ++i) {
    const PageId child = adopted[i];
    orphan_parents_.erase(child);
    link(child, view.page);
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
  if (node(view.page).orphan()) {
    const auto [begin, end] = orphans_.equal_range(orphan_parents_.at(view.page));
    for (auto it = begin; it != end; ++it)
      if (it->second == view.page) {
        orphans_.erase(it);
        break;
      }
    orphan_parents_.erase(view.page);
  }
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
                                             const std::function<bool(const Key&)>& awaited) const {
  std::vector<PageId> pages;
  for (const auto& [parent, page] : orphans_) {
    if (pages.size() == limit) break;
    if (!awaited(parent)) pages.push_back(page);
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
  orphans_.emplace(parent, page);
  orphan_parents_[page] = parent;
}

}  // namespace kvw
