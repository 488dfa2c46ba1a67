// A client's way to the daemon: one socket, which calls take in turns, and what the daemon that was
// found last has handed out. Thread-safe.
//
// When the daemon was replaced, it says hello to the new one, presents the session and settles what
// a lost reply had granted. Only a round trip waits for the socket: what is mapped is had at once.
// After a fork the child's link refuses every call.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "client/connection.h"
#include "client/extents.h"
#include "client/hbm.h"
#include "client/remote_filter.h"
#include "client/session.h"
#include "client/view.h"
#include "exchange/messages.h"

namespace kvw {

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

// What a daemon has handed out. Calls that began with it end with it; the next daemon's is another.
struct Attachment {
  Attachment(std::shared_ptr<const View> its_view, std::shared_ptr<ClientSession> its_session,
             uint32_t welcome_flags)
      : view(std::move(its_view)),
        session(std::move(its_session)),
        knows_since((welcome_flags & kWelcomeSince) != 0),
        segments((welcome_flags & kWelcomeLocates) != 0),
        hbm((welcome_flags & kWelcomeHbm) != 0),
        remote((welcome_flags & kWelcomeRemote) != 0) {}

  const std::shared_ptr<const View> view;
  const std::shared_ptr<ClientSession> session;
  const bool knows_since;  // kExchangeSince
  SegmentFolder segments;
  HbmCopies hbm;
  RemoteFilter remote;
};

// The reservations that threads of a client may be writing under. Whatever else the daemon has
// granted to the session, a lost or late reply granted, and nobody will seal it. Thread-safe.
class Unsettled {
 public:
  // `shards`: of each answer.
  void granted(std::span<const ReserveAnswer> answers, std::span<const uint32_t> shards) {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < answers.size(); ++i)
      if (answers[i].answer == Answer::granted)
        writing_.insert({answers[i].slot, shards[i], answers[i].generation});
  }
  // Sealed, or given up.
  void ended(std::span<const SlotRef> refs) {
    const std::lock_guard lock(mutex_);
    for (const SlotRef& ref : refs) writing_.erase(of(ref));
  }
  // Those of `listed` that no thread is writing under.
  std::vector<SlotRef> idle(std::span<const SlotRef> listed) {
    const std::lock_guard lock(mutex_);
    std::vector<SlotRef> idle;
    for (const SlotRef& ref : listed)
      if (!writing_.contains(of(ref))) idle.push_back(ref);
    return idle;
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    writing_.clear();
  }

 private:
  using Writing = std::tuple<SlotId, uint32_t, uint64_t>;
  static Writing of(const SlotRef& ref) { return {ref.slot, ref.shard, ref.generation}; }

  std::mutex mutex_;
  std::set<Writing> writing_;
};

class DaemonLink {
 public:
  // Connects. Throws Error transport at once: "no_daemon" when there is none, "daemon_untrusted"
  // when it, or a file that it hands over, is another user's.
  explicit DaemonLink(ClientOptions options);

  const ClientOptions& options() const { return options_; }
  void close();
  bool forked() const { return fork_count() != forks_; }
  bool connected();
  // Throws Error transport "forked", usage "closed".
  std::shared_ptr<Attachment> attachment();

  // Finds a new daemon if the old one went. `patient`: waits for the socket and raises when there
  // is none; otherwise gives it the client's patience now and then, and goes on with what is
  // mapped. Throws as attachment().
  void renew(bool patient, uint64_t deadline_ns);
  // The same, patiently. False: none answered, or one whose files somebody has cut, which ends.
  // True at once while another thread talks to the one that is mapped: that thread may be waiting
  // for the processor rather than for the daemon, and what became of the connection it finds out by
  // itself.
  bool refresh(uint64_t timeout_ns);

  // Maps what the daemon shows of its remote tier, where it does so in a moment and that is not
  // mapped yet: at each hello, and then by calls that may talk to the daemon.
  void renew_remote(uint64_t deadline_ns);

  Connection::Reply ask(Writer& message, MessageType expected, uint64_t deadline_ns);
  // One exchange of a store that works with `from`; `shards`: of each page that it reserves. What
  // is granted counts as being written, and what was sealed does not any more, before another
  // thread can say hello again and settle either. Throws Error transport "daemon_replaced" when
  // `from` is not what is attached now.
  Connection::Reply exchange(const Attachment& from, Writer& message, std::span<const Seal> seals,
                             std::span<const uint32_t> shards, uint64_t deadline_ns);
  // Granted and never to be sealed; settled before the next round trip.
  void give_up(std::span<const SlotRef> refs);
  // Does not wait for what the daemon makes of it. Nothing where it cannot be sent.
  void tell(Writer& message, uint64_t deadline_ns);

 private:
  void refuse_forked() const;
  std::unique_lock<std::timed_mutex> lock_socket(uint64_t deadline_ns);
  // Whether another thread holds the socket for a round trip with the daemon that is mapped.
  bool talks();
  // The rest holds the socket.
  void reconnect(uint64_t deadline_ns);
  Connection::Reply say_hello(Connection& to, std::optional<SlotRef> after, uint64_t deadline_ns);
  void adopt(Connection::Reply& welcome);
  std::shared_ptr<Attachment> attached();  // null: none yet, or closed
  // Where something may have been lost: asks the daemon what this session was granted, and settles
  // what no thread of it is writing.
  void settle_lost(uint64_t deadline_ns);
  void settle_listed(Connection::Reply welcome, uint64_t deadline_ns);

  const ClientOptions options_;
  const uint64_t forks_;
  // Order: socket before state. The state's is only ever held for a moment; the socket's for a
  // round trip, so that lookups and loads never wait for it.
  std::timed_mutex socket_mutex_;  // connection_, retry_at_ns_
  Connection connection_;
  uint64_t retry_at_ns_ = 0;
  std::atomic<bool> reconnects_{false};  // the thread that holds the socket says hello
  Unsettled unsettled_;
  std::atomic<bool> lost_{false};  // something was given up that the daemon may have granted
  std::mutex state_mutex_;         // the rest
  std::shared_ptr<Attachment> attachment_;
  bool closed_ = false;
};

}  // namespace kvw
