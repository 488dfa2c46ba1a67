"""All metrics, and how a status snapshot becomes Prometheus text.

Names, labels and helps stand beside the fields that they show, in status.proto; here are the few
that are computed of several fields.

Stateless; thread-safe. One scrape is one snapshot, so that sums hold within it: hits per tier plus
misses are the pages asked for. Labels are closed sets: a value outside its set counts as "other".
Everything counts outcomes (what happened to a page), never attempts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

from kvwarehouse.wire import status_pb2

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX: Final = "kvwarehouse_"
_OPTION: Final = re.compile(r"(\w+)(?:\{(\w+)=([\w|]+)\})?")

Samples = list[tuple[dict[str, str], float]]


@dataclass(frozen=True)
class Metric:
    """`part`: the message of Status without which it is left out; `values`: of its labels."""

    name: str
    help: str
    part: str
    reads: tuple[Callable[[status_pb2.Status], Samples], ...]
    values: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def render(status: status_pb2.Status) -> str:
    """`status` in Prometheus' text format 0.0.4 (prometheus.io, "Exposition formats"). What it does
    not have (the core is still recovering) is left out, not reported as zero."""
    lines: list[str] = []
    for metric in METRICS.values():
        if metric.part and not status.HasField(metric.part):
            continue
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for read in metric.reads:
            lines += [f"{metric.name}{_labels(labels)} {value!r}" for labels, value in read(status)]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _all() -> dict[str, Metric]:
    """By name, those of one name joined."""
    found: dict[str, Metric] = {}
    for metric in (*_declared(status_pb2.Status.DESCRIPTOR), *_COMPUTED):
        first = found.get(metric.name, replace(metric, reads=()))
        found[metric.name] = replace(
            first,
            help=first.help or metric.help,
            reads=first.reads + metric.reads,
            values=first.values + metric.values,
        )
    return found


def _declared(message: Any, path: tuple[str, ...] = ()) -> Iterator[Metric]:
    """What the fields of `message`, a descriptor at `path` in Status, say of themselves."""
    for field in message.fields:
        here = (*path, field.name)
        options = field.GetOptions()
        if options.HasExtension(status_pb2.metric):
            option = _OPTION.fullmatch(options.Extensions[status_pb2.metric])
            assert option, f"{field.full_name}: no NAME, and no NAME{{label=values}}"
            name, label, values = option.group(1), option.group(2), option.group(3)
            yield _shown(here, name, options.Extensions[status_pb2.help], label, values)
        elif field.message_type and not field.is_repeated:
            yield from _declared(field.message_type, here)


def _shown(path: tuple[str, ...], name: str, text: str, label: str, values: str | None) -> Metric:
    closed = (*values.split("|"), "other") if values else ()

    def read(status: status_pb2.Status) -> Samples:
        return _samples(reduce(getattr, path, status), label, closed)

    part = path[0] if len(path) > 1 else ""
    return Metric(f"{_PREFIX}{name}", text, part, (read,), closed)


def _samples(value: object, label: str, values: tuple[str, ...]) -> Samples:
    if isinstance(value, int | float):
        return [({label: values[0]} if values else {}, value)]
    if isinstance(value, Mapping):
        totals = dict.fromkeys(values, 0)
        for reason, count in value.items():
            totals[reason if reason in totals else "other"] += count
        return [({label: reason}, count) for reason, count in totals.items()]
    if values:
        now = value if value in values else "other"
        return [({label: each}, int(each == now)) for each in values]
    assert isinstance(value, Sequence)
    return [({}, int(bool(value)) if isinstance(value, str) else len(value))]


def _computed(
    name: str, text: str, read: Callable[[status_pb2.Status], Samples], part: str = "core"
) -> Metric:
    return Metric(f"{_PREFIX}{name}", text, part, (read,))


def _info(status: status_pb2.Status) -> Samples:
    names = {"name": status.name, "version": status.version}
    return [({**names, "warehouse_id": status.core.warehouse_id}, 1)]


def _segments(status: status_pb2.Status) -> Samples:
    nvme = status.core.tiers.nvme
    used = nvme.segments - nvme.free_segments
    return [({"use": "used"}, used), ({"use": "free"}, nvme.free_segments)]


def _damaged(status: status_pb2.Status) -> Samples:
    return [({}, status.core.loads.failed.get("mismatch", 0))]


def _replays(status: status_pb2.Status) -> Samples:
    events = status.kv_events
    return [
        ({"answer": "buffer"}, events.replays - events.snapshots),
        ({"answer": "snapshot"}, events.snapshots),
        ({"answer": "failed"}, events.failed_replays),
    ]


_COMPUTED: Final = (
    _computed("info", "Constant 1; who this is.", _info),
    _computed("nvme_segments", "Segment files by use.", _segments),
    _computed(
        "digest_mismatches_total",
        "Loads of bytes that were not those stored; all misses.",
        _damaged,
    ),
    _computed(
        "kv_event_replays_total",
        "Requests of subscribers for what they missed: from the buffer, by saying all anew, or "
        "not answered.",
        _replays,
        "kv_events",
    ),
    _computed(
        "remote_first_byte_seconds",
        "How long the store takes to begin to give an object; 0: not read in the last minute.",
        lambda status: [({}, status.remote.first_byte_ms / 1e3)],
        "remote",
    ),
)

METRICS: Final = _all()
"""By name."""
