"""What Core.status() returns, and Core.start()'s report: nested dicts of plain values.

The same names as in proto/kvwarehouse/v1/status.proto (a test keeps them equal). Counters rise from
the daemon's start. One call is one snapshot: sums hold within it.
"""

from typing import TypedDict


class HbmStatus(TypedDict):
    """Copies of pages of the DRAM tier in the memory of a GPU. All zero without the tier."""

    health: str  # "off", "starting", "ok", "waiting" (for room on the device), "failed"
    reason: str  # why it waits or failed, and what to do
    capacity_bytes: int
    used_bytes: int
    pages: int
    leaving_places: int  # dropped while somebody may still read them
    queued_pages: int  # to be copied
    pages_promoted: int
    bytes_promoted: int
    left: dict[str, int]  # copies by reason: names of native HbmLeaveReason


class DramStatus(TypedDict):
    health: str  # "ok", "populating", or why it cannot grow
    capacity_bytes: int
    populated_bytes: int
    used_bytes: int
    pages: int
    free_slots: int
    reserved_slots: int
    limbo_slots: int
    zombie_slots: int
    left: dict[str, int]  # pages by reason: names of native LeaveReason


class NvmeStatus(TypedDict):
    """The fields of nvme::LogStats, and what the index knows. All zero without the tier."""

    health: str  # "off", "ok", "read_only"
    reason: str
    io_engine: str
    direct_io: bool
    capacity_bytes: int
    used_bytes: int
    pages: int
    segments: int
    free_segments: int
    queued_bytes: int
    queued_records: int
    reads_in_flight: int
    promotions_in_flight: int
    pages_promoted: int
    written_records: int
    written_bytes: int
    relocated_records: int
    relocated_bytes: int
    read_records: int
    read_bytes: int
    read_digest_s: float  # of the processor, to digest what was read of records
    reclaimed_segments: int
    dropped_records: int
    write_errors: int
    read_errors: int
    mismatches: int
    flushes: int
    flush_errors: int
    read_bytes_per_s: int
    write_bytes_per_s: int
    oldest_position: int  # in the log (life << 32): a start finds nothing older; 0: not known
    left: dict[str, int]  # pages by reason: names of native LeaveReason
    not_admitted: dict[str, int]  # sealed pages that were not written, by reason


class TiersStatus(TypedDict):
    hbm: HbmStatus
    dram: DramStatus
    nvme: NvmeStatus


class LookupsStatus(TypedDict):
    """Outcomes, from the counters that clients publish. A page once: the sum is the pages asked."""

    calls: int
    pages_hit_hbm: int
    pages_hit_dram: int
    pages_hit_nvme: int
    pages_missed: int


class LoadsStatus(TypedDict):
    """From the counters that clients publish: shards of pages."""

    calls: int
    pages_loaded: int
    pages_from_hbm: int  # of them
    hbm_mismatches: int  # copies in HBM that were not what was stored; the pages came from DRAM
    bytes_loaded: int
    failed: dict[str, int]  # by reason: "stale", "mismatch", "timeout"


class StoresStatus(TypedDict):
    calls: int
    pages_sealed: int  # all shards of each
    bytes_sealed: int
    already: int
    dropped: dict[str, int]  # shards of pages by reason, as clients were told: metrics.DROP_REASONS


class PinsStatus(TypedDict):
    held: int
    taken: int
    refused: int


class IndexStatus(TypedDict):
    pages: int
    capacity: int
    bound: bool


class NamespaceStatus(TypedDict):
    ordinal: int
    id: str  # 32 hex digits
    pages: int
    dram_pages: int
    nvme_pages: int
    clear_epoch: int


class RecoveryStatus(TypedDict):
    """What start() found; also its return value. RecoverySummary and nvme::RecoveryReport."""

    pages_dram: int
    pages_nvme: int
    dropped_slots: int
    unfinished_slots: int
    cleared: int
    unknown_namespace: int
    orphans: int
    sessions: int
    segments: int
    records: int
    scanned_segments: int
    refused_records: int
    foreign_segments: int
    bad_headers: int
    unreadable_segments: int
    epoch_seen: int  # the highest clear epoch met in any header; the ledger must not be behind it
    seconds: float


class CoreStatus(TypedDict):
    warehouse_id: str  # 32 hex digits
    incarnation: int
    uptime_s: float
    draining: bool
    tiers: TiersStatus
    lookups: LookupsStatus
    loads: LoadsStatus
    stores: StoresStatus
    quarantined: int
    orphan_pages: int
    sessions: int
    connections: int
    pins: PinsStatus
    index: IndexStatus
    namespaces: list[NamespaceStatus]
    recovery: RecoveryStatus
    events_dropped: int
    page_bytes_max: int  # of all shards of a page, each rounded up to 4 KiB
