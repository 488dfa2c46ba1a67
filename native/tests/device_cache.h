// A paged cache in the memory of a (modelled) GPU, and an engine's stream that writes to it.
#pragma once

#include <vector>

#include "client/client.h"
#include "tests/cuda_world.h"

namespace kvw {

// Blocks of one page each, in pieces of `piece_bytes`, with gaps between them.
class DeviceCache final : public Regions {
 public:
  static constexpr size_t kGapBytes = 24;
  static constexpr std::byte kGuard{0xdb};  // what the model's new memory holds

  DeviceCache(const CudaModel& model, size_t pages, size_t page_bytes, size_t piece_bytes)
      : model_(model),
        cuda_(gpu::driver()),
        pages_(pages),
        page_bytes_(page_bytes),
        piece_bytes_(piece_bytes) {
    CHECK_EQ(cuda_.cuDevicePrimaryCtxRetain(&context_, 0), gpu::kCudaSuccess);
    CHECK_EQ(cuda_.cuCtxPushCurrent(context_), gpu::kCudaSuccess);
    CHECK_EQ(cuda_.cuMemAlloc(&memory_, pages * stride() + kGapBytes), gpu::kCudaSuccess);
    CHECK_EQ(cuda_.cuStreamCreate(&stream_, gpu::kStreamNonBlocking), gpu::kCudaSuccess);
    CHECK_EQ(cuda_.cuEventCreate(&event_, gpu::kEventDisableTiming), gpu::kCudaSuccess);
    CHECK_EQ(cuda_.cuCtxPopCurrent(nullptr), gpu::kCudaSuccess);
  }
  ~DeviceCache() override {
    cuda_.cuCtxPushCurrent(context_);
    cuda_.cuStreamDestroy(stream_);
    cuda_.cuEventDestroy(event_);
    cuda_.cuMemFree(memory_);
    cuda_.cuCtxPopCurrent(nullptr);
    cuda_.cuDevicePrimaryCtxRelease(0);
  }
  DeviceCache(const DeviceCache&) = delete;
  DeviceCache& operator=(const DeviceCache&) = delete;

  size_t count() const override { return pages_; }
  size_t page_bytes() const override { return page_bytes_; }
  bool writable() const override { return true; }
  const DevicePlace* device() const override { return &place; }
  void pieces(size_t page, std::vector<Piece>& out) const override {
    out.clear();
    uint64_t at = memory_ + page * stride() + kGapBytes;
    for (size_t done = 0; done < page_bytes_; done += piece_bytes_) {
      const size_t bytes = std::min(piece_bytes_, page_bytes_ - done);
      out.push_back({reinterpret_cast<std::byte*>(at), bytes});  // NOLINT
      at += piece_bytes_ + kGapBytes;
    }
  }

  uint64_t address() const { return memory_; }

  std::vector<std::byte> page(size_t number) const {
    std::vector<std::byte> data(page_bytes_);
    size_t done = 0;
    std::vector<Piece> own;
    pieces(number, own);
    for (const Piece& piece : own) {
      model_.peek(reinterpret_cast<uint64_t>(piece.data), data.data() + done, piece.bytes);
      done += piece.bytes;
    }
    return data;
  }
  void put(size_t number, const std::vector<std::byte>& data) const {
    size_t done = 0;
    std::vector<Piece> own;
    pieces(number, own);
    for (const Piece& piece : own) {
      model_.poke(reinterpret_cast<uint64_t>(piece.data), data.data() + done, piece.bytes);
      done += piece.bytes;
    }
  }
  bool gaps_hold() const {
    std::vector<std::byte> all(pages_ * stride() + kGapBytes);
    model_.peek(memory_, all.data(), all.size());
    std::vector<Piece> own;
    for (size_t number = 0; number < pages_; ++number) {
      pieces(number, own);
      for (const Piece& piece : own)
        std::fill_n(
            all.begin() + static_cast<ptrdiff_t>(reinterpret_cast<uint64_t>(piece.data) - memory_),
            piece.bytes, kGuard);
    }
    return std::ranges::all_of(all, [](std::byte byte) { return byte == kGuard; });
  }

  // The engine: queues `data` as page `number` on its own stream, behind all that is queued there,
  // and `place.ready` says when it is done. Host memory must stay.
  void queue_put(size_t number, const std::vector<std::byte>& data) {
    CHECK_EQ(cuda_.cuCtxPushCurrent(context_), gpu::kCudaSuccess);
    std::vector<Piece> own;
    pieces(number, own);
    void* pinned = nullptr;
    CHECK_EQ(cuda_.cuMemHostAlloc(&pinned, data.size(), 1), gpu::kCudaSuccess);
    std::memcpy(pinned, data.data(), data.size());
    staged_.push_back(pinned);
    size_t done = 0;
    for (const Piece& piece : own) {
      CHECK_EQ(
          cuda_.cuMemcpyHtoDAsync(reinterpret_cast<uint64_t>(piece.data),
                                  static_cast<std::byte*>(pinned) + done, piece.bytes, stream_),
          gpu::kCudaSuccess);
      done += piece.bytes;
    }
    CHECK_EQ(cuda_.cuEventRecord(event_, stream_), gpu::kCudaSuccess);
    CHECK_EQ(cuda_.cuCtxPopCurrent(nullptr), gpu::kCudaSuccess);
    place.ready = {event_};
  }
  void free_staged() {
    CHECK_EQ(cuda_.cuCtxPushCurrent(context_), gpu::kCudaSuccess);
    CHECK_EQ(cuda_.cuEventSynchronize(event_), gpu::kCudaSuccess);
    for (void* pinned : staged_) CHECK_EQ(cuda_.cuMemFreeHost(pinned), gpu::kCudaSuccess);
    CHECK_EQ(cuda_.cuCtxPopCurrent(nullptr), gpu::kCudaSuccess);
    staged_.clear();
  }

  DevicePlace place;

 private:
  size_t pieces_each() const { return (page_bytes_ + piece_bytes_ - 1) / piece_bytes_; }
  size_t stride() const { return pieces_each() * (piece_bytes_ + kGapBytes); }

  const CudaModel& model_;
  const gpu::Driver& cuda_;
  size_t pages_, page_bytes_, piece_bytes_;
  gpu::CUcontext context_ = nullptr;
  gpu::CUdeviceptr memory_ = 0;
  gpu::CUstream stream_ = nullptr;
  gpu::CUevent event_ = nullptr;
  std::vector<void*> staged_;
};

}  // namespace kvw
