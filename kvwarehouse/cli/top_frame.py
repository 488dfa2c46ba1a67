"""What `kvwarehouse top` shows, computed from two snapshots of one warehouse.

A snapshot is what `Client.status` returns: proto/kvwarehouse/v1/status.proto as nested dicts. What
an older daemon does not report may be missing. Stateless; thread-safe; no clock and no I/O. Times
are seconds, rates are a second of the daemon's own clock, shares are from 0 to 1. None: not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvwarehouse.wire import status_pb2

Snapshot = Mapping[str, Any]

TIERS: Final = ("hbm", "dram", "nvme")
_FOUND: Final = (*TIERS, "remote")

# What was not done, or was found damaged: the words for it, where it is counted, and the reason
# where the counter is not a map of reasons.
_LOSSES: Final = (
    ("shards not stored", "core.stores.dropped", ""),
    ("shards not loaded", "core.loads.failed", ""),
    ("not put on nvme", "core.tiers.nvme.not_admitted", ""),
    ("calls refused", "service.refused", ""),
    ("pins refused", "core.pins.refused", "too_many"),
    ("damaged pages", "core.quarantined", "quarantined"),
    ("damaged pages", "core.tiers.nvme.mismatches", "on nvme"),
    ("damaged pages", "core.loads.hbm_mismatches", "in hbm"),
    ("nvme errors", "core.tiers.nvme.write_errors", "write"),
    ("nvme errors", "core.tiers.nvme.read_errors", "read"),
    ("nvme errors", "core.tiers.nvme.flush_errors", "flush"),
    ("remote dropped", "core.remote_puts.dropped", ""),
    ("remote puts", "remote.puts.failed", "failed"),
    ("remote puts", "remote.puts.damaged", "damaged"),
    ("remote puts", "remote.puts.no_room", "no_room"),
    *(
        ("remote reads", f"core.remote_fetches.ends.{end}", end)
        for end in ("missing", "damaged", "failed", "late", "no_room")
    ),
)


@dataclass(frozen=True)
class NamespaceSize:
    """What a listing of namespaces says of one, and a snapshot does not."""

    model: str
    page_bytes: int
    """Of all shards of a page."""


@dataclass(frozen=True)
class Problem:
    """Something that works worse than it was set up to."""

    what: str
    reason: str
    for_s: float


@dataclass(frozen=True)
class TierLine:
    name: str
    health: str
    capacity_bytes: int
    used_bytes: int
    pages: int | None
    """None: it is known by objects."""
    hit_share: float | None
    """Of the pages that lookups asked for within the interval, those found here."""
    pages_in_per_s: float | None
    pages_out_per_s: float | None


@dataclass(frozen=True)
class FlowLine:
    """Requests, or pages that move between tiers. None: not counted for this flow, or no rate.
    A call of the remote tier's is an object. Loads and stores count the shards of pages, which
    their names say."""

    name: str
    calls_per_s: float | None
    pages_per_s: float | None
    bytes_per_s: float | None


@dataclass(frozen=True)
class LossLine:
    """A reason for which pages or calls came to nothing within the interval."""

    what: str
    reason: str
    per_s: float
    total: int
    """Since the daemon's start."""


@dataclass(frozen=True)
class NamespaceLine:
    """Bytes are None where no listing told how large a page is."""

    id: str
    model: str
    pages: int
    dram_bytes: int | None
    nvme_bytes: int | None


@dataclass(frozen=True)
class Underway:
    """Work that is not finished at the moment of the snapshot."""

    queued_bytes: int
    queued_records: int
    reads_in_flight: int
    promotions_in_flight: int
    hbm_queued_pages: int
    reserved_slots: int
    remote_puts: int | None
    """Runs of pages that wait to be put into the store. None: there is no remote tier."""
    remote_gets: int | None
    """Likewise those that loads wait for."""


@dataclass(frozen=True)
class ClientCounts:
    """`*_max`: 0 where there is no such bound, as without --listen."""

    sessions: int
    pins: int
    streams: int
    streams_max: int
    connections: int
    connections_max: int


@dataclass(frozen=True)
class Frame:
    name: str
    version: str
    state: str
    incarnation: int
    uptime_s: float
    interval_s: float | None
    """Between the two snapshots, by the daemon's clock. None: there are no rates."""
    restarted: bool
    """Another daemon answered than before, so that its counters began anew."""
    hit_rate: float | None
    """Pages found of pages that lookups asked for, within the interval."""
    hit_rate_run: float | None
    """The same since the daemon's start."""
    problems: tuple[Problem, ...]
    tiers: tuple[TierLine, ...]
    flows: tuple[FlowLine, ...]
    losses: tuple[LossLine, ...]
    underway: Underway
    clients: ClientCounts
    namespaces: tuple[NamespaceLine, ...]
    """Those with pages, the largest first."""
    rates: Mapping[str, Any]
    """As rates_of gives them."""


