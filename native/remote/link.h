// The link between a daemon's core and the worker of its remote tier: a SOCK_SEQPACKET socketpair,
// on which the core hands out runs of pages to put. Little-endian, fixed layouts, no reply to
// anything: the worker says how many runs it takes at a time, the core gives as many, and each that
// is done makes room for another.
//
// Neither end believes the other: what is not a whole message of this version ends the link, and
// nothing else.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "base/fd.h"
#include "base/types.h"
#include "remote/object.h"

namespace kvw::remote {

inline constexpr uint32_t kLinkMagic = 0x4c57564b;  // "KVWL"
inline constexpr uint16_t kLinkVersion = 1;
inline constexpr uint32_t kMostPuts = 64;  // runs at a time: all fit a socket's buffer

enum class LinkType : uint16_t {
  none = 0,
  ready = 1,
  run = 2,
  done = 3,
  gets = 4,  // those of get_link.h
  state = 5,
  get = 6,
  got = 7,
};

struct LinkHead {
  uint32_t magic = kLinkMagic;
  uint16_t version = kLinkVersion;
  LinkType type{};
};

// Of the worker: the presence filter's file can be read, and so many runs are wanted at a time.
struct LinkReady {
  static constexpr LinkType kType = LinkType::ready;
  uint32_t puts;  // 1 to kMostPuts
  uint32_t spare;
};
// Of the core.
struct LinkRun {
  static constexpr LinkType kType = LinkType::run;
  uint64_t number;
  Key namespace_id;
  Key key;
  uint64_t epoch;
  uint64_t record_bytes;
  uint32_t first_position;
  uint32_t pages;
  uint32_t day;  // with `refresh`
  uint32_t refresh;
};
// Of the worker.
struct LinkDone {
  static constexpr LinkType kType = LinkType::done;
  uint64_t number;
};

template <class Body>
struct LinkMessage {
  LinkHead head{.type = Body::kType};
  Body body;
};
static_assert(sizeof(LinkMessage<LinkReady>) == 16 && sizeof(LinkMessage<LinkDone>) == 16 &&
              sizeof(LinkMessage<LinkRun>) == 80);

// Of a run on the wire: that there can be such a one.
bool is_run(uint32_t first_position, uint32_t pages, uint64_t record_bytes);
LinkRun link_run(const RunToPut& run, uint64_t number);
// Nothing: no run that there can be.
std::optional<RunToPut> run_from(const LinkRun& wire);

// A received message, which may be anything.
struct LinkBuffer {
  alignas(8) std::array<std::byte, 128> bytes;
  size_t size = 0;

  // Null: not a whole message of this type.
  template <class Body>
  const Body* as() const {
    const auto* message = reinterpret_cast<const LinkMessage<Body>*>(bytes.data());
    const bool same = size == sizeof(LinkMessage<Body>) && message->head.magic == kLinkMagic &&
                      message->head.version == kLinkVersion && message->head.type == Body::kType;
    return same ? &message->body : nullptr;
  }
};

// An end of the link. Never blocks. Thread-safe: a message is sent and received whole.
class LinkEnd {
 public:
  // Takes the descriptor over. Throws Error usage "bad_link" unless it is a SOCK_SEQPACKET socket.
  explicit LinkEnd(Fd fd);

  int fd() const { return fd_.get(); }
  // False: the other end is gone, or does not read.
  template <class Body>
  bool send(const Body& body) const {
    const LinkMessage<Body> message{.body = body};
    return send_bytes(std::as_bytes(std::span(&message, 1)));
  }
  enum class Got { message, nothing, closed };
  Got receive(LinkBuffer& buffer) const;
  // Whoever waits for a message is told that it is closed.
  void close() const;

  // What a worker calls, to whom a link that is over is an Error transport "link_closed".
  template <class Body>
  void say(const Body& body) const {
    if (!send(body)) throw_closed();
  }
  // The next run of the core, which `Wire` describes; waits for it, at most that long.
  template <class Wire>
  auto next_run(uint64_t timeout_ns) const -> decltype(run_from(std::declval<const Wire&>())) {
    LinkBuffer buffer;
    if (!wait_for_message(buffer, timeout_ns)) return std::nullopt;
    const Wire* wire = buffer.as<Wire>();
    if (auto run = wire != nullptr ? run_from(*wire) : std::nullopt) return run;
    close();  // no daemon of this version
    throw_closed();
  }

 private:
  [[noreturn]] static void throw_closed();
  bool send_bytes(std::span<const std::byte> bytes) const;
  // False: none came in time.
  bool wait_for_message(LinkBuffer& buffer, uint64_t timeout_ns) const;

  Fd fd_;
};

// The worker's end. Thread-safe.
class WorkerLink {
 public:
  explicit WorkerLink(Fd fd) : end_(std::move(fd)) {}

  // All of them throw Error transport "link_closed" where the core has ended it.
  // Throws Error usage "bad_puts" unless 1 to kMostPuts.
  void ready(uint32_t puts) const;
  // Waits for the next run, at most that long.
  std::optional<RunToPut> next(uint64_t timeout_ns) const;
  void done(const RunToPut& run) const;
  void close() const { end_.close(); }

 private:
  LinkEnd end_;
};

}  // namespace kvw::remote
