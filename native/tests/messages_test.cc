// The messages of the local socket: what is read stays inside what was received, and whatever one
// peer sends, the daemon stays and other clients go on.
#include "exchange/messages.h"

#include <poll.h>

#include <chrono>
#include <future>
#include <thread>

#include "tests/check.h"
#include "tests/daemon_world.h"

namespace kvw {
namespace {

using Bytes = std::vector<std::byte>;

// A peer that says what it likes.
class Rogue {
 public:
  explicit Rogue(const Daemon& daemon) : fd_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string path = daemon.socket();
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    if (::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      throw storage_error("cannot connect", errno);
    int bytes = 1 << 20;
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  }
  bool send(std::span<const std::byte> message) {
    return ::send(fd_.get(), message.data(), message.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(message.size());
  }
  bool try_send(std::span<const std::byte> message) {
    return ::send(fd_.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(message.size());
  }
  // The next message, empty when the daemon hung up; descriptors are taken and closed.
  Bytes receive() {
    pollfd watch{fd_.get(), POLLIN, 0};
    CHECK(::poll(&watch, 1, kPatienceMs) == 1);
    return take(0);
  }
  void discard() {
    while (!take(MSG_DONTWAIT).empty()) {
    }
  }
  // Says hello; the session's id.
  uint64_t hello(uint32_t flags = 0) {
    Writer message(MessageType::hello, 1);
    message.put(Hello{0, 1});
    message.set_counts(0, 0, flags);
    CHECK(send(message.finish()));
    const Bytes reply = receive();
    CHECK(reply.size() >= sizeof(MessageHead) + sizeof(Welcome));
    Reader body(std::span<const std::byte>(reply).subspan(sizeof(MessageHead)));
    return body.take<Welcome>()->session;
  }
  // The code of a refusal; "" for any other message, "hang-up" for none.
  std::string refusal() {
    const Bytes reply = receive();
    if (reply.empty()) return "hang-up";
    const MessageHead* head = parse_head(reply);
    CHECK(head != nullptr);
    if (head->type != MessageType::refused) return "";
    const std::string text(reinterpret_cast<const char*>(head + 1), head->first);
    const size_t first = text.find('\0');
    return text.substr(first + 1, text.find('\0', first + 1) - first - 1);
  }

 private:
  Bytes take(int flags) {
    Bytes message(kMessageBytes);
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(8 * sizeof(int))> control{};
    iovec piece{message.data(), message.size()};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t got = ::recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC | flags);
    for (cmsghdr* part = CMSG_FIRSTHDR(&header); got > 0 && part != nullptr;
         part = CMSG_NXTHDR(&header, part)) {
      int fd = -1;
      for (size_t at = 0; at + sizeof fd <= part->cmsg_len - CMSG_LEN(0); at += sizeof fd) {
        std::memcpy(&fd, CMSG_DATA(part) + at, sizeof fd);
        kept_.emplace_back(fd);  // the last is the session's lock
      }
    }
    message.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return message;
  }

  Fd fd_;
  std::vector<Fd> kept_;
};

Bytes copy_of(std::span<const std::byte> message) { return {message.begin(), message.end()}; }

struct Pair {
  uint64_t a, b;
};

TEST(reader_takes_nothing_beyond_the_end) {
  alignas(8) const std::array<std::byte, 40> data{};
  for (size_t bytes = 0; bytes <= data.size(); ++bytes) {
    Reader reader(std::span<const std::byte>(data).first(bytes));
    CHECK_EQ(reader.take_array<Pair>(2) != nullptr, bytes >= 32);
    CHECK_EQ(reader.ok(), bytes >= 32);
  }
  for (const size_t count : {size_t{3}, SIZE_MAX, SIZE_MAX / 16, SIZE_MAX / 16 + 1}) {
    Reader reader(data);
    CHECK(reader.take_array<Pair>(count) == nullptr);
    CHECK(reader.take<std::byte>() == nullptr);  // what failed once stays failed
  }
  Reader reader(data);
  CHECK(reader.take_array<std::byte>(3) == data.data());
  CHECK(reader.take_array<uint32_t>(1) == reinterpret_cast<const uint32_t*>(data.data() + 8));
  CHECK(reader.take_array<Pair>(1) != nullptr);
  CHECK(reader.take_array<std::byte>(8) != nullptr);
  CHECK(reader.at_end());
  CHECK(reader.take_array<Pair>(0) != nullptr || reader.ok());
}

TEST(head_is_refused_when_it_is_not_ours_or_lies_about_its_size) {
  Writer writer(MessageType::settle, 7);
  writer.put(Pair{1, 2});
  const Bytes good = copy_of(writer.finish());
  CHECK(parse_head(good) != nullptr);
  CHECK_EQ(parse_head(good)->request, 7);
  for (size_t bytes = 0; bytes < good.size(); ++bytes)
    CHECK(parse_head(std::span(good).first(bytes)) == nullptr);
  Bytes bad = good;
  bad[0] ^= std::byte{1};
  CHECK(parse_head(bad) == nullptr);
  bad = good;
  bad.resize(bad.size() + 8);
  CHECK(parse_head(bad) == nullptr);
}

TEST(reason_names_are_all_different) {
  std::set<std::string> names;
  for (uint32_t reason = 0; reason < static_cast<uint32_t>(Reason::count); ++reason)
    CHECK(names.insert(reason_name(static_cast<Reason>(reason))).second);
  CHECK_EQ(std::string(reason_name(Reason::count)), "unknown");
}

TEST(wrong_requests_are_refused_with_a_reason_or_hung_up_on) {
  Daemon daemon(shape_of(5000));
  daemon.start();
  const auto said = [&](bool hello, auto&& build) {
    Rogue rogue(daemon);
    if (hello) rogue.hello();
    const Bytes message = build();
    CHECK(rogue.send(message));
    return rogue.refusal();
  };
  const auto message = [](MessageType type, uint32_t first, uint32_t second, size_t body,
                          uint16_t version = kProtocolVersion) {
    return [=] {
      Writer writer(type, 5);
      const Bytes zeros(body);
      writer.put_bytes(zeros.data(), zeros.size());
      writer.set_counts(first, second);
      Bytes bytes = copy_of(writer.finish());
      reinterpret_cast<MessageHead*>(bytes.data())->version = version;
      return bytes;
    };
  };
  CHECK_EQ(said(false, message(MessageType::exchange, 0, 0, 16)), "no_session");
  CHECK_EQ(said(false, message(MessageType::hello, 0, 0, 16, 2)), "protocol_version");
  CHECK_EQ(said(true, message(MessageType::settle, 8193, 0, 16)), "message_too_large");
  CHECK_EQ(said(true, message(MessageType::exchange, 0, UINT32_MAX, 16)), "message_too_large");
  CHECK_EQ(said(true, message(MessageType::exchange, 0, 1, 64)), "namespace_unknown");
  CHECK_EQ(said(true, message(MessageType::exchange, 0, 0, 0)), "hang-up");
  CHECK_EQ(said(true, message(MessageType::exchange, 3, 0, 16)), "hang-up");
  CHECK_EQ(said(true, message(MessageType::exchange, 0, 2, 64)), "hang-up");
  CHECK_EQ(said(true, message(MessageType::settle, 2, 0, 16)), "hang-up");
  CHECK_EQ(said(true, message(MessageType::promote, 100, 0, 16)), "hang-up");
  CHECK_EQ(said(true, message(MessageType::report, 0, 0, 8)), "hang-up");
  CHECK_EQ(said(true, message(MessageType::locate, 0, 0, 0)), "no_nvme_tier");
  CHECK_EQ(said(false, message(MessageType::locate, 0, 0, 0)), "no_session");
  CHECK_EQ(said(true, message(MessageType::located, 1, 1, 8)), "hang-up");
  CHECK_EQ(said(true, message(MessageType::presence, 0, 0, 0)), "presence_not_ready");
  CHECK_EQ(said(true, message(MessageType::fetch, 1, 0, 24)), "hang-up");
  CHECK_EQ(said(true, message(MessageType::fetch, 0, 0, 16)), "hang-up");
  CHECK_EQ(said(true, message(static_cast<MessageType>(99), 0, 0, 8)), "hang-up");
  CHECK_EQ(said(true, message(MessageType::welcome, 0, 0, 8)), "hang-up");
  CHECK_EQ(said(false, message(MessageType::hello, 0, 0, 0)), "hang-up");
  CHECK_EQ(said(true, [&] { return Bytes(31, std::byte{0x4b}); }), "hang-up");
  CHECK_EQ(said(true, [&] { return Bytes(kMessageBytes + 8); }), "hang-up");
}

TEST(read_only_session_cannot_store) {
  Daemon daemon(shape_of(5000));
  daemon.start();
  Rogue rogue(daemon);
  rogue.hello(kHelloReadOnly);
  Writer exchange(MessageType::exchange, 2);
  exchange.put(kSpace);
  CHECK(rogue.send(exchange.finish()));
  CHECK_EQ(rogue.refusal(), "read_only");
}

TEST(peer_that_never_reads_its_answers_is_hung_up_on_and_stalls_nobody) {
  Daemon daemon(shape_of(5000));
  daemon.start();
  Client client(daemon.client_options());
  const Chain chain(daemon.shape(), 1, 4);
  chain.store_all(client);
  Rogue rogue(daemon);
  rogue.hello();
  Writer settle(MessageType::settle, 3);
  const Bytes message = copy_of(settle.finish());
  // Far more answers than any socket buffer holds.
  for (int i = 0; i < 200000 && rogue.send(message); ++i) {
  }
  CHECK(!rogue.send(message));
  CHECK_EQ(chain.load(client, 1), 4);
}

TEST(process_has_half_of_the_connections) {
  Daemon daemon(shape_of(5000));
  daemon.start();
  std::vector<std::unique_ptr<Rogue>> silent;
  for (size_t i = 0; i < Server::kMaxConnections / 2; ++i)
    silent.push_back(std::make_unique<Rogue>(daemon));
  CHECK(Rogue(daemon).receive().empty());  // hung up on
  silent[0]->hello();
  silent.clear();
  const uint64_t end_ns = system_clock().boot_ns() + kPatienceMs * kMillisecondNs;
  while (true) {
    Rogue late(daemon);
    Writer settle(MessageType::settle, 1);
    if (late.send(settle.finish()) && late.refusal() == "no_session") break;
    CHECK(system_clock().boot_ns() < end_ns);
  }
}

// Incident: turns went by connection, so a process that said something on five hundred of them had
// all the others wait for five hundred answers.
TEST(process_has_one_turn_in_a_round_however_many_connections_it_has) {
  constexpr size_t kTurn = 16, kRounds = 4;
  Daemon daemon(shape_of(5000));
  daemon.start();
  std::vector<std::unique_ptr<Rogue>> peers;
  for (size_t i = 0; i < 6 * kTurn; ++i) peers.push_back(std::make_unique<Rogue>(daemon));
  const auto accepted = [&](Warehouse&) { return daemon.server().connections(); };
  while (daemon.call(accepted) < peers.size()) std::this_thread::yield();
  std::promise<void> begun, all_said;
  check::Thread busy([&] {
    daemon.call([&](Warehouse&) {
      begun.set_value();
      all_said.get_future().wait();
      return 0;
    });
  });
  begun.get_future().wait();
  Writer hello(MessageType::hello, 1);
  hello.put(Hello{0, 1});
  const Bytes message = copy_of(hello.finish());
  for (const auto& peer : peers) CHECK(peer->send(message));
  // Each of these waits for a round of its own: it takes longer than what may begin together.
  const auto answered = std::make_shared<std::vector<size_t>>();
  const auto look = [answered](Warehouse& warehouse) {
    answered->push_back(warehouse.sessions().size());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return 0;
  };
  for (size_t i = 0; i < kRounds; ++i) CHECK_THROWS(daemon.server().call(look, 0), "core_busy");
  all_said.set_value();
  busy.join();
  for (const auto& peer : peers) CHECK(!peer->receive().empty());  // and every one has its turn
  daemon.call([](Warehouse&) { return 0; });
  CHECK_EQ(answered->size(), kRounds);
  for (size_t i = 0; i < kRounds; ++i)
    CHECK(answered->at(i) <= (i == 0 ? 0 : answered->at(i - 1)) + 2 * kTurn);
}

TEST(connection_without_a_hello_is_ended_whatever_else_it_says) {
  Daemon daemon(shape_of(5000));
  daemon.start();
  Rogue client(daemon);
  client.hello();
  Rogue talker(daemon);
  Rogue silent(daemon);
  Writer settle(MessageType::settle, 1);
  const Bytes message = copy_of(settle.finish());
  CHECK(talker.send(message));
  CHECK_EQ(talker.refusal(), "no_session");
  CHECK(silent.receive().empty());
  CHECK(talker.receive().empty());
  CHECK(client.send(message));
  CHECK(!client.receive().empty());
}

// --- random garbage

class Garbage {
 public:
  Garbage(std::mt19937_64& random, const NamespaceShape& one, const NamespaceShape& two)
      : random_(random), shapes_{one, two} {}

