"""What bench/vllm_overhead.py found, as tables and figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse_bench.harness.alternation import Spread
from kvwarehouse_bench.vllm.arms import Effect

GOAL = 1.01
"""Of a step's time without the connector."""
_STEP_OF = {"scheduler": "build_connector_meta", "worker": "bind_connector_metadata"}
"""Hooks that run once a step."""
_NOTES = (
    "A step's time is from its begin in the scheduler to the next one's. on / off and off again /"
    " off are medians over triples, with their 95 % interval by bootstrap.",
    "In all arms a request's coming and going is noted, and a message goes to the worker with each"
    " step; the times of hooks have both.",
    "Each hook's time has a clock around it, about 0.3 microseconds a call.",
)


@dataclass(frozen=True)
class Hook:
    """Seconds of all its calls in steps of one kind, by one half of the connector."""

    kind: str
    half: str
    name: str
    calls: int
    seconds: float
    median_s: float
    """Of a call: what it costs when nothing interrupts it and there is nothing special to do."""

    @classmethod
    def of(cls, kind: str, half: str, name: str, calls_ns: Sequence[int]) -> Hook:
        median_s = statistics.median(calls_ns) / 1e9 if calls_ns else 0.0
        return cls(kind, half, name, len(calls_ns), sum(calls_ns) / 1e9, median_s)


@dataclass
class OverheadResults:
    """An effect is None where no whole triple was seen."""

    conditions: dict[str, str]
    effects: dict[str, Effect | None] = field(default_factory=dict)
    hooks: list[Hook] = field(default_factory=list)

    def of(self, kind: str, half: str) -> list[Hook]:
        return [hook for hook in self.hooks if (hook.kind, hook.half) == (kind, half)]

    def steps(self, kind: str, half: str) -> int:
        """While hooks were timed; at least 1."""
        return sum(h.calls for h in self.of(kind, half) if h.name == _STEP_OF[half]) or 1

    def per_step_s(self, kind: str, half: str) -> float:
        return sum(hook.seconds for hook in self.of(kind, half)) / self.steps(kind, half)

    def usual_step_s(self, kind: str, half: str) -> float:
        """With the median call of each hook, as often as there were calls."""
        spent_s = sum(hook.median_s * hook.calls for hook in self.of(kind, half))
        return spent_s / self.steps(kind, half)


def overhead_report(found: OverheadResults) -> Report:
    return Report(
        title="What the connector costs a vLLM engine when nothing is reused",
        summary=_summary(found),
        blocks=[
            TableBlock("conditions", ("", ""), [*found.conditions.items()]),
            _effects(found),
            _sums(found),
            *(_hooks(found, kind) for kind in found.effects),
            _plot(found),
        ],
        figures=_figures(found),
        notes=_NOTES,
    )


def _summary(found: OverheadResults) -> str:
    parts = [
        f"{kind}: {_percent(seen.on.median)} of a step ({_interval(seen.on)}), where the same twice"
        f" differs by {_percent(seen.again.median)} ({_interval(seen.again)})"
        if seen is not None
        else f"{kind}: too short for a single triple"
        for kind, seen in found.effects.items()
    ]
    return "; ".join(parts) + "."


def _effects(found: OverheadResults) -> TableBlock:
    rows = [
        (
            kind,
            seen.steps,
            seen.triples,
            f"{seen.step_s * 1e3:.2f}",
            f"{_percent(seen.again.median)} ({_interval(seen.again)})",
            f"{_percent(seen.on.median)} ({_interval(seen.on)})",
            _verdict(seen.on),
        )
        for kind, seen in found.effects.items()
        if seen is not None
    ]
    columns = ("steps of", ">steps", ">triples", ">step, ms", ">off again / off", ">on / off")
    return TableBlock("with and without, in turns", (*columns, "goal: +1 % at most"), rows)


def _verdict(on: Spread) -> str:
    if on.high <= GOAL:
        return "met"
    return "missed" if on.low > GOAL else "cannot be told: measure longer, or when it is quiet"


def _sums(found: OverheadResults) -> TableBlock:
    rows = []
    for kind, seen in found.effects.items():
        for half in _STEP_OF:
            usual_s, spent_s = found.usual_step_s(kind, half), found.per_step_s(kind, half)
            share = f"{spent_s / seen.step_s:.2%}" if seen is not None else ""
            rows.append((kind, half, f"{usual_s * 1e6:.1f}", f"{spent_s * 1e6:.1f}", share))
    return TableBlock(
        "all hooks of a step, by their own clocks",
        ("steps of", "half", ">usual, us", ">mean, us", ">mean, of a step"),
        rows,
        "Usual: with the median call of each hook. The mean has the steps that store, and every"
        " interruption by other programs.",
    )


def _hooks(found: OverheadResults, kind: str) -> TableBlock:
    rows = []
    for half in _STEP_OF:
        steps = found.steps(kind, half)
        rows += [
            (
                half,
                hook.name,
                f"{hook.calls / steps:.2f}",
                f"{hook.median_s * 1e6:.2f}",
                f"{hook.seconds / steps * 1e6:.2f}",
            )
            for hook in found.of(kind, half)
        ]
    return TableBlock(
        f"hooks in steps of {kind}",
        ("half", "hook", ">calls a step", ">median call, us", ">mean of a step, us"),
        rows,
    )


def _plot(found: OverheadResults) -> Plot:
    """The ratios of all triples in order: a line's middle is the median, its slope the spread."""
    lines = [
        Series(f"{kind}, {name}", _ordered(values))
        for kind, seen in found.effects.items()
        if seen is not None
        for name, values in (("off again / off", seen.again_ratios), ("on / off", seen.on_ratios))
    ]
    return Plot("Steps with and without", "percent of triples", "effect on a step, percent", lines)


def _ordered(values: Sequence[float]) -> list[tuple[float, float]]:
    return [
        (100 * (at + 0.5) / len(values), (value - 1) * 100)
        for at, value in enumerate(sorted(values))
    ]


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.2f} %"


def _interval(spread: Spread) -> str:
    return f"{_percent(spread.low)} to {_percent(spread.high)}"


def _figures(found: OverheadResults) -> dict[str, object]:
    effects: Sequence[tuple[str, object]] = [
        (kind, asdict(seen) if seen is not None else None) for kind, seen in found.effects.items()
    ]
    return {
        "conditions": found.conditions,
        "effects": dict(effects),
        "hooks": [asdict(hook) for hook in found.hooks],
    }
