// What the local socket answers. Every body is bounds-checked before it is used; garbage ends the
// connection, a wrong request is refused with a reason, and neither touches anybody else.
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <string>

#include "base/error.h"
#include "presence/presence_file.h"
#include "server/server.h"

namespace kvw {

namespace {

constexpr uint32_t kItemsPerMessage = 8192;

}  // namespace

bool Server::send(Connection& connection, std::span<const std::byte> message,
                  std::span<const int> descriptors) {
  iovec piece{const_cast<std::byte*>(message.data()), message.size()};
  msghdr header{};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(5 * sizeof(int))> control{};
  if (!descriptors.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  // A client that asks and does not read its answers loses its connection, not the daemon's time.
  return ::sendmsg(connection.fd.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(message.size());
}

bool Server::refuse(Connection& connection, uint64_t request, const Error& error) {
  Writer writer(MessageType::refused, request);
  std::string text = kind_name(error.kind());
  text += '\0' + error.code() + '\0' + error.what();
  writer.put_bytes(text.data(), text.size());
  writer.set_counts(static_cast<uint32_t>(text.size()));
  return send(connection, writer.finish());
}

bool Server::answer(Connection& connection, std::span<const std::byte> message) {
  const MessageHead* head = parse_head(message);
  if (head == nullptr) {
    warehouse_->on_event("message_refused", "reason=not_ours");
    return false;
  }
  if (head->version != kProtocolVersion)
    return refuse(
        connection, head->request,
        Error(ErrorKind::usage, "protocol_version",
              "the client speaks protocol " + std::to_string(head->version) + ", this daemon " +
                  std::to_string(kProtocolVersion) + "; upgrade the older one"));
  if (head->first > kItemsPerMessage || head->second > kItemsPerMessage)
    return refuse(connection, head->request,
                  Error(ErrorKind::usage, "message_too_large",
                        "a message may hold " + std::to_string(kItemsPerMessage) + " items"));
  Reader body(message.subspan(sizeof(MessageHead)));
  if (head->type != MessageType::hello && connection.session == 0)
    return refuse(connection, head->request,
                  Error(ErrorKind::usage, "no_session", "say hello first"));
  try {
    switch (head->type) {
      case MessageType::hello:
        return answer_hello(connection, *head, body);
      case MessageType::exchange:
        return answer_exchange(connection, *head, body);
      case MessageType::settle:
        return answer_settle(connection, *head, body);
      case MessageType::promote:
        return answer_promote(connection, *head, body);
      case MessageType::report:
        return answer_report(connection, *head, body);
      case MessageType::locate:
        return answer_locate(connection, *head);
      case MessageType::hbm:
        return answer_hbm(connection, *head);
      case MessageType::presence:
        return answer_presence(connection, *head);
      case MessageType::fetch:
        return answer_fetch(connection, *head, body);
      default:
        warehouse_->on_event("message_refused", "reason=unknown_type");
        return false;
    }
  } catch (const Error& error) {
    return refuse(connection, head->request, error);
  }
}

bool Server::answer_hello(Connection& connection, const MessageHead& head, Reader& body) {
  const Hello* hello = body.take<Hello>();
  const SlotRef* after = body.take_array<SlotRef>(head.first);
  if (!body.ok() || head.first > 1 ||
      (connection.session != 0 && connection.session != hello->session))
    return false;
  Registry& sessions = warehouse_->sessions();
  Fd session_fd;
  SessionId id = 0;
  if (connection.session != 0) {
    id = connection.session;  // again, for its unsettled slots
  } else if (hello->session != 0 && sessions.find(hello->session, connection.pid) != nullptr) {
    id = hello->session;
    // The owner is here, on a new connection: the old one is history.
    std::vector<int> old;
    for (const auto& [fd, other] : connections_)
      if (other.session == id) old.push_back(fd);
    for (const int fd : old) hang_up(fd);
    sessions.find(id, connection.pid);
  } else {
    Registry::Created created = sessions.create(connection.pid);
    id = created.session->id;
    session_fd = std::move(created.descriptor);
  }
  connection.session = id;
  connection.read_only = (head.flags & kHelloReadOnly) != 0;
  Arena& arena = warehouse_->arena();
  if (const int mended = arena.mend_headers(); mended > 0)
    warehouse_->on_event("headers_mended", "files=" + std::to_string(mended));
  std::array<int, 5> descriptors{arena.control_fd(), arena.slots_fd(), arena.index_fd(),
                                 connection.read_only ? arena.arena_read_fd() : arena.arena_fd(),
                                 session_fd.get()};
  const uint32_t count = session_fd.valid() ? 5 : 4;
  std::vector<SlotRef> unsettled = warehouse_->unsettled(id);
  const auto order = [](const SlotRef& ref) { return std::pair(ref.slot, ref.shard); };
  if (head.first == 1)
    std::erase_if(unsettled, [&](const SlotRef& ref) { return order(ref) <= order(*after); });
  std::ranges::sort(unsettled, {}, order);
  if (unsettled.size() > kUnsettledPerWelcome) unsettled.resize(kUnsettledPerWelcome);
  Writer writer(MessageType::welcome, head.request);
  writer.put(Welcome{id, arena.incarnation(), arena.control().warehouse_id});
  writer.put_bytes(unsettled.data(), unsettled.size() * sizeof(SlotRef));
  writer.set_counts(static_cast<uint32_t>(unsettled.size()), count,
                    kWelcomeSince | (warehouse_->has_log() ? kWelcomeLocates : 0) |
                        (warehouse_->hbm() != nullptr ? kWelcomeHbm : 0) |
                        (warehouse_->fetches() != nullptr ? kWelcomeRemote : 0));
  return send(connection, writer.finish(), std::span(descriptors).first(count));
}

bool Server::answer_exchange(Connection& connection, const MessageHead& head, Reader& body) {
  if (connection.read_only)
    throw Error(ErrorKind::usage, "read_only", "this session is read-only: it cannot store");
  const uint64_t* since = (head.flags & kExchangeSince) != 0 ? body.take<uint64_t>() : nullptr;
  const Key* space = body.take<Key>();
  const Seal* seals = body.take_array<Seal>(head.first);
  std::vector<ReserveRequest> requests;
  requests.reserve(head.second);
  for (uint32_t i = 0; i < head.second && body.ok(); ++i) {
    const Reserve* fields = body.take<Reserve>();
    if (fields == nullptr) break;
    const auto* witness = body.take_array<std::byte>(fields->witness_bytes);
    requests.push_back({fields, witness});
  }
  if (!body.ok()) return false;
  std::vector<SealAnswer> sealed;
  std::vector<ReserveAnswer> reserved;
  const ExchangeTarget target(*space, since == nullptr ? std::nullopt : std::optional(*since));
  warehouse_->exchange(connection.session, target, std::span(seals, head.first), requests, sealed,
                       reserved);
  Writer writer(MessageType::exchanged, head.request);
  writer.put_bytes(sealed.data(), sealed.size() * sizeof(SealAnswer));
  writer.put_bytes(reserved.data(), reserved.size() * sizeof(ReserveAnswer));
  writer.set_counts(static_cast<uint32_t>(sealed.size()), static_cast<uint32_t>(reserved.size()));
  const bool sent = send(connection, writer.finish());
  warehouse_->count_stores();
  return sent;
}

bool Server::answer_settle(Connection& connection, const MessageHead& head, Reader& body) {
  const SlotRef* refs = body.take_array<SlotRef>(head.first);
  if (!body.ok()) return false;
  warehouse_->settle(connection.session, std::span(refs, head.first));
  return send(connection, Writer(MessageType::settled, head.request).finish());
}

bool Server::answer_promote(Connection& connection, const MessageHead& head, Reader& body) {
  const Key* keys = body.take_array<Key>(head.first);
  if (!body.ok()) return false;
  std::vector<PromoteAnswer> answers;
  warehouse_->promote(std::span(keys, head.first), answers);
  Writer writer(MessageType::promoting, head.request);
  writer.put_bytes(answers.data(), answers.size() * sizeof(PromoteAnswer));
  writer.set_counts(static_cast<uint32_t>(answers.size()));
  return send(connection, writer.finish());
}

bool Server::answer_report(Connection& connection, const MessageHead& head, Reader& body) {
  const Report* report = body.take<Report>();
  if (!body.ok()) return false;
  warehouse_->report(connection.session, *report);
  return send(connection, Writer(MessageType::reported, head.request).finish());
}

bool Server::answer_locate(Connection& connection, const MessageHead& head) {
  if (!warehouse_->has_log())
    throw Error(ErrorKind::usage, "no_nvme_tier", "this daemon has no NVMe tier");
  const std::string path = warehouse_->segments_directory();
  const Fd directory(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!directory.valid()) throw storage_error("cannot open " + path, errno);
  Writer writer(MessageType::located, head.request);
  writer.put(Located{warehouse_->segments_held_limit()});
  writer.set_counts(1, 1);
  const int descriptor = directory.get();
  return send(connection, writer.finish(), std::span(&descriptor, 1));
}

bool Server::answer_hbm(Connection& connection, const MessageHead& head) {
  HbmTier* hbm = warehouse_->hbm();
  if (hbm == nullptr || hbm->table() == nullptr)
    throw Error(ErrorKind::usage, "hbm_not_ready",
                "this daemon has no pool in HBM (kvwarehouse status says why); pages come from "
                "DRAM");
  Writer writer(MessageType::hbm_shared, head.request);
  writer.set_counts(0, 2);
  const std::array<int, 2> descriptors{hbm->table()->fd(), hbm->pool_fd()};
  return send(connection, writer.finish(), descriptors);
}

bool Server::answer_presence(Connection& connection, const MessageHead& head) {
  const Fd file =
      warehouse_->fetches() != nullptr ? open_presence(warehouse_->presence_path()) : Fd();
  if (!file.valid())
    throw Error(ErrorKind::usage, "presence_not_ready",
                "this daemon has no presence filter of a remote store (kvwarehouse status says "
                "why); what is stored here is served");
  Writer writer(MessageType::presence_shared, head.request);
  writer.set_counts(0, 1);
  const int descriptor = file.get();
  return send(connection, writer.finish(), std::span(&descriptor, 1));
}

bool Server::answer_fetch(Connection& connection, const MessageHead& head, Reader& body) {
  const FetchSpace* space = body.take<FetchSpace>();
  const FetchRun* runs = body.take_array<FetchRun>(head.first);
  if (!body.ok()) return false;
  if (head.first > kFetchRuns)
    throw Error(ErrorKind::usage, "message_too_large",
                "a message may ask for " + std::to_string(kFetchRuns) + " runs");
  const std::vector<FetchAnswer> answers =
      warehouse_->fetch(connection.session, *space, std::span(runs, head.first));
  Writer writer(MessageType::fetching, head.request);
  writer.put_bytes(answers.data(), answers.size() * sizeof(FetchAnswer));
  writer.set_counts(static_cast<uint32_t>(answers.size()));
  const bool sent = send(connection, writer.finish());
  // Whoever asked waits: not until the next tick, and behind its answer.
  with_link(get_link_, &CoreLink::give);
  return sent;
}

}  // namespace kvw
