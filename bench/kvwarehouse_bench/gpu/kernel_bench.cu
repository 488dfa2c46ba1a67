// The kernels that move and digest pages, beside one copy of as many bytes in the device. A program
// by itself, for a GPU with nothing else to do:
//
//   nvcc -O3 -std=c++17 -arch=native -I . -o build/kernel_bench bench/kvwarehouse_bench/gpu/kernel_bench.cu
//   build/kernel_bench
//
// Batches follow one another through 256 MiB, more than the device's caches hold: of 16 MiB, as a
// client has them under way to and from host memory, and of all. Times are medians, of a batch.
// Ends with 1 where bytes are not those that were to be written, or digests are not those of the
// first kernel.
//
// KVW_OTHERS: more lines of `tried`, for a program that includes this one.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kvwarehouse/client/gpu/page_kernels.cu"

#ifndef KVW_OTHERS
#define KVW_OTHERS
#endif

#define OK(call)                                              \
  do {                                                        \
    const cudaError_t made = (call);                          \
    if (made == cudaSuccess) break;                           \
    std::printf("%s: %s\n", #call, cudaGetErrorString(made)); \
    std::exit(1);                                             \
  } while (0)

namespace bench {

using Kernel = void (*)(u64, u64, u64, u64, u64);

struct Tried {
  const char* name;
  Kernel kernel;
  bool to_pieces, in_place;
  unsigned block = 256, threads_a_leaf = 8;
};

const Tried tried[] = {{"kvw_scatter", kvw_scatter, true, false},
                       {"kvw_gather", kvw_gather, false, false},
                       {"kvw_gather, in place", kvw_gather, false, true},
                       KVW_OTHERS};

constexpr u64 kKiB = 1 << 10, kMiB = 1 << 20, kTotal = 256 * kMiB, kLeaves = kTotal / 4096;
constexpr int kRounds = 11;

__global__ void compare(const u64* a, const u64* b, u64 words, int* differ) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words;
       i += (u64)gridDim.x * blockDim.x)
    if (a[i] != b[i]) *differ = 1;
}

