// Loads and pins: from DRAM without a call, from NVMe after asking for promotion
// (promotion_window.h).
#include <algorithm>

#include "base/error.h"
#include "base/sequence_point.h"
#include "client/client.h"
#include "client/device_load.h"
#include "client/promotion_window.h"

namespace kvw {

namespace {

uint64_t now_ns() { return system_clock().boot_ns(); }

}  // namespace

LoadReport Client::load(const Key& namespace_id, Prompt& prompt, size_t first,
                        const Regions& regions, uint32_t shard, uint64_t timeout_ns) {
  const uint64_t deadline_ns = now_ns() + timeout_ns;
  const Open call = open(namespace_id, prompt, false, deadline_ns);
  const NamespaceShape& shape = call.row.shape;
  if (shard >= shape.shards)
    throw Error(ErrorKind::usage, "bad_shard",
                "shard is " + std::to_string(shard) + ", this namespace has " +
                    std::to_string(shape.shards));
  if (regions.page_bytes() != shape.shard_bytes)
    throw Error(ErrorKind::usage, "bad_page_bytes",
                "a page of the buffer has " + std::to_string(regions.page_bytes()) +
                    " bytes, a page of the namespace " + std::to_string(shape.shard_bytes));
  if (!regions.writable())
    throw Error(ErrorKind::usage, "read_only_buffer", "the buffer to load into is read-only");
  LoadReport report =
      regions.device() == nullptr
          ? load_to_host(call, prompt, first, regions, shard, deadline_ns)
          : DeviceLoad(*this, call, prompt, first, regions, shard, deadline_ns).run();
  ClientSession& session = *call.session;
  if (const auto late = report.reasons.find(reason_name(Reason::timeout));
      late != report.reasons.end())
    session.count(Counter::load_timeout, late->second);
  session.count(Counter::loads);
  session.count(Counter::pages_loaded, report.pages);
  session.count(Counter::bytes_loaded, report.pages * shape.shard_bytes);
  return report;
}

LoadReport Client::load_to_host(const Open& call, Prompt& prompt, size_t first,
                                const Regions& regions, uint32_t shard, uint64_t deadline_ns) {
  const NamespaceShape& shape = call.row.shape;
  ClientSession& session = *call.session;
  const size_t end = std::min(prompt.pages(), first + regions.count());
  PromotionWindow promotions(*this, call, prompt, deadline_ns);
  LoadReport report;
  std::vector<Piece> pieces;
  Reason why = Reason::none;
  size_t page = first;
  int stale = 0;
  while (page < end) {
    const auto entry = promotions.in_dram(page, end, why);
    if (!entry) break;
    KVW_SEQUENCE_POINT("load: entry found");
    regions.pieces(page - first, pieces);
    const Expected expected = expected_page(shape.id, prompt, page);
    const bool verify = options_.verify_always || (entry->flags & kEntryUnverified) != 0;
    if (call.view->slot_in_range(entry->slot))
      call.view->prefault(
          entry->slot, call.view->slots().layout(call.view->slots().slab_of(entry->slot)), false);
    const LoadResult result = call.view->load(*entry, expected, shape, shard, pieces, verify);
    if (result == LoadResult::ok) {
      session.touch(*entry);
      ++page;
      stale = 0;
      continue;
    }
    if (result == LoadResult::mismatch) {
      session.count(Counter::load_mismatch);
      report_mismatch(*entry, *call.view, shard, deadline_ns);
    } else {
      session.count(Counter::load_stale);
    }
    const bool damaged = result == LoadResult::mismatch;
    if (++stale >= kStaleTries || (damaged && !promotions.has_other_copy(*entry))) {
      why = damaged ? Reason::mismatch : Reason::stale;
      break;
    }
  }
  report.pages = page - first;
  if (page < end && why != Reason::none) report.reasons[reason_name(why)] = end - page;
  return report;
}

std::vector<Client::Held> Client::hold(const Open& call, PromotionWindow& promotions, size_t page,
                                       size_t end, Pins* budget, Reason& why) {
  ClientSession& session = *call.session;
  std::vector<Held> batch;
  const auto release = [&](size_t from) {
    for (size_t i = from; i < batch.size(); ++i) session.drop_pin(batch[i].place);
    if (budget != nullptr) budget->give_back_room(batch.size() - from);
    batch.resize(from);
  };
  for (; page + batch.size() < end;) {
    const auto entry = promotions.in_dram(page + batch.size(), end, why);
    if (!entry) break;
    const bool room = budget == nullptr || budget->take_room();
    const int place = room ? session.take_pin() : -1;
    if (place < 0) {
      if (room && budget != nullptr) budget->give_back_room(1);
      release(0);
      session.count(Counter::pins_refused);
      throw Error(ErrorKind::pin, "pin_budget",
                  "a session may pin " +
                      std::to_string(call.view->control().pin_limit_bytes.value.load()) +
                      " bytes and " + std::to_string(kPinCapacity) +
                      " pages; release pins, or pin fewer pages at a time");
    }
    KVW_SEQUENCE_POINT("pin: entry found");
    session.store_pin(place, slot_pin(entry->slot, entry->generation));
    batch.push_back({place, *entry});
  }
  // The one fence of the batch: the reclaimer's stands between its CLOSING and its scan, so one
  // of the two sees the other.
  full_fence();
  KVW_SEQUENCE_POINT("pin: stored");
  size_t held = 0;
  // What the daemon does not see of the session holds nothing.
  while (held < batch.size() && !session.lost() &&
         call.view->slot_in_range(batch[held].entry.slot) &&
         call.view->is_live(batch[held].entry.slot, batch[held].entry.generation))
    ++held;
  release(held);
  return batch;
}

std::unique_ptr<Pins> Client::pin(const Key& namespace_id, Prompt& prompt, size_t first,
                                  uint64_t timeout_ns) {
  constexpr size_t kBatch = 256;  // pages per fence
  const uint64_t deadline_ns = now_ns() + timeout_ns;
  const Open call = open(namespace_id, prompt, false, deadline_ns);
  auto pins = std::make_unique<Pins>(call.session, pinned_bytes_);
  pins->bytes_each_ = call.row.shape.slot_bytes();
  pins->limit_bytes_ = call.view->control().pin_limit_bytes.value.load();
  PromotionWindow promotions(*this, call, prompt, deadline_ns);
  Reason why = Reason::none;
  for (size_t page = first; page < prompt.pages();) {
    const size_t end = std::min(prompt.pages(), page + kBatch);
    const std::vector<Held> batch = hold(call, promotions, page, end, pins.get(), why);
    for (const Held& each : batch) {
      pins->places_.push_back(each.place);
      call.session->touch(each.entry);
    }
    page += batch.size();
    if (page < end) break;
  }
  call.session->count(Counter::pins_taken, pins->places_.size());
  return pins;
}

}  // namespace kvw