def frame_of(before: Snapshot | None, after: Snapshot, sizes: Mapping[str, NamespaceSize]) -> Frame:
    """`before`: the snapshot to take differences from, None at the beginning. `sizes`: by the ids
    of namespaces, as hex digits."""
    rates = rates_of(before, after)
    core = _at(after, "core", {})
    return Frame(
        name=_at(after, "name", ""),
        version=_at(after, "version", ""),
        state=_at(after, "state", ""),
        incarnation=_at(core, "incarnation", 0),
        uptime_s=_at(core, "uptime_s", 0.0),
        interval_s=_elapsed_s(before, after),
        restarted=before is not None and _was_another(before, after),
        hit_rate=_hit_rate(_at(rates, "core.lookups", {})),
        hit_rate_run=_hit_rate(_at(core, "lookups", {})),
        problems=tuple(_problems(after)),
        tiers=tuple(_tiers(after, rates)),
        flows=tuple(_flows(after, rates)),
        losses=tuple(_losses(after, rates)),
        underway=_underway(after, core),
        clients=_clients(after),
        namespaces=_namespaces(_at(core, "namespaces", ()), sizes),
        rates=rates,
    )


def rates_of(before: Snapshot | None, after: Snapshot) -> dict[str, Any]:
    """All counters of `after` by their names in a snapshot, as rises a second since `before`: never
    negative. A field is a counter if status.proto gives it a metric whose name ends in "_total".
    Empty where there is nothing to compare: no `before`, another daemon's, or no time between."""
    seconds = _elapsed_s(before, after)
    if before is None or seconds is None:
        return {}
    return _rates(status_pb2.Status.DESCRIPTOR, before, after, seconds)


