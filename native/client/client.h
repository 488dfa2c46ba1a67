// A client of the warehouse: lookups from shared memory, loads that copy and check, stores through
// exchange, pins. Thread-safe: calls of several threads run side by side; only the socket's round
// trips take turns.
//
// It reconnects by itself: when the daemon was replaced, the next call says hello again, presents
// its session and settles what a lost reply had granted. Lookups and loads go on from shared memory
// while there is no daemon, and without patience they leave the new one to refresh() and to stores.
// After a fork the child's client refuses every call.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/fork.h"
#include "client/connection.h"
#include "client/gpus.h"
#include "client/prompt.h"
#include "client/session.h"
#include "client/view.h"
#include "exchange/messages.h"

namespace kvw {

// Memory of a GPU, in which regions lie, and the events of streams that must have happened before
// they are read or written. They are the caller's, and outlive the call.
struct DevicePlace {
  int ordinal = 0;
  std::vector<gpu::CUevent> ready;
};

// Where pages lie in the client's memory.
class Regions {
 public:
  virtual ~Regions() = default;
  virtual size_t count() const = 0;       // pages
  virtual size_t page_bytes() const = 0;  // of one shard
  virtual bool writable() const = 0;
  // Null: in host memory, and pieces may be followed by this process.
  virtual const DevicePlace* device() const { return nullptr; }
  // The pieces of a page, in page order, appended to `out` after clearing it.
  virtual void pieces(size_t page, std::vector<Piece>& out) const = 0;
};

// Where a page is read from now: the fastest tier that has it. HBM: by clients that load into the
// memory of the pool's device, which have its table mapped. The numbers are public.
enum class PageTier : uint8_t { missing = 0, dram = 1, nvme = 2, hbm = 3 };

struct LookupResult {
  uint64_t hbm = 0, dram = 0, nvme = 0;  // pages, each once

  uint64_t pages() const { return hbm + dram + nvme; }
  void add(PageTier tier);
};

struct LoadReport {
  uint64_t pages = 0;  // filled, in order
  std::map<std::string, uint64_t> reasons;
};

struct StoreReport {
  uint64_t stored = 0, already = 0;
  std::map<std::string, uint64_t> dropped;
};

struct ClientOptions {
  std::string socket_path;
  bool verify_always = true;
  bool read_only = false;
  uint64_t timeout_ns = 5 * kSecondNs;  // for hello and for calls without a deadline of their own
  // What a lookup, load or pin may spend on the hello of a new daemon. 0: they never look for one.
  // Nothing: 20 ms, or up to a quarter of a load's time.
  std::optional<uint64_t> patience_ns;
  // Whose daemon is trusted beside this process's own user's and root's.
  std::optional<uid_t> daemon_uid;
};

class Client;
class PromotionWindow;
class Extents;
class DeviceStage;

// Pages held in DRAM. Released on destruction; a forked child's copy holds nothing.
class Pins {
 public:
  Pins(std::shared_ptr<ClientSession> session, std::atomic<uint64_t>& pinned_bytes)
      : session_(std::move(session)), pinned_bytes_(pinned_bytes), forks_(fork_count()) {}
  ~Pins() { release(); }
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  void release();
  size_t pages() const { return places_.size(); }

 private:
  friend class Client;
  // Room for one more page, before it is pinned: all pins of a client stay within its share.
  bool take_room();
  void give_back_room(size_t pages) { pinned_bytes_ -= pages * bytes_each_; }

