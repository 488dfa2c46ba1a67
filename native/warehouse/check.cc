#include "warehouse/check.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "digest/digest.h"
#include "warehouse/promotions.h"

namespace kvw {

namespace {

constexpr uint64_t kStretchBytes = 32ull << 20;  // of DRAM
constexpr size_t kGoodKept = 8192;
constexpr size_t kReads = 4;
constexpr size_t kReadsBesidePromotions = 1;

uint64_t bytes_of(const nvme::Extent& extent) { return uint64_t{extent.blocks} * kBlockBytes; }

}  // namespace

void Checker::begin(const CheckRequest& request, End end) {
  if (stretches_.size() >= kMaxStretches)
    throw Error(ErrorKind::capacity, "check_busy",
                std::to_string(kMaxStretches) +
                    " checks are waiting already, the bound; try again when one has ended");
  stretches_.push_back({request, std::move(end), {}, {}, 0, false, {}});
  if (stretches_.size() == 1) go_on();
}

void Checker::go_on() {
  collect(stretches_.front());
  step();
}

void Checker::step() {
  if (std::exchange(stepping_, true)) return;
  while (!stretches_.empty()) {
    Stretch& stretch = stretches_.front();
    while (!stretch.unread.empty() && read_next(stretch)) {
    }
    if (!stretch.collected || !stretch.unread.empty() || reads_ != 0) break;
    Stretch done = std::move(stretch);
    stretches_.pop_front();
    done.end(std::move(done.report));
  }
  stepping_ = false;
}

void Checker::tick(uint64_t now_ns) {
  now_ns_ = now_ns;
  reported_bytes_left_ = kReportedBytesPerTick;
  std::erase_if(good_, [now_ns](const auto& item) { return item.second.until_ns <= now_ns; });
  judge_reported();
  goes_on() ? go_on() : step();
}

void Checker::report(SessionId session, const Report& report) {
  const auto good = good_.find(report.slot);
  if (good != good_.end() && good->second.generation == report.generation) return;
  size_t of_session = 0;
  for (const Reported& other : reported_) {
    const Digested& page = other.digested;
    if (page.slot == report.slot && page.generation == report.generation) return;
    of_session += other.session == session;
  }
  if (of_session >= kReportsPerSession) return;
  reported_.push_back({session, report.key, {report.slot, report.generation, 0, {}}});
  judge_reported();
}

void Checker::judge_reported() {
  while (!reported_.empty() && reported_bytes_left_ > 0) {
    Digested& page = reported_.front().digested;
    const auto view = state_.catalog.find(reported_.front().key);
    const bool there = is_there(page, view);
    const char* problem = nullptr;
    if (there && !digest(page, *view, reported_bytes_left_, problem)) return;
    const SlotId slot = page.slot;
    const uint64_t generation = page.generation;
    reported_.pop_front();
    if (problem != nullptr) {
      quarantine_.dram(*view, problem);
    } else if (there) {
      // The reporter's own trouble, or that of the copy in HBM that it read.
      if (state_.hbm) state_.hbm->damaged(slot);
      if (good_.size() < kGoodKept) good_[slot] = {generation, now_ns_ + kSecondNs};
    }
  }
}

bool Checker::is_there(const Digested& page, const std::optional<EntryView>& view) const {
  return view && view->in_dram() && view->slot == page.slot &&
         state_.pool.load(page.slot).generation == page.generation;
}

bool Checker::digest(Digested& page, const EntryView& view, uint64_t& bytes, const char*& problem) {
  problem = !state_.has_good_header(view.slot)                ? "header"
            : !(state_.pool.meta(view.slot)->key == view.key) ? "key"
                                                              : nullptr;
  const uint32_t shards = state_.pool.meta(page.slot)->shards;
  while (problem == nullptr && page.shard < shards) {
    if (bytes == 0 || !digest_shard(page, bytes, problem)) return false;
    ++page.shard;
  }
  return true;
}

// Of a page whose header is good. False: there is more.
bool Checker::digest_shard(Digested& page, uint64_t& bytes, const char*& problem) {
  const SlotMeta* meta = state_.pool.meta(page.slot);
  const uint64_t at = page.leaves.size() * kBlockBytes, all = meta->shard_bytes;
  const uint64_t some = std::min(all - std::min(at, all), bytes);
  const uint64_t stride = round_up(all, kBlockBytes);
  add_leaves(state_.pool.payload(page.slot) + page.shard * stride + at, some, page.leaves);
  bytes -= std::min(round_up(some, kBlockBytes), bytes);
  if (at + some < all) return false;
  const uint64_t seed = digest_seed(meta->key, page.shard, all);
  if (digest_root(page.leaves, seed) != digests_of(meta)[page.shard]) problem = "digest";
  page.leaves.clear();
  return true;
}

void Checker::collect(Stretch& stretch) {
  const CheckRequest& request = stretch.request;
  const uint64_t entries = state_.catalog.index().entries();
  PageId& page = stretch.request.after;
  uint64_t bytes = kBytesPerStep;
  const auto more = [&] {
    return page < entries && stretch.found < request.limit &&
           stretch.report.dram.bytes < kStretchBytes;
  };
  for (uint64_t looks = 0; more(); ++page, ++looks) {
    if (looks == kLooksPerStep) return;
    const auto view = state_.catalog.at(page);
    if (!view || (request.ordinal >= 0 && view->space != request.ordinal)) continue;
    if (state_.is_cleared(*view)) continue;
    if (view->in_dram() && !check_dram(stretch, *view, bytes)) return;
    if (view->in_nvme()) stretch.unread.push_back(view->key);
    ++stretch.found;
  }
  stretch.report.next = page < entries ? static_cast<int64_t>(page) : -1;
  stretch.collected = true;
}

// False: not whole in this step.
bool Checker::check_dram(Stretch& stretch, const EntryView& view, uint64_t& bytes) {
  Digested& page = stretch.digested;
  if (!is_there(page, view)) page = {view.slot, state_.pool.load(view.slot).generation, 0, {}};
  const char* problem = nullptr;
  if (!digest(page, view, bytes, problem)) return false;
  page = {};
  TierCheck& tier = stretch.report.dram;
  const uint64_t size = state_.spaces[view.space].shape.slot_bytes();
  ++tier.pages;
  tier.bytes += size;
  if (problem == nullptr) return true;
  ++tier.bad;
  stretch.report.bad.push_back({view.key, "dram", problem});
  if (!stretch.request.repair) return true;
  ++tier.dropped;
  tier.dropped_bytes += size;
  quarantine_.dram(view, problem);
  return true;
}

bool Checker::may_read(uint64_t bytes) const {
  if (reads_ == 0) return true;
  const size_t most = promotions_.under_way() == 0 ? kReads : kReadsBesidePromotions;
  return reads_ < most && read_bytes_ + bytes <= kMaxReadBytes;
}

// False: not now.
bool Checker::read_next(Stretch& stretch) {
  const auto view = state_.catalog.find(stretch.unread.front());
  if (!view || !view->in_nvme()) {  // it left while it waited
    stretch.unread.pop_front();
    return true;
  }
  const nvme::Extent extent = view->extent;
  if (!may_read(bytes_of(extent))) return false;
  const auto end = [this, key = view->key, extent](nvme::RecordEnd&& read) {
    read_ended(key, extent, read);
  };
  if (!state_.log->check(extent, view->key, end)) return false;
  stretch.unread.pop_front();
  ++reads_;
  read_bytes_ += bytes_of(extent);
  return true;
}

void Checker::read_ended(const Key& key, const nvme::Extent& extent, const nvme::RecordEnd& end) {
  --reads_;
  read_bytes_ -= bytes_of(extent);
  Stretch& stretch = stretches_.front();
  const auto view = state_.catalog.find(key);
  if (view && view->in_nvme() && !state_.is_cleared(*view)) {
    // Reclaim moved it meanwhile: what counts is the copy that a promotion would read.
    if (view->extent == extent)
      judge(stretch, *view, end);
    else
      stretch.unread.push_back(key);
  }
  step();
}

void Checker::judge(Stretch& stretch, const EntryView& view, const nvme::RecordEnd& end) {
  const char* problem = end.reason;
  if (end.result == nvme::ReadResult::ok)
    problem = state_.fits_namespace(view, end.facts) ? nullptr : "namespace";
  else if (std::string_view(problem) == "stopped")
    return;  // the warehouse is ending: nothing was found out
  TierCheck& tier = stretch.report.nvme;
  const uint64_t bytes = bytes_of(view.extent);
  ++tier.pages;
  tier.bytes += bytes;
  if (problem == nullptr) return;
  ++tier.bad;
  stretch.report.bad.push_back({view.key, "nvme", problem});
  if (!stretch.request.repair) return;
  ++tier.dropped;
  tier.dropped_bytes += bytes;
  quarantine_.nvme(view, problem, end.result == nvme::ReadResult::io_error);
}

}  // namespace kvw
