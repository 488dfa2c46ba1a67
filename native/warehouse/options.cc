#include "warehouse/options.h"

#include <algorithm>
#include <bit>

#include "arena/arena.h"
#include "base/error.h"
#include "eviction/policy.h"
#include "nvme/log.h"
#include "nvme/segment.h"
#include "session/registry.h"
#include "warehouse/absences.h"
#include "warehouse/keeps.h"
#include "warehouse/page_table.h"
#include "warehouse/versions.h"

namespace kvw {

namespace {

constexpr uint64_t kMiB = 1ull << 20;
constexpr uint64_t kSegmentOwnBytes = 64 * 1024;

uint32_t segment_words_for(const WarehouseOptions& options) {
  return options.nvme_dir.empty() ? 0 : nvme::kMaxSegments;
}

// Pages are rarely smaller than 64 KiB; a table for more of them would cost memory for nothing.
// Never more than pages of 4 KiB could fill, nor a table above a sixteenth of the DRAM tier beside
// it.
uint64_t index_entries_for(const WarehouseOptions& options) {
  constexpr uint64_t kUsual = 65536, kMost = 1ull << 30;  // pages; a PageId has 32 bits
  if (options.index_pages > kMost)
    throw Error(ErrorKind::usage, "index_too_large",
                "--index-pages " + std::to_string(options.index_pages) + " is above the limit of " +
                    std::to_string(kMost));
  const uint64_t bytes = options.dram_bytes + options.nvme_capacity_bytes;
  uint64_t pages = options.index_pages;
  if (pages == 0) {
    const uint64_t most =
        std::max<uint64_t>(options.dram_bytes / 16 / (2 * sizeof(IndexEntry)), 1024);
    pages = std::clamp(bytes / (64 * 1024), std::min({kUsual, bytes / kBlockBytes, most}), most);
  }
  return std::bit_ceil(pages * 2);
}

}  // namespace

uint64_t segment_bytes_for(const WarehouseOptions& options) {
  if (options.nvme_segment_bytes != 0) return options.nvme_segment_bytes;
  // Above 16 TiB as large as makes no more of them than there may be.
  const uint64_t least =
      std::bit_ceil((options.nvme_capacity_bytes + nvme::kMaxSegments - 1) / nvme::kMaxSegments);
  return std::clamp(std::bit_floor(std::max<uint64_t>(options.nvme_capacity_bytes / 8, 1)), kMiB,
                    std::max(256 * kMiB, least));
}

uint64_t record_payload_max(const WarehouseOptions& options) {
  if (options.nvme_dir.empty()) return UINT64_MAX;
  const uint64_t segment = segment_bytes_for(options);
  return segment - std::min<uint64_t>(segment, kSegmentOwnBytes);
}

ArenaOptions arena_options_for(const WarehouseOptions& options) {
  if (options.secret.size() != kSecretBytes)
    throw Error(ErrorKind::usage, "bad_secret",
                "the domain's secret has " + std::to_string(options.secret.size()) +
                    " bytes, it needs " + std::to_string(kSecretBytes));
  return {options.arena_dir,
          options.warehouse_id,
          std::span<const std::byte, kSecretBytes>(options.secret.data(), kSecretBytes),
          options.dram_bytes,
          index_entries_for(options),
          segment_words_for(options)};
}

uint64_t index_bytes_for(const WarehouseOptions& options) {
  return index_bytes(index_entries_for(options));
}

uint64_t table_bytes(std::string_view policy, uint64_t pages, uint64_t slots, bool nvme) {
  // Of the standard library's: what an element takes, its share of the buckets or of the
  // allocator's headers with it.
  constexpr uint64_t kHashed = 56, kOrdered = 64;
  const uint64_t parents = pages / 2;  // with several children, which the catalog counts
  const uint64_t catalog = PageTable::bytes(pages) + parents * kHashed;
  const uint64_t pool = slots * (sizeof(PageId) + sizeof(SlotId) + policy_page_bytes(policy));
  const uint64_t kept = std::min(pages / 2, Keeps::kMostKeptPages) * kHashed;
  return catalog + Absences::bytes(pages) + kept + pool +
         (nvme ? std::min(pages, slots) * kOrdered : 0);  // unwritten ones
}

uint64_t table_bytes_for(const WarehouseOptions& options) {
  constexpr uint64_t kSlotBytes = 32 * 1024;
  const uint64_t pages = index_entries_for(options) / 2, slots = options.dram_bytes / kSlotBytes;
  const bool nvme = !options.nvme_dir.empty();
  const uint64_t recovery =
      std::min(pages, slots) * kRecoveredSlotBytes + (nvme ? pages * kRecoveredRecordBytes : 0);
  const uint64_t records = nvme ? pages * sizeof(nvme::RecordRef) : 0;  // of closed segments
  return table_bytes(options.policy, pages, slots, nvme) + recovery + records +
         Registry::kFilesBytes;
}

void check_options(const WarehouseOptions& options) {
  refuse_newer_files(options.arena_dir, options.nvme_dir);
  check_dram(options.dram_bytes);
  index_entries_for(options);
  if (!options.nvme_dir.empty())
    nvme::check_sizes(options.nvme_capacity_bytes, segment_bytes_for(options));
}

RemoteWrite remote_write_from(std::string_view name) {
  if (name.empty()) return RemoteWrite::none;
  if (name == "reused") return RemoteWrite::reused;
  if (name == "all") return RemoteWrite::all;
  throw Error(ErrorKind::usage, "bad_remote_write",
              "remote_write is '" + std::string(name) + "', it must be reused, all or empty");
}

const char* leave_reason_name(LeaveReason reason) {
  static constexpr const char* kNames[] = {"evicted", "window",      "rebalanced", "reclaimed",
                                           "cleared", "operator",    "orphaned",   "quarantined",
                                           "lost",    "write_budget"};
  static_assert(sizeof kNames / sizeof *kNames == kLeaveReasons);
  return kNames[static_cast<size_t>(reason)];
}

}  // namespace kvw
