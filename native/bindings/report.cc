#include "bindings/report.h"

#include <nanobind/stl/vector.h>

#include <algorithm>

#include "exchange/drop_counters.h"

namespace kvw::bindings {

namespace {

nb::dict left_by_reason(const std::array<uint64_t, kLeaveReasons>& counts) {
  nb::dict made;
  for (size_t i = 0; i < kLeaveReasons; ++i) made[leave_reason_name(LeaveReason(i))] = counts[i];
  return made;
}

nb::dict counts_of(const std::map<std::string, uint64_t>& counts) {
  nb::dict made;
  for (const auto& [name, count] : counts) made[name.c_str()] = count;
  return made;
}

nb::dict hbm_of(const HbmStatus& status) {
  nb::dict made, left;
  for (size_t i = 0; i < status.left.size(); ++i)
    left[hbm_leave_reason_name(HbmLeaveReason(i))] = status.left[i];
  made["health"] = status.health;
  made["reason"] = status.reason;
  made["capacity_bytes"] = status.capacity_bytes;
  made["used_bytes"] = status.used_bytes;
  made["pages"] = status.pages;
  made["leaving_places"] = status.leaving;
  made["queued_pages"] = status.queued;
  made["pages_promoted"] = status.pages_promoted;
  made["bytes_promoted"] = status.bytes_promoted;
  made["left"] = left;
  return made;
}

nb::dict puts_of(const PutsStatus& status) {
  nb::dict made, dropped;
  for (size_t i = 0; i < kPutDrops; ++i) dropped[put_drop_name(PutDrop(i))] = status.dropped[i];
  made["queued_runs"] = status.queued;
  made["runs_under_way"] = status.under_way;
  made["offered_runs"] = status.offered;
  made["refresh_runs"] = status.refreshes;
  made["dropped"] = dropped;
  return made;
}

nb::dict fetches_of(const FetchesStatus& status) {
  nb::dict made, ends;
  for (size_t i = 0; i < status.ends.size(); ++i)
    ends[remote::get_end_name(remote::GetEnd(i))] = status.ends[i];
  made["asked"] = status.asked;
  made["joined"] = status.joined;
  made["later"] = status.later;
  made["queued"] = status.queued;
  made["under_way"] = status.under_way;
  made["under_way_bytes"] = status.under_way_bytes;
  made["ends"] = ends;
  return made;
}

nb::dict dram_of(const WarehouseStatus& status) {
  nb::dict made;
  made["health"] = status.dram_health;
  made["capacity_bytes"] = status.dram_capacity_bytes;
  made["populated_bytes"] = status.dram_populated_bytes;
  made["used_bytes"] = status.dram_used_bytes;
  made["pages"] = status.dram_pages;
  made["free_slots"] = status.free_slots;
  made["reserved_slots"] = status.reserved_slots;
  made["limbo_slots"] = status.limbo_slots;
  made["zombie_slots"] = status.zombie_slots;
  made["left"] = left_by_reason(status.left_dram);
  return made;
}

nb::dict nvme_of(const WarehouseStatus& status) {
  const nvme::LogStats& log = status.log;
  nb::dict made;
  const bool writable = log.health == nvme::LogHealth::ok;
  made["health"] = !status.has_nvme ? "off" : writable ? "ok" : "read_only";
  made["reason"] = log.health_reason;
  made["io_engine"] = log.io_engine;
  made["direct_io"] = log.direct_io;
  made["capacity_bytes"] = log.capacity_bytes;
  made["used_bytes"] = log.used_bytes;
  made["pages"] = status.nvme_pages;
  made["segments"] = log.segments;
  made["free_segments"] = log.free_segments;
  made["queued_bytes"] = log.queued_bytes;
  made["queued_records"] = log.queued_records;
  made["reads_in_flight"] = log.reads_in_flight;
  made["promotions_in_flight"] = status.promotions_in_flight;
  made["pages_promoted"] = status.pages_promoted;
  made["written_records"] = log.written_records;
  made["written_bytes"] = log.written_bytes;
  made["relocated_records"] = log.relocated_records;
  made["relocated_bytes"] = log.relocated_bytes;
  made["read_records"] = log.read_records;
  made["read_bytes"] = log.read_bytes;
  made["read_digest_s"] = static_cast<double>(log.read_digest_ns) / 1e9;
  made["reclaimed_segments"] = log.reclaimed_segments;
  made["dropped_records"] = log.dropped_records;
  made["write_errors"] = log.write_errors;
  made["read_errors"] = log.read_errors;
  made["mismatches"] = log.mismatches;
  made["flushes"] = log.flushes;
  made["flush_errors"] = log.flush_errors;
  made["budget_bytes_per_day"] = status.nvme_bytes_per_day;
  made["budget_left_bytes"] = static_cast<int64_t>(status.nvme_bytes_left);
  made["read_bytes_per_s"] = log.read_bytes_per_s;
  made["write_bytes_per_s"] = log.write_bytes_per_s;
  made["oldest_position"] = uint64_t{log.oldest_life} << 32;
  made["left"] = left_by_reason(status.left_nvme);
  made["not_admitted"] = counts_of(status.not_admitted);
  return made;
}

uint64_t counter(const WarehouseStatus& status, Counter which) {
  return status.clients[static_cast<size_t>(which)];
}

nb::dict lookups_of(const WarehouseStatus& status) {
  nb::dict made;
  made["calls"] = counter(status, Counter::lookups);
  made["pages_hit_hbm"] = counter(status, Counter::lookup_hit_hbm);
  made["pages_hit_dram"] = counter(status, Counter::lookup_hit_dram);
  made["pages_hit_nvme"] = counter(status, Counter::lookup_hit_nvme);
  made["pages_hit_remote"] = counter(status, Counter::lookup_hit_remote);
  made["pages_missed"] = counter(status, Counter::lookup_missed);
  return made;
}

nb::dict loads_of(const WarehouseStatus& status) {
  nb::dict failed, made;
  failed["stale"] = counter(status, Counter::load_stale);
  failed["mismatch"] = counter(status, Counter::load_mismatch);
  failed["timeout"] = counter(status, Counter::load_timeout);
  made["calls"] = counter(status, Counter::loads);
  made["pages_loaded"] = counter(status, Counter::pages_loaded);
  made["hbm_mismatches"] = counter(status, Counter::load_mismatch_hbm);
  made["pages_from_hbm"] = counter(status, Counter::pages_loaded_hbm);
  made["pages_from_remote"] = counter(status, Counter::pages_loaded_remote);
  made["bytes_loaded"] = counter(status, Counter::bytes_loaded);
  made["failed"] = failed;
  return made;
}

nb::dict dropped_of(const WarehouseStatus& status) {
  nb::dict made;
  const auto put = [&](const char* name, Counter which) {
    if (const uint64_t pages = counter(status, which); pages != 0) made[name] = pages;
  };
  for (uint32_t at = 0; at < static_cast<uint32_t>(Reason::count); ++at)
    if (const Counter which = drop_counter(Reason(at)); which != Counter::dropped_other)
      put(reason_name(Reason(at)), which);
  put("other", Counter::dropped_other);
  return made;
}

nb::dict stores_of(const WarehouseStatus& status) {
  nb::dict made;
  made["calls"] = counter(status, Counter::stores);
  made["shards_stored"] = counter(status, Counter::pages_stored);
  made["pages_sealed"] = status.pages_sealed;
  made["bytes_sealed"] = status.bytes_sealed;
  made["already"] = counter(status, Counter::pages_already);
  made["stored_again"] = left_by_reason(status.stored_again);
  made["dropped"] = dropped_of(status);
  return made;
}

nb::list spaces_of(const WarehouseStatus& status) {
  nb::list made;
  for (const WarehouseStatus::Space& space : status.spaces) {
    nb::dict row;
    row["ordinal"] = space.ordinal;
    row["id"] = bytes_of(space.shape.id).attr("hex")();
    row["pages"] = space.pages;
    row["dram_pages"] = space.dram;
    row["nvme_pages"] = space.nvme;
    row["clear_epoch"] = space.clear_epoch;
    made.append(row);
  }
  return made;
}

nb::dict dict_of(const char* name, const TierCheck& tier) {
  nb::dict made;
  made["tier"] = name;
  made["pages"] = tier.pages;
  made["bytes"] = tier.bytes;
  made["bad"] = tier.bad;
  made["dropped"] = tier.dropped;
  made["dropped_bytes"] = tier.dropped_bytes;
  return made;
}

}  // namespace

nb::dict dict_of(const RecoverySummary& summary) {
  nb::dict made;
  made["pages_dram"] = summary.pages_dram;
  made["pages_nvme"] = summary.pages_nvme;
  made["dropped_slots"] = summary.dropped_slots;
  made["unfinished_slots"] = summary.unfinished_slots;
  made["cleared"] = summary.cleared;
  made["unknown_namespace"] = summary.unknown_namespace;
  made["orphans"] = summary.orphans;
  made["sessions"] = summary.sessions;
  made["segments"] = summary.log.segments;
  made["records"] = summary.log.records;
  made["scanned_segments"] = summary.log.scanned_segments;
  made["refused_records"] = summary.log.refused_records;
  made["foreign_segments"] = summary.log.foreign_segments;
  made["bad_headers"] = summary.log.bad_headers;
  made["unreadable_segments"] = summary.log.unreadable_segments;
  made["epoch_seen"] = summary.epoch;
  made["seconds"] = summary.seconds;
  return made;
}

nb::dict dict_of(const WarehouseStatus& status, const RecoverySummary& recovery,
                 const Key& warehouse_id, uint64_t connections) {
  nb::dict made, tiers, pins, index;
  made["warehouse_id"] = bytes_of(warehouse_id).attr("hex")();
  made["incarnation"] = status.incarnation;
  made["uptime_s"] = static_cast<double>(status.uptime_ns) / 1e9;
  made["draining"] = status.draining;
  tiers["hbm"] = hbm_of(status.hbm);
  tiers["dram"] = dram_of(status);
  tiers["nvme"] = nvme_of(status);
  made["tiers"] = tiers;
  made["lookups"] = lookups_of(status);
  made["loads"] = loads_of(status);
  made["stores"] = stores_of(status);
  made["quarantined"] = status.quarantined;
  made["orphan_pages"] = status.orphan_pages;
  made["released_pages"] = status.released_pages;
  made["keeps"] = status.keeps;
  made["kept_pages"] = status.kept_pages;
  made["kept_bytes"] = status.kept_bytes;
  made["keep_capacity_bytes"] = status.keep_capacity_bytes;
  made["sessions"] = status.sessions;
  made["connections"] = connections;
  pins["held"] = status.pins;
  pins["taken"] = counter(status, Counter::pins_taken);
  pins["refused"] = counter(status, Counter::pins_refused);
  made["pins"] = pins;
  index["pages"] = status.index_pages;
  index["capacity"] = status.index_capacity;
  index["bound"] = status.index_bound;
  made["index"] = index;
  made["remote_puts"] = puts_of(status.puts);
  made["remote_fetches"] = fetches_of(status.fetches);
  made["page_bytes_max"] = status.page_bytes_max;
  made["policy"] = status.policy;
  made["namespaces"] = spaces_of(status);
  made["recovery"] = dict_of(recovery);
  made["events_dropped"] = status.events_dropped;
  return made;
}

nb::dict dict_of(const PageInfo& page) {
  nb::dict made;
  nb::list tiers;
  if (page.hbm) tiers.append("hbm");
  if (page.dram) tiers.append("dram");
  if (page.nvme) tiers.append("nvme");
  made["id"] = page.page;
  made["namespace"] = page.space;
  made["key"] = bytes_of(page.key);
  made["parent"] = bytes_of(page.parent);
  made["position"] = page.position;
  made["tiers"] = tiers;
  made["bytes"] = page.bytes;
  made["sealed_at_ns"] = page.stored_at_ns;
  return made;
}

// Only sizes at which the curve rises: few of them, where few distances occurred.
nb::dict dict_of(const MissRatioReport& report) {
  nb::dict made;
  nb::list sizes, hits;
  double before = 0;
  for (size_t step = 0; step < MissRatioCurve::kSizes; ++step) {
    const double now = report.curve.hits[step];
    if (now <= before) continue;
    sizes.append(MissRatioCurve::size_bytes(step));
    hits.append(now);
    before = now;
  }
  made["uses"] = report.curve.uses;
  made["uses_lost"] = report.uses_lost;
  made["since_s"] = static_cast<double>(report.since_ns) / 1e9;
  made["share"] = report.curve.share;
  made["samples"] = report.curve.samples;
  made["sizes_bytes"] = sizes;
  made["hits"] = hits;
  return made;
}

nb::dict dict_of(const CheckReport& report) {
  nb::dict made;
  nb::list bad, tiers;
  for (const CheckReport::Bad& each : report.bad) {
    nb::dict row;
    row["key"] = bytes_of(each.key);
    row["tier"] = each.tier;
    row["reason"] = each.reason;
    bad.append(row);
  }
  tiers.append(dict_of("dram", report.dram));
  tiers.append(dict_of("nvme", report.nvme));
  made["next"] = report.next;
  made["tiers"] = tiers;
  made["bad"] = bad;
  return made;
}

nb::dict dict_of(const KeepReport& report) {
  nb::dict made;
  const uint64_t now = system_clock().boot_ns();
  made["id"] = report.id;
  made["left_s"] =
      static_cast<double>(report.time.until_ns - std::min(report.time.until_ns, now)) / 1e9;
  made["pages"] = report.pages;
  made["bytes"] = report.bytes;
  return made;
}

nb::dict dict_of(const WhyReport& report) {
  // Wall time in nanoseconds; 0: none. As far as the boot clock and the wall clock went alike.
  const auto wall_ns = [&](uint32_t at_s) -> uint64_t {
    const uint64_t ago_s = absence_time(report.boot_ns) - at_s;
    return at_s == 0 ? 0 : report.wall_ns - std::min(report.wall_ns, ago_s * kSecondNs);
  };
  nb::dict made, branches;
  nb::list runs;
  for (const WhyRun& run : report.runs) {
    const Absence& absence = run.why.absence;
    nb::dict row;
    row["first"] = run.first;
    row["pages"] = run.pages;
    const bool absent = run.why.state == PageWhy::State::absent;
    row["state"] = absent ? absence.refused ? "refused" : "left" : page_state_name(run.why.state);
    row["reason"] = absent ? absence.name() : "";
    row["earliest_at_ns"] = wall_ns(run.earliest_at_s);
    row["latest_at_ns"] = wall_ns(run.latest_at_s);
    row["first_at_ns"] = wall_ns(absence.at_s);
    row["stored_at_ns"] = wall_ns(absence.stored_at_s);
    row["used_at_ns"] = wall_ns(absence.used_at_s);
    row["used_earlier"] = absence.perhaps_earlier;
    row["remembered_ns"] = wall_ns(run.why.remembered_s);
    runs.append(row);
  }
  branches["pages"] = report.branches.pages;
  branches["more"] = report.branches.more;
  branches["compared"] = report.branches.compared;
  branches["common_tokens"] = report.branches.common_tokens;
  branches["tokens"] = report.branches.tokens;
  made["found"] = report.found;
  made["runs"] = runs;
  made["branches"] = branches;
  return made;
}

nb::dict fields_of(const std::string& detail) {
  nb::dict made;
  size_t at = 0;
  while (at < detail.size()) {
    const size_t end = std::min(detail.find(' ', at), detail.size());
    const std::string field = detail.substr(at, end - at);
    const size_t equals = field.find('=');
    if (equals == std::string::npos) {
      made.clear();
      made["detail"] = detail;
      return made;
    }
    made[field.substr(0, equals).c_str()] = field.substr(equals + 1);
    at = end + 1;
  }
  return made;
}

}  // namespace kvw::bindings