def _rates(message: Any, before: Snapshot, after: Snapshot, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in message.fields:
        now, then = after.get(field.name), before.get(field.name)
        if now is None:
            continue
        options = field.GetOptions()
        if options.HasExtension(status_pb2.metric):
            if _is_counter(options.Extensions[status_pb2.metric]):
                found[field.name] = _rise(then, now, seconds)
        elif field.message_type and not field.is_repeated:
            found[field.name] = _rates(field.message_type, then or {}, now, seconds)
    return found


def _is_counter(metric: str) -> bool:
    return metric.partition("{")[0].endswith("_total")


def _rise(then: Any, now: Any, seconds: float) -> Any:
    if isinstance(now, Mapping):
        return {name: _rise((then or {}).get(name), now[name], seconds) for name in now}
    return max(0.0, (now - (then or 0)) / seconds)


def _identity(snapshot: Snapshot) -> tuple[str, int]:
    return _at(snapshot, "core.warehouse_id", ""), _at(snapshot, "core.incarnation", 0)


def _was_another(before: Snapshot, after: Snapshot) -> bool:
    """A daemon that recovers has no incarnation yet, and is not another than the one it becomes."""
    return bool(_identity(before)[1]) and _identity(before) != _identity(after)


def _elapsed_s(before: Snapshot | None, after: Snapshot) -> float | None:
    if before is None or _identity(before) != _identity(after):
        return None
    seconds = float(_at(after, "core.uptime_s", 0.0) - _at(before, "core.uptime_s", 0.0))
    return seconds if seconds > 0 else None


def _at(tree: Mapping[str, Any], path: str, default: Any) -> Any:
    """What lies at a dotted path; `default` where it, or something on the way, is not there."""
    found: Any = tree
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            return default
    return found


def _hit_rate(lookups: Mapping[str, float]) -> float | None:
    asked = _asked(lookups)
    return 1 - lookups.get("pages_missed", 0) / asked if asked else None


def _asked(lookups: Mapping[str, float]) -> float:
    hits = sum(lookups.get(f"pages_hit_{tier}", 0) for tier in _FOUND)
    return hits + lookups.get("pages_missed", 0)


def _problems(status: Snapshot) -> Iterator[Problem]:
    for each in _at(status, "problems", ()):
        yield Problem(each["what"], each["reason"], each["for_s"])


def _tiers(status: Snapshot, rates: Mapping[str, Any]) -> Iterator[TierLine]:
    lookups = _at(rates, "core.lookups", {})
    asked = _asked(lookups)
    for name in TIERS:
        tier = _at(status, f"core.tiers.{name}", {})
        left = _at(rates, f"core.tiers.{name}.left", None)
        yield TierLine(
            name=name,
            health=tier.get("health", "off"),
            capacity_bytes=tier.get("capacity_bytes", 0),
            used_bytes=tier.get("used_bytes", 0),
            pages=tier.get("pages", 0),
            hit_share=lookups.get(f"pages_hit_{name}", 0) / asked if asked else None,
            pages_in_per_s=_pages_in(name, rates),
            pages_out_per_s=None if left is None else sum(left.values()),
        )
    remote = _at(status, "remote", {})
    if remote.get("state"):
        yield TierLine(
            name="remote",
            health=remote["state"],
            capacity_bytes=remote["capacity_bytes"],
            used_bytes=remote["used_bytes"],
            pages=None,
            hit_share=lookups.get("pages_hit_remote", 0) / asked if asked else None,
            pages_in_per_s=None,
            pages_out_per_s=None,
        )


def _pages_in(tier: str, rates: Mapping[str, Any]) -> float | None:
    ways = {
        "hbm": ("core.tiers.hbm.pages_promoted",),
        "dram": ("core.stores.pages_sealed", "core.tiers.nvme.pages_promoted"),
        "nvme": ("core.tiers.nvme.written_records",),
    }[tier]
    found = [rate for rate in (_at(rates, way, None) for way in ways) if rate is not None]
    return sum(found) if found else None


def _flows(status: Snapshot, rates: Mapping[str, Any]) -> Iterator[FlowLine]:
    """Those of a tier that is off, and moves that never happened, are left out."""

    def flow(name: str, part: str, calls: str, pages: str, moved: str) -> FlowLine:
        counted = _at(rates, part, {})
        return FlowLine(name, counted.get(calls), counted.get(pages), counted.get(moved))

    lookups = _at(rates, "core.lookups", {})
    asked = _asked(lookups) if lookups else None
    yield FlowLine("lookups", lookups.get("calls"), asked, None)
    yield flow("loads, shards", "core.loads", "calls", "pages_loaded", "bytes_loaded")
    yield flow("stores, shards", "core.stores", "calls", "shards_stored", "bytes_sealed")
    if _at(status, "core.tiers.hbm.health", "off") != "off":
        yield flow("copied to hbm", "core.tiers.hbm", "", "pages_promoted", "bytes_promoted")
    if _at(status, "core.tiers.nvme.health", "off") != "off":
        nvme = "core.tiers.nvme"
        yield flow("written to nvme", nvme, "", "written_records", "written_bytes")
        yield flow("read from nvme", nvme, "", "read_records", "read_bytes")
        if _at(status, f"{nvme}.relocated_records", 0):
            yield flow("moved within nvme", nvme, "", "relocated_records", "relocated_bytes")
    if _at(status, "remote.state", ""):
        stored = _at(rates, "remote.puts.stored", 0.0) if rates else None
        yield FlowLine("put into store", stored, None, _at(rates, "remote.put_bytes", None))
        filled = _at(rates, "remote.gets.filled", 0.0) if rates else None
        yield FlowLine("read from store", filled, None, _at(rates, "remote.get_bytes", None))


def _losses(status: Snapshot, rates: Mapping[str, Any]) -> Iterator[LossLine]:
    for what, path, reason in _LOSSES:
        rose, total = _at(rates, path, 0.0), _at(status, path, 0)
        by_reason = rose if isinstance(rose, Mapping) else {reason: rose}
        totals = total if isinstance(total, Mapping) else {reason: total}
        for each, per_s in sorted(by_reason.items(), key=lambda item: -item[1]):
            if per_s > 0:
                yield LossLine(what, each, per_s, totals[each])


def _underway(status: Snapshot, core: Mapping[str, Any]) -> Underway:
    remote = bool(_at(status, "remote.state", ""))
    return Underway(
        queued_bytes=_at(core, "tiers.nvme.queued_bytes", 0),
        queued_records=_at(core, "tiers.nvme.queued_records", 0),
        reads_in_flight=_at(core, "tiers.nvme.reads_in_flight", 0),
        promotions_in_flight=_at(core, "tiers.nvme.promotions_in_flight", 0),
        hbm_queued_pages=_at(core, "tiers.hbm.queued_pages", 0),
        reserved_slots=_at(core, "tiers.dram.reserved_slots", 0),
        remote_puts=_at(core, "remote_puts.queued_runs", 0) if remote else None,
        remote_gets=_to_read(core) if remote else None,
    )


def _to_read(core: Mapping[str, Any]) -> int:
    fetches = _at(core, "remote_fetches", {})
    return int(fetches.get("queued", 0) + fetches.get("under_way", 0))


def _clients(status: Snapshot) -> ClientCounts:
    return ClientCounts(
        sessions=_at(status, "core.sessions", 0),
        pins=_at(status, "core.pins.held", 0),
        streams=_at(status, "service.streams", 0),
        streams_max=_at(status, "service.streams_max", 0),
        connections=_at(status, "service.connections", 0),
        connections_max=_at(status, "service.connections_max", 0),
    )


def _namespaces(
    listed: Sequence[Mapping[str, Any]], sizes: Mapping[str, NamespaceSize]
) -> tuple[NamespaceLine, ...]:
    lines = [_namespace(each, sizes.get(each["id"])) for each in listed if each.get("pages")]
    lines.sort(key=lambda line: (-(line.dram_bytes or 0) - (line.nvme_bytes or 0), -line.pages))
    return tuple(lines)


def _namespace(counts: Mapping[str, Any], size: NamespaceSize | None) -> NamespaceLine:
    def held_bytes(tier: str) -> int | None:
        return None if size is None else int(counts.get(f"{tier}_pages", 0)) * size.page_bytes

    return NamespaceLine(
        id=counts["id"],
        model="" if size is None else size.model,
        pages=counts["pages"],
        dram_bytes=held_bytes("dram"),
        nvme_bytes=held_bytes("nvme"),
    )