  Bytes next() {
    Bytes bytes;
    switch (below(6)) {
      case 0:
        return noise(1 + below(3000));
      case 1:
        bytes = copy_of(headed(noise(below(600))));
        break;
      default:
        bytes = plausible();
    }
    for (uint64_t i = below(4); i > 0; --i) bytes[below(bytes.size())] ^= flipped();
    if (below(8) == 0) bytes.resize(1 + below(bytes.size()));
    if (below(3) != 0 && bytes.size() >= sizeof(MessageHead)) {  // past the first gate
      auto* head = reinterpret_cast<MessageHead*>(bytes.data());
      head->magic = kMessageMagic;
      head->bytes = static_cast<uint32_t>(bytes.size());
      if (below(4) != 0) head->version = kProtocolVersion;
    }
    return bytes;
  }

 private:
  uint64_t below(uint64_t bound) { return random_() % bound; }
  std::byte flipped() { return static_cast<std::byte>(1u << below(8)); }
  uint64_t number() {
    const uint64_t choices[] = {0,          1,          below(40), below(5000),
                                UINT32_MAX, UINT64_MAX, random_(), 63};
    return choices[below(8)];
  }
  Bytes noise(size_t bytes) {
    Bytes data(bytes);
    for (std::byte& byte : data) byte = static_cast<std::byte>(random_());
    return data;
  }
  std::span<const std::byte> headed(const Bytes& body) {
    writer_ = Writer(static_cast<MessageType>(1 + below(19)), random_());
    writer_.put_bytes(body.data(), body.size());
    writer_.set_counts(static_cast<uint32_t>(number()), static_cast<uint32_t>(number()));
    return writer_.finish();
  }
  // What a client could have meant: real keys and small numbers in real layouts.
  Bytes plausible() {
    const NamespaceShape& shape = shapes_[below(2)];
    const auto count = static_cast<uint32_t>(below(5));
    switch (below(6)) {
      case 0:
        return exchange(shape, count);
      case 4: {
        writer_ = Writer(MessageType::fetch, 1);
        writer_.put(FetchSpace{shape.id, static_cast<uint32_t>(1 + below(2)), 0});
        for (uint32_t i = 0; i < count; ++i)
          writer_.put(FetchRun{page_of(shape, below(4), 0).key, static_cast<uint32_t>(number()),
                               static_cast<uint32_t>(16 * below(5)), 16,
                               static_cast<uint32_t>(below(17)), number()});
        break;
      }
      case 1: {
        writer_ = Writer(MessageType::settle, 1);
        for (uint32_t i = 0; i < count; ++i)
          writer_.put(
              SlotRef{number(), static_cast<SlotId>(number()), static_cast<uint32_t>(number())});
        break;
      }
      case 2: {
        writer_ = Writer(MessageType::promote, 1);
        for (uint32_t i = 0; i < count; ++i) writer_.put(page_of(shape, below(4), 0).key);
        break;
      }
      case 3: {
        writer_ = Writer(MessageType::report, 1);
        writer_.put(Report{page_of(shape, below(4), 0).key, number(), static_cast<SlotId>(number()),
                           static_cast<uint32_t>(number())});
        break;
      }
      default: {
        writer_ = Writer(MessageType::hello, 1);
        writer_.put(Hello{below(2) == 0 ? 0 : random_(), number()});
      }
    }
    writer_.set_counts(count, 0);
    return copy_of(writer_.finish());
  }
  Bytes exchange(const NamespaceShape& shape, uint32_t count) {
    writer_ = Writer(MessageType::exchange, 1);
    const bool since = below(2) == 0;
    if (since) writer_.put(number());
    writer_.put(shapes_[below(2)].id);
    for (uint32_t i = 0; i < count; ++i)
      writer_.put(Seal{number(), random_(), static_cast<SlotId>(number()),
                       static_cast<uint32_t>(number())});
    for (uint32_t i = 0; i < count; ++i) {
      const TestPage page = page_of(shape, below(4), static_cast<uint32_t>(below(3)));
      writer_.put(Reserve{page.key, page.parent, page.position, static_cast<uint32_t>(number()),
                          static_cast<uint32_t>(1 + below(2)), 64});
      writer_.put_bytes(page.tokens.data(), 64);
    }
    writer_.set_counts(count, count, since ? kExchangeSince : 0);
    return copy_of(writer_.finish());
  }

