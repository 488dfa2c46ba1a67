"""What bench/vllm_sweep.py found, as tables, a plot and figures."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.harness.alternation import Spread, percentile
from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS, ModelShape
from kvwarehouse_bench.vllm.messages import LOADED_BLOCKS, MISSED_BLOCKS, EngineReply

RECOMPUTED, AGAIN, CHOICE = "recomputed", "again", "choice"
GOAL = 1.05
"""p99 of the choice over p99 of recomputing."""
_RESAMPLES = 2000
_NOTES = (
    "Ratios are of percentiles over all samples at a speed, with their 95 % interval by bootstrap:"
    " the first samples after a change of speed, when the connector still believes the old one,"
    " count like all others.",
    "again / recomputed is what the machine alone does to such a ratio.",
    "Given up: blocks whose load was begun and then left to the engine, as they came too late. In"
    " vain: requests with such blocks. Each costs its wait; p99 shows it where they are more than"
    " one in a hundred.",
)


@dataclass
class Speed:
    """multiple: of break-even; 0: the disk as it is."""

    multiple: float
    bytes_per_s: float
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    loaded_blocks: list[float] = field(default_factory=list)
    missed_blocks: list[float] = field(default_factory=list)
    """Of each call of the choice: what came, and what was begun and given up."""

    @property
    def name(self) -> str:
        if not self.multiple:
            return "as it is"
        return f"{self.multiple:g} x ({format_size(int(self.bytes_per_s))}/s)"

    def add(self, way: str, answer: EngineReply) -> None:
        """One ask at a time is measured from outside, several by the engine's own clock."""
        one = len(answer.ttft_s) == 1
        self.ttft_s[way] += [answer.seconds] if one else answer.ttft_s
        if way == CHOICE:
            self.loaded_blocks.append(answer.counts.get(LOADED_BLOCKS, 0.0))
            self.missed_blocks.append(answer.counts.get(MISSED_BLOCKS, 0.0))

    def at(self, way: str, share: float) -> float:
        return percentile(self.ttft_s[way], share)

    def ratio(self, way: str, share: float) -> Spread:
        """To recomputing."""
        numbers = random.Random(0)
        found = sorted(
            percentile(_again(self.ttft_s[way], numbers), share)
            / percentile(_again(self.ttft_s[RECOMPUTED], numbers), share)
            for _ in range(_RESAMPLES)
        )
        ratio = self.at(way, share) / self.at(RECOMPUTED, share)
        return Spread(ratio, found[_RESAMPLES // 40], found[-_RESAMPLES // 40])


def _again(values: Sequence[float], numbers: random.Random) -> list[float]:
    return numbers.choices(values, k=len(values))


@dataclass
class SweepResults:
    shape: ModelShape
    tokens: int
    together: int
    conditions: dict[str, str]
    break_even_bytes_per_s: float = 0.0
    speeds: list[Speed] = field(default_factory=list)

    def share(self, speed: Speed, blocks: Sequence[float]) -> float:
        """Of what could be loaded."""
        each = self.tokens // BLOCK_TOKENS
        asked = len(speed.ttft_s[CHOICE]) * each
        return sum(blocks) / asked if asked else 0.0


def sweep_report(found: SweepResults) -> Report:
    rising = sorted(found.speeds, key=lambda speed: speed.multiple or float("inf"))
    return Report(
        title="Load or recompute, over disks of all speeds",
        summary=_summary(rising),
        blocks=[
            TableBlock("conditions", ("", ""), [*_conditions(found).items()]),
            _times(found, rising),
            _ratios(rising),
            _plot(rising),
        ],
        figures=_figures(found, rising),
        notes=_NOTES,
    )


def _summary(speeds: Sequence[Speed]) -> str:
    worst = max(speeds, key=lambda speed: speed.ratio(CHOICE, 0.99).median)
    ratio = worst.ratio(CHOICE, 0.99)
    met = "met" if ratio.median <= GOAL else "missed"
    return (
        f"The worst p99 is {ratio:.2f} times that of recomputing, at {worst.name}; where"
        f" recomputing again has {worst.ratio(AGAIN, 0.99):.2f}. Goal: {GOAL} at most, {met}."
    )


def _conditions(found: SweepResults) -> Mapping[str, str]:
    return {
        **found.conditions,
        "prompts": f"{found.tokens:,} tokens, {found.together} at once",
        "break-even": f"{format_size(int(found.break_even_bytes_per_s))}/s",
    }


def _times(found: SweepResults, speeds: Sequence[Speed]) -> TableBlock:
    rows = [
        (
            speed.name,
            *(f"{speed.at(way, 0.5) * 1e3:,.1f}" for way in (RECOMPUTED, CHOICE)),
            *(f"{speed.at(way, 0.99) * 1e3:,.1f}" for way in (RECOMPUTED, CHOICE)),
            f"{found.share(speed, speed.loaded_blocks):.0%}",
            f"{found.share(speed, speed.missed_blocks):.0%}",
            f"{sum(1 for missed in speed.missed_blocks if missed)} of {len(speed.missed_blocks)}",
        )
        for speed in speeds
    ]
    columns = (">p50 recomputed", ">p50 choice", ">p99 recomputed", ">p99 choice")
    return TableBlock(
        "time to first token, ms, by speed of the disk",
        ("break-even x", *columns, ">loaded", ">given up", ">in vain"),
        rows,
    )


def _ratios(speeds: Sequence[Speed]) -> TableBlock:
    rows = [
        (
            speed.name,
            f"{speed.ratio(CHOICE, 0.5):.2f}",
            f"{speed.ratio(AGAIN, 0.5):.2f}",
            f"{speed.ratio(CHOICE, 0.99):.2f}",
            f"{speed.ratio(AGAIN, 0.99):.2f}",
        )
        for speed in speeds
    ]
    columns = (">p50 choice", ">p50 again", ">p99 choice", ">p99 again")
    return TableBlock("ratios to recomputed", ("break-even x", *columns), rows)


def _plot(speeds: Sequence[Speed]) -> Plot:
    slowed = [speed for speed in speeds if speed.multiple]
    lines = [
        Series(f"{way}, {name}", [(s.bytes_per_s / 1e6, s.at(way, share) * 1e3) for s in slowed])
        for way in (RECOMPUTED, CHOICE)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]
    return Plot(
        "Time to first token by speed of the disk",
        "disk, MB/s",
        "ms",
        lines,
        log_x=True,
        log_y=True,
    )


def _figures(found: SweepResults, speeds: Sequence[Speed]) -> dict[str, object]:
    return {
        "conditions": _conditions(found),
        "break_even_bytes_per_s": found.break_even_bytes_per_s,
        "speeds": [
            {
                "multiple": speed.multiple,
                "bytes_per_s": speed.bytes_per_s,
                "ttft_s": dict(speed.ttft_s),
                "p50_ratio": vars(speed.ratio(CHOICE, 0.5)),
                "p99_ratio": vars(speed.ratio(CHOICE, 0.99)),
                "p99_ratio_again": vars(speed.ratio(AGAIN, 0.99)),
                "loaded_share": found.share(speed, speed.loaded_blocks),
                "given_up_share": found.share(speed, speed.missed_blocks),
                "loaded_blocks": speed.loaded_blocks,
                "given_up_blocks": speed.missed_blocks,
            }
            for speed in speeds
        ],
    }
