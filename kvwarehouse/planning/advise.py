"""What more, or less, DRAM and NVMe would bring, from the curves that a daemon keeps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvwarehouse.miss_ratio import MissRatio
from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse.sizes import format_size

FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
ENOUGH_USES: Final = 10_000
"""Fewer say little: the next hour can be another workload."""

_WORTH = 0.01
_MOST_LOST = 0.01
_HOUR_S = 3600.0


@dataclass(frozen=True)
class NamespaceCurve:
    """A namespace's traffic. The curves of several share one cache, so their hits add up."""

    name: str
    page_bytes: int
    page_tokens: int
    curve: MissRatio


@dataclass(frozen=True)
class TierSetup:
    """As they are. nvme_bytes 0: there is none. Rates in bytes a second; `prefill_tokens_per_s`
    None: not known, then nothing is said about time. `policy`: by which pages leave."""

    dram_bytes: int
    nvme_bytes: int
    dram_read: float
    nvme_read: float
    prefill_tokens_per_s: float | None = None
    policy: str = "lru"
    nvme_bytes_per_day: int = 0
    """That may be written; 0: no bound."""
    missed_for_writes: int = 0
    """Pages that had left before that bound let them be written, and were stored again."""

    def of_dram(self, factor: float) -> TierSetup:
        return self._with(int(self.dram_bytes * factor), self.nvme_bytes)

    def of_nvme(self, factor: float) -> TierSetup:
        return self._with(self.dram_bytes, int(self.nvme_bytes * factor))

    def _with(self, dram_bytes: int, nvme_bytes: int) -> TierSetup:
        return replace(self, dram_bytes=dram_bytes, nvme_bytes=nvme_bytes)


@dataclass(frozen=True)
class TierOutcome:
    """What tiers of these sizes would do with the traffic seen. Rates of all uses, 0 to 1."""

    tiers: TierSetup
    dram_rate: float
    either_rate: float
    busy_s_per_hour: float | None
    """Seconds of loading and computing KV in an hour of such traffic; None: not known."""


def outcome(parts: Sequence[NamespaceCurve], tiers: TierSetup) -> TierOutcome:
    """What is in DRAM is on NVMe too, so the larger of the two holds all there is."""
    uses = sum(part.curve.uses for part in parts)
    held = max(tiers.dram_bytes, tiers.nvme_bytes)
    dram = sum(part.curve.hits_at(tiers.dram_bytes) for part in parts)
    either = sum(part.curve.hits_at(held) for part in parts)
    since_s = max((part.curve.since_s for part in parts), default=0.0)
    busy_s = None
    if tiers.prefill_tokens_per_s and since_s:
        busy_s = sum(_busy_s(part, tiers, held) for part in parts) * _HOUR_S / since_s
    return TierOutcome(tiers, dram / uses if uses else 0.0, either / uses if uses else 0.0, busy_s)


def _busy_s(part: NamespaceCurve, tiers: TierSetup, held_bytes: int) -> float:
    assert tiers.prefill_tokens_per_s
    dram = part.curve.hits_at(tiers.dram_bytes)
    nvme = part.curve.hits_at(held_bytes) - dram
    missed = part.curve.uses - dram - nvme
    return (
        dram * part.page_bytes / tiers.dram_read
        + nvme * part.page_bytes / tiers.nvme_read
        + missed * part.page_tokens / tiers.prefill_tokens_per_s
    )


def advise(parts: Sequence[NamespaceCurve], tiers: TierSetup, *, all_uses: int) -> Report:
    """The whole answer: tables of both tiers, the curve, and what to do in a sentence. all_uses:
    those of namespaces that have no curve of their own too."""
    parts = [part for part in parts if part.curve.uses]
    now = outcome(parts, tiers)
    dram = [outcome(parts, tiers.of_dram(factor)) for factor in FACTORS]
    nvme = [outcome(parts, tiers.of_nvme(factor)) for factor in FACTORS] if tiers.nvme_bytes else []
    blocks: list[TableBlock | Plot] = [_table("DRAM", dram, now)]
    if nvme:
        blocks.append(_table("NVMe", nvme, now))
    blocks.append(_plot(parts))
    uses = sum(part.curve.uses for part in parts)
    since_s = max((part.curve.since_s for part in parts), default=0.0)
    return Report(
        "What other sizes of the tiers would hit",
        f"{uses:,} uses of pages in {_duration(since_s)};"
        f" {_counsel('DRAM', [each.dram_rate for each in dram])}",
        blocks,
        _figures(parts, now, dram, nvme) | _budget_figures(tiers, all_uses),
        _notes(parts, tiers, uses, all_uses - uses),
    )


def _duration(seconds: float) -> str:
    if seconds < _HOUR_S:
        return f"{seconds / 60:,.0f} minutes"
    return f"{seconds / _HOUR_S:,.1f} hours"


def _counsel(name: str, rates: Sequence[float]) -> str:
    """rates: by FACTORS."""
    here = FACTORS.index(1.0)
    gains = [rate - rates[here] for rate in rates]
    if gains[here + 1] >= _WORTH:
        return f"twice the {name} would add {gains[here + 1] * 100:.1f} points of hits"
    if gains[-1] >= _WORTH:
        return (
            f"twice the {name} would add less than a point,"
            f" {FACTORS[-1]:.0f} times {gains[-1] * 100:.1f}"
        )
    if rates[here] - rates[here - 1] < _WORTH:
        return f"half the {name} would lose less than a point"
    return f"more {name} would add less than a point"


