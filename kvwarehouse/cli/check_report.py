"""What `kvwarehouse check` found, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvwarehouse.cli.output import print_json, print_table
from kvwarehouse.sizes import format_size
from kvwarehouse.types import BadCopy, CheckProgress

_MOST_KEPT: Final = 10_000

# Fields of RecoveryStatus that say what the start could not believe.
_AT_START: Final = {
    "bad_headers": "segments without a header that can be believed",
    "unreadable_segments": "segments that the device could not read",
    "refused_records": "records refused in segments that had to be scanned",
    "dropped_slots": "pages in DRAM with a damaged header",
    "foreign_segments": "segments of another warehouse",
}
_NO_DAMAGE: Final = {"foreign_segments"}


class Report:
    def __init__(
        self,
        recovery: Mapping[str, Any],
        findings: Sequence[tuple[str, Mapping[str, str]]] | None = None,
    ) -> None:
        """recovery: what the start found. findings: what it said then about single segments, where
        that start was this check's own: then it counts as damage."""
        self.at_start = {name: int(recovery.get(name, 0)) for name in _AT_START}
        self.findings = findings
        self.last = CheckProgress()
        self.bad: list[BadCopy] = []
        self._unread = 0  # io_error: the next start looks again, whatever was dropped

    def add(self, part: CheckProgress) -> None:
        self.last = part
        self._unread += sum(bad.reason == "io_error" for bad in part.bad)
        self.bad += part.bad[: _MOST_KEPT - len(self.bad)]

    @property
    def has_damage(self) -> bool:
        return self.last.damaged + self._own_start > 0

    @property
    def left(self) -> int:
        """What is damaged and stays so: what was not quarantined, and what no check mends."""
        there = self.last.damaged - self.last.quarantined + self._own_start
        return there + (self._unread if self.last.quarantined else 0)

    @property
    def _own_start(self) -> int:
        own = self.at_start if self.findings is not None else {}
        return sum(count for name, count in own.items() if name not in _NO_DAMAGE)


def show(report: Report, *, as_json: bool, repaired: bool) -> None:
    if as_json:
        print_json(_plain(report))
    else:
        _print(report, repaired=repaired)


def _plain(report: Report) -> dict[str, Any]:
    last = report.last
    tiers = {
        tier.tier: {
            "pages": tier.pages,
            "size_bytes": tier.size_bytes,
            "damaged": tier.damaged,
            "dropped": tier.dropped,
            "dropped_bytes": tier.dropped_bytes,
        }
        for tier in last.tiers
    }
    findings = report.findings or ()
    return {
        "checked": last.checked,
        "size_bytes": last.size_bytes,
        "quarantined": last.quarantined,
        "damaged": last.damaged,
        "left": report.left,
        "tiers": tiers,
        "bad": [{"key": bad.key, "tier": bad.tier, "reason": bad.reason} for bad in report.bad],
        "at_start": report.at_start,
        "findings": [{"finding": name, **fields} for name, fields in findings],
    }


def _print(report: Report, *, repaired: bool) -> None:
    if report.bad:
        rows = [(bad.key, bad.tier, bad.reason) for bad in report.bad]
        print_table("", ("damaged page", "tier", "reason"), rows)
    for name, fields in report.findings or ():
        print(f"{name} {' '.join(f'{key}={text}' for key, text in fields.items())}")
    for tier in report.last.tiers:
        dropped = f"{tier.dropped:,} quarantined ({format_size(tier.dropped_bytes)})"
        print(
            f"{tier.tier}: checked {tier.pages:,} pages ({format_size(tier.size_bytes)}):"
            f" {tier.damaged:,} damaged, {dropped}"
        )
    when = "found" if report.findings is not None else "found when the daemon started"
    for name, count in report.at_start.items():
        if count:
            print(f"{when}: {count:,} {_AT_START[name]}")
    if report.last.damaged and not repaired:
        print("run it with --repair to quarantine them; loads treat them as misses already")