  std::shared_ptr<ClientSession> session_;
  std::atomic<uint64_t>& pinned_bytes_;
  std::vector<int> places_;
  uint64_t bytes_each_ = 0, limit_bytes_ = 0;
  uint64_t forks_;
};

class Client {
 public:
  // Connects. Throws Error transport at once: "no_daemon" when there is none, "daemon_untrusted"
  // when it, or a file that it hands over, is another user's.
  explicit Client(ClientOptions options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void close();
  bool connected();
  uint64_t session_id();
  std::shared_ptr<const View> view();
  std::shared_ptr<ClientSession> session();

  // Finds the daemon again if it was replaced, within the time given; other threads' lookups do not
  // wait meanwhile. False: none answered. True at once while another thread talks to the one that
  // is mapped: that thread may be waiting for the processor rather than for the daemon, and what
  // became of the connection it finds out by itself.
  bool refresh(uint64_t timeout_ns);
  // Whether the mapped control page shows it. No call.
  bool sees_namespace(const Key& id);
  // False: the daemon does not know it (it must be opened over the service first). Finds a new
  // daemon if it must, within the client's timeout.
  bool has_namespace(const Key& id);

  // Longest stored prefix. Never calls the daemon, unless the view is outdated.
  // Throws Error usage "namespace_unknown".
  LookupResult lookup(const Key& namespace_id, Prompt& prompt);
  // Where each page is, as lookup finds it, up to the first gap of each run; what lies behind a gap
  // is missing too. `counted`: as a lookup, in the session's counters.
  std::vector<PageTier> tiers(const Key& namespace_id, Prompt& prompt, bool counted = true);
  // A word for each page, as good as its key for telling it from others.
  std::vector<uint64_t> tags(const Key& namespace_id, Prompt& prompt);
  // Fills regions[i] with page first + i, in order, until one is missing or the deadline passes.
  LoadReport load(const Key& namespace_id, Prompt& prompt, size_t first, const Regions& regions,
                  uint32_t shard, uint64_t timeout_ns);
  // Stores page first + i from regions[i]. Returns when all is sealed, refused or late.
  StoreReport store(const Key& namespace_id, Prompt& prompt, size_t first, const Regions& regions,
                    uint32_t shard, uint64_t timeout_ns);
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
    return fork_count() != forks_ || gpus_.stop(std::chrono::nanoseconds(timeout_ns));
  }
  // Pins the stored pages from `first` on. Throws Error pin "pin_budget" beyond the session's
  // share.
  std::unique_ptr<Pins> pin(const Key& namespace_id, Prompt& prompt, size_t first,
                            uint64_t timeout_ns);
  // Holds pages from `first` on where they are on NVMe, at most `pages` of them, for reading by the
  // client itself (client/extents.h); ends before the first page that is not there, whose segment
  // is being reclaimed, or whose segment would be one too many for this session. One round trip a
  // connection; reads the records' headers, and blocks for them, for at most its time: nothing is
  // held where a disk does not answer by then, nor where the daemon hands out no extents.
  std::unique_ptr<Extents> hold(const Key& namespace_id, Prompt& prompt, size_t first, size_t pages,
                                uint32_t shard, uint64_t timeout_ns);
  // Where the segments are that hold() reads, as a path for any process of this user, until the
  // client is closed or finds another daemon. Empty: this daemon has none, or does not answer.
  std::string segments(uint64_t timeout_ns);

 private:
  struct Open {  // what one call works with
    std::shared_ptr<const View> view;
    std::shared_ptr<ClientSession> session;
    View::SpaceRow row;
  };
  // A reservation that some thread of this client may be writing under.
  struct Writing {
    SlotId slot;
    uint32_t shard;
    uint64_t generation;
    auto operator<=>(const Writing&) const = default;
  };
  // A page that is pinned, until its place is dropped.
  struct Held {
    int place;
    EntryView entry;
  };
  friend class DeviceLoad;
  friend class DeviceWriter;
  friend class Finder;
  friend class PromotionWindow;
  friend class StoreCall;
  friend class HoldCall;

  // The segments' directory as this connection's daemon gave it; null where it gives none.
  struct SegmentFolder {
    ParentFd directory;
    uint64_t segments_held = 0;  // that a session may hold at a time
  };
  std::shared_ptr<const SegmentFolder> folder(uint64_t deadline_ns);
  // The daemon's copies in the memory of a device. Null: it has none there, or does not say so in a
  // moment; asked again a little later then.
  std::shared_ptr<const HbmView> hbm(const std::shared_ptr<gpu::Device>& device,
                                     uint64_t deadline_ns);
  std::shared_ptr<const HbmView> ask_hbm(const std::shared_ptr<gpu::Device>& device,
                                         uint64_t deadline_ns);

