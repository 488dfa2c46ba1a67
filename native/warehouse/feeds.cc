#include "warehouse/feeds.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "warehouse/state.h"

namespace kvw {

namespace {

constexpr uint8_t kTiers = kFeedDram | kFeedNvme;
constexpr uint8_t kAgain = 4;     // to be told again, because its parent was
constexpr uint8_t kSiblings = 8;  // and then its next sibling has its turn
static_assert((kTiers & (kAgain | kSiblings)) == 0);

// Of one advance(): a millisecond or two of the core thread.
constexpr size_t kVisits = 512;
constexpr uint64_t kScanned = 65536;
// As many as a promotion may have company of: somebody waits for those.
constexpr size_t kHeaderReads = 4;

uint8_t tiers_of(const EntryView& view) {
  return static_cast<uint8_t>((view.in_dram() ? kFeedDram : 0) | (view.in_nvme() ? kFeedNvme : 0));
}

}  // namespace

Feed::Feed(WarehouseState& state, Feeds& feeds, uint64_t id, const FeedRequest& request,
           std::shared_ptr<FeedQueue> queue)
    : state_(state),
      feeds_(feeds),
      id_(id),
      request_(request),
      queue_(std::move(queue)),
      told_(state.catalog.index().entries()) {
  restart();
}

void Feed::restart() {
  std::fill(told_.begin(), told_.end(), 0);
  stack_.clear();
  unread_.clear();
  cursor_ = 0;
  synced_ = false;
  ++round_;
  reads_ = 0;
  queue_->restart();
}

bool Feed::parent_told(PageId page) const {
  const Catalog& catalog = state_.catalog;
  if (catalog.node(page).position == 0) return true;
  const PageId parent = catalog.parent(page);
  return parent != kNoPage && (told_[parent] & kTiers) != 0;
}

void Feed::came(const EntryView& view) {
  if (!follows(view)) return;
  const uint8_t now = tiers_of(view);
  if (const uint8_t gone = told_[view.page] & kTiers & ~now; gone != 0) say_removed(view, gone);
  tell(view, static_cast<uint8_t>(now & ~told_[view.page]));
}

void Feed::left(const EntryView& view) {
  go_on_behind(view.page);
  if (!follows(view)) return;
  if (const uint8_t gone = told_[view.page] & kTiers; gone != 0) say_removed(view, gone);
  told_[view.page] = 0;
}

void Feed::tell(const EntryView& view, uint8_t tiers) {
  if (tiers == 0 || !parent_told(view.page) || state_.is_cleared(view)) return;
  if (!view.in_dram()) {
    unread_.push_back(view.key);
    queue_->want_advance();
    return;
  }
  // A damaged header would be told as if it were the page's; its load will find it out.
  if (!state_.has_good_header(view.slot)) return;
  const SlotMeta* meta = state_.pool.meta(view.slot);
  say_stored(view, tiers, meta->parent, static_cast<WitnessKind>(meta->witness_kind),
             {witness_of(meta), meta->witness_bytes});
}

void Feed::say_stored(const EntryView& view, uint8_t tiers, const Key& parent, WitnessKind kind,
                      std::span<const std::byte> witness) {
  if (request_.tokens_only && kind != WitnessKind::tokens) return;
  const uint32_t position = state_.catalog.node(view.page).position;
  const bool anew = (told_[view.page] & kTiers & ~tiers) == 0;
  told_[view.page] |= tiers;
  queue_->push({FeedKind::stored, tiers, position, state_.spaces[view.space].shape.id, view.key,
                position > 0 ? parent : Key{}, kind, static_cast<uint32_t>(witness.size())},
               witness);
  if (anew) tell_with_siblings(state_.catalog.first_child(view.page));
}

void Feed::say_removed(const EntryView& view, uint8_t tiers) {
  told_[view.page] = static_cast<uint8_t>(told_[view.page] & ~tiers);
  const uint32_t position = state_.catalog.node(view.page).position;
  queue_->push({.kind = FeedKind::removed,
                .tiers = tiers,
                .position = position,
                .namespace_id = state_.spaces[view.space].shape.id,
                .key = view.key});
}

void Feed::tell_with_siblings(PageId page) {
  if (page == kNoPage) return;
  if ((told_[page] & kTiers) != 0) told_[page] |= kAgain;
  told_[page] |= kSiblings;
  stack_.push_back(page);
  queue_->want_advance();
}

void Feed::go_on_behind(PageId page) {
  if ((told_[page] & kSiblings) == 0) return;
  told_[page] = static_cast<uint8_t>(told_[page] & ~kSiblings);
  tell_with_siblings(state_.catalog.next_sibling(page));
}

void Feed::visit(PageId page) {
  const auto view = state_.catalog.at(page);
  if (!view) return;
  go_on_behind(page);
  if (!follows(*view)) return;
  const bool again = (told_[page] & kAgain) != 0;
  told_[page] &= kTiers;
  const uint8_t now = tiers_of(*view);
  tell(*view, again ? now : static_cast<uint8_t>(now & ~told_[page]));
}

// Goes on to the next page that begins a chain. False: none was found in this stretch.
bool Feed::scan_roots() {
  const Catalog& catalog = state_.catalog;
  const uint64_t entries = catalog.index().entries();
  while (cursor_ < entries && scan_left_ > 0) {
    --scan_left_;
    const PageId page = cursor_++;
    const auto view = catalog.at(page);
    if (!view || catalog.node(page).position != 0) continue;
    stack_.push_back(page);
    return true;
  }
  return false;
}

bool Feed::read_next() {
  while (!unread_.empty() && reads_ < kHeaderReads) {
    const Key key = unread_.front();
    const auto view = state_.catalog.find(key);
    if (!view || view->in_dram()) {  // it left, or came to DRAM, while it waited
      unread_.pop_front();
      if (view) visit(view->page);
      continue;
    }
    const auto end = [feeds = &feeds_, id = id_, round = round_, key,
                      extent = view->extent](nvme::RecordEnd&& read) {
      Feed* feed = feeds->find(id);
      if (feed != nullptr && feed->round_ == round) feed->header_read(key, extent, std::move(read));
    };
    if (!state_.log->read_header(view->extent, key, end)) return false;
    unread_.pop_front();
    ++reads_;
    return true;
  }
  return false;
}

void Feed::header_read(const Key& key, const nvme::Extent& extent, nvme::RecordEnd&& end) {
  --reads_;
  queue_->want_advance();
  const auto view = state_.catalog.find(key);
  if (!view || !follows(*view)) return;
  if (view->in_dram() || !(view->extent == extent)) {
    unread_.push_back(key);  // moved, or promoted: what is there now is what counts
    return;
  }
  // What cannot be read cannot be loaded: it is not told, and nothing below it.
  if (end.result != nvme::ReadResult::ok || !state_.fits_namespace(*view, end.facts)) return;
  if (!parent_told(view->page) || state_.is_cleared(*view)) return;
  say_stored(*view, tiers_of(*view), end.facts.parent, end.facts.witness_kind, end.facts.witness);
}

void Feed::advance() {
  if (queue_->lost()) return;
  scan_left_ = kScanned;
  for (size_t visits = 0; visits < kVisits && !queue_->half_full(); ++visits) {
    if (stack_.empty() && !scan_roots()) break;
    const PageId page = stack_.back();
    stack_.pop_back();
    visit(page);
  }
  while (read_next()) {
  }
  const bool scanned = cursor_ >= state_.catalog.index().entries();
  const bool more = !stack_.empty() || !scanned;
  if (more) queue_->want_advance();
  if (!more && unread_.empty() && reads_ == 0 && !std::exchange(synced_, true))
    queue_->push({.kind = FeedKind::synced});
}

uint64_t Feeds::open(const FeedRequest& request, std::shared_ptr<FeedQueue> queue) {
  drop_closed();
  if (feeds_.size() >= kMaxFeeds)
    throw Error(ErrorKind::capacity, "too_many_watchers",
                std::to_string(kMaxFeeds) +
                    " watchers are there already, the bound; try again when one has ended");
  const uint64_t id = next_id_++;
  feeds_[id] = std::make_unique<Feed>(state_, *this, id, request, std::move(queue));
  state_.catalog.watch(this);
  return id;
}

void Feeds::drop_closed() {
  const size_t dropped =
      std::erase_if(feeds_, [](const auto& each) { return each.second->queue_->closed(); });
  if (dropped != 0 && feeds_.empty()) state_.catalog.watch(nullptr);
}

Feed* Feeds::find(uint64_t id) {
  const auto found = feeds_.find(id);
  return found == feeds_.end() ? nullptr : found->second.get();
}

void Feeds::restart(uint64_t id) {
  if (Feed* feed = find(id)) feed->restart();
}

void Feeds::advance(uint64_t id) {
  if (Feed* feed = find(id)) feed->advance();
}

bool Feeds::follow(uint32_t ordinal) const {
  return std::any_of(feeds_.begin(), feeds_.end(), [=](const auto& each) {
    const Feed& feed = *each.second;
    return feed.request_.ordinal == static_cast<int>(ordinal) && !feed.queue_->closed();
  });
}

void Feeds::came(const EntryView& view) {
  for (const auto& [id, feed] : feeds_) feed->came(view);
}

void Feeds::left(const EntryView& view) {
  for (const auto& [id, feed] : feeds_) feed->left(view);
}

}  // namespace kvw
