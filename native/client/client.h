// A client of the warehouse: lookups from shared memory, loads that copy and check, stores through
// exchange, pins. Thread-safe: calls of several threads run side by side; only the socket's round
// trips take turns.
//
// It reconnects by itself (daemon_link.h). Lookups and loads go on from shared memory while there
// is no daemon, and without patience they leave the new one to refresh() and to stores.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/daemon_link.h"
#include "client/fill_run.h"
#include "client/gpus.h"
#include "client/object_memory.h"
#include "client/pack_run.h"
#include "client/pins.h"
#include "client/prompt.h"
#include "client/regions.h"
#include "remote/object.h"

namespace kvw {

// Where a page is read from now: the fastest tier that has it. HBM: by clients that load into the
// memory of the pool's device, which have its table mapped. Remote: probably. The numbers are
// public.
enum class PageTier : uint8_t { missing = 0, dram = 1, nvme = 2, hbm = 3, remote = 4 };

struct LookupResult {
  uint64_t hbm = 0, dram = 0, nvme = 0, remote = 0;  // pages, each once

  uint64_t pages() const { return hbm + dram + nvme + remote; }
  void add(PageTier tier);
};

struct LoadReport {
  uint64_t pages = 0;    // filled, in order
  uint64_t fetched = 0;  // of them, from the remote store for this load
  std::map<std::string, uint64_t> reasons;
};

struct StoreReport {
  uint64_t stored = 0, already = 0;
  std::map<std::string, uint64_t> dropped;
};

class DeviceStage;

class Client {
 public:
  // Connects. Throws as DaemonLink does.
  explicit Client(ClientOptions options);
  void close();
  bool connected() { return link_.connected(); }
  uint64_t session_id() { return session()->id(); }
  std::shared_ptr<const View> view() { return link_.attachment()->view; }
  std::shared_ptr<ClientSession> session() { return link_.attachment()->session; }

  // Finds the daemon again if it was replaced, within the time given; other threads' lookups do not
  // wait meanwhile. See DaemonLink.
  bool refresh(uint64_t timeout_ns);
  // Whether the mapped control page shows it. No call.
  bool sees_namespace(const Key& id) { return view()->space(id).has_value(); }
  // Its clear epoch now, from the control page; nothing where it is not known there.
  std::optional<uint64_t> clear_epoch(const Key& id);
  // False: the daemon does not know it (it must be opened over the service first). Finds a new
  // daemon if it must, within the client's timeout.
  bool has_namespace(const Key& id);

  // Longest stored prefix, and behind it what the remote store probably has. Never calls the
  // daemon, unless the view is outdated.
  // Throws Error usage "namespace_unknown", storage "memory_lost" where somebody has cut the
  // control page, as every call of a prompt does: one that only reads has missed everything then.
  LookupResult lookup(const Key& namespace_id, Prompt& prompt);
  // Where each page is, as lookup finds it, up to the first gap of each run; what lies behind a gap
  // is missing too. `counted`: as a lookup, in the session's counters.
  std::vector<PageTier> tiers(const Key& namespace_id, Prompt& prompt, bool counted = true);
  // Says that whoever asks needs the stored pages from `first` on no more, up to the first gap of
  // each run: they leave before others, unless somebody has stored pages behind them or uses them.
  // A hint that is never waited for, and is lost where the daemon has not listened lately. Returns
  // of how many pages, at most kTouchCapacity / 2: of a longer prompt those at its end.
  size_t release(const Key& namespace_id, Prompt& prompt, size_t first);
  // A word for each page, as good as its key for telling it from others.
  std::vector<uint64_t> tags(const Key& namespace_id, Prompt& prompt);
  // Fills regions[i] with page first + i, in order, until one is missing or the deadline passes.
  // What is on NVMe is promoted, and what the remote store seems to have is fetched. Ends where the
  // namespace is cleared meanwhile: what is stored after that is taken by the next load.
  LoadReport load(const Key& namespace_id, Prompt& prompt, size_t first, const Regions& regions,
                  uint32_t shard, uint64_t timeout_ns);
  // Stores page first + i from regions[i]. Returns when all is sealed, refused or late. `since`:
  // the clear epoch that their bytes belong to, nothing for that of now; if the namespace was
  // cleared after it, they are dropped as "cleared". Throws Error usage "since_unknown" where the
  // daemon is too old for that.
  StoreReport store(const Key& namespace_id, Prompt& prompt, size_t first, const Regions& regions,
                    uint32_t shard, uint64_t timeout_ns, std::optional<uint64_t> since = {});
  // Makes a device one that regions may lie in: `image` are the kernels, compiled for it. Takes the
  // memory of one call there, where there is some: calls need take none while an engine serves.
  // Maps what the daemon has in HBM there, where it says so in a moment; else the first load does.
  // Throws Error usage "no_gpu", capacity "gpu_memory", storage "gpu_error".
  void use_device(int ordinal, const std::string& image);
  // Memory of a device that was given, for pages that the caller reads there by itself.
  std::unique_ptr<DeviceStage> device_stage(int ordinal, size_t bytes);
  bool has_device(int ordinal) { return gpus_.has(ordinal); }
  // Bytes of the arena that are registered with CUDA, whether that is all there will be, and why
  // some are not.
  RegistrationReport registration() { return gpus_.report(); }
  // For the end of the process, see Gpus::stop. Nothing where it forked since.
  bool stop_registering(uint64_t timeout_ns) {
    return link_.forked() || gpus_.stop(std::chrono::nanoseconds(timeout_ns));
  }
  // Pins the stored pages from `first` on, promoting and fetching as a load does. Throws Error pin
  // "pin_budget" beyond the session's share.
  std::unique_ptr<Pins> pin(const Key& namespace_id, Prompt& prompt, size_t first,
                            uint64_t timeout_ns);
  // Holds pages from `first` on where they are on NVMe, at most `pages` of them, for reading by the
  // client itself (client/extents.h); ends before the first page that is not there, whose segment
  // is being reclaimed, or whose segment would be one too many for this session. One round trip a
  // connection; reads the records' headers, and blocks for them, for at most its time: nothing is
  // held where a disk does not answer by then, nor where the daemon hands out no extents.
  std::unique_ptr<Extents> hold(const Key& namespace_id, Prompt& prompt, size_t first, size_t pages,
                                uint32_t shard, uint64_t timeout_ns);
  // An object of a run of pages, for the remote store: all of them are in DRAM, pinned meanwhile,
  // and what was sealed. A page that is not is reported to the daemon. Throws Error transport
  // "forked", usage "closed".
  PackedRun pack_run(const remote::RunToPut& run, const Key& fleet);
  // The other way: stores what is good of an object's records from page run.from on, `body`. Waits
  // for room, and for pages that others are storing, within that time. Nothing that was reserved
  // for it is left, but where the daemon does not answer: then it is settled before the next round
  // trip. Throws Error transport "forked", usage "closed", "since_unknown", storage "memory_lost".
  FilledRun fill_run(const remote::RunToGet& run, std::span<const std::byte> body, const Key& fleet,
                     uint64_t within_ns);
  // Where the segments are that hold() reads, as a path for any process of this user, until the
  // client is closed or finds another daemon. Empty: there is none then, the daemon has none, or it
  // does not answer.
  std::string segments(uint64_t timeout_ns);

 private:
  DaemonLink link_;
  Gpus gpus_;
  const std::shared_ptr<ObjectMemory> objects_ = std::make_shared<ObjectMemory>();
};

}  // namespace kvw
