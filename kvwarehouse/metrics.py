"""Names of all metrics, what they mean, and how a status snapshot becomes Prometheus text.

Stateless; thread-safe. One scrape is one snapshot, so that sums hold within it: hits per tier plus
misses are the pages asked for. Labels are closed sets: a value outside its set counts as "other".
Everything counts outcomes (what happened to a page), never attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

TIERS: Final = ("hbm", "dram", "nvme")
"""What is in HBM is in DRAM too: pages of all tiers do not sum to the pages there are."""

DROP_REASONS: Final = (
    "draining",
    "parent_missing",
    "reserve_limit",
    "later",
    "no_room",
    "index_full",
    "refused_tail",
    "stale",
    "cleared",
    "timeout",
    "busy",
    "unreachable",
    "other",
)
"""Why a page was not stored: those of native/exchange/drop_counters.h."""

REFUSAL_REASONS: Final = (
    "no_token",
    "bad_token",
    "too_many_streams",
    "staging_full",
    "too_many_watchers",
    "watcher_too_slow",
    "too_many_calls",
    "other",
)
"""Why a call over gRPC was refused for who asked, or for how many did: codes of errors.py."""

LOAD_REASONS: Final = ("stale", "mismatch", "timeout", "other")
"""Why a page that was found was not loaded: names in native/session/session_file.h."""

LEFT_REASONS: Final = (
    "evicted",
    "window",
    "rebalanced",
    "reclaimed",
    "cleared",
    "operator",
    "orphaned",
    "quarantined",
    "lost",
    "other",
)
"""Why a page left a tier: names of LeaveReason in native/warehouse/options.h."""

ADMISSION_REASONS: Final = (
    "parent_not_admitted",
    "queue_full",
    "read_only",
    "no_space",
    "io_error",
    "stopped",
    "other",
)
"""Why a sealed page was not written to NVMe."""

HBM_LEFT_REASONS: Final = ("demoted", "left_dram", "rebalanced", "damaged", "operator", "other")
"""Why a copy left HBM: names of HbmLeaveReason in native/hbm/status.h."""

HBM_HEALTHS: Final = ("off", "starting", "ok", "waiting", "failed", "other")
HEALTHS: Final = ("off", "ok", "read_only", "no_answer", "other")
LEDGER_HEALTHS: Final = ("ok", "rebuilt", "in_memory", "other")
STATES: Final = ("recovering", "serving", "draining", "stopped", "other")

Sample = tuple[Mapping[str, str], float]
Snapshot = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """`read` takes a snapshot (Status of proto/kvwarehouse/v1/status.proto as nested dicts)."""

    name: str
    kind: str  # "counter" or "gauge"
    help: str
    read: Callable[[Snapshot], Iterable[Sample]]


def render(snapshot: Snapshot) -> str:
    """`snapshot` in Prometheus' text format 0.0.4 (prometheus.io, "Exposition formats"). What the
    snapshot does not have (the core is still recovering) is left out, not reported as zero."""
    lines: list[str] = []
    for metric in METRICS:
        try:
            samples = list(metric.read(snapshot))
        except KeyError:
            continue
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines += [f"{metric.name}{_labels(labels)} {value!r}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _at(snapshot: Snapshot, path: str) -> Any:
    value: Any = snapshot
    for key in path.split("."):
        value = value[key]
    return value


def _one(path: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda snapshot: [({}, _at(snapshot, path))]


def _paths(label: str, **paths: str) -> Callable[[Snapshot], Iterable[Sample]]:
    """One sample a label value, each from a path of its own."""
    return lambda snapshot: [({label: key}, _at(snapshot, path)) for key, path in paths.items()]


def _tiers(field: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return _paths("tier", **{tier: f"core.tiers.{tier}.{field}" for tier in TIERS})


def _reasons(path: str, closed: tuple[str, ...]) -> Callable[[Snapshot], Iterable[Sample]]:
    """A counter by reason: every value of the closed set, zeros too, so that rates have a start."""

    def read(snapshot: Snapshot) -> Iterable[Sample]:
        totals = dict.fromkeys(closed, 0)
        for reason, count in _at(snapshot, path).items():
            totals[reason if reason in totals else "other"] += count
        return [({"reason": reason}, count) for reason, count in totals.items()]

    return read


def _state(
    path: str, label: str, closed: tuple[str, ...]
) -> Callable[[Snapshot], Iterable[Sample]]:
    """One of the closed set is 1, the others 0."""

    def read(snapshot: Snapshot) -> Iterable[Sample]:
        value = _at(snapshot, path)
        now = value if value in closed else "other"
        return [({label: entry}, int(entry == now)) for entry in closed]

    return read


def _info(snapshot: Snapshot) -> Iterable[Sample]:
    labels = {"name": str(snapshot["name"]), "version": str(snapshot["version"])}
    return [({**labels, "warehouse_id": str(_at(snapshot, "core.warehouse_id"))}, 1)]


def _counter(name: str, text: str, read: Callable[[Snapshot], Iterable[Sample]]) -> Metric:
    return Metric(f"kvwarehouse_{name}", "counter", text, read)


def _gauge(name: str, text: str, read: Callable[[Snapshot], Iterable[Sample]]) -> Metric:
    return Metric(f"kvwarehouse_{name}", "gauge", text, read)


METRICS: Final = (
    _gauge("info", "Constant 1; who this is.", _info),
    _gauge("state", "What the daemon does now; one is 1.", _state("state", "state", STATES)),
    _gauge("uptime_seconds", "Since the core started.", _one("core.uptime_s")),
    _gauge("incarnation", "Rises with every start of a daemon.", _one("core.incarnation")),
    _gauge(
        "recovery_seconds",
        "How long the last start's recovery took.",
        _one("core.recovery.seconds"),
    ),
    _gauge(
        "recovered_pages",
        "Pages found at the start, by tier.",
        _paths("tier", dram="core.recovery.pages_dram", nvme="core.recovery.pages_nvme"),
    ),
    # Lookups. Hits of all tiers plus misses are the pages asked for.
    _counter("lookups_total", "Lookups.", _one("core.lookups.calls")),
    _counter(
        "lookup_hit_pages_total",
        "Pages asked for and found, by the fastest tier with them.",
        _paths("tier", **{tier: f"core.lookups.pages_hit_{tier}" for tier in TIERS}),
    ),
    _counter(
        "lookup_missed_pages_total",
        "Pages asked for and not found.",
        _one("core.lookups.pages_missed"),
    ),
    # Loads and stores.
    _counter("loads_total", "Loads.", _one("core.loads.calls")),
    _counter(
        "loaded_pages_total",
        "Shards of pages loaded and verified.",
        _one("core.loads.pages_loaded"),
    ),
    _counter(
        "loaded_hbm_pages_total",
        "Of them, those from copies in HBM.",
        _one("core.loads.pages_from_hbm"),
    ),
    _counter("loaded_bytes_total", "Bytes loaded and verified.", _one("core.loads.bytes_loaded")),
    _counter(
        "load_failed_pages_total",
        "Shards of pages found and not loaded.",
        _reasons("core.loads.failed", LOAD_REASONS),
    ),
    _counter("stores_total", "Stores.", _one("core.stores.calls")),
    _counter(
        "sealed_pages_total", "Pages sealed, all shards of each.", _one("core.stores.pages_sealed")
    ),
    _counter("sealed_bytes_total", "Bytes of sealed pages.", _one("core.stores.bytes_sealed")),
    _counter(
        "store_already_pages_total",
        "Pages asked to be stored that were there.",
        _one("core.stores.already"),
    ),
    _counter(
        "store_dropped_pages_total",
        "Pages that stores dropped, as their callers were told: shards of pages.",
        _reasons("core.stores.dropped", DROP_REASONS),
    ),
    # Tiers.
    _gauge("tier_pages", "Pages in a tier; one in both counts in both.", _tiers("pages")),
    _gauge("tier_capacity_bytes", "Bound of a tier.", _tiers("capacity_bytes")),
    _gauge("tier_used_bytes", "Bytes of a tier in use.", _tiers("used_bytes")),
    _gauge(
        "dram_populated_bytes",
        "Bytes of the arena backed by memory.",
        _one("core.tiers.dram.populated_bytes"),
    ),
    _gauge(
        "dram_slots",
        "Slots by state, those of pages aside.",
        _paths(
            "state",
            free="core.tiers.dram.free_slots",
            reserved="core.tiers.dram.reserved_slots",
            limbo="core.tiers.dram.limbo_slots",
            zombie="core.tiers.dram.zombie_slots",
        ),
    ),
    _gauge(
        "hbm_health",
        "Health of the HBM tier; one is 1.",
        _state("core.tiers.hbm.health", "health", HBM_HEALTHS),
    ),
    _gauge(
        "hbm_leaving_places",
        "Places of dropped copies that somebody may still read.",
        _one("core.tiers.hbm.leaving_places"),
    ),
    _gauge("hbm_queued_pages", "Pages to be copied.", _one("core.tiers.hbm.queued_pages")),
    _counter("hbm_promoted_pages_total", "Pages copied.", _one("core.tiers.hbm.pages_promoted")),
    _counter("hbm_promoted_bytes_total", "Bytes copied.", _one("core.tiers.hbm.bytes_promoted")),
    _gauge(
        "nvme_health",
        "Health of the NVMe tier; one is 1.",
        _state("core.tiers.nvme.health", "health", HEALTHS),
    ),
    _gauge("nvme_segments", "Segment files by use.", lambda snapshot: _segments(snapshot)),
    _gauge(
        "nvme_queue_bytes", "Bytes waiting to be written.", _one("core.tiers.nvme.queued_bytes")
    ),
    _gauge(
        "nvme_queue_records",
        "Records waiting to be written.",
        _one("core.tiers.nvme.queued_records"),
    ),
    _gauge("nvme_reads_in_flight", "Records being read.", _one("core.tiers.nvme.reads_in_flight")),
    _counter(
        "nvme_written_bytes_total",
        "Bytes written, by why.",
        _paths(
            "why", store="core.tiers.nvme.written_bytes", relocate="core.tiers.nvme.relocated_bytes"
        ),
    ),
    _counter(
        "nvme_written_records_total",
        "Records written, by why.",
        _paths(
            "why",
            store="core.tiers.nvme.written_records",
            relocate="core.tiers.nvme.relocated_records",
        ),
    ),
    _counter(
        "nvme_not_admitted_pages_total",
        "Sealed pages that were not written to NVMe.",
        _reasons("core.tiers.nvme.not_admitted", ADMISSION_REASONS),
    ),
    _counter(
        "nvme_promoted_pages_total",
        "Pages read back into DRAM.",
        _one("core.tiers.nvme.pages_promoted"),
    ),
    _gauge(
        "nvme_promotions_in_flight",
        "Pages on their way back into DRAM.",
        _one("core.tiers.nvme.promotions_in_flight"),
    ),
    _counter("nvme_read_bytes_total", "Bytes read.", _one("core.tiers.nvme.read_bytes")),
    _counter("nvme_read_records_total", "Records read.", _one("core.tiers.nvme.read_records")),
    _counter(
        "nvme_read_digest_seconds_total",
        "Processor time of digesting what was read.",
        _one("core.tiers.nvme.read_digest_s"),
    ),
    _counter(
        "nvme_reclaimed_segments_total",
        "Segments recycled.",
        _one("core.tiers.nvme.reclaimed_segments"),
    ),
    _counter(
        "nvme_dropped_records_total",
        "Records gone with recycled segments.",
        _one("core.tiers.nvme.dropped_records"),
    ),
    _counter(
        "nvme_errors_total",
        "Failed operations, by which.",
        _paths(
            "operation",
            write="core.tiers.nvme.write_errors",
            read="core.tiers.nvme.read_errors",
            flush="core.tiers.nvme.flush_errors",
        ),
    ),
    _counter("nvme_flushes_total", "Flushes that succeeded.", _one("core.tiers.nvme.flushes")),
    # Integrity and order.
    _counter(
        "digest_mismatches_total",
        "Loads of bytes that were not those stored; all misses.",
        lambda snapshot: [({}, _at(snapshot, "core.loads.failed").get("mismatch", 0))],
    ),
    _counter(
        "hbm_mismatches_total",
        "Copies that were not what was stored; their pages came from DRAM.",
        _one("core.loads.hbm_mismatches"),
    ),
    _counter(
        "nvme_mismatches_total",
        "Records that were not what they should be.",
        _one("core.tiers.nvme.mismatches"),
    ),
    _counter(
        "quarantined_pages_total",
        "Pages taken out because of their bytes.",
        _one("core.quarantined"),
    ),
    _counter(
        "hbm_left_pages_total",
        "Copies that left HBM; their pages stayed in DRAM unless they left it.",
        _reasons("core.tiers.hbm.left", HBM_LEFT_REASONS),
    ),
    _counter(
        "dram_left_pages_total",
        "Pages that left DRAM.",
        _reasons("core.tiers.dram.left", LEFT_REASONS),
    ),
    _counter(
        "nvme_left_pages_total",
        "Pages that left NVMe.",
        _reasons("core.tiers.nvme.left", LEFT_REASONS),
    ),
    _gauge(
        "orphan_pages",
        "Stored pages with an ancestor in no tier; 0 after a sweep.",
        _one("core.orphan_pages"),
    ),
    # Bounds.
    _gauge("index_pages", "Entries of the index in use.", _one("core.index.pages")),
    _gauge("index_capacity_pages", "Pages the index has room for.", _one("core.index.capacity")),
    _gauge("namespaces", "Registered namespaces.", lambda snapshot: _namespaces(snapshot)),
    _gauge("sessions", "Clients whose session lives.", _one("core.sessions")),
    _gauge("connections", "Clients connected to the local socket.", _one("core.connections")),
    _gauge("pins", "Slots and extents held by clients.", _one("core.pins.held")),
    _counter("pins_taken_total", "Pins taken.", _one("core.pins.taken")),
    _counter("pins_refused_total", "Pins refused by their bound.", _one("core.pins.refused")),
    _gauge(
        "grpc_connections",
        "Connections at the TCP address of gRPC.",
        _one("service.connections"),
    ),
    _gauge(
        "grpc_connections_max",
        "Connections that it takes; 0 without --listen.",
        _one("service.connections_max"),
    ),
    _counter(
        "refused_calls_total",
        "Calls over gRPC that were refused.",
        _reasons("service.refused", REFUSAL_REASONS),
    ),
    _gauge("streams", "gRPC stores and loads under way.", _one("service.streams")),
    _gauge("staging_bytes", "Memory of gRPC streams.", _one("service.staging_bytes")),
    _gauge(
        "ledger_health",
        "Health of the ledger; one is 1.",
        _state("service.ledger_health", "health", LEDGER_HEALTHS),
    ),
    _gauge(
        "paths_lost",
        "1 while files or sockets of the daemon are gone that it cannot put back.",
        lambda snapshot: [({}, int(bool(_at(snapshot, "service.paths_reason"))))],
    ),
    _gauge(
        "ledger_tombstones",
        "Evicted keys that the ledger keeps down.",
        _one("service.ledger_tombstones"),
    ),
    # KV events for routers; absent where none are published.
    _counter(
        "kv_event_batches_total", "Batches of KV events published.", _one("kv_events.batches")
    ),
    _counter(
        "kv_event_blocks_total",
        "Blocks said to have entered or left a medium.",
        _paths("change", stored="kv_events.stored", removed="kv_events.removed"),
    ),
    _counter(
        "kv_event_losses_total",
        "Times when more changed than could be kept, and all was said anew.",
        _one("kv_events.losses"),
    ),
    _counter(
        "kv_event_replays_total",
        "Requests of subscribers for what they missed: from the buffer, by saying all anew, or "
        "not answered.",
        lambda snapshot: _replays(snapshot),
    ),
    _counter(
        "kv_event_ended_peers_total",
        "Connections to the ports of KV events that were too many, said too much or did not read.",
        _one("kv_events.ended_peers"),
    ),
    _counter(
        "events_dropped_total",
        "Core events lost because nobody drained them in time.",
        _one("core.events_dropped"),
    ),
)


def _segments(snapshot: Snapshot) -> Iterable[Sample]:
    nvme = _at(snapshot, "core.tiers.nvme")
    used = nvme["segments"] - nvme["free_segments"]
    return [({"use": "used"}, used), ({"use": "free"}, nvme["free_segments"])]


def _replays(snapshot: Snapshot) -> Iterable[Sample]:
    events = _at(snapshot, "kv_events")
    return [
        ({"answer": "buffer"}, events["replays"] - events["snapshots"]),
        ({"answer": "snapshot"}, events["snapshots"]),
        ({"answer": "failed"}, events["failed_replays"]),
    ]


def _namespaces(snapshot: Snapshot) -> Iterable[Sample]:
    return [({}, len(_at(snapshot, "core.namespaces")))]
