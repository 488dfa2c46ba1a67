/* A disk that is faulty on demand, for a process that is started with this library in LD_PRELOAD:
 * calls on files below FAULTY_DISK_PATH fail or take their time as the words of the file
 * FAULTY_DISK_WORDS say, which a test changes while the process runs. See
 * tests/support/testkit/faulty_disk.py.
 * io_uring does not come by here. Thread-safe: words are single, with one writer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ_ERRNO, WRITE_ERRNO, SYNC_ERRNO, DELAY_US, EVERY, CORE_DELAY_US, STRUCK, WORDS };
enum { SLICE_US = 20000 };

static volatile int* words;
static const char* path;
static unsigned calls;

__attribute__((constructor)) static void start(void) {
  const char* file = getenv("FAULTY_DISK_WORDS");
  path = getenv("FAULTY_DISK_PATH");
  const int fd = file == NULL ? -1 : open(file, O_RDWR | O_CLOEXEC);
  if (fd < 0 || path == NULL) return;
  words = mmap(NULL, WORDS * sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (words == MAP_FAILED) words = NULL;
  close(fd);
}

static int is_meant(int fd) {
  char link[64], target[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, target, sizeof target - 1);
  if (length <= 0) return 0;
  target[length] = 0;
  return strncmp(target, path, strlen(path)) == 0;
}

/* 0, or what the call fails with. */
static int faulty(int fd, int which, int core) {
  if (words == NULL) return 0;
  volatile int* const delay = &words[core && words[CORE_DELAY_US] != 0 ? CORE_DELAY_US : DELAY_US];
  const int delay_us = *delay;
  if ((words[which] == 0 && delay_us == 0) || !is_meant(fd)) return 0;
  /* A disk that is healed answers what it has kept. */
  for (int slept_us = 0; slept_us < delay_us && *delay == delay_us; slept_us += SLICE_US)
    usleep(delay_us - slept_us < SLICE_US ? (useconds_t)(delay_us - slept_us) : SLICE_US);
  const int every = words[EVERY] > 0 ? words[EVERY] : 1;
  if (words[which] == 0 || __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) % every != 0) return 0;
  __atomic_add_fetch(&words[STRUCK], 1, __ATOMIC_RELAXED);
  return words[which];
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define DISK_FOR(core, name, which, result, declared, passed)  \
  result name declared {                                       \
    static __typeof__(&name) real;                             \
    if (real == NULL) real = REAL(name);                       \
    const int error = faulty(fd, which, core);                 \
    if (error == 0) return real passed;                        \
    errno = error;                                             \
    return -1;                                                 \
  }

#define DISK(...) DISK_FOR(0, __VA_ARGS__)
#define CORE(...) DISK_FOR(1, __VA_ARGS__) /* what else a daemon does is by other calls */

CORE(preadv, READ_ERRNO, ssize_t, (int fd, const struct iovec* iov, int count, off_t at),
     (fd, iov, count, at))
CORE(preadv64, READ_ERRNO, ssize_t, (int fd, const struct iovec* iov, int count, off64_t at),
     (fd, iov, count, at))
DISK(preadv2, READ_ERRNO, ssize_t,
     (int fd, const struct iovec* iov, int count, off_t at, int flags),
     (fd, iov, count, at, flags)) /* Python's */
DISK(preadv64v2, READ_ERRNO, ssize_t,
     (int fd, const struct iovec* iov, int count, off64_t at, int flags),
     (fd, iov, count, at, flags))
CORE(pwritev, WRITE_ERRNO, ssize_t, (int fd, const struct iovec* iov, int count, off_t at),
     (fd, iov, count, at))
CORE(pwritev64, WRITE_ERRNO, ssize_t, (int fd, const struct iovec* iov, int count, off64_t at),
     (fd, iov, count, at))
DISK(pwrite, WRITE_ERRNO, ssize_t, (int fd, const void* data, size_t bytes, off_t at),
     (fd, data, bytes, at))
DISK(pwrite64, WRITE_ERRNO, ssize_t, (int fd, const void* data, size_t bytes, off64_t at),
     (fd, data, bytes, at))
DISK(fdatasync, SYNC_ERRNO, int, (int fd), (fd))
DISK(fsync, SYNC_ERRNO, int, (int fd), (fd))
