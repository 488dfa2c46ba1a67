#include "gpu/batch.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "digest/digest.h"

namespace kvw::gpu {

namespace {

// Far beyond what 16 MiB take on any bus: the device hangs.
constexpr uint64_t kStallNs = 30 * kSecondNs;
constexpr unsigned kThreads = 256;
constexpr uint64_t kMark = 1;
// Copies that are queued by one call: more of them go no faster, and begin later.
constexpr size_t kCopies = 64;

}  // namespace

void append_pieces(std::span<const Piece> pieces, std::vector<PagePiece>& table) {
  uint64_t offset = 0;
  for (const Piece& piece : pieces) {
    if (piece.bytes == 0) continue;
    table.push_back({reinterpret_cast<uint64_t>(piece.data), offset});
    offset += piece.bytes;
  }
}

void launch_kernel(const Device& device, CUfunction kernel, const KernelTables& tables,
                   uint64_t page_bytes, uint64_t count, CUstream stream) {
  const Driver& cuda = device.cuda();
  uint64_t pages = tables.pages, pieces = tables.pieces, leaves = tables.leaves;
  void* arguments[] = {&pages, &pieces, &leaves, &page_bytes, &count};
  const uint64_t threads = count * leaves_of(page_bytes) * 8;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  cuda.check(
      cuda.cuLaunchKernel(kernel, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
      "cuLaunchKernel");
}

Batch::Batch(const Device& device)
    : device_(device),
      staging_(device),
      tables_(device),
      bounce_(device),
      host_tables_(device),
      host_leaves_(device) {
  const Device::Current current(device_);
  const Driver& cuda = device_.cuda();
  cuda.check(cuda.cuEventCreate(&done_, kEventDisableTiming), "cuEventCreate");
  const CUresult made = cuda.cuStreamCreate(&stream_, kStreamNonBlocking);
  if (made != kCudaSuccess) cuda.cuEventDestroy(done_);
  cuda.check(made, "cuStreamCreate");
}

Batch::~Batch() {
  if (device_.forked()) return;
  const Device::Current current(device_, std::nothrow);
  device_.cuda().cuStreamDestroy(stream_);
  device_.cuda().cuEventDestroy(done_);
}

uint64_t Batch::stride() const { return round_up(page_bytes_, kBlockBytes); }

// Of pages of the host's and of the device's, as many as room() and device_room() let in.
size_t Batch::most_leaves() const {
  return std::max<size_t>(kBytes / kBlockBytes, leaves_each()) +
         std::max<size_t>(kDeviceBytes / kBlockBytes, leaves_each());
}

void Batch::begin(Way way, uint64_t page_bytes, const Registration* arena) {
  way_ = way;
  page_bytes_ = page_bytes;
  arena_ = arena;
  places_.clear();
  work_.clear();
  pieces_.clear();
  host_pages_ = 0;
  copies_.clear();
}

size_t Batch::room() const {
  const size_t fit = std::min<size_t>(kPages, std::max<size_t>(1, kBytes / stride()));
  return std::min(fit - std::min(fit, host_pages_), kPages - work_.size());
}

size_t Batch::device_room() const {
  const size_t fit = std::min<size_t>(kPages, std::max<size_t>(1, kDeviceBytes / stride()));
  return fit - std::min(fit, work_.size());
}

bool Batch::add(std::span<const Piece> pieces, std::byte* host) {
  if (room() == 0) return false;
  if (!add(pieces, {host, true, arena_->covers(host, page_bytes_), host_pages_}, 0)) return false;
  ++host_pages_;
  return true;
}

bool Batch::add_from_device(std::span<const Piece> pieces, uint64_t address) {
  return device_room() != 0 && add(pieces, {nullptr, false, true, 0}, address);
}

bool Batch::add(std::span<const Piece> pieces, Page page, uint64_t staged) {
  const bool first = work_.empty();
  if (!first && pieces_.size() + pieces.size() > kPieces) return false;
  PageWork work{staged, pieces_.size(), 0};
  append_pieces(pieces, pieces_);
  work.pieces = pieces_.size() - work.first_piece;
  // A page of one piece takes one copy either way.
  page.direct =
      page.direct && std::ranges::all_of(pieces, [this](const Piece& piece) {
        return piece.bytes == 0 || piece.bytes >= std::min<size_t>(kDirectBytes, page_bytes_);
      });
  places_.push_back(page);
  work_.push_back(work);
  return true;
}

// Memory for what is to come, and addresses in it.
void Batch::prepare() {
  const auto any = [this](auto is) { return std::ranges::any_of(places_, is); };
  const size_t pages = work_.size();
  const auto staged = [](const Page& page) { return page.host != nullptr && !page.direct; };
  take(any(staged), any([](const Page& page) { return !page.pinned; }));
  for (size_t page = 0; page < pages; ++page)
    if (staged(places_[page]))
      work_[page].staged = staging_.address() + places_[page].place * stride();
  pieces_at_ = pages * sizeof(PageWork);
  mark_at_ = pieces_at_ + pieces_.size() * sizeof(PagePiece);
  leaves_at_ = mark_at_ + sizeof kMark;
}

void Batch::take(bool staging, bool bounce) {
  const size_t most_pieces = std::max(kPieces, pieces_.size());
  const size_t most_tables =
      kPages * sizeof(PageWork) + most_pieces * sizeof(PagePiece) + sizeof kMark;
  const size_t most_leaf_bytes = most_leaves() * sizeof(uint64_t);
  if (staging) staging_.need(most_host_bytes());
  if (bounce) bounce_.need(most_host_bytes());
  tables_.need(most_tables + most_leaf_bytes);
  host_tables_.need(most_tables + sizeof kMark);  // and where the device writes it
  host_leaves_.need(most_leaf_bytes);
}

void Batch::take_memory() {
  const Device::Current current(device_);
  take(true, true);
}

void Batch::upload() {
  auto* host = host_tables_.as<std::byte>();
  std::memcpy(host, work_.data(), pieces_at_);
  std::memcpy(host + pieces_at_, pieces_.data(), mark_at_ - pieces_at_);
  std::memcpy(host + mark_at_, &kMark, sizeof kMark);
  device_.cuda().check(
      device_.cuda().cuMemcpyHtoDAsync(tables_.address(), host, leaves_at_, stream_),
      "cuMemcpyHtoDAsync");
}

void Batch::launch() {
  const uint64_t at = tables_.address();
  launch_kernel(device_, way_ == Way::to_device ? device_.scatter() : device_.gather(),
                {at, at + pieces_at_, at + leaves_at_}, page_bytes_, work_.size(), stream_);
}

// What the kernel found, and behind it the mark: all before it is done then.
void Batch::bring_leaves() {
  const Driver& cuda = device_.cuda();
  cuda.check(cuda.cuMemcpyDtoHAsync(host_leaves_.as<void>(), tables_.address() + leaves_at_,
                                    work_.size() * leaves_each() * sizeof(uint64_t), stream_),
             "cuMemcpyDtoHAsync");
  cuda.check(cuda.cuMemcpyDtoHAsync(&mark(), tables_.address() + mark_at_, sizeof kMark, stream_),
             "cuMemcpyDtoHAsync");
}

std::atomic<uint64_t>& Batch::mark() const {
  static_assert(sizeof(PageWork) % alignof(std::atomic<uint64_t>) == 0 &&
                sizeof(PagePiece) % alignof(std::atomic<uint64_t>) == 0);
  return *reinterpret_cast<std::atomic<uint64_t>*>(host_tables_.as<std::byte>() + leaves_at_);
}

void Batch::copy(std::byte* host, uint64_t device, size_t bytes) {
  copies_.push_back({host, device, bytes});
  if (copies_.size() == kCopies) copy_all();
}

// In one call where the driver has it: a copy of its own waits for the one before, a bus of 55 GB/s
// moves 35 in copies of 256 KiB.
void Batch::copy_all() {
  if (copies_.size() < 2 || !copy_together())
    for (const Copy& each : copies_) copy_alone(each);
  copies_.clear();
}

// False: the driver cannot.
bool Batch::copy_together() {
  const Driver& cuda = device_.cuda();
  if (cuda.cuMemcpyBatchAsync == nullptr) return false;
  std::array<CUdeviceptr, kCopies> hosts, devices;
  std::array<size_t, kCopies> bytes;
  const size_t count = copies_.size();
  for (size_t i = 0; i < count; ++i) {
    hosts[i] = reinterpret_cast<uint64_t>(copies_[i].host);
    devices[i] = copies_[i].device;
    bytes[i] = copies_[i].bytes;
  }
  const bool to_device = way_ == Way::to_device;
  CUmemcpyAttributes how{kSourceInStreamOrder, {}, {}, kBesideKernels};
  size_t first = 0;
  const CUresult result = cuda.cuMemcpyBatchAsync((to_device ? devices : hosts).data(),
                                                  (to_device ? hosts : devices).data(),
                                                  bytes.data(), count, &how, &first, 1, stream_);
  if (result == kCudaNotSupported) return false;
  cuda.check(result, "cuMemcpyBatchAsync");
  return true;
}

void Batch::copy_alone(const Copy& copy) {
  const Driver& cuda = device_.cuda();
  if (way_ == Way::to_device)
    cuda.check(cuda.cuMemcpyHtoDAsync(copy.device, copy.host, copy.bytes, stream_),
               "cuMemcpyHtoDAsync");
  else
    cuda.check(cuda.cuMemcpyDtoHAsync(copy.host, copy.device, copy.bytes, stream_),
               "cuMemcpyDtoHAsync");
}

void Batch::copy_page(size_t page) {
  if (places_[page].host == nullptr) return;
  std::byte* host = places_[page].pinned ? places_[page].host : bounce(page);
  if (way_ == Way::to_device && !places_[page].pinned) {
    copy_all();  // they are under way while this processor copies
    copy_streaming(host, places_[page].host, page_bytes_);
  }
  if (!places_[page].direct) return copy(host, work_[page].staged, page_bytes_);
  const PageWork& work = work_[page];
  for (size_t i = work.first_piece; i < work.first_piece + work.pieces; ++i) {
    const bool last = i + 1 == work.first_piece + work.pieces;
    const uint64_t end = last ? page_bytes_ : pieces_[i + 1].offset;
    copy(host + pieces_[i].offset, pieces_[i].address, end - pieces_[i].offset);
  }
}

void Batch::start() {
  const Device::Current current(device_);
  prepare();
  under_way_ = true;
  unknown_ = true;
  mark().store(0, std::memory_order_relaxed);
  try {
    upload();
    if (way_ == Way::to_host) launch();
    for (size_t page = 0; page < work_.size(); ++page) copy_page(page);
    copy_all();
    if (way_ == Way::to_device) launch();
    bring_leaves();
  } catch (...) {
    // What was queued can still be waited for.
    unknown_ = device_.cuda().cuEventRecord(done_, stream_) != kCudaSuccess;
    throw;
  }
  device_.cuda().check(device_.cuda().cuEventRecord(done_, stream_), "cuEventRecord");
  unknown_ = false;
}

void Batch::finish() {
  unknown_ = unknown_ || !device_.wait(done_, system_clock().boot_ns() + kStallNs, &mark());
  if (unknown_)
    throw Error(ErrorKind::storage, "gpu_stalled",
                "device " + std::to_string(device_.ordinal()) + " has not finished " +
                    std::to_string(work_.size()) + " pages in " +
                    std::to_string(kStallNs / kSecondNs) +
                    " s; it may still write to them: start this process again, and see nvidia-smi "
                    "and the kernel's log (Xid)");
  under_way_ = false;
  if (way_ == Way::to_device) return;
  for (size_t page = 0; page < work_.size(); ++page)
    if (!places_[page].pinned) copy_streaming(places_[page].host, bounce(page), page_bytes_);
}

bool Batch::settle() {
  if (!under_way_) return true;
  if (unknown_) return false;
  try {
    finish();
  } catch (const Error&) {
    unknown_ = true;
  }
  return !unknown_;
}

uint64_t Batch::digest(size_t page, const Key& key, uint32_t shard) const {
  const std::span leaves(host_leaves_.as<const uint64_t>() + page * leaves_each(), leaves_each());
  return digest_root(leaves, digest_seed(key, shard, page_bytes_));
}

}  // namespace kvw::gpu
