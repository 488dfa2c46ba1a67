// A real daemon core and a peer that says what the input says, over the real socket: the daemon
// stays, and what others have stored stays right.
#include <poll.h>

#include "fuzz/target.h"
#include "tests/daemon_world.h"

namespace kvw::fuzz {
namespace {

constexpr int kMost = 16;             // messages of an input
constexpr uint64_t kCheckEach = 256;  // inputs

// The peer: one session, presented again after each hang-up, so that inputs leave no files behind.
class Peer {
 public:
  explicit Peer(const Daemon& daemon) : path_(daemon.socket()) {}

  // False: hung up on, or nothing came within the daemon's patience.
  bool exchange(std::span<const std::byte> message) {
    if (!fd_.valid() && !hello()) return false;
    if (::send(fd_.get(), message.data(), message.size(), MSG_NOSIGNAL) < 0 || !receive()) {
      fd_.reset();
      return false;
    }
    return true;
  }

 private:
  bool hello() {
    fd_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.c_str(), path_.size() + 1);
    require(::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0,
            "the daemon takes connections");
    Writer writer(MessageType::hello, 1);
    writer.put(Hello{session_, 1});
    const auto message = writer.finish();
    require(::send(fd_.get(), message.data(), message.size(), MSG_NOSIGNAL) > 0, "hello is sent");
    require(receive(), "hello is answered");
    const auto* head = reinterpret_cast<const MessageHead*>(reply_.data());
    require(head->type == MessageType::welcome, "hello is welcomed");
    session_ = reinterpret_cast<const Welcome*>(head + 1)->session;
    return true;
  }
  bool receive() {
    pollfd watch{fd_.get(), POLLIN, 0};
    require(::poll(&watch, 1, kPatienceMs) == 1, "every message is answered or hung up on");
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(8 * sizeof(int))> control{};
    iovec piece{reply_.data(), reply_.size()};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t got = ::recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC);
    cmsghdr* part = got > 0 ? CMSG_FIRSTHDR(&header) : nullptr;
    if (part == nullptr) return got > 0;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t at = 0; at < count; ++at) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + at * sizeof fd, sizeof fd);
      Fd taken(fd);
      if (at == 4) lock_ = std::move(taken);  // of the session: kept, so that it lives
    }
    return true;
  }

  std::string path_;
  Fd fd_, lock_;
  uint64_t session_ = 0;
  std::vector<std::byte> reply_ = std::vector<std::byte>(kMessageBytes);
};

struct Target {
  Target() : daemon(shape_of(5000)) {
    daemon.options.remote_read = true;
    daemon.start();
    remote = std::make_unique<RemoteGets>(daemon);
    client = std::make_unique<Client>(daemon.client_options());
    good = std::make_unique<Chain>(daemon.shape(), 1, 3);
    good->store_all(*client);
    Prompt prompt = good->prompt();
    pins = client->pin(kSpace, prompt, 0, kSecondNs);  // whatever the peer stores, they stay
    peer = std::make_unique<Peer>(daemon);
  }
  void check() {
    require(good->load(*client, 0) == 3 && good->load(*client, 1) == 3, "good pages are served");
    require(daemon.status().quarantined == 0, "nobody is believed who says they are bad");
  }

  Daemon daemon;
  std::unique_ptr<Client> client;
  std::unique_ptr<Chain> good;
  std::unique_ptr<Pins> pins;
  std::unique_ptr<Peer> peer;
  std::unique_ptr<RemoteGets> remote;
  uint64_t inputs = 0;
};

// A message of the input: honest about its size mostly, its type one that exists mostly. Words of
// it are the good page's key or the namespace, which no noise would ever hit.
std::vector<std::byte> message_of(Input& input, const Chain& good) {
  const auto how = input.number<uint8_t>();
  const auto raw = input.take(input.number<uint8_t>() * 4ull);
  std::vector<std::byte> message(sizeof(MessageHead) + raw.size());
  if (!raw.empty()) std::memcpy(message.data() + sizeof(MessageHead), raw.data(), raw.size());
  auto* head = new (message.data()) MessageHead{};
  head->type = static_cast<MessageType>(input.number<uint8_t>() % 20);
  head->request = 9;
  head->first = input.number<uint8_t>();
  head->second = input.number<uint8_t>();
  head->bytes = static_cast<uint32_t>(message.size());
  if (how % 8 == 0) head->first = input.number<uint32_t>();
  if (how % 8 == 1) head->bytes = input.number<uint32_t>();
  if (how % 8 == 2) head->version = input.number<uint16_t>();
  if (how % 8 == 3) head->flags = input.number<uint32_t>();
  const Key known[] = {kSpace, good.pages[0].key, good.pages[1].key};
  for (size_t at = sizeof(MessageHead), bit = 16; at + sizeof(Key) <= message.size() && bit != 0;
       at += sizeof(Key), bit = bit << 1 & 0xff)
    if ((how & bit) != 0)
      std::memcpy(message.data() + at, &known[at / sizeof(Key) % 3], sizeof(Key));
  if (head->type == MessageType::fetch && raw.size() >= sizeof(FetchSpace) + sizeof(FetchRun)) {
    auto* space = reinterpret_cast<FetchSpace*>(head + 1);
    auto* run = reinterpret_cast<FetchRun*>(space + 1);
    if ((how & 8) != 0) space->namespace_id = kSpace;
    space->witness_kind = 1 + space->witness_kind % 2;
    run->pages = 16;  // an object's, of this shape
    run->first_position -= run->first_position % 16;
  }
  return message;
}

}  // namespace
}  // namespace kvw::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvw;
  static fuzz::Target target;
  fuzz::Input input(data, size);
  for (int count = 0; count < fuzz::kMost && !input.empty(); ++count) {
    const auto message = fuzz::message_of(input, *target.good);
    target.peer->exchange(message);
  }
  uint64_t turn = ++target.inputs;
  const auto ends = [&turn] { return turn++; };
  target.remote->end_all(ends);
  if (target.inputs % fuzz::kCheckEach == 0) target.check();
  return 0;
}
