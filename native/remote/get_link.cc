#include "remote/get_link.h"

#include <string>

#include "base/error.h"

namespace kvw::remote {

const char* get_end_name(GetEnd end) {
  static constexpr const char* kNames[] = {"filled", "missing", "damaged", "failed",
                                           "late",   "no_room", "cleared"};
  static_assert(std::size(kNames) == static_cast<size_t>(GetEnd::count));
  return end < GetEnd::count ? kNames[static_cast<size_t>(end)] : "unknown";
}

LinkGet link_get(const RunToGet& run) {
  return {run.number,
          run.namespace_id,
          run.key,
          run.epoch,
          run.clear_epoch,
          run.record_bytes,
          run.within_ns,
          run.first_position,
          run.pages,
          run.from,
          run.day,
          static_cast<uint32_t>(run.witness_kind),
          0};
}

std::optional<RunToGet> run_from(const LinkGet& wire) {
  const bool sound = is_run(wire.first_position, wire.pages, wire.record_bytes) &&
                     wire.from < wire.pages &&
                     (wire.witness_kind == static_cast<uint32_t>(WitnessKind::tokens) ||
                      wire.witness_kind == static_cast<uint32_t>(WitnessKind::engine_key));
  if (!sound) return std::nullopt;
  return RunToGet{.number = wire.number,
                  .namespace_id = wire.namespace_id,
                  .key = wire.key,
                  .epoch = wire.epoch,
                  .clear_epoch = wire.clear_epoch,
                  .record_bytes = wire.record_bytes,
                  .within_ns = wire.within_ns,
                  .first_position = wire.first_position,
                  .pages = wire.pages,
                  .from = wire.from,
                  .day = wire.day,
                  .witness_kind = static_cast<WitnessKind>(wire.witness_kind)};
}

void WorkerGetLink::ready(uint32_t gets) const {
  if (gets == 0 || gets > kMostGets)
    throw Error(ErrorKind::usage, "bad_gets",
                "a worker gets 1 to " + std::to_string(kMostGets) + " runs at a time, not " +
                    std::to_string(gets));
  end_.say(LinkGets{gets, 0});
}

void WorkerGetLink::state(uint64_t until_ns, uint64_t read_bytes_per_s,
                          uint64_t first_byte_ns) const {
  end_.say(LinkState{until_ns, read_bytes_per_s, first_byte_ns});
}

std::optional<RunToGet> WorkerGetLink::next(uint64_t timeout_ns) const {
  return end_.next_run<LinkGet>(timeout_ns);
}

void WorkerGetLink::done(const RunToGet& run, GetEnd end, uint32_t pages) const {
  end_.say(LinkGot{run.number, static_cast<uint32_t>(end), pages});
}

}  // namespace kvw::remote
