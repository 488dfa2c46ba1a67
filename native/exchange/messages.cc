#include "exchange/messages.h"

namespace kvw {

const char* reason_name(Reason reason) {
  static constexpr const char* kNames[] = {
      "none",        "draining",   "parent_missing", "reserve_limit",  "no_room",
      "later",       "index_full", "refused_tail",   "stale",          "not_owner",
      "cleared",     "mismatch",   "io_error",       "timeout",        "busy",
      "unreachable", "missing",    "remote_missing", "remote_damaged", "remote_failed",
      "remote_off"};
  static_assert(sizeof kNames / sizeof *kNames == static_cast<size_t>(Reason::count));
  return reason < Reason::count ? kNames[static_cast<size_t>(reason)] : "unknown";
}

Writer::Writer(MessageType type, uint64_t request) : data_(sizeof(MessageHead)) {
  head() = MessageHead{};
  head().type = type;
  head().request = request;
}

void Writer::put_bytes(const void* data, size_t bytes) {
  if (bytes == 0) return;  // `data` may be nullptr then, which memcpy does not allow
  const size_t at = data_.size();
  data_.resize(at + round_up(bytes, 8));
  std::memcpy(data_.data() + at, data, bytes);
}

void Writer::set_counts(uint32_t first, uint32_t second, uint32_t flags) {
  head().first = first;
  head().second = second;
  head().flags = flags;
}

std::span<const std::byte> Writer::finish() {
  head().bytes = static_cast<uint32_t>(data_.size());
  return data_;
}

const MessageHead* parse_head(std::span<const std::byte> message) {
  if (message.size() < sizeof(MessageHead)) return nullptr;
  const auto* head = reinterpret_cast<const MessageHead*>(message.data());
  if (head->magic != kMessageMagic || head->bytes != message.size()) return nullptr;
  return head;
}

}  // namespace kvw
