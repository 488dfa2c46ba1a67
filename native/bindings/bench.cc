// Measures that need the core's own parts: one call each.
#include <nanobind/stl/vector.h>

#include "bench/index_cost.h"
#include "bench/presence_cost.h"
#include "bindings/bindings.h"

namespace kvw::bindings {

namespace {

nb::list index_costs_of(const std::vector<uint64_t>& counts, uint32_t rounds) {
  std::vector<IndexCost> costs;
  {
    WithoutGil release;
    costs = index_costs(counts, rounds);
  }
  nb::list made;
  for (const IndexCost& cost : costs) {
    nb::dict one;
    one["entries"] = cost.entries;
    one["refused"] = cost.refused;
    one["hit_ns"] = cost.hit_ns;
    one["miss_ns"] = cost.miss_ns;
    one["replace_ns"] = cost.replace_ns;
    made.append(one);
  }
  return made;
}

nb::dict presence_costs_of(uint64_t objects, uint32_t rounds) {
  PresenceCost cost;
  {
    nb::gil_scoped_release release;
    cost = presence_costs(objects, rounds);
  }
  nb::dict made;
  made["objects"] = cost.objects;
  made["index_ns"] = cost.index;
  made["pages_ns"] = cost.pages;
  made["runs_ns"] = cost.runs;
  made["absent_ns"] = cost.absent;
  return made;
}

}  // namespace

void bind_bench(nb::module_& m) {
  m.def("index_costs", &index_costs_of, nb::arg("counts"), nb::arg("rounds"));
  m.def("presence_costs", &presence_costs_of, nb::arg("objects"), nb::arg("rounds"));
}

}  // namespace kvw::bindings
