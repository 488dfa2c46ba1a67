"""How near the made workloads are to what was published: the table of docs/sizing.md.

    python -m kvwarehouse.workloads.fit

Every figure is measured on traces of the published length, for several seeds. The published figures
are those of Mooncake's conversation and synthetic traces, of the AgentX traces and of Bailian's
to-B trace. Stateless.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.planning.replay import ReplaySetup, run_replay, sweep
from kvwarehouse.trace.trace import Trace, TraceBuilder
from kvwarehouse.workloads.agents import VARIANTS, Agents
from kvwarehouse.workloads.call import WorkloadCall
from kvwarehouse.workloads.conversations import PROFILES, TO_BUSINESS, Chat, SystemPrompts

SIZES: Final = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000)
_SESSIONS: Final = 200
_CALLS: Final = 20_000


@dataclass(frozen=True)
class Published:
    """`near` is how far from `value` the mean over the seeds may lie."""

    value: float
    near: float


@dataclass(frozen=True)
class Source:
    name: str
    seeds: int
    measured: Callable[[int], Mapping[str, float]]
    published: Mapping[str, Published]


@dataclass(frozen=True)
class Fit:
    source: str
    figure: str
    published: Published
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def fits(self) -> bool:
        return abs(self.mean - self.published.value) <= self.published.near


def fits(source: Source) -> list[Fit]:
    found = [source.measured(seed) for seed in range(source.seeds)]
    return [
        Fit(source.name, name, published, tuple(each[name] for each in found))
        for name, published in source.published.items()
    ]


# --- what is measured -----------------------------------------------------------------------------


def _conversation(seed: int) -> dict[str, float]:
    trace = _trace(islice(_chat(seed, "conversation"), 12_031), 512)
    times = np.bincount(np.bincount(trace.pages)) / trace.ids
    return {
        **_inputs(trace, (50, 99)),
        "blocks used once, %": 100 * float(times[1]),
        "twice, %": 100 * float(times[2]),
        "three times, %": 100 * float(times[3]),
        # The root is used by every request; its gaps are those of arrivals.
        **_gaps(trace, without_root=True),
    }


def _synthetic(seed: int) -> dict[str, float]:
    trace = _trace(islice(_chat(seed, "synthetic"), 3_993), 512)
    curve = sweep(trace, ReplaySetup(), SIZES)
    return {
        **_inputs(trace, (50, 90, 99)),
        "arrivals/s": trace.requests / trace.span_s,
        "hits, endless cache, %": 100 * run_replay(trace, ReplaySetup()).hit_rate,
        **{f"hits, {pages:,} blocks, %": 100 * rate for pages, rate in curve},
        **_gaps(trace),
    }


def _agents(variant: str) -> Callable[[int], dict[str, float]]:
    def measured(seed: int) -> dict[str, float]:
        asked = different = 0
        requests = []
        for session in islice(Agents(seed, VARIANTS[variant], 1.0).sessions(), _SESSIONS):
            calls = session.flat()
            requests.append(len(calls))
            asked += sum(len(call.blocks) for call in calls)
            different += len({block for call in calls for block in call.blocks})
        return {
            "requests a session, mean": statistics.fmean(requests),
            "hits, endless cache, %": 100 * (1 - different / asked),
        }

    return measured


def _to_business(seed: int) -> dict[str, float]:
    calls = list(islice(SystemPrompts(seed, TO_BUSINESS, 20.0).calls(), _CALLS))
    trace = _trace(calls, 16)
    run = run_replay(trace, ReplaySetup())
    again = np.sort(np.bincount(trace.pages))[::-1] - 1
    single = np.array([call.turn == 1 for call in calls])
    return {
        "hits, endless cache, %": 100 * run.hit_rate,
        "uses again of a tenth of the blocks, %": 100
        * float(again[: len(again) // 10].sum() / again.sum()),
        "uses again within 10 s, %": 100 * float((_waits(trace) < 10).mean()),
        "hits of single turns, %": 100 * float(run.dram_hits[single].sum() / run.hits),
    }


def _chat(seed: int, profile: str) -> Iterable[WorkloadCall]:
    return Chat(seed, PROFILES[profile], PROFILES[profile].requests_per_s).calls()


def _trace(calls: Iterable[WorkloadCall], block_tokens: int) -> Trace:
    builder = TraceBuilder()
    for call in calls:
        builder.add(call.request)
    return builder.build("made", "mooncake", block_tokens)


def _inputs(trace: Trace, percents: Iterable[int]) -> dict[str, float]:
    return {
        f"input tokens, p{percent}": float(np.percentile(trace.input_tokens, percent))
        for percent in percents
    }


def _gaps(trace: Trace, *, without_root: bool = False) -> dict[str, float]:
    waits = _waits(trace, without=0 if without_root else None)
    return {
        f"between uses of a block, p{percent}, s": float(np.percentile(waits, percent))
        for percent in (10, 50, 90)
    }


def _waits(trace: Trace, without: int | None = None) -> NDArray[np.float64]:
    """Seconds between two uses of a block, all of them."""
    users = np.repeat(np.arange(trace.requests), trace.lengths)
    order = np.argsort(trace.pages, kind="stable")
    pages, times = trace.pages[order], trace.times_s[users[order]]
    same = pages[1:] == pages[:-1]
    if without is not None:
        same &= pages[1:] != without
    waits: NDArray[np.float64] = np.diff(times)[same]
    return waits


# --- what was published ---------------------------------------------------------------------------

_GAPS: Final = {
    "between uses of a block, p10, s": Published(4.8, 2.5),
    "between uses of a block, p50, s": Published(59.4, 18),
    "between uses of a block, p90, s": Published(281.8, 60),
}
_SESSION: Final = {"requests a session, mean": Published(80.2, 8)}

SOURCES: Final = (
    Source(
        "chat, conversation",
        4,
        _conversation,
        {
            "input tokens, p50": Published(6_900, 350),
            "input tokens, p99": Published(85_000, 6_000),
            "blocks used once, %": Published(76, 2),
            "twice, %": Published(14, 2),
            "three times, %": Published(5, 1),
        },
    ),
    Source(
        "chat, synthetic",
        8,
        _synthetic,
        {
            "input tokens, p50": Published(11_587, 1_200),
            "input tokens, p90": Published(38_615, 4_000),
            "input tokens, p99": Published(66_458, 5_000),
            "arrivals/s": Published(3.9, 0.1),
            "hits, endless cache, %": Published(64.0, 2),
            **{
                f"hits, {pages:,} blocks, %": Published(rate, 2)
                for pages, rate in zip(SIZES, (8.2, 27.9, 42.3, 62.4, 64.0, 64.0), strict=True)
            },
            **_GAPS,
        },
    ),
    Source(
        "agents, cached",
        2,
        _agents("cached"),
        {**_SESSION, "hits, endless cache, %": Published(96, 1)},
    ),
    Source(
        "agents, truncated",
        2,
        _agents("truncated"),
        {**_SESSION, "hits, endless cache, %": Published(70, 3)},
    ),
    Source(
        "system-prompts",
        2,
        _to_business,
        {
            "hits, endless cache, %": Published(54, 2),
            "uses again of a tenth of the blocks, %": Published(77, 3),
            "uses again within 10 s, %": Published(80, 3),
            "hits of single turns, %": Published(97, 1.5),
        },
    ),
)


def main() -> None:
    print("| workload | figure | published | made, mean of seeds | least to most | allowed |")
    print("|---|---|---:|---:|---:|---:|")
    for source in SOURCES:
        for fit in fits(source):
            cells = (
                fit.source,
                fit.figure,
                _shown(fit.published.value),
                _shown(fit.mean),
                f"{_shown(min(fit.values))} to {_shown(max(fit.values))}",
                f"{_shown(fit.published.near)}" + ("" if fit.fits else " MISSED"),
            )
            print(f"| {' | '.join(cells)} |")


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
