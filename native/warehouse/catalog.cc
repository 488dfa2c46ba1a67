#include "warehouse/catalog.h"

#include <new>
#include <type_traits>

namespace kvw {

Catalog::Catalog(Index& index)
    : index_(index),
      capacity_(index.entries() / 2),
      entries_(static_cast<EntryView*>(std::calloc(index.entries(), sizeof(EntryView)))),
      nodes_(index.entries()),
      spaces_(kMaxNamespaces) {
  static_assert(std::is_trivially_destructible_v<EntryView> &&
                std::is_trivially_copyable_v<EntryView>);
  if (!entries_) throw std::bad_alloc();
}

std::optional<EntryView> Catalog::find(const Key& key) const {
  for (uint32_t step = 0; step < kIndexWindow; ++step) {
    const EntryView& entry = entries_[(index_.home(key) + step) % index_.entries()];
    if ((entry.flags & kEntryUsed) != 0 && entry.key == key) return entry;
  }
  return std::nullopt;
}

PageId Catalog::empty_in_window(const Key& key) const {
  for (uint32_t step = 0; step < kIndexWindow; ++step) {
    const auto page = static_cast<PageId>((index_.home(key) + step) % index_.entries());
    if ((entries_[page].flags & kEntryUsed) == 0) return page;
  }
  return kNoPage;
}

bool Catalog::has_room(const Key& key) const { return !full() && empty_in_window(key) != kNoPage; }

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
  view.page = empty_in_window(view.key);
  view.flags |= kEntryUsed;
  nodes_[view.page] = PageNode{};
  nodes_[view.page].position = position;
  ++pages_;
  ++spaces_[view.space].pages;
  count(view, +1);
  write(view);
  if (position > 0) {
    if (const auto above = find(parent))
      link(view.page, above->page);
    else
      make_orphan(view.page, parent);
  }
  const auto [begin, end] = orphans_.equal_range(view.key);
  const size_t first = adopted.size();
  for (auto it = begin; it != end; ++it) adopted.push_back(it->second);
  orphans_.erase(begin, end);
  for (size_t i = first; i < adopted.size(); ++i) {
    const PageId child = adopted[i];
    nodes_[child].orphan = false;
    orphan_parents_.erase(child);
    link(child, view.page);
  }
  if (watcher_ != nullptr) watcher_->came(view);
  return view.page;
}

void Catalog::update(const EntryView& view) {
  if (const auto old = at(view.page)) count(*old, -1);
  count(view, +1);
  write(view);
  if (watcher_ != nullptr) watcher_->came(view);
}

void Catalog::remove(const EntryView& view) {
  if (watcher_ != nullptr) watcher_->left(view);
  PageNode& node = nodes_[view.page];
  if (node.orphan) {
    const auto [begin, end] = orphans_.equal_range(orphan_parents_.at(view.page));
    for (auto it = begin; it != end; ++it)
      if (it->second == view.page) {
        orphans_.erase(it);
        break;
      }
    orphan_parents_.erase(view.page);
  }
  unlink(view.page);
  for (PageId child = node.first_child; child != kNoPage;) {
    const PageId next = nodes_[child].next;
    nodes_[child].parent = nodes_[child].next = nodes_[child].previous = kNoPage;
    make_orphan(child, view.key);
    child = next;
  }
  if (const auto old = at(view.page)) count(*old, -1);
  entries_[view.page] = {};
  index_.erase(view.page);
  --pages_;
  --spaces_[view.space].pages;
  node = PageNode{};
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
  PageNode& node = nodes_[page];
  node.parent = parent;
  node.previous = kNoPage;
  node.next = nodes_[parent].first_child;
  if (node.next != kNoPage) nodes_[node.next].previous = page;
  nodes_[parent].first_child = page;
}

void Catalog::unlink(PageId page) {
  PageNode& node = nodes_[page];
  if (node.parent == kNoPage) return;
  if (node.previous != kNoPage)
    nodes_[node.previous].next = node.next;
  else
    nodes_[node.parent].first_child = node.next;
  if (node.next != kNoPage) nodes_[node.next].previous = node.previous;
  node.parent = node.next = node.previous = kNoPage;
}

void Catalog::make_orphan(PageId page, const Key& parent) {
  nodes_[page].orphan = true;
  orphans_.emplace(parent, page);
  orphan_parents_[page] = parent;
}

}  // namespace kvw
