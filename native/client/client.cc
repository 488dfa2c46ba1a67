#include "client/client.h"

#include <utility>

#include "client/call.h"
#include "client/device_stage.h"
#include "copy/copy.h"

namespace kvw {

namespace {

// An impossible KVW_COPY_PATH is refused here, not by the first copy.
ClientOptions checked(ClientOptions options) {
  copy_path();
  return options;
}

}  // namespace

Client::Client(ClientOptions options) : link_(checked(std::move(options))) {}

void Client::close() {
  if (link_.forked()) return;  // the parent's; nothing of it is the child's to close
  link_.close();
  gpus_.close();
}

bool Client::refresh(uint64_t timeout_ns) {
  const uint64_t deadline_ns = now_ns() + timeout_ns;
  const bool found = link_.refresh(timeout_ns);
  if (found) link_.renew_remote(deadline_ns);
  return found;
}

bool Client::has_namespace(const Key& id) {
  const uint64_t deadline_ns = now_ns() + link_.options().timeout_ns;
  link_.renew(true, deadline_ns);
  link_.renew_remote(deadline_ns);
  return sees_namespace(id);
}

std::optional<uint64_t> Client::clear_epoch(const Key& id) {
  const auto seen = view();
  const auto row = seen->space(id);
  if (!row) return std::nullopt;
  return seen->clear_epoch(row->ordinal);
}

void Client::use_device(int ordinal, const std::string& image) {
  link_.attachment();  // refuses a closed client
  gpus_.add(ordinal, image);
  link_.attachment()->hbm.of(gpus_.device(ordinal), link_, now_ns() + link_.options().timeout_ns);
}

std::unique_ptr<DeviceStage> Client::device_stage(int ordinal, size_t bytes) {
  link_.attachment();  // refuses a closed client
  return std::make_unique<DeviceStage>(gpus_.device(ordinal), bytes);
}

std::unique_ptr<Pins> Client::pin(const Key& namespace_id, Prompt& prompt, size_t first,
                                  uint64_t timeout_ns) {
  const auto call = ClientCall::open(link_, namespace_id, prompt, false, now_ns() + timeout_ns);
  link_.renew_remote(call.deadline_ns);
  auto pins = std::make_unique<Pins>(call);
  pins->take(call, first);
  return pins;
}

}  // namespace kvw
