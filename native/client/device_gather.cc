#include "client/device_gather.h"

#include <cstring>

namespace kvw {

GatherPlan::GatherPlan(const Regions& regions, uint64_t to) : page_bytes_(regions.page_bytes()) {
  pages_.reserve(regions.count());
  std::vector<Piece> pieces;
  for (size_t page = 0; page < regions.count(); ++page) {
    regions.pieces(page, pieces);
    const size_t first = pieces_.size();
    gpu::append_pieces(pieces, pieces_);
    pages_.push_back({to + page * page_bytes_, first, pieces_.size() - first});
  }
}

size_t GatherPlan::table_bytes() const {
  return pages_.size() * sizeof(gpu::PageWork) + pieces_.size() * sizeof(gpu::PagePiece);
}

size_t GatherPlan::device_bytes() const {
  return table_bytes() + pages_.size() * gpu::leaves_of(page_bytes_) * sizeof(uint64_t);
}

void GatherPlan::write(std::byte* tables) const {
  const size_t pages_bytes = pages_.size() * sizeof(gpu::PageWork);
  std::memcpy(tables, pages_.data(), pages_bytes);
  std::memcpy(tables + pages_bytes, pieces_.data(), pieces_.size() * sizeof(gpu::PagePiece));
}

void DeviceGather::launch(const GatherPlan& plan, uint64_t tables, gpu::CUstream stream) const {
  if (plan.pages_.empty()) return;
  const gpu::Device::Current current(device_);
  const gpu::KernelTables at{tables, tables + plan.pages_.size() * sizeof(gpu::PageWork),
                             tables + plan.table_bytes()};
  gpu::launch_kernel(device_, device_.gather(), at, plan.page_bytes_, plan.pages_.size(), stream);
}

}  // namespace kvw