  std::mt19937_64& random_;
  std::array<NamespaceShape, 2> shapes_;
  Writer writer_{MessageType::hello, 0};
};

TEST(garbage_on_the_socket_harms_neither_the_daemon_nor_another_client) {
  auto random = check::random("garbage_on_the_socket_harms_neither_the_daemon_nor_another_client");
  Daemon daemon(shape_of(5000));
  const NamespaceShape wide = shape_of(4096, 64, {6, 6});
  daemon.declared.push_back(wide);
  daemon.options.grace_ns = 1;
  daemon.options.remote_read = true;
  daemon.start();
  const RemoteGets remote(daemon);
  Client client(daemon.client_options());
  const Chain kept(daemon.shape(), 100, 6);
  kept.store_all(client);
  Garbage garbage(random, daemon.shape(), wide);
  for (uint64_t round = 0; round < check::rounds(60); ++round) {
    {
      Rogue rogue(daemon);
      if (random() % 4 != 0) rogue.hello();
      for (int i = 0; i < 50 && rogue.try_send(garbage.next()); ++i) rogue.discard();
    }
    remote.end_all(random);
    for (uint32_t shard = 0; shard < 2; ++shard) CHECK_EQ(kept.load(client, shard), 6);
    const Chain fresh(daemon.shape(), 1000 + round, 1);
    CHECK_EQ(fresh.store(client, 0).stored, 1);
    CHECK_EQ(fresh.store(client, 1).stored, 1);
    CHECK_EQ(fresh.load(client, 1), 1);
  }
  // What the rogues reserved ends with them.
  for (int i = 0; i < 100000 && daemon.status().reserved_slots + daemon.status().limbo_slots != 0;
       ++i)
    daemon.tick();
  CHECK_EQ(daemon.status().reserved_slots + daemon.status().limbo_slots, 0);
  CHECK_EQ(daemon.status().quarantined, 0);
}

}  // namespace
}  // namespace kvw
