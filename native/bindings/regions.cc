// Regions: where pages lie in the memory of a process, and copies of them to and from rows.
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "client/client.h"

namespace kvw::bindings {

namespace {

// One contiguous row a page.
class PageRows final : public Regions {
 public:
  PageRows(nb::object owner, std::byte* data, size_t count, size_t page_bytes, bool writable)
      : owner_(std::move(owner)),
        data_(data),
        count_(count),
        page_bytes_(page_bytes),
        writable_(writable) {}
  size_t count() const override { return count_; }
  size_t page_bytes() const override { return page_bytes_; }
  bool writable() const override { return writable_; }
  void pieces(size_t page, std::vector<Piece>& out) const override {
    out.assign(1, Piece{data_ + page * page_bytes_, page_bytes_});
  }

 private:
  nb::object owner_;
  std::byte* data_;
  size_t count_, page_bytes_;
  bool writable_;
};

// A paged cache: bases[j] + blocks[p][b] * strides[j], piece_bytes[j] long, block by block.
class StridedBlocks final : public Regions {
 public:
  StridedBlocks(nb::object owners, std::vector<uint64_t> bases, std::vector<int64_t> strides,
                std::vector<uint64_t> bytes, std::vector<int64_t> blocks, size_t pages,
                size_t blocks_per_page)
      : owners_(std::move(owners)),
        bases_(std::move(bases)),
        strides_(std::move(strides)),
        bytes_(std::move(bytes)),
        blocks_(std::move(blocks)),
        pages_(pages),
        blocks_per_page_(blocks_per_page) {
    for (const uint64_t piece : bytes_) page_bytes_ += piece;
    page_bytes_ *= blocks_per_page_;
  }
  size_t count() const override { return pages_; }
  size_t page_bytes() const override { return page_bytes_; }
  bool writable() const override { return true; }
  void pieces(size_t page, std::vector<Piece>& out) const override {
    out.clear();
    for (size_t block = 0; block < blocks_per_page_; ++block) {
      const int64_t number = blocks_[page * blocks_per_page_ + block];
      for (size_t j = 0; j < bases_.size(); ++j)
        out.push_back(
            {reinterpret_cast<std::byte*>(  // NOLINT(performance-no-int-to-ptr): numpy's addresses
                 bases_[j] + static_cast<uint64_t>(number * strides_[j])),
             bytes_[j]});
    }
  }

 private:
  nb::object owners_;
  std::vector<uint64_t> bases_;
  std::vector<int64_t> strides_;
  std::vector<uint64_t> bytes_;
  std::vector<int64_t> blocks_;
  size_t pages_, blocks_per_page_;
  size_t page_bytes_ = 0;
};

// Regions in the memory of a GPU.
class OnDevice final : public Regions {
 public:
  OnDevice(nb::object regions, DevicePlace place)
      : owner_(std::move(regions)),
        regions_(nb::cast<const Regions&>(owner_)),
        place_(std::move(place)) {}
  size_t count() const override { return regions_.count(); }
  size_t page_bytes() const override { return regions_.page_bytes(); }
  bool writable() const override { return regions_.writable(); }
  const DevicePlace* device() const override { return &place_; }
  void pieces(size_t page, std::vector<Piece>& out) const override { regions_.pieces(page, out); }

