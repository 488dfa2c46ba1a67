// One local socket to the daemon: requests and replies with deadlines. Not thread-safe.
//
// A deadline ends the wait, not the connection: replies come in the order of their requests, and
// one that comes late is passed over by its number. Garbage and hang-ups end the connection. What a
// lost or late reply granted is listed at the next hello.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fork.h"
#include "exchange/messages.h"

namespace kvw {

class Connection {
 public:
  struct Reply {
    std::vector<std::byte> message;
    std::vector<ParentFd> descriptors;
    const MessageHead& head() const {
      return *reinterpret_cast<const MessageHead*>(message.data());
    }
    Reader body() const { return Reader(std::span(message).subspan(sizeof(MessageHead))); }
  };

  Connection() = default;
  // Waits until deadline_ns (boot clock) where too many others wait to be accepted. Throws Error
  // transport "no_daemon" at once when nobody listens, "deadline", "daemon_untrusted" when who
  // listens is neither of our user, nor root, nor daemon_uid.
  Connection(const std::string& socket_path, std::optional<uid_t> daemon_uid, uint64_t deadline_ns);

  // The daemon closed its end, or there never was one. One poll: about half a microsecond.
  bool hung_up() const;
  uid_t daemon_uid() const { return daemon_uid_; }  // by the kernel's word
  void close() { fd_.reset(); }

  // Sends and waits for the reply of the expected type until deadline_ns (boot clock). Throws Error
  // transport "daemon_gone" | "deadline", or what the daemon refused with.
  Reply ask(Writer& request, MessageType expected, uint64_t deadline_ns);
  // Sends what nobody waits to be answered, if it can be sent now and not too many replies are due.
  void tell(Writer& request);

 private:
  void wait_for(short events, uint64_t deadline_ns);
  void send(std::span<const std::byte> request, uint64_t deadline_ns);
  Reply receive(uint64_t deadline_ns);
  Reply next_reply(uint64_t deadline_ns);

  ParentFd fd_;
  uid_t daemon_uid_ = 0;
  uint64_t sent_ = 0, answered_ = 0;  // requests, each with the next number
  std::vector<std::byte> buffer_;     // as long as a message may be
};

}  // namespace kvw
