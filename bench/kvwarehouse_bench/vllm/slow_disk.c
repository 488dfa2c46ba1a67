/* A disk of a chosen speed, for the process that this is preloaded into: reads of files below
 * KVW_SLOW_DIR wait as long as such a disk would take for them, one after the other, and are then
 * done as they were. The speed lies in the file KVW_SLOW_RATE, a little-endian uint64 of bytes a
 * second (0: as fast as it is), and may change at any time.
 *
 * Works on synchronous reads alone: the daemon runs with io_engine = "pread".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const _Atomic uint64_t* rate;
static const char* folder;
static _Atomic int64_t free_at_ns; /* when the disk is done with what it was asked for so far */

__attribute__((constructor)) static void open_rate(void) {
  const char* path = getenv("KVW_SLOW_RATE");
  folder = getenv("KVW_SLOW_DIR");
  if (!path || !folder) return;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void* mapped = mmap(NULL, sizeof(uint64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) rate = mapped;
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int is_slow(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t size = readlink(link, path, sizeof path - 1);
  if (size <= 0) return 0;
  path[size] = 0;
  const size_t prefix = strlen(folder);
  return strncmp(path, folder, prefix) == 0 && path[prefix] == '/';
}

static void wait_for(int file, size_t bytes) {
  const uint64_t bytes_per_s = rate ? atomic_load(rate) : 0;
  if (!bytes_per_s || !bytes || !is_slow(file)) return;
  const int64_t takes_ns = (int64_t)((double)bytes * 1e9 / (double)bytes_per_s);
  int64_t free_at = atomic_load(&free_at_ns), done_ns;
  do {
    const int64_t now = now_ns();
    done_ns = (free_at > now ? free_at : now) + takes_ns;
  } while (!atomic_compare_exchange_weak(&free_at_ns, &free_at, done_ns));
  const struct timespec until = {done_ns / 1000000000, done_ns % 1000000000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) {}
}

static size_t total(const struct iovec* pieces, int count) {
  size_t bytes = 0;
  for (int at = 0; at < count; ++at) bytes += pieces[at].iov_len;
  return bytes;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pread(int file, void* to, size_t bytes, off_t at) {
  wait_for(file, bytes);
  return NEXT(pread)(file, to, bytes, at);
}

ssize_t pread64(int file, void* to, size_t bytes, off64_t at) {
  wait_for(file, bytes);
  return NEXT(pread64)(file, to, bytes, at);
}

ssize_t preadv(int file, const struct iovec* pieces, int count, off_t at) {
  wait_for(file, total(pieces, count));
  return NEXT(preadv)(file, pieces, count, at);
}

ssize_t preadv64(int file, const struct iovec* pieces, int count, off64_t at) {
  wait_for(file, total(pieces, count));
  return NEXT(preadv64)(file, pieces, count, at);
}