 private:
  nb::object owner_;
  const Regions& regions_;
  DevicePlace place_;
};

Error bad_buffer(const std::string& what) {
  return Error(ErrorKind::usage, "bad_buffer",
               what + "; pages are a C-contiguous uint8 array of shape (pages, page_bytes)");
}

void check_rows(const Regions& regions, size_t rows, size_t bytes) {
  if (regions.device() != nullptr)
    throw Error(ErrorKind::usage, "bad_buffer",
                "the regions are in the memory of a GPU, which this process cannot read; load or "
                "store them, or copy them with the engine's own means");
  if (rows != regions.count() || bytes != regions.page_bytes())
    throw bad_buffer("the rows are (" + std::to_string(rows) + ", " + std::to_string(bytes) +
                     "), the regions " + std::to_string(regions.count()) + " pages of " +
                     std::to_string(regions.page_bytes()) + " bytes");
}

std::unique_ptr<Regions> rows_of(nb::object array, bool writable) {
  nb::ndarray<nb::ro, nb::device::cpu> rows;
  if (!nb::try_cast(array, rows)) throw bad_buffer("the buffer is no array in host memory");
  if (rows.dtype() != nb::dtype<uint8_t>()) throw bad_buffer("the buffer's dtype is not uint8");
  if (rows.ndim() != 2)
    throw bad_buffer("the buffer has " + std::to_string(rows.ndim()) + " dimensions");
  const size_t count = rows.shape(0), bytes = rows.shape(1);
  const bool contiguous = (bytes <= 1 || rows.stride(1) == 1) &&
                          (count <= 1 || rows.stride(0) == static_cast<int64_t>(bytes));
  if (!contiguous) throw bad_buffer("the buffer is not contiguous");
  if (writable) {
    nb::ndarray<nb::device::cpu> probe;
    if (!nb::try_cast(array, probe)) throw bad_buffer("the buffer to load into is read-only");
  }
  auto* data = const_cast<std::byte*>(static_cast<const std::byte*>(rows.data()));
  return std::make_unique<PageRows>(std::move(array), data, count, bytes, writable);
}

template <class T>
using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;

std::unique_ptr<Regions> strided_of(nb::object owners, const Array<uint64_t>& bases,
                                    const Array<int64_t>& strides, const Array<uint64_t>& bytes,
                                    const Array<int64_t>& blocks) {
  const size_t pieces = bases.size();
  if (bases.ndim() != 1 || strides.size() != pieces || bytes.size() != pieces || blocks.ndim() != 2)
    throw Error(ErrorKind::usage, "bad_regions",
                "bases, strides and piece_bytes must be one-dimensional and equally long, blocks "
                "(pages, blocks per page)");
  return std::make_unique<StridedBlocks>(
      std::move(owners), std::vector<uint64_t>(bases.data(), bases.data() + pieces),
      std::vector<int64_t>(strides.data(), strides.data() + pieces),
      std::vector<uint64_t>(bytes.data(), bytes.data() + pieces),
      std::vector<int64_t>(blocks.data(), blocks.data() + blocks.size()), blocks.shape(0),
      blocks.shape(1));
}

// All pages, one after another, to rows that are as many and as long.
void gather_rows(const Regions& regions,
                 const nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows) {
  check_rows(regions, rows.shape(0), rows.shape(1));
  auto* to = reinterpret_cast<std::byte*>(rows.data());
  WithoutGil release;
  std::vector<Piece> pieces;
  for (size_t page = 0; page < regions.count(); ++page, to += regions.page_bytes()) {
    regions.pieces(page, pieces);
    gather(to, pieces);
  }
}

void scatter_rows(
    const Regions& regions,
    const nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows) {
  check_rows(regions, rows.shape(0), rows.shape(1));
  if (!regions.writable()) throw bad_buffer("the buffer to scatter to is read-only");
  const auto* from = reinterpret_cast<const std::byte*>(rows.data());
  WithoutGil release;
  std::vector<Piece> pieces;
  for (size_t page = 0; page < regions.count(); ++page, from += regions.page_bytes()) {
    regions.pieces(page, pieces);
    scatter(pieces, from);
  }
}

}  // namespace

void bind_regions(nb::module_& m) {
  using nb::arg;
  nb::class_<Regions>(m, "Regions")
      .def_static("pages", &rows_of, arg("array"), arg("writable"))
      .def_static("strided", &strided_of, arg("owners"), arg("bases"), arg("strides"),
                  arg("piece_bytes"), arg("blocks"))
      .def(
          "on_device",
          [](nb::object self, int ordinal,
             const std::vector<uint64_t>& ready) -> std::unique_ptr<Regions> {
            DevicePlace place{ordinal, {}};
            for (const uint64_t event : ready)
              // NOLINTNEXTLINE(performance-no-int-to-ptr): how Python has an event
              place.ready.push_back(reinterpret_cast<gpu::CUevent>(event));
            return std::make_unique<OnDevice>(std::move(self), std::move(place));
          },
          arg("ordinal"), arg("ready"))
      .def("gather", &gather_rows, arg("rows"))
      .def("scatter", &scatter_rows, arg("rows"))
      .def_prop_ro("count", &Regions::count)
      .def_prop_ro("page_bytes", &Regions::page_bytes);
}

}  // namespace kvw::bindings
