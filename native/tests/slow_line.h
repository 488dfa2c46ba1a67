// A line between clients and a daemon on which replies can be held back, as those of a busy daemon
// are, and which can be cut.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "exchange/messages.h"
#include "tests/check.h"

namespace kvw {

class SlowLine {
 public:
  explicit SlowLine(std::string daemon) : daemon_(std::move(daemon)), path_(daemon_ + ".line") {
    listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const sockaddr_un address = address_of(path_);
    CHECK_EQ(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address),
             0);
    CHECK_EQ(::listen(listener_.get(), 8), 0);
    thread_ = std::thread([this] { run(); });
  }
  ~SlowLine() {
    ends_ = true;
    thread_.join();
  }
  const std::string& socket() const { return path_; }

  static constexpr uint64_t kAll = UINT64_MAX / 2;
  // So many more replies come through; those behind them wait.
  void pass(uint64_t replies) { replies_ = replies; }
  uint64_t requests() const { return requests_; }  // so far
  // Welcomes of an older daemon, which has not these flags.
  void hide(uint32_t welcome_flags) { hidden_ = welcome_flags; }
  // Whatever is to be made of replies; set before anybody connects.
  void edit(std::function<void(MessageHead& head, std::byte* body)> edit) {
    edit_ = std::move(edit);
  }
  // Both sides of every connection see a hang-up.
  void cut() {
    cut_ = true;
    while (cut_) std::this_thread::yield();
  }

 private:
  struct Pair {
    Fd client, daemon;
  };

  static sockaddr_un address_of(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    return address;
  }

  void run() {
    std::vector<Pair> pairs;
    while (!ends_) {
      if (cut_) pairs.clear();
      cut_ = false;
      if (readable(listener_)) pairs.push_back(accept());
      std::erase_if(pairs, [this](const Pair& pair) {
        if (readable(pair.client)) {
          if (!move(pair.client, pair.daemon)) return true;
          ++requests_;
        }
        if (replies_ == 0 || !readable(pair.daemon)) return false;
        --replies_;
        return !move(pair.daemon, pair.client);
      });
      std::this_thread::yield();
    }
  }
  Pair accept() const {
    Pair pair{Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)),
              Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0))};
    const sockaddr_un address = address_of(daemon_);
    if (::connect(pair.daemon.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) !=
        0)
      pair.daemon.reset();  // the client hears of it at its first request
    return pair;
  }
  static bool readable(const Fd& fd) {
    pollfd watch{fd.get(), POLLIN, 0};
    return ::poll(&watch, 1, 0) > 0;
  }
  // One message with its descriptors. False: a hang-up.
  bool move(const Fd& from, const Fd& to) {
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(8 * sizeof(int))> control;
    iovec piece{buffer_.data(), buffer_.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t got = ::recvmsg(from.get(), &message, MSG_CMSG_CLOEXEC);
    if (got <= 0) return false;
    piece.iov_len = static_cast<size_t>(got);
    auto* head = reinterpret_cast<MessageHead*>(buffer_.data());
    if (parse_head(std::span(buffer_).first(piece.iov_len)) && head->type == MessageType::welcome)
      head->flags &= ~hidden_;
    if (edit_) edit_(*head, buffer_.data() + sizeof *head);
    const bool sent = ::sendmsg(to.get(), &message, MSG_NOSIGNAL) == got;
    for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
         part = CMSG_NXTHDR(&message, part))
      for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= part->cmsg_len; at += sizeof(int))
        ::close(*reinterpret_cast<int*>(CMSG_DATA(part) + at));
    return sent;
  }

  std::string daemon_, path_;
  Fd listener_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(kMessageBytes);
  std::atomic<uint64_t> replies_{kAll}, requests_{0};
  std::atomic<uint32_t> hidden_{0};
  std::function<void(MessageHead&, std::byte*)> edit_;
  std::atomic<bool> cut_{false}, ends_{false};
  std::thread thread_;
};

}  // namespace kvw
