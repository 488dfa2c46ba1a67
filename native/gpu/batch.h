// A batch of pages on their way between the arena and the memory of a device, digested there.
//
// A page with large pieces is copied piece by piece, straight to or from where it lies, and its
// pieces are digested in place. Others go through device memory of the batch's own, in one copy a
// page, and a kernel gathers or scatters them. Host memory that is not registered is copied through
// a pinned buffer of the batch's.
//
// What a batch has of the device and of pinned memory is taken by take_memory or at its first use,
// as much as any batch needs: freeing memory may wait for the device, and so for the engine, so
// nothing is freed or grown while the engine serves. That is 16 MiB where pages are staged, 16 MiB
// pinned where some of the host's are not registered, and 1.4 MiB of each for tables and leaves;
// more only for a page that is larger.
//
// Not thread-safe. begin, add while it fits, start, then finish or settle; again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"
#include "copy/copy.h"
#include "gpu/device.h"
#include "gpu/registration.h"

namespace kvw::gpu {

// What kernels read: kvwarehouse/client/gpu/page_kernels.cu has the same.
struct PagePiece {
  uint64_t address, offset;
};
struct PageWork {
  uint64_t staged, first_piece, pieces;
};

// The pieces that are not empty, behind those of the pages before.
void append_pieces(std::span<const Piece> pieces, std::vector<PagePiece>& table);

constexpr size_t leaves_of(uint64_t page_bytes) {
  return (page_bytes + kBlockBytes - 1) / kBlockBytes;
}

// Addresses in device memory: of PageWork and PagePiece, and where the leaves' digests go.
struct KernelTables {
  uint64_t pages, pieces, leaves;
};

// Queues one of the device's kernels for `count` pages, at least one. Under the device's context.
// Throws Error as Driver::check.
void launch_kernel(const Device& device, CUfunction kernel, const KernelTables& tables,
                   uint64_t page_bytes, uint64_t count, CUstream stream);

enum class Way { to_device, to_host };

class Batch {
 public:
  static constexpr size_t kBytes = 16u << 20;  // of host pages at most, unless it is one page
  static constexpr size_t kDeviceBytes = 128u << 20;  // of pages that are on the device, likewise
  static constexpr size_t kPages = 1024;
  static constexpr size_t kPieces = 64 << 10;  // at most, unless it is one page
  // From here on a copy of its own costs less than the device's memory twice over. Measured on an
  // H100, whose bus moves 55 GB/s: copies of 128 KiB go at 26 GB/s one by one, at 53 together.
  static constexpr size_t kDirectBytes = 128 << 10;

  explicit Batch(const Device& device);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // All the memory that batches of usual pages can need, so that none of them takes it. May wait
  // for the device. Throws Error capacity "gpu_memory".
  void take_memory();
  // `arena`: the registration of the host memory that pages are added from; it must outlive the
  // batch's work. Null where none is. page_bytes of every page.
  void begin(Way way, uint64_t page_bytes, const Registration* arena);
  // How many pages fit at most, whatever their pieces: of the host's, and of the device's.
  size_t room() const;
  size_t device_room() const;
  // The page's pieces in device memory, and its bytes in the arena. False, and nothing added: it
  // does not fit, start the batch first.
  bool add(std::span<const Piece> pieces, std::byte* host);
  // Likewise of a page that lies at `address` in the device's memory, one run, 8-byte aligned: the
  // kernel alone moves it. To the device only.
  bool add_from_device(std::span<const Piece> pieces, uint64_t address);
  size_t pages() const { return work_.size(); }

  // Queues it all. Throws Error as Driver::check: part of it may be under way then.
  void start();
  // Waits until it is done, and the bytes are where they belong. Throws Error storage "gpu_stalled"
  // after half a minute, and as Driver::check.
  void finish();
  // Like finish, of a batch that nobody wants any more. False: the device may still be at it.
  bool settle();
  bool idle() const { return !under_way_; }
  // Of a page, after finish.
  uint64_t digest(size_t page, const Key& key, uint32_t shard) const;

 private:
  struct Page {
    std::byte* host;  // null: it is on the device already
    bool direct, pinned;
    size_t place;  // among the host's pages
  };
  struct Copy {
    std::byte* host;
    uint64_t device;
    size_t bytes;
  };

  size_t leaves_each() const { return leaves_of(page_bytes_); }
  uint64_t stride() const;
  uint64_t most_host_bytes() const { return std::max<uint64_t>(kBytes, stride()); }
  size_t most_leaves() const;
  bool add(std::span<const Piece> pieces, Page page, uint64_t staged);
  void prepare();
  void take(bool staging, bool bounce);
  void upload();
  void launch();
  void copy_page(size_t page);
  void copy(std::byte* host, uint64_t device, size_t bytes);
  void copy_all();
  bool copy_together();
  void copy_alone(const Copy& copy);
  void bring_leaves();
  // 0 until the device writes kMark, from start on; behind what upload copies to the device.
  std::atomic<uint64_t>& mark() const;
  std::byte* bounce(size_t page) const {
    return bounce_.as<std::byte>() + places_[page].place * stride();
  }

  const Device& device_;
  CUstream stream_ = nullptr;
  CUevent done_ = nullptr;
  Way way_ = Way::to_device;
  uint64_t page_bytes_ = 0;
  const Registration* arena_ = nullptr;
  std::vector<Page> places_;
  std::vector<PageWork> work_;
  std::vector<PagePiece> pieces_;
  size_t host_pages_ = 0;
  std::vector<Copy> copies_;  // not queued yet
  bool under_way_ = false;
  bool unknown_ = false;  // under way, and no event tells until when
  Memory<true> staging_, tables_;
  Memory<false> bounce_, host_tables_, host_leaves_;
  uint64_t pieces_at_ = 0, mark_at_ = 0, leaves_at_ = 0;  // places in tables_
};

}  // namespace kvw::gpu
