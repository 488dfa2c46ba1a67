"""What the reports of both kinds of drives share. Stateless; thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvwarehouse.durations import format_duration
from kvwarehouse.loadgen.drive import Drive
from kvwarehouse.loadgen.histogram import Histogram
from kvwarehouse.report.report import TableBlock

# Beyond this an open loop was no longer the trace's.
_LATE_S = 0.1


@dataclass(frozen=True)
class Facts:
    """What was driven, and how."""

    engine: str
    source: str
    loop: str
    notes: Sequence[str] = field(default=())

    def figures(self, drive: Drive) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "source": self.source,
            "loop": self.loop,
            "elapsed_s": drive.elapsed_s,
            "was_interrupted": drive.interrupted,
            "notes": list(self.notes) + late_note(drive),
        }


def loop_rows(drive: Drive, facts: Facts) -> list[tuple[str, Any]]:
    over = format_duration(drive.elapsed_s) + (", interrupted" if drive.interrupted else "")
    return [
        ("trace", facts.source),
        ("loop", facts.loop),
        ("over", over),
        ("started", drive.started),
    ]


def times_table(times: Mapping[str, Histogram]) -> TableBlock:
    rows = [
        (name, each.count, *(_milliseconds(value) for value in list(each.figures().values())[1:]))
        for name, each in times.items()
    ]
    columns = ("milliseconds", ">count", ">mean", ">p50", ">p90", ">p99", ">max")
    return TableBlock("Times", columns, rows)


def time_figures(times: Mapping[str, Histogram]) -> dict[str, Any]:
    return {name: each.figures() for name, each in times.items()}


def by_reason(title: str, counts: Mapping[str, int], details: Mapping[str, str]) -> TableBlock:
    most_first = sorted(counts.items(), key=lambda item: -item[1])
    rows = [(reason, count, _one_line(details.get(reason, ""))) for reason, count in most_first]
    return TableBlock(title, ("reason", ">count", "the first"), rows)


def failure_figures(counts: Mapping[str, int], details: Mapping[str, str]) -> dict[str, Any]:
    return {
        reason: {"count": count, "first": details.get(reason, "")}
        for reason, count in counts.items()
    }


def late_note(drive: Drive) -> list[str]:
    late_s = drive.late.percentile(99)
    if late_s is None or late_s < _LATE_S:
        return []
    return [
        f"One request in a hundred went out {format_duration(late_s)} or more after its time: all"
        " workers were busy, or this machine was. The load was lower than the trace's; raise"
        " --most-in-flight, or lower --speed."
    ]


def _milliseconds(seconds: float | int | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:,.4g}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:100]
