// The HBM tier's thread: it opens the device, makes the pool, and copies pages into it, from the
// arena through pinned memory, digesting what it copies. The core thread hears of what is done
// through event_fd() and take(), and never waits for a device.
//
// A page may be evicted and its slot written again while it is read here: whoever takes the batch
// checks the slot's generation afterwards, and believes nothing of a page whose slot moved on.
//
// Any error of the device ends it: the pool stays as it is, since nobody can tell what the device
// still does, until the process ends. Only a device without room is asked again.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/types.h"

namespace kvw {

struct HbmOptions {
  uint64_t bytes = 0;                  // 0: no HBM tier
  int device = 0;                      // ordinal
  uint64_t retry_ns = 30'000'000'000;  // when a device that had no room is asked again
};

// A page on its way.
struct HbmPage {
  SlotId slot = kNoSlot;
  uint64_t generation = 0;
  const std::byte* from = nullptr;  // in the arena, shards 4 KiB aligned
  uint64_t offset = 0;              // in the pool
  Key key;
  uint64_t shard_bytes = 0;
  std::vector<uint64_t> digests;  // of each shard, as sealed
  bool same = false;              // the answer: what was copied is what was sealed
};

class HbmCopier {
 public:
  static constexpr uint64_t kBatchBytes = 16ull << 20;  // unless it is one page

  explicit HbmCopier(const HbmOptions& options);
  // Waits a few seconds for the thread; one that hangs in the driver is left behind.
  ~HbmCopier();
  HbmCopier(const HbmCopier&) = delete;
  HbmCopier& operator=(const HbmCopier&) = delete;

  // Readable when something of the following changed; take() empties it.
  int event_fd() const;

  struct Pool {
    uint64_t bytes = 0;
    uint64_t address = 0;  // in this process; nobody's to follow but the device's
    std::array<uint8_t, 16> device{};
    Fd fd;
  };
  struct News {
    std::optional<Pool> pool;            // it was made
    std::vector<HbmPage> copied;         // the batch is done
    std::optional<std::string> trouble;  // why there is no pool, or none any more
    bool over = false;                   // for good
  };
  News take();
  // One batch at a time.
  void submit(std::vector<HbmPage> batch);

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace kvw
