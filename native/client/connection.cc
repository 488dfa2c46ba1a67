#include "client/connection.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/error.h"

namespace kvw {

namespace {

// A connection whose daemon owes more replies than this is given up; nothing is told to it then.
constexpr uint64_t kRepliesOwed = 64;

Error gone(const std::string& why) {
  return Error(ErrorKind::transport, "daemon_gone",
               "the daemon ended the connection (" + why +
                   "); stored pages stay readable, a new daemon serves them again");
}

[[noreturn]] void throw_late() {
  throw Error(ErrorKind::transport, "deadline",
              "the daemon did not answer in time; it is busy or stopped (see kvwarehouse status)");
}

// 0 or an errno: EAGAIN when as many as may wait to be accepted did so until the deadline.
int connect_until(int fd, const sockaddr_un& address, uint64_t deadline_ns) {
  for (;;) {
    const uint64_t now = system_clock().boot_ns();
    const uint64_t left_us = deadline_ns > now ? (deadline_ns - now) / 1000 : 0;
    timeval patience{};  // of a connect that finds no room; 0 would be without end
    patience.tv_sec = static_cast<time_t>(left_us / 1'000'000);
    patience.tv_usec = static_cast<suseconds_t>(left_us == 0 ? 1 : left_us % 1'000'000);
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return 0;
    if (errno != EINTR) return errno;
  }
}

[[noreturn]] void throw_refusal(const Connection::Reply& reply) {
  Reader body = reply.body();
  const auto* bytes = body.take_array<char>(reply.head().first);
  if (bytes == nullptr) throw gone("garbage");
  const std::string_view text(bytes, reply.head().first);
  const size_t first = text.find('\0');
  const size_t second = first == std::string_view::npos ? first : text.find('\0', first + 1);
  if (second == std::string_view::npos) throw gone("garbage");
  throw Error(kind_from(text.substr(0, first)),
              std::string(text.substr(first + 1, second - first - 1)),
              std::string(text.substr(second + 1)));
}

}  // namespace

Connection::Connection(const std::string& socket_path, std::optional<uid_t> daemon_uid,
                       uint64_t deadline_ns) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_path.size() >= sizeof address.sun_path)
    throw Error(ErrorKind::usage, "socket_path_too_long",
                "the socket path " + socket_path + " is longer than the system allows (" +
                    std::to_string(sizeof address.sun_path - 1) + " characters)");
  std::memcpy(address.sun_path, socket_path.c_str(), socket_path.size() + 1);
  fd_ = ParentFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (const int err = connect_until(fd_.get(), address, deadline_ns); err != 0) {
    fd_.reset();
    if (err == EAGAIN) throw_late();
    throw Error(
        ErrorKind::transport, "no_daemon",
        "no daemon answers on " + socket_path + " (" + std::strerror(err) + ")" +
            (err == EACCES ? "" : "; start one with: kvwarehouse serve --socket " + socket_path));
  }
  // Before a word is said: whoever made a socket where ours is expected would be given all KV.
  ucred peer{};
  socklen_t size = sizeof peer;
  const bool known = ::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  const bool trusted = peer.uid == ::geteuid() || peer.uid == 0 || peer.uid == daemon_uid;
  if (!known || !trusted)
    throw Error(ErrorKind::transport, "daemon_untrusted",
                "who listens on " + socket_path + " runs as uid " + std::to_string(peer.uid) +
                    ", and only a daemon of uid " +
                    std::to_string(daemon_uid.value_or(::geteuid())) +
                    " or root is trusted with KV; if it is the right one, set KVW_DAEMON_UID=" +
                    std::to_string(peer.uid));
  daemon_uid_ = peer.uid;
  ::fcntl(fd_.get(), F_SETFL, O_NONBLOCK);
  int bytes = 2 * static_cast<int>(kMessageBytes);
  ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

bool Connection::hung_up() const {
  if (!fd_.valid()) return true;
  pollfd watch{fd_.get(), POLLIN, 0};
  return ::poll(&watch, 1, 0) > 0 && (watch.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0;
}

void Connection::wait_for(short events, uint64_t deadline_ns) {
  for (;;) {
    const uint64_t now = system_clock().boot_ns();
    if (now >= deadline_ns) throw_late();
    const uint64_t left_ms = (deadline_ns - now) / kMillisecondNs + 1;
    pollfd watch{fd_.get(), events, 0};
    const int ready = ::poll(&watch, 1, static_cast<int>(std::min<uint64_t>(left_ms, 1000)));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw gone(std::strerror(errno));
  }
}

void Connection::send(std::span<const std::byte> request, uint64_t deadline_ns) {
  while (::send(fd_.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0) {
    if (errno != EAGAIN && errno != EINTR) throw gone(std::strerror(errno));
    wait_for(POLLOUT, deadline_ns);
  }
}

Connection::Reply Connection::receive(uint64_t deadline_ns) {
  Reply reply;
  buffer_.resize(kMessageBytes);
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(8 * sizeof(int))> control;
  iovec piece{buffer_.data(), buffer_.size()};
  for (;;) {
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t got = ParentFd::receive(fd_.get(), header, reply.descriptors);
    if (got == 0) throw gone("hang-up");
    if (got > 0) {
      reply.message.assign(buffer_.begin(), buffer_.begin() + got);
      if (parse_head(reply.message) == nullptr) throw gone("garbage");
      return reply;
    }
    if (errno != EAGAIN && errno != EINTR) throw gone(std::strerror(errno));
    wait_for(POLLIN, deadline_ns);
  }
}

Connection::Reply Connection::next_reply(uint64_t deadline_ns) {
  Reply reply = receive(deadline_ns);
  if (reply.head().request != answered_ + 1) throw gone("garbage");
  ++answered_;
  return reply;
}

Connection::Reply Connection::ask(Writer& request, MessageType expected, uint64_t deadline_ns) {
  try {
    if (!fd_.valid()) throw gone("closed");
    send(request.finish(sent_ + 1), deadline_ns);
    for (const uint64_t number = ++sent_;;) {
      Reply reply = next_reply(deadline_ns);
      if (answered_ < number) continue;  // whoever asked has gone
      if (reply.head().type == MessageType::refused) throw_refusal(reply);
      if (reply.head().type != expected) throw gone("unexpected reply");
      return reply;
    }
  } catch (const Error& error) {
    // A refusal is an answer, and so is a deadline; after anything else nobody knows what comes
    // next.
    const bool late = error.code() == "deadline";
    if ((error.kind() == ErrorKind::transport && !late) || sent_ - answered_ > kRepliesOwed)
      close();
    throw;
  }
}

void Connection::tell(Writer& request) {
  try {
    pollfd watch{fd_.get(), POLLIN, 0};
    while (answered_ < sent_ && ::poll(&watch, 1, 0) > 0) next_reply(0);
    if (!fd_.valid() || sent_ - answered_ >= kRepliesOwed) return;
    send(request.finish(sent_ + 1), 0);
    ++sent_;
  } catch (const Error& error) {
    if (error.code() != "deadline") close();
  }
}

}  // namespace kvw
