#include "remote/link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "base/clock.h"
#include "base/error.h"

namespace kvw::remote {

namespace {

constexpr uint64_t kLongestWaitNs = 3600 * kSecondNs;

}  // namespace

LinkRun link_run(const RunToPut& run, uint64_t number) {
  return {number,    run.namespace_id,    run.key,
          run.epoch, run.record_bytes,    run.first_position,
          run.pages, run.day.value_or(0), run.day ? 1u : 0u};
}

bool is_run(uint32_t first_position, uint32_t pages, uint64_t record_bytes) {
  return pages >= 1 && pages <= kObjectTokens && first_position % pages == 0 &&
         record_bytes >= kBlockBytes && record_bytes % kBlockBytes == 0 &&
         record_bytes <= 2 * kMostPageBytes;
}

std::optional<RunToPut> run_from(const LinkRun& wire) {
  if (!is_run(wire.first_position, wire.pages, wire.record_bytes)) return std::nullopt;
  RunToPut run;
  run.number = wire.number;
  run.namespace_id = wire.namespace_id;
  run.key = wire.key;
  run.first_position = wire.first_position;
  run.pages = wire.pages;
  run.epoch = wire.epoch;
  if (wire.refresh != 0) run.day = wire.day;
  run.record_bytes = wire.record_bytes;
  return run;
}

LinkEnd::LinkEnd(Fd fd) : fd_(std::move(fd)) {
  int type = 0;
  socklen_t size = sizeof type;
  if (::getsockopt(fd_.get(), SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_SEQPACKET)
    throw Error(ErrorKind::usage, "bad_link",
                "descriptor " + std::to_string(fd_.get()) +
                    " is no end of a link; give one of a SOCK_SEQPACKET socketpair");
  ::fcntl(fd_.get(), F_SETFD, FD_CLOEXEC);
}

bool LinkEnd::send_bytes(std::span<const std::byte> bytes) const {
  ssize_t sent;
  do {
    sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes.size());
}

LinkEnd::Got LinkEnd::receive(LinkBuffer& buffer) const {
  ssize_t got;
  do {
    got = ::recv(fd_.get(), buffer.bytes.data(), buffer.bytes.size(), MSG_DONTWAIT | MSG_TRUNC);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) return Got::nothing;
  if (got <= 0) return Got::closed;
  buffer.size = static_cast<size_t>(got);  // of one that is too long: more than there is room for
  return Got::message;
}

void LinkEnd::close() const { ::shutdown(fd_.get(), SHUT_RDWR); }

void LinkEnd::throw_closed() {
  throw Error(ErrorKind::transport, "link_closed",
              "the daemon has closed its link with this worker; end, another one is started");
}

bool LinkEnd::wait_for_message(LinkBuffer& buffer, uint64_t timeout_ns) const {
  const uint64_t until_ns =
      system_clock().boot_ns() + std::min<uint64_t>(timeout_ns, kLongestWaitNs);
  for (;;) {
    const Got got = receive(buffer);
    if (got == Got::closed) throw_closed();
    if (got == Got::message) return true;
    const uint64_t now = system_clock().boot_ns();
    if (now >= until_ns) return false;
    pollfd poll{fd_.get(), POLLIN, 0};
    ::poll(&poll, 1, static_cast<int>((until_ns - now) / kMillisecondNs) + 1);
  }
}

void WorkerLink::ready(uint32_t puts) const {
  if (puts == 0 || puts > kMostPuts)
    throw Error(ErrorKind::usage, "bad_puts",
                "a worker puts 1 to " + std::to_string(kMostPuts) + " runs at a time, not " +
                    std::to_string(puts));
  end_.say(LinkReady{puts, 0});
}

std::optional<RunToPut> WorkerLink::next(uint64_t timeout_ns) const {
  return end_.next_run<LinkRun>(timeout_ns);
}

void WorkerLink::done(const RunToPut& run) const { end_.say(LinkDone{run.number}); }

}  // namespace kvw::remote