def _table(name: str, outcomes: Sequence[TierOutcome], now: TierOutcome) -> TableBlock:
    dram = name == "DRAM"
    rows = []
    for factor, each in zip(FACTORS, outcomes, strict=True):
        rate, rate_now = (
            (each.dram_rate, now.dram_rate) if dram else (each.either_rate, now.either_rate)
        )
        change = "now" if factor == 1 else f"{(rate - rate_now) * 100:+.1f}"
        size = each.tiers.dram_bytes if dram else each.tiers.nvme_bytes
        time = _time(now if factor == 1 else each, now)
        rows.append((format_size(size), f"{rate:.1%}", change, *time))
    where = "from DRAM itself" if dram else "from either tier"
    timed = (">busy s an hour", ">change") if now.busy_s_per_hour is not None else ()
    return TableBlock(
        f"{name}: hits {where}", (f">{name}", ">hits", ">change, points", *timed), rows
    )


def _time(each: TierOutcome, now: TierOutcome) -> tuple[str, ...]:
    if each.busy_s_per_hour is None or now.busy_s_per_hour is None:
        return ()
    change = each.busy_s_per_hour - now.busy_s_per_hour
    return f"{each.busy_s_per_hour:,.0f}", "now" if each is now else f"{change:+,.0f}"


def _plot(parts: Sequence[NamespaceCurve]) -> Plot:
    sizes = sorted({size for part in parts for size in part.curve.sizes_bytes})
    uses = sum(part.curve.uses for part in parts) or 1
    points = [
        (size / 2**30, 1 - sum(part.curve.hits_at(size) for part in parts) / uses) for size in sizes
    ]
    return Plot("Miss-ratio curve", "cache, GiB", "miss ratio", [Series("all", points)], log_x=True)


def _notes(
    parts: Sequence[NamespaceCurve], tiers: TierSetup, uses: int, elsewhere: int
) -> list[str]:
    notes = [
        "A use is a load of a page, or a store of one that no tier had. Prompts that were looked"
        " up and neither loaded nor stored are not in it.",
        "NVMe's hits are an upper bound: it reclaims whole segments and refuses writes while its"
        " queue is full.",
    ]
    if tiers.policy != "lru":
        notes.append(
            f"The curve is that of the least recently used. This daemon evicts by {tiers.policy},"
            " which does that where it is best: expect as many hits, or more."
        )
    if tiers.nvme_bytes_per_day:
        notes.append(_write_budget(tiers, uses + elsewhere))
    if uses < ENOUGH_USES:
        notes.append(f"{uses:,} uses are few: ask again after {ENOUGH_USES:,}.")
    if elsewhere > 0:
        notes.append(f"{elsewhere:,} uses were of other namespaces, or of ones without a curve.")
    share = min((part.curve.share for part in parts), default=1.0)
    if share < 1:
        notes.append(f"{share:.2%} of the pages are followed; expect an error of a point or two.")
    lost = max((part.curve.uses_lost for part in parts), default=0)
    if lost > _MOST_LOST * (uses + lost):
        notes.append(f"{lost:,} uses came too fast to be counted: hits are higher than shown.")
    if tiers.prefill_tokens_per_s:
        notes.append(
            f"Time: a hit loads at {tiers.dram_read / 1e9:.3g} GB/s from DRAM and at"
            f" {tiers.nvme_read / 1e9:.3g} GB/s from NVMe, a miss is computed at"
            f" {tiers.prefill_tokens_per_s:,.0f} tokens a second; no queue."
        )
    return notes


def _write_budget(tiers: TierSetup, uses: int) -> str:
    lost = tiers.missed_for_writes / uses if uses else 0.0
    said = f"The budget of {format_size(tiers.nvme_bytes_per_day)} of writes a day"
    if not tiers.missed_for_writes:
        return f"{said} has cost no hit so far."
    return (
        f"{said} has cost {lost * 100:.1f} points of hits at most, which NVMe's figures do not"
        f" show: {tiers.missed_for_writes:,} pages were stored again that it had kept from NVMe."
    )


def _figures(
    parts: Sequence[NamespaceCurve],
    now: TierOutcome,
    dram: Sequence[TierOutcome],
    nvme: Sequence[TierOutcome],
) -> dict[str, Any]:
    return {
        "uses": sum(part.curve.uses for part in parts),
        "since_s": max((part.curve.since_s for part in parts), default=0.0),
        "now": _plain(now),
        "dram": [_plain(each) for each in dram],
        "nvme": [_plain(each) for each in nvme],
        "namespaces": [
            {
                "model": part.name,
                "uses": part.curve.uses,
                "uses_lost": part.curve.uses_lost,
                "share": part.curve.share,
                "sizes_bytes": list(part.curve.sizes_bytes),
                "hits": list(part.curve.hits),
            }
            for part in parts
        ],
    }


def _budget_figures(tiers: TierSetup, all_uses: int) -> dict[str, Any]:
    if not tiers.nvme_bytes_per_day:
        return {}
    lost = tiers.missed_for_writes / all_uses if all_uses else 0.0
    return {"write_budget": {"bytes_per_day": tiers.nvme_bytes_per_day, "hit_rate_lost": lost}}


def _plain(each: TierOutcome) -> dict[str, Any]:
    return {
        "dram_bytes": each.tiers.dram_bytes,
        "nvme_bytes": each.tiers.nvme_bytes,
        "hit_rate_dram": each.dram_rate,
        "hit_rate": each.either_rate,
        "busy_s_per_hour": each.busy_s_per_hour,
    }
