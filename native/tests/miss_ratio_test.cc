// The live miss-ratio curve: exact while all pages are followed, near an exact replay when few are,
// bounded always.
#include "eviction/miss_ratio.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "replay/replay.h"
#include "tests/check.h"

namespace kvw {
namespace {

constexpr uint64_t kPageBytes = 1 << 20;
constexpr double kPoints = 0.02;
constexpr uint64_t kStep = kPageBytes / 16;  // more than from one size of the curve to the next

uint64_t mixed(uint64_t x) {  // splitmix64, so that numbers of pages are as good as hashes
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

Key key_of(PageId page, uint64_t seed = 0) { return {page, mixed(page ^ seed << 32)}; }

// Of the largest size of the curve that is not above; sizes are 4.4 % apart.
double hits_at(const MissRatioCurve::Curve& curve, uint64_t bytes) {
  size_t step = 0;
  while (step + 1 < MissRatioCurve::kSizes && MissRatioCurve::size_bytes(step + 1) <= bytes) ++step;
  return curve.hits[step];
}

// Requests as chains of page numbers: conversations that grow by a few pages a turn, every one of
// them behind a system prompt that `systems` of them share; popular ones come back more often.
struct Workload {
  std::vector<std::vector<PageId>> requests;
  PageId pages = 0;

  Workload(std::mt19937_64& random, size_t sessions, size_t turns, size_t systems) {
    std::vector<std::vector<PageId>> roots(systems), chains(sessions);
    for (auto& root : roots)
      for (int i = 0; i < 4; ++i) root.push_back(pages++);
    for (auto& chain : chains) chain = roots[random() % systems];
    for (size_t turn = 0; turn < turns; ++turn) {
      const double uniform = static_cast<double>(random() % 1000003) / 1000003;
      auto& chain =
          chains[static_cast<size_t>(static_cast<double>(sessions) * uniform * uniform * uniform)];
      for (size_t more = 1 + random() % 6; more > 0; --more) chain.push_back(pages++);
      requests.push_back(chain);
      if (chain.size() > 60) chain = roots[random() % systems];  // the next conversation
    }
  }
};

double replayed(const Workload& workload, uint64_t capacity_pages) {
  Replay replay({"lru", capacity_pages, 0, true}, workload.pages);
  double hits = 0, asked = 0;
  for (const auto& chain : workload.requests) {
    hits += replay.request(chain).dram;
    asked += static_cast<double>(chain.size());
  }
  return hits / asked;
}

// One page by itself.
void use(MissRatioCurve& curve, const Key& key, uint16_t space, uint64_t held_bytes = 0) {
  const MissRatioCurve::Use page{key, space, kPageBytes, held_bytes};
  curve.use({&page, 1});
}

void feed(MissRatioCurve& curve, const Workload& workload, uint64_t seed) {
  for (const auto& chain : workload.requests) {
    std::vector<MissRatioCurve::Use> pages;
    for (const PageId page : chain) pages.push_back({key_of(page, seed), 3, kPageBytes, 0});
    curve.use(pages);
  }
}

}  // namespace

TEST(distance_is_the_bytes_of_distinct_pages_since_the_last_use_and_the_pages_own) {
  MissRatioCurve curve;
  for (const PageId page : {0, 1, 2, 1, 0}) use(curve, key_of(page), 0);
  const auto all = curve.curve(-1);
  CHECK_EQ(all.uses, 5);
  CHECK_EQ(hits_at(all, kPageBytes), 0);
  CHECK_EQ(hits_at(all, 2 * kPageBytes + 2 * kStep), 1);  // page 1, behind page 2
  CHECK_EQ(hits_at(all, 3 * kPageBytes + 3 * kStep), 2);  // page 0, behind both
  CHECK_EQ(all.share, 1);
}

TEST(page_that_was_there_before_the_curve_counts_at_the_size_that_held_it) {
  MissRatioCurve curve;
  use(curve, key_of(1), 0, 64 * kPageBytes);
  use(curve, key_of(2), 0);
  CHECK_EQ(hits_at(curve.curve(0), 63 * kPageBytes), 0);
  CHECK_EQ(hits_at(curve.curve(0), 64 * kPageBytes), 1);
}

TEST(curve_of_a_namespace_has_its_own_uses_at_distances_in_the_whole_cache) {
  MissRatioCurve curve;
  use(curve, key_of(1), 7);
  for (PageId page = 10; page < 19; ++page) use(curve, key_of(page), 8);
  use(curve, key_of(1), 7);
  CHECK_EQ(curve.curve(7).uses, 2);
  CHECK_EQ(hits_at(curve.curve(7), 9 * kPageBytes), 0);
  CHECK_EQ(hits_at(curve.curve(7), 10 * (kPageBytes + kStep)), 1);
  CHECK_EQ(hits_at(curve.curve(8), 1 << 30), 0);
  CHECK_EQ(curve.curve(9).uses, 0);
}

TEST(curve_is_within_two_points_of_an_exact_replay_when_every_page_is_followed) {
  auto random = check::random("every page");
  const Workload workload(random, 300, 2000, 5);
  MissRatioCurve curve;
  feed(curve, workload, 0);
  CHECK_EQ(curve.curve(-1).share, 1);
  for (const uint64_t pages : {200, 500, 1000, 2000, 5000}) {
    const double exact = replayed(workload, pages);
    const auto all = curve.curve(-1);
    const double said = hits_at(all, pages * kPageBytes) / static_cast<double>(all.uses);
    std::printf("%llu pages: %.3f, exactly %.3f, ", static_cast<unsigned long long>(pages), said,
                exact);
    CHECK(std::abs(said - exact) <= kPoints);
  }
}

TEST(curve_is_within_two_points_of_an_exact_replay_when_few_pages_are_followed) {
  auto random = check::random("few pages");
  const Workload workload(random, 6000, 80000, 20);
  CHECK(workload.pages > 6 * MissRatioCurve::kSamples);
  const std::vector<uint64_t> sizes = {3000, 8000, 20000, 40000, 80000};
  std::vector<double> exact;
  for (const uint64_t pages : sizes) exact.push_back(replayed(workload, pages));
  for (uint64_t seed = 0; seed < check::rounds(6); ++seed) {
    MissRatioCurve curve;
    feed(curve, workload, seed + random() % 1000);
    const auto all = curve.curve(-1);
    CHECK(all.share < 0.2);
    CHECK(all.samples <= MissRatioCurve::kSamples);
    double worst = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const double said = hits_at(all, sizes[i] * kPageBytes) / static_cast<double>(all.uses);
      worst = std::max(worst, std::abs(said - exact[i]));
    }
    std::printf("%.4f ", worst);
    CHECK(worst <= kPoints);
  }
}

// Without the adjustment the curve would be off by the root's whole share of the uses, times the
// weight of a sample, where the root is followed.
TEST(page_that_every_request_uses_disturbs_no_curve_whether_it_is_followed_or_not) {
  bool was_followed[2] = {};
  for (uint64_t seed = 0; seed < 40; ++seed) {
    MissRatioCurve curve;
    PageId next = 1;
    constexpr int kRequests = 100000;
    for (int request = 0; request < kRequests; ++request) {
      use(curve, key_of(0, seed), 0);
      for (int i = 0; i < 3; ++i) use(curve, key_of(next++, seed), 0);
    }
    const auto all = curve.curve(-1);
    const double said = hits_at(all, 64 * kPageBytes) / static_cast<double>(all.uses);
    was_followed[static_cast<double>(key_of(0, seed).hi) < all.share * std::exp2(64)] = true;
    CHECK(std::abs(said - 0.25) <= kPoints);
    if (was_followed[0] && was_followed[1]) break;
  }
  CHECK(was_followed[0] && was_followed[1]);
}

TEST(times_start_again_without_changing_a_distance) {
  constexpr size_t kFew = 64;
  MissRatioCurve curve(kFew);
  constexpr uint64_t kTurns = 10000;
  for (uint64_t turn = 0; turn < kTurns; ++turn)
    for (PageId page = 0; page < 10; ++page) use(curve, key_of(page), 0);
  const auto all = curve.curve(-1);
  CHECK_EQ(hits_at(all, 9 * kPageBytes), 0);
  CHECK_EQ(hits_at(all, 10 * (kPageBytes + kStep)), 10 * (kTurns - 1));
}

TEST(namespaces_beyond_the_bound_count_in_the_curve_of_all_alone) {
  MissRatioCurve curve;
  const auto spaces = static_cast<uint16_t>(MissRatioCurve::kSpaces);
  for (uint16_t space = 0; space <= spaces; ++space) use(curve, key_of(space), space);
  CHECK_EQ(curve.curve(spaces - 1).uses, 1);
  CHECK_EQ(curve.curve(spaces).uses, 0);
  CHECK_EQ(curve.curve(-1).uses, MissRatioCurve::kSpaces + 1);
}

}  // namespace kvw
