#include "eviction/miss_ratio.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvw {

namespace {

constexpr double kStepsPerOctave = 16;
constexpr double kNever = INFINITY;

}  // namespace

MissRatioCurve::MissRatioCurve(size_t most_samples)
    : most_samples_(most_samples), tree_(4 * most_samples) {
  samples_.reserve(most_samples + 1);
}

uint64_t MissRatioCurve::size_bytes(size_t step) {
  return static_cast<uint64_t>(static_cast<double>(kSmallest) *
                               std::exp2(static_cast<double>(step) / kStepsPerOctave));
}

double MissRatioCurve::weight() const {
  return std::exp2(64) / (static_cast<double>(threshold_) + 1);
}

MissRatioCurve::Histogram* MissRatioCurve::histogram(uint16_t space) {
  if (const auto found = spaces_.find(space); found != spaces_.end()) return &found->second;
  return spaces_.size() < kSpaces ? &spaces_[space] : nullptr;
}

void MissRatioCurve::use(std::span<const Use> pages) {
  // What a prompt finds is settled before any of its pages is used.
  for (const Use& page : pages) {
    Histogram* own = histogram(page.space);
    ++all_.uses;
    if (own != nullptr) ++own->uses;
    if (page.key.hi > threshold_) continue;
    const double far = distance(page);
    record(&all_, far);
    record(own, far);
  }
  for (size_t at = pages.size(); at-- > 0;) {
    if (pages[at].key.hi <= threshold_) follow(pages[at]);
    if (samples_.size() > most_samples_) follow_fewer();
  }
}

double MissRatioCurve::distance(const Use& page) const {
  const auto found = samples_.find(page.key.hi);
  if (found == samples_.end())
    return page.held_bytes == 0 ? kNever : static_cast<double>(page.held_bytes);
  const uint64_t since = followed_bytes_ - bytes_until(found->second.time);
  return static_cast<double>(since) * weight() + static_cast<double>(page.bytes);
}

void MissRatioCurve::follow(const Use& page) {
  const auto [found, fresh] = samples_.try_emplace(page.key.hi);
  Sample& sample = found->second;
  if (fresh) {
    hashes_.push(page.key.hi);
  } else {
    add(sample.time, -sample.bytes);
    followed_bytes_ -= sample.bytes;
    sample.bytes = 0;
  }
  if (now_ == tree_.size()) renumber();
  sample = {now_++, page.bytes};
  add(sample.time, page.bytes);
  followed_bytes_ += page.bytes;
}

void MissRatioCurve::record(Histogram* histogram, double distance) const {
  if (histogram == nullptr) return;
  histogram->followed += weight();
  const double octaves = std::log2(distance / static_cast<double>(kSmallest));
  const double step = std::ceil(std::max(0.0, octaves) * kStepsPerOctave);
  if (step < static_cast<double>(kSizes)) histogram->hits[static_cast<size_t>(step)] += weight();
}

void MissRatioCurve::follow_fewer() {
  const uint64_t dropped = hashes_.top();
  hashes_.pop();
  const Sample sample = samples_.at(dropped);
  add(sample.time, -sample.bytes);
  followed_bytes_ -= sample.bytes;
  samples_.erase(dropped);
  threshold_ = dropped - 1;
}

// Times start again from 0, in the same order.
void MissRatioCurve::renumber() {
  std::vector<Sample*> order;
  order.reserve(samples_.size());
  for (auto& [hash, sample] : samples_)
    if (sample.bytes != 0) order.push_back(&sample);
  std::ranges::sort(order, {}, &Sample::time);
  std::ranges::fill(tree_, 0);
  now_ = 0;
  for (Sample* sample : order) {
    sample->time = now_++;
    add(sample->time, sample->bytes);
  }
}

// Sums wrap, so that what was added can be taken away by adding its complement.
void MissRatioCurve::add(uint32_t time, uint64_t bytes) {
  for (size_t at = time + 1; at <= tree_.size(); at += at & -at) tree_[at - 1] += bytes;
}

// Of samples last used at `time` or before.
uint64_t MissRatioCurve::bytes_until(uint32_t time) const {
  uint64_t sum = 0;
  for (size_t at = time + 1; at > 0; at -= at & -at) sum += tree_[at - 1];
  return sum;
}

MissRatioCurve::Curve MissRatioCurve::curve(int space) const {
  Curve made;
  made.share = 1 / weight();
  made.samples = samples_.size();
  const Histogram* histogram = &all_;
  if (space != kAll) {
    const auto found = spaces_.find(static_cast<uint16_t>(space));
    if (found == spaces_.end()) return made;
    histogram = &found->second;
  }
  made.uses = histogram->uses;
  const double uses = static_cast<double>(made.uses);
  double hits = uses - histogram->followed;  // see the head of miss_ratio.h
  for (size_t step = 0; step < kSizes; ++step) {
    hits += histogram->hits[step];
    made.hits[step] = std::clamp(hits, step == 0 ? 0.0 : made.hits[step - 1], uses);
  }
  return made;
}

}  // namespace kvw