template <class T>
struct Memory {
  explicit Memory(u64 count) : bytes(count * sizeof(T)) { OK(cudaMalloc(&data, bytes)); }
  explicit Memory(const std::vector<T>& values) : Memory(values.size()) {
    OK(cudaMemcpy(data, values.data(), bytes, cudaMemcpyHostToDevice));
  }
  ~Memory() { cudaFree(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  bool equals(const Memory& other) const {
    Memory<int> differ(std::vector<int>{0});
    compare<<<1024, 256>>>((const u64*)data, (const u64*)other.data, bytes / 8, differ.data);
    int said = 1;
    OK(cudaMemcpy(&said, differ.data, sizeof said, cudaMemcpyDeviceToHost));
    return said == 0;
  }
  u64 bytes;
  T* data = nullptr;
};

// `run` queues all batches.
template <class Run>
double batch_us(u64 batches, Run run) {
  cudaEvent_t begin, end;
  OK(cudaEventCreate(&begin));
  OK(cudaEventCreate(&end));
  std::vector<float> all;
  for (int round = 0; round < kRounds; ++round) {
    float ms = 0;
    OK(cudaEventRecord(begin));
    run();
    OK(cudaEventRecord(end));
    OK(cudaEventSynchronize(end));
    OK(cudaEventElapsedTime(&ms, begin, end));
    all.push_back(ms);
  }
  OK(cudaEventDestroy(begin));
  OK(cudaEventDestroy(end));
  std::sort(all.begin(), all.end());
  return all[kRounds / 2] * 1000 / (double)batches;
}

const std::vector<u64>& noise() {
  static const std::vector<u64> words = [] {
    std::vector<u64> made(kTotal / 8);
    std::mt19937_64 random(1);
    for (u64& word : made) word = random();
    return made;
  }();
  return words;
}

// Pieces of pages lie in any order, `shift` bytes behind multiples of their size.
bool measured(u64 batch, u64 page, u64 piece, u64 shift) {
  const u64 pages = kTotal / page, each = page / piece, batches = kTotal / batch;
  std::vector<u64> order(kTotal / piece), paged(kTotal / 8 + 32);
  for (u64 i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937_64(2));
  for (u64 i = 0; i < order.size(); ++i)
    std::memcpy((u8*)paged.data() + shift + order[i] * piece, (const u8*)noise().data() + i * piece,
                piece);

  const Memory<u64> right_run(noise()), right_cache(paged);
  Memory<u64> run(kTotal / 8), cache(paged.size()), digests(kLeaves), right_digests(kLeaves);
  std::vector<PageWork> staged, in_place;
  std::vector<PagePiece> pieces;
  for (u64 p = 0; p < pages; ++p) {
    staged.push_back({(u64)run.data + p * page, pieces.size(), each});
    in_place.push_back({0, pieces.size(), each});
    for (u64 i = 0; i < each; ++i)
      pieces.push_back({(u64)cache.data + shift + order[p * each + i] * piece, i * piece});
  }
  const Memory<PageWork> staged_work(staged), in_place_work(in_place);
  const Memory<PagePiece> all_pieces(pieces);

  const double copy = batch_us(batches, [&] {
    for (u64 i = 0; i < batches; ++i)
      OK(cudaMemcpyAsync(cache.data + i * batch / 8, right_run.data + i * batch / 8, batch,
                         cudaMemcpyDeviceToDevice));
  });
  std::printf("batches of %llu MiB, pages of %llu KiB, pieces of %g KiB%s\n", batch / kMiB,
              page / kKiB, (double)piece / kKiB, shift % 16 == 0 ? "" : ", unaligned");
  std::printf("  %-36s %8.1f us %6.2f TB/s read and written\n", "copy", copy, 2e-6 * batch / copy);
  bool right = true;
  for (const Tried& one : tried) {
    Memory<u64>& to = one.to_pieces ? cache : run;
    const Memory<u64>& right_to = one.to_pieces ? right_cache : right_run;
    OK(cudaMemcpy(run.data, right_run.data, run.bytes, cudaMemcpyDeviceToDevice));
    OK(cudaMemcpy(cache.data, right_cache.data, cache.bytes, cudaMemcpyDeviceToDevice));
    if (!one.in_place) OK(cudaMemset(to.data, 0, to.bytes));
    OK(cudaMemset(digests.data, 0, digests.bytes));
    const PageWork* work = one.in_place ? in_place_work.data : staged_work.data;
    const u64 leaves = batch / 4096, threads = leaves * one.threads_a_leaf;
    const double took = batch_us(batches, [&] {
      for (u64 i = 0; i < batches; ++i)
        one.kernel<<<(unsigned)((threads + one.block - 1) / one.block), one.block>>>(
            (u64)(work + i * (batch / page)), (u64)all_pieces.data,
            (u64)(digests.data + i * leaves), page, batch / page);
    });
    OK(cudaGetLastError());
    if (&one == tried)
      OK(cudaMemcpy(right_digests.data, digests.data, digests.bytes, cudaMemcpyDeviceToDevice));
    const bool bytes = to.equals(right_to), digested = digests.equals(right_digests);
    std::printf("  %-36s %8.1f us, %4.2f of the copy's speed%s%s\n", one.name, took, copy / took,
                bytes ? "" : ", BYTES DIFFER", digested ? "" : ", DIGESTS DIFFER");
    right = right && bytes && digested;
  }
  return right;
}

int all() {
  bool right = true;
  for (const u64 batch : {256 * kMiB, 16 * kMiB}) {
    for (const u64 page : {64 * kKiB, 256 * kKiB, kMiB})
      for (const u64 piece : {page, 16 * kKiB}) right = measured(batch, page, piece, 0) && right;
    right = measured(batch, kMiB, 16 * kKiB, 8) && right;
    right = measured(batch, 64 * kKiB, 2 * kKiB, 0) && right;
  }
  std::printf(right ? "bytes and digests are right\n" : "WRONG BYTES OR DIGESTS\n");
  return right ? 0 : 1;
}

}  // namespace bench

int main() { return bench::all(); }
