// One local socket to the daemon: requests and replies with deadlines. Not thread-safe.
// Any failure, a late reply included, ends the connection: what a lost reply granted is listed at
// the next hello.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "exchange/messages.h"

namespace kvw {

class Connection {
 public:
  Connection() = default;
  // Throws Error transport "no_daemon" at once when nobody listens.
  explicit Connection(const std::string& socket_path);

  bool alive() const { return fd_.valid(); }
  // The daemon closed its end, or there never was one. One poll: about half a microsecond.
  bool hung_up() const;
  void close() { fd_.reset(); }
  int fd() const { return fd_.get(); }

  struct Reply {
    std::vector<std::byte> message;
    std::vector<Fd> descriptors;
    const MessageHead& head() const {
      return *reinterpret_cast<const MessageHead*>(message.data());
    }
    Reader body() const { return Reader(std::span(message).subspan(sizeof(MessageHead))); }
  };
  // Sends and waits for the reply of the expected type until deadline_ns (boot clock). Throws Error
  // transport "daemon_gone" | "deadline", or what the daemon refused with.
  Reply ask(std::span<const std::byte> request, MessageType expected, uint64_t deadline_ns);

 private:
  void wait_for(short events, uint64_t deadline_ns);

  Fd fd_;
};

}  // namespace kvw
