// Which page leaves a tier next. A policy sees page metadata alone: it runs in the daemon over the
// index's page ids and in a trace replay over the trace's, without an arena or a daemon.
// Not thread-safe: one thread owns a policy. Invariant: a victim has no resident descendants other
// than victims before it, so prefixes never get gaps.
// Touches and removals may come late (a touch ring is lossy and lags): a page that is not resident
// is ignored, and inserting a resident page touches it.
// A call about a page is O(log n); of "s3fifo" O(1), but for removed(): O(children).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/types.h"

namespace kvw {

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // The next page that is inserted under this id is the one called `identity`, the same whenever
  // it comes back (its key). For policies that remember what left; ids alone are used again.
  virtual void announced(PageId page, uint64_t identity) {
    (void)page;
    (void)identity;
  }
  // The page became resident. `parent` is its parent if that is resident, else kNoPage.
  // Ids are dense (below the capacity given at construction, or grown to).
  virtual void inserted(PageId page, PageId parent) = 0;
  // `child` became resident before its parent did (promotion, recovery): link them. Ignored unless
  // both are resident.
  virtual void adopt(PageId parent, PageId child) = 0;
  // The page was used.
  virtual void touched(PageId page) = 0;
  // Whoever used the page needs it no more: unless it is used again it leaves before those that
  // were not released, once it has no children. A hint, which a policy may ignore.
  virtual void released(PageId page) { (void)page; }
  // The page left. Its resident children, if any, become roots.
  virtual void removed(PageId page) = 0;
  // Up to out.size() victims, coldest first with descendants before ancestors, none of them twice,
  // skipping pages that `exempt` is true for (and so their ancestors). The pages stay resident
  // until removed() is called. Returns how many were found; fewer than asked means that there are
  // no more, or only some that were exempt before, of which each call looks at others. Bounded
  // work: a victim, or a page that is exempt for the first time since it was used, is O(log n), for
  // "s3fifo" amortised O(1); when fewer are found also O(1,024), for "s3fifo" O(exempt pages).
  virtual size_t victims(std::span<PageId> out, const class Exempt& exempt) = 0;
  // Position in coldness for comparing two pages at one time: larger is worth more, of "lru" used
  // more recently; 0 if not resident. Of another time it may be another.
  virtual uint64_t heat(PageId page) const = 0;
  virtual size_t size() const = 0;

  // Pages of policies that have one clock can be compared by their heat. Not owned; before the
  // first page.
  void share_clock(uint64_t& clock) { clock_ = &clock; }

 protected:
  uint64_t tick() { return ++*clock_; }
  uint64_t now() const { return *clock_; }

 private:
  uint64_t own_clock_ = 0;
  uint64_t* clock_ = &own_clock_;
};

// Says which pages may not leave now (pinned, being written to disk). Does not throw and does not
// call the policy.
class Exempt {
 public:
  virtual ~Exempt() = default;
  virtual bool operator()(PageId page) const = 0;
};

// None is.
class ExemptNone final : public Exempt {
 public:
  bool operator()(PageId) const override { return false; }
};

// Those of which `exempt` is true.
class ExemptIf final : public Exempt {
 public:
  explicit ExemptIf(std::function<bool(PageId)> exempt) : exempt_(std::move(exempt)) {}
  bool operator()(PageId page) const override { return exempt_(page); }

 private:
  std::function<bool(PageId)> exempt_;
};

// Names: "lru", "adaptive", "s3fifo". Throws Error (usage) that lists the known names. `capacity`
// is a hint of ids.
std::unique_ptr<EvictionPolicy> make_policy(std::string_view name, size_t capacity);
// What a page takes in that policy, at most: what grows by doubling is there twice while it does.
// Throws likewise.
uint64_t policy_page_bytes(std::string_view name);
std::vector<std::string> policy_names();

}  // namespace kvw
