#include "client/call.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace kvw {

ClientCall ClientCall::open(DaemonLink& link, const Key& namespace_id, Prompt& prompt, bool patient,
                            uint64_t deadline_ns) {
  link.renew(patient, deadline_ns);
  auto daemon = link.attachment();
  const View& view = *daemon->view;
  const auto row = view.space(namespace_id);
  if (!row) {
    require_whole(!view.control_lost(), "control page");
    throw Error(ErrorKind::usage, "namespace_unknown",
                "the daemon does not know namespace " + to_hex(namespace_id) + "; open it again");
  }
  prompt.bind(Secret(view.control().secret, kSecretBytes), namespace_id, row->shape.page_tokens);
  const uint64_t epoch = view.clear_epoch(row->ordinal);
  // Once all is read: with zeros for a secret nothing is found, with a zero for an epoch what was
  // cleared is.
  require_whole(!view.control_lost(), "control page");
  return {link, std::move(daemon), prompt, *row, epoch, deadline_ns};
}

bool ClientCall::follows_stored(size_t page) const {
  if (page != prompt.run_begin(page) || prompt.position(page) == 0) return true;
  const auto entry = view().index().find(prompt.parent(page));
  return entry && entry->space == row.ordinal && entry->clear_epoch >= clear_epoch;
}

void ClientCall::check_shard(uint32_t shard) const {
  if (shard >= shape().shards)
    throw Error(ErrorKind::usage, "bad_shard",
                "shard is " + std::to_string(shard) + ", this namespace has " +
                    std::to_string(shape().shards));
}

void ClientCall::check_pages(const Regions& regions, uint32_t shard) const {
  check_shard(shard);
  if (regions.page_bytes() != shape().shard_bytes)
    throw Error(ErrorKind::usage, "bad_page_bytes",
                "a page of the buffer has " + std::to_string(regions.page_bytes()) +
                    " bytes, a page of the namespace " + std::to_string(shape().shard_bytes));
}

void ClientCall::report_mismatch(const EntryView& entry, uint32_t shard) const {
  Writer message(MessageType::report);
  const uint64_t generation = view().slots().load(entry.slot).generation;
  message.put(Report{entry.key, generation, entry.slot, shard});
  link.tell(message, deadline_ns);
}

}  // namespace kvw
