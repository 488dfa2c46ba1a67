// Loads: from DRAM without a call, from NVMe after asking for promotion (promotion_window.h), from
// the remote store after asking for a fetch (fetch_window.h).
#include <algorithm>

#include "base/error.h"
#include "base/sequence_point.h"
#include "client/client.h"
#include "client/device_load.h"
#include "client/promotion_window.h"

namespace kvw {

namespace {

LoadReport load_to_host(const ClientCall& call, size_t first, const Regions& regions,
                        uint32_t shard) {
  const View& view = call.view();
  ClientSession& session = call.session();
  const bool verify_always = call.link.options().verify_always;
  const size_t end = std::min(call.prompt.pages(), first + regions.count());
  PromotionWindow promotions(call);
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
    const Expected expected = call.expected(page);
    const bool verify = verify_always || (entry->flags & kEntryUnverified) != 0;
    view.prefault(entry->slot, false);
    const LoadResult result = view.load(*entry, expected, call.shape(), shard, pieces, verify);
    if (result == LoadResult::ok) {
      session.touch(*entry);
      ++page;
      stale = 0;
      continue;
    }
    if (result == LoadResult::mismatch) {
      session.count(Counter::load_mismatch);
      call.report_mismatch(*entry, shard);
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
  report.fetched = promotions.fetched(first, page);
  if (page < end && why != Reason::none) report.reasons[reason_name(why)] = end - page;
  return report;
}

}  // namespace

LoadReport Client::load(const Key& namespace_id, Prompt& prompt, size_t first,
                        const Regions& regions, uint32_t shard, uint64_t timeout_ns) {
  const auto call = ClientCall::open(link_, namespace_id, prompt, false, now_ns() + timeout_ns);
  call.check_pages(regions, shard);
  if (!regions.writable())
    throw Error(ErrorKind::usage, "read_only_buffer", "the buffer to load into is read-only");
  link_.renew_remote(call.deadline_ns);
  LoadReport report = regions.device() == nullptr
                          ? load_to_host(call, first, regions, shard)
                          : DeviceLoad(call, gpus_, first, regions, shard).run();
  ClientSession& session = call.session();
  if (const auto late = report.reasons.find(reason_name(Reason::timeout));
      late != report.reasons.end())
    session.count(Counter::load_timeout, late->second);
  session.count(Counter::loads);
  session.count(Counter::pages_loaded, report.pages);
  session.count(Counter::pages_loaded_remote, report.fetched);
  session.count(Counter::bytes_loaded, report.pages * call.shape().shard_bytes);
  return report;
}

}  // namespace kvw
