// Traces against tiers: one call a replay, over whole arrays.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "eviction/policy.h"
#include "replay/optimum.h"
#include "replay/replay.h"

namespace kvw::bindings {

namespace {

using Pages = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ends = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Requests {
  Requests(const Pages& pages, const Ends& ends)
      : pages(pages.data(), pages.size()), ends(ends.data(), ends.size()) {}

  // Throws unless the ends rise to the number of pages and the ids are below `ids`.
  void check(size_t ids) const;

  std::span<const uint32_t> pages;
  std::span<const uint64_t> ends;
};

void Requests::check(size_t ids) const {
  uint64_t begin = 0;
  for (const uint64_t end : ends) {
    if (end < begin || end > pages.size())
      throw Error(ErrorKind::usage, "bad_trace",
                  "a request ends at page " + std::to_string(end) + " of " +
                      std::to_string(pages.size()) + ", the one before it at " +
                      std::to_string(begin));
    begin = end;
  }
  for (const uint32_t page : pages)
    if (page >= ids)
      throw Error(ErrorKind::usage, "bad_trace",
                  "page id " + std::to_string(page) + " is not below " + std::to_string(ids));
}

nb::object array_of(std::vector<uint32_t>&& made) {
  auto* kept = new std::vector<uint32_t>(std::move(made));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<uint32_t>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, uint32_t>(kept->data(), {kept->size()}, owner));
}

nb::dict counts_of(const TierCounts& counts) {
  nb::dict made;
  made["written"] = counts.written;
  made["evicted"] = counts.evicted;
  made["refused"] = counts.refused;
  made["spared"] = counts.spared;
  return made;
}

nb::dict replay(const Pages& pages, const Ends& ends, size_t ids, const std::string& policy,
                std::pair<uint64_t, uint64_t> capacities, bool leaves_first,
                uint64_t nvme_pages_per_day, const std::optional<Ends>& times_ns) {
  const Requests requests(pages, ends);
  if (times_ns && times_ns->size() != ends.size())
    throw Error(ErrorKind::usage, "bad_trace",
                std::to_string(times_ns->size()) + " times for " + std::to_string(ends.size()) +
                    " requests");
  std::vector<uint32_t> dram(requests.ends.size()), nvme(requests.ends.size());
  TierCounts dram_counts, nvme_counts;
  {
    WithoutGil release;
    requests.check(ids);
    Replay run({policy, capacities.first, capacities.second, leaves_first, nvme_pages_per_day},
               ids);
    uint64_t begin = 0;
    for (size_t i = 0; i < dram.size(); ++i) {
      const uint64_t end = requests.ends[i];
      const RequestHits hits = run.request(requests.pages.subspan(begin, end - begin),
                                           times_ns ? times_ns->data()[i] : 0);
      dram[i] = hits.dram;
      nvme[i] = hits.nvme;
      begin = end;
    }
    dram_counts = run.dram();
    nvme_counts = run.nvme();
  }
  nb::dict made;
  made["dram_hits"] = array_of(std::move(dram));
  made["nvme_hits"] = array_of(std::move(nvme));
  made["dram"] = counts_of(dram_counts);
  made["nvme"] = counts_of(nvme_counts);
  return made;
}

nb::dict optimum(const Pages& pages, const Ends& ends, size_t ids, uint64_t capacity) {
  const Requests requests(pages, ends);
  std::vector<uint32_t> hits(requests.ends.size());
  TierCounts counts;
  {
    WithoutGil release;
    requests.check(ids);
    counts = optimal_hits(requests.pages, requests.ends, ids, capacity, hits);
  }
  nb::dict made = counts_of(counts);
  made["hits"] = array_of(std::move(hits));
  return made;
}

}  // namespace

void bind_replay(nb::module_& m) {
  m.attr("ENDLESS") = kEndless;
  m.def("policy_names", &policy_names);
  m.def("replay", &replay, nb::arg("pages"), nb::arg("ends"), nb::arg("ids"), nb::arg("policy"),
        nb::arg("capacities"), nb::arg("leaves_first"), nb::arg("nvme_pages_per_day") = 0,
        nb::arg("times_ns") = nb::none());
  m.def("optimal_hits", &optimum, nb::arg("pages"), nb::arg("ends"), nb::arg("ids"),
        nb::arg("capacity"));
}

}  // namespace kvw::bindings