  Open open(const Key& namespace_id, Prompt& prompt, bool need_daemon, uint64_t deadline_ns);
  LoadReport load_to_host(const Open& call, Prompt& prompt, size_t first, const Regions& regions,
                          uint32_t shard, uint64_t deadline_ns);
  // Pins pages from `page` to `end`, promoting them if it must; with room of `budget`, if there is
  // one. Fewer: the next one is not to be had, and `why` says so, or none, where its slot was
  // reused meanwhile. Throws Error pin "pin_budget".
  std::vector<Held> hold(const Open& call, PromotionWindow& promotions, size_t page, size_t end,
                         Pins* budget, Reason& why);
  static void count_lookup(ClientSession& session, const LookupResult& found, size_t asked);
  // The copies that this client has mapped already, of any device. Null: none. No call.
  std::shared_ptr<const HbmView> mapped_hbm();
  void refuse_forked() const;
  void refuse_closed() const;
  // Finds a new daemon if the old one went. `patient`: waits for the socket and raises when there
  // is none; otherwise gives it the client's patience now and then, and goes on with what is
  // mapped.
  void renew(bool patient, uint64_t deadline_ns);
  void reconnect(uint64_t deadline_ns);  // under socket_mutex_
  std::shared_ptr<const MappedArena> arena_now();
  // Whether another thread holds the socket for a round trip with the daemon that is mapped.
  bool talks();
  std::unique_lock<std::timed_mutex> lock_socket(uint64_t deadline_ns);
  Connection::Reply say_hello(Connection& to, std::optional<SlotRef> after, uint64_t deadline_ns);
  void adopt(Connection::Reply& welcome);
  // Where something may have been lost: asks the daemon what this session was granted, and settles
  // what no thread of it is writing. Under socket_mutex_, like the next two.
  void settle_lost(uint64_t deadline_ns);
  void settle_listed(Connection::Reply welcome, uint64_t deadline_ns);
  void settle_idle(std::span<const SlotRef> listed, uint64_t deadline_ns);
  void forget(std::span<const SlotRef> refs);  // not written any more; under state_mutex_
  // Granted and never to be sealed; settled before the next round trip.
  void give_up(std::span<const SlotRef> refs);
  Connection::Reply ask(Writer& message, MessageType expected, uint64_t deadline_ns);
  // One exchange of a store that works with `view`. What is granted counts as being written, and
  // what was sealed does not any more, before another thread can say hello again and settle either.
  // Throws Error transport "daemon_replaced" when the view is not the current one.
  Connection::Reply exchange(const View& view, Writer& message, std::span<const Seal> seals,
                             size_t reserves, uint32_t shard, uint64_t deadline_ns);
  // Tells the daemon, and does not wait for what it finds.
  void report_mismatch(const EntryView& entry, const View& view, uint32_t shard,
                       uint64_t deadline_ns);

  ClientOptions options_;
  uint64_t forks_;
  // Order: socket before state. The state's is only ever held for a moment; the socket's for a
  // round trip, so that lookups and loads never wait for it.
  std::timed_mutex socket_mutex_;  // connection_, retry_at_ns_
  Connection connection_;
  uint64_t retry_at_ns_ = 0;
  std::atomic<bool> reconnects_{false};  // the thread that holds the socket says hello
  std::mutex state_mutex_;               // the rest
  std::shared_ptr<const View> view_;
  std::shared_ptr<ClientSession> session_;
  std::set<Writing> writing_;
  std::atomic<bool> lost_{false};  // something was given up that the daemon may have granted
  bool closed_ = false;
  bool locates_ = false;  // the daemon hands out extents
  std::shared_ptr<const SegmentFolder> folder_;
  // By device, null where it has no copies; what the daemon of the current connection said.
  struct HbmAnswer {
    std::shared_ptr<const HbmView> view;
    uint64_t ask_again_ns;
  };
  bool has_hbm_ = false;  // the daemon has an HBM tier
  std::map<int, HbmAnswer> hbm_;
  std::atomic<uint64_t> pinned_bytes_{0};
  Gpus gpus_;
  const std::shared_ptr<std::atomic<uint64_t>> segments_held_ =
      std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace kvw
