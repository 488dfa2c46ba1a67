// Messages of the local socket as both sides read them: what is taken lies inside the message.
#include "exchange/messages.h"

#include "fuzz/target.h"

namespace kvw::fuzz {
namespace {

// As answers.cc, load.cc and store.cc do it: counts from the head, then whatever they say.
void walk(const MessageHead& head, Reader body) {
  switch (head.type) {
    case MessageType::exchange: {
      if ((head.flags & kExchangeSince) != 0) body.take<uint64_t>();
      body.take<Key>();
      body.take_array<Seal>(head.first);
      for (uint32_t i = 0; i < head.second && body.ok(); ++i) {
        const auto* fields = body.take<Reserve>();
        if (fields != nullptr) body.take_array<std::byte>(fields->witness_bytes);
      }
      break;
    }
    case MessageType::exchanged:
      body.take_array<SealAnswer>(head.first);
      body.take_array<ReserveAnswer>(head.second);
      break;
    case MessageType::fetch:
      body.take<FetchSpace>();
      body.take_array<FetchRun>(head.first);
      break;
    case MessageType::fetching:
      body.take_array<FetchAnswer>(head.first);
      break;
    case MessageType::welcome:
      body.take<Welcome>();
      body.take_array<SlotRef>(head.first);
      break;
    default:
      body.take_array<Key>(head.first);
      body.take<Report>();
  }
}

void read_all(std::span<const std::byte> body, Input shape) {
  Reader reader(body);
  const std::byte* end = body.data() + body.size();
  while (!shape.empty() && reader.ok()) {
    const auto count = shape.number<uint32_t>();
    const auto* taken = reader.take_array<SlotRef>(count);
    if (taken == nullptr) continue;
    require(reinterpret_cast<const std::byte*>(taken + count) <= end, "what was read is inside");
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; ++i) sum += taken[i].generation;
    asm volatile("" : : "r"(sum));
  }
}

}  // namespace
}  // namespace kvw::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvw;
  fuzz::Input input(data, size);
  const bool honest = input.number<uint8_t>() % 4 != 0;  // its head says what it is
  const auto raw = input.take(size);
  std::vector<std::byte> message(raw.size());  // exactly: a byte too far is somebody else's
  if (!raw.empty()) std::memcpy(message.data(), raw.data(), raw.size());
  if (honest && message.size() >= sizeof(MessageHead)) {
    auto* head = reinterpret_cast<MessageHead*>(message.data());
    head->magic = kMessageMagic;
    head->bytes = static_cast<uint32_t>(message.size());
  }
  const MessageHead* head = parse_head(message);
  if (head == nullptr) return 0;
  const auto body = std::span<const std::byte>(message).subspan(sizeof(MessageHead));
  fuzz::walk(*head, Reader(body));
  fuzz::read_all(body, fuzz::Input(data, size));
  return 0;
}
